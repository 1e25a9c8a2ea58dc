# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over rows of logits in plain torch operations, in one pass or in two.

Two passes: `row_statistics` finds maximum and sum of a row, `overwrite_with_gradient` reads the logits again. One pass:
`overwrite_with_exponentials` writes exp(logit - reference) at once, together with the sum of each part of a row. The
gradient of a row's loss is softmax - onehot, up to a factor exponentials - sum * onehot, so `finish_gradient`
changes only one element per row, the label's, and returns a factor per row. The products after it apply that factor to
their tokens, [T, h] instead of [T, V].

A row is cut over ranks, each with its own classes, and on a rank into parts of `part_size` classes, so that even few
rows fill a device. `combined` and `joined` add parts in their order, so every rank gets the same bits. All arithmetic
is fp32, or fp64 for fp64 logits.

The reference of a part need not be its maximum; it only keeps the numbers in range. `reference_of` takes the multiple
of EXPONENT_PERIOD by which the part's largest exponent lies in (MIN_EXPONENT, MAX_EXPONENT]. e^40 times 262,272 does
not overflow; a hidden state divided by that, times a small gradient of the loss, is no denormal number of bf16; and
only logits below e^-47 of the largest are lost. For logits of ordinary size the reference is 0 in every part; a part
with another reference than its row's largest is scaled afterwards.

Shapes: logits [T, V], V the classes of this rank from class first_class on; labels int64 [T]; statistics [parts, 3, T]:
of each part the maximum (or the reference), the sum of exponentials relative to it, and the label's logit, 0 where the
label is in another part; normalizer [2, T]: a row's maximum and the logarithm of its sum. They are kept apart because
their sum would lose the difference of a probability from 1. For a label that is no class of any rank the logit counts
as 0, and the row's gradient is that of the softmax alone.

Eager mode works on blocks of rows, which keeps intermediate results small; torch.compile gets all rows at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import wide

PART_ALIGNMENT = 16  # classes: every part starts at a multiple of 16 bytes
ELEMENTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24, "meta": 2**24}  # of a block of rows; on a CPU it fits into the cache
MIN_EXPONENT, MAX_EXPONENT = -40.0, 40.0
EXPONENT_PERIOD = MAX_EXPONENT - MIN_EXPONENT
# From this value on multiples of EXPONENT_PERIOD are not exact enough in fp32, and the maximum itself is the reference.
MAX_ROUNDED = 2.0**24


def part_size(classes: int, parts: int) -> int:
    """Return the classes of each part; the last ones may have fewer, or none."""
    return max(1, -(-classes // (parts * PART_ALIGNMENT))) * PART_ALIGNMENT


def reference_of(top: Tensor) -> Tensor:
    """Return the reference of a part with maximum `top`; infinities are their own reference."""
    return torch.where(
        top.abs() < MAX_ROUNDED, EXPONENT_PERIOD * ((top - MAX_EXPONENT) * (1 / EXPONENT_PERIOD)).ceil(), top
    )


def combined(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalizer [2, T] and the label's logit [T] from the parts of all ranks [parts, 3, T]."""
    top, total, label = statistics.unbind(1)
    if len(statistics) == 1:
        return torch.stack((top[0], total[0].log())), label[0]
    largest = top.amax(0)
    return torch.stack((largest, (total * (top - largest).exp()).sum(0).log())), label.sum(0)


def joined(statistics: Tensor) -> Tensor:
    """Join the statistics of all parts to those of one, [1, 3, T]."""
    references, sums, labels_logits = statistics.unbind(1)
    largest = references.amax(0)
    total = (sums * (references - _shift(largest)).exp()).sum(0)
    return torch.stack((largest, total, labels_logits.sum(0))).unsqueeze(0)


def losses(normalizer: Tensor, label: Tensor, z_loss: float) -> Tensor:
    """Return -log softmax(logits)[label] + z_loss * logsumexp(logits)^2 (arXiv 2204.02311 section 5), [T]."""
    cross_entropy = normalizer[1] - (label - normalizer[0])
    return cross_entropy if z_loss == 0 else cross_entropy + z_loss * normalizer.sum(0).square()


def row_statistics(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """Return statistics [parts, 3, T] in fp32 or wider: maximum, sum of exp(logit - maximum), label's logit."""
    statistics = _statistics_of_labels(logits, labels, first_class, parts)
    for rows, part, values in _pieces(logits, parts):
        values = values.to(statistics.dtype)
        top = values.amax(-1)
        statistics[part, 0, rows] = top.t()
        statistics[part, 1, rows] = (values - _shift(top).unsqueeze(-1)).exp_().sum(-1).t()
    return statistics


def overwrite_with_gradient(
    logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float
) -> None:
    """Overwrite logits with grad * (softmax(logits) * (1 + 2 z_loss logsumexp(logits)) - onehot(labels)); grad [T]."""
    column, classes = labels - first_class, torch.arange(logits.shape[1], device=logits.device)
    for rows in _blocks(logits):
        top, log_sum = normalizer[:, rows, None]
        values = (logits[rows].to(normalizer.dtype) - top).sub_(log_sum).exp_()
        if z_loss:
            values.mul_(1 + 2 * z_loss * (top + log_sum))
        hot = (classes == column[rows, None]).to(values.dtype)
        logits[rows] = values.sub_(hot).mul_(grad[rows, None])


def overwrite_with_exponentials(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """Overwrite logits with exp(logits - reference of the part), rounded to their dtype.

    Return statistics [parts, 3, T] in fp32 or wider: reference, sum of the exponentials before they were rounded,
    label's logit.
    """
    statistics = _statistics_of_labels(logits, labels, first_class, parts)
    for rows, part, stored in _pieces(logits, parts):
        values = stored.to(statistics.dtype)
        reference = reference_of(values.amax(-1))
        statistics[part, 0, rows] = reference.t()
        values = values.sub_(_shift(reference).unsqueeze(-1)).exp_()
        statistics[part, 1, rows] = values.sum(-1).t()
        if stored.dtype != values.dtype:
            stored.copy_(values)
    return statistics


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
    """Return the losses, and turn the exponentials of `overwrite_with_exponentials` into a row's gradient up to a
    factor, in place.

    Args:
        statistics: of all ranks' parts, [all parts, 3, T]; those of `exponentials` are the `parts` from first_part on.
            A part's sum and label's logit may be stored in another part's place. grad: [T] of the statistics' dtype.

    Returns:
        [2, T] in fp32 or wider: losses, -log softmax(logits)[label] + z_loss * logsumexp(logits)^2, and the factors of
        the rows; row times factor is the gradient that `overwrite_with_gradient` writes.
    """
    references, sums, labels_logits = statistics.unbind(1)
    shift = _shift(references.amax(0))
    scale = (references - shift).exp()
    total = (sums * scale).sum(0)
    label = labels_logits.sum(0) - shift
    of_label = label.exp()
    log_total = total.log()
    # Where the label has most of the sum, a difference of logarithms would lose the remainder.
    most = (of_label > 0.5 * total) & (of_label < 2 * total)
    loss = torch.where(most, (total / of_label).log(), log_total - label)
    log_sum = shift + log_total
    factor = 1 + 2 * z_loss * log_sum
    if len(statistics) > 1:  # one part needs no scaling; checking several would wait for the device
        for rows, part, values in _pieces(exponentials, parts):
            values.mul_(scale[first_part : first_part + parts][part, rows].t().unsqueeze(-1))
    if exponentials.shape[1]:
        column, inside = _columns_of(labels, first_class, exponentials.shape[1])
        gradient = (of_label - total / factor).to(exponentials.dtype)
        gradient = torch.where(inside, gradient, _at(exponentials, column))
        exponentials.scatter_(-1, column.unsqueeze(-1), gradient.unsqueeze(-1))
    return torch.stack((loss + z_loss * log_sum.square() if z_loss else loss, grad * factor / total))


def _shift(reference: Tensor) -> Tensor:
    """Return the number to subtract: finite even where all logits are -inf."""
    return reference.clamp(min=torch.finfo(reference.dtype).min)


def _columns_of(labels: Tensor, first_class: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label, any column for labels of other ranks, and which are of this rank; both [T]."""
    column = labels - first_class
    inside = column.clamp(0, classes - 1)
    return inside, inside == column


def _statistics_of_labels(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """Return the statistics [parts, 3, T] of rows without logits, with the labels' logits."""
    statistics = torch.zeros((parts, 3, len(logits)), dtype=wide(logits.dtype), device=logits.device)
    statistics[:, 0] = -torch.inf
    if logits.shape[1]:
        column, inside = _columns_of(labels, first_class, logits.shape[1])
        label = torch.where(inside, _at(logits, column).to(statistics.dtype), 0)
        statistics[:, 2].scatter_(0, (column // part_size(logits.shape[1], parts)).unsqueeze(0), label.unsqueeze(0))
    return statistics


def _at(rows: Tensor, column: Tensor) -> Tensor:
    """Return the element of each row in its column, [T]."""
    return rows.gather(-1, column.unsqueeze(-1)).squeeze(-1)


def _blocks(logits: Tensor) -> list[slice]:
    """Return the rows of a block: all under torch.compile, which makes one kernel."""
    tokens, classes = logits.shape
    if not classes or torch.compiler.is_compiling():
        return [slice(0, tokens)] if classes else []
    rows = max(1, ELEMENTS_AT_ONCE[logits.device.type] // classes)
    return [slice(at, at + rows) for at in range(0, tokens, rows)]


def _pieces(logits: Tensor, parts: int) -> list[tuple[slice, slice, Tensor]]:
    """Yield views [rows, parts, classes of a part] of the logits, with their rows and parts: all full parts, then the
    last one.
    """
    classes, step = logits.shape[1], part_size(logits.shape[1], parts)
    full = classes // step
    pieces = []
    for rows in _blocks(logits):
        if full:
            values = logits[rows, : full * step]
            pieces.append((rows, slice(0, full), values.view(values.shape[0], full, step)))
        if classes % step:
            pieces.append((rows, slice(full, full + 1), logits[rows, full * step :].unsqueeze(1)))
    return pieces
