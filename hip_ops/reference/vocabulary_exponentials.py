# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy from one pass over rows of logits, in plain torch: the pass overwrites logits with exponentials before their sum is known.

The gradient of a row's loss is softmax - onehot, up to a factor exponentials - sum * onehot. So the exponentials of a part of a row are written
with their sum at once, and what is left is one element a row, the label's, and one factor a row, which the two products after it take on their
side of tokens, [T, h] for [T, V]. A pass that needs the maximum first would read the logits once more.

What an exponential is relative to need not be the maximum, it must only keep the numbers in range. `reference_of` takes the multiple of PERIOD that
lies so that a part's largest exponent is in (LEAST, MOST]: e^40 times 262,272 is far from overflowing, a hidden state divided by that, times a small gradient
of the loss, is no denormal number of bf16, and nothing is lost that is larger than e^-47 of the largest. For logits of ordinary size it is 0 in every part; a part that had another one than its row's largest is scaled afterwards.

Shapes and conventions: hip_ops/reference/vocabulary_rows.py, of which statistics keep the layout: [parts, 3, T], here with that reference in the
maximum's place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.reference.vocabulary_rows import columns_of, part_size, statistics_of_labels

LEAST, MOST = -40.0, 40.0
PERIOD = MOST - LEAST
LARGE = 2.0**24  # from where on a multiple of PERIOD is not near enough in fp32: the maximum itself is taken
LARGEST_PART = 2048  # classes: what a wave keeps in its registers between the maximum and the exponentials, and what was fastest on an H200


def parts_of_exponentials(classes: int) -> int:
    """Parts of a row, each of at most LARGEST_PART classes."""
    return max(1, -(-classes // LARGEST_PART))


def reference_of(top: Tensor) -> Tensor:
    """What is subtracted from the logits of a part with maximum `top`; -inf and infinity for themselves."""
    return torch.where(top.abs() < LARGE, PERIOD * ((top - MOST) * (1 / PERIOD)).ceil(), top)


def _shift(reference: Tensor) -> Tensor:
    """Nothing is subtracted where all logits are -inf."""
    return reference.masked_fill(reference == -torch.inf, 0)


def joined(statistics: Tensor) -> Tensor:
    """Those of all parts as of one, [1, 3, T]."""
    references, sums, labels_logits = statistics.unbind(1)
    largest = references.amax(0)
    return torch.stack((largest, (sums * (references - _shift(largest)).exp()).sum(0), labels_logits.sum(0))).unsqueeze(
        0
    )


def overwrite_with_exponentials(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """logits <- exp(logits - reference of the part), rounded to their dtype. Returns statistics [parts, 3, T] in fp32 or wider: reference, sum of
    the exponentials before they were rounded, label's logit."""
    found, columns = statistics_of_labels(logits, labels, first_class, parts)
    for part, each in enumerate(columns):
        wide = logits[:, each].to(found.dtype)
        found[part, 0] = reference_of(wide.amax(-1))
        wide = (wide - _shift(found[part, 0]).unsqueeze(-1)).exp_()
        found[part, 1] = wide.sum(-1)
        logits[:, each] = wide
    return found


def finish_gradient(
    exponentials: Tensor,
    labels: Tensor,
    first_class: int,
    statistics: Tensor,
    first_part: int,
    parts: int,
    grad: Tensor,
    z_loss: float,
) -> Tensor:
    """Makes of what `overwrite_with_exponentials` left a row's gradient up to a factor, in place.

    Args:
        statistics: of all ranks' parts, [all parts, 3, T]; those of `exponentials` are the `parts` from first_part on. Sums and
            labels' logits of a part may count in another one's place. grad: [T] of the statistics' dtype.

    Returns:
        [2, T] in fp32 or wider: losses, -log softmax(logits)[label] + z_loss * logsumexp(logits)^2, and the factors with which rows are the
        gradient that hip_ops.reference.vocabulary_rows.overwrite_with_gradient gives.
    """
    classes, compute = exponentials.shape[1], statistics.dtype
    references, sums, labels_logits = statistics.unbind(1)
    largest = references.amax(0)
    shift = _shift(largest)
    total = (sums * (references - shift).exp()).sum(0)
    label = labels_logits.sum(0) - shift
    of_label = label.exp()
    log_total = total.log()
    # Where the label has most of the sum, a difference of logarithms would lose what the rest is.
    most = (of_label > 0.5 * total) & (of_label < 2 * total)
    loss = torch.where(most, (total / of_label).log(), log_total - label)
    log_sum = shift + log_total
    factor = 1 + 2 * z_loss * log_sum
    step = part_size(classes, parts)
    for part in range(
        -(-classes // step)
    ):  # whether any part has to be scaled is not asked: a device would be waited for
        exponentials[:, part * step : (part + 1) * step].mul_(
            (references[first_part + part] - shift).exp().unsqueeze(-1)
        )
    if classes:
        column, here = columns_of(labels, first_class, classes)
        now, then = exponentials.gather(-1, column), (of_label - total / factor).to(exponentials.dtype).unsqueeze(-1)
        exponentials.scatter_(-1, column, torch.where(here.unsqueeze(-1), then, now))
    return torch.stack((loss + z_loss * log_sum.square() if z_loss else loss, grad.to(compute) * factor / total))
