# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over rows of logits in plain torch: the statistics of a row, and the logits overwritten with their gradient.

A row may be cut: over ranks, each with its own classes, and on one rank into parts of `part_size` classes, so that few rows still fill a
device. A part gives maximum, sum of exp(logit - maximum) and the label's logit (0 where the label is of another part); `combined` joins
parts in their order, hence to the same bits on every rank. All arithmetic is fp32, or fp64 for fp64 logits.

Shapes: logits [T, V], V the classes of this rank from class first_class on; labels int64 [T]; statistics [parts, 3, T]; normalizer [2, T]: a
row's maximum and the logarithm of its sum, kept apart because their sum would lose what distinguishes a probability from 1. A label that is no
class of any rank takes no part: its logit counts as 0, and its row's gradient has the softmax alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PART_ALIGNMENT = 16  # classes: every part starts at a multiple of 16 bytes
ELEMENTS_AT_ONCE = 2**24  # of the wider copies here


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 tensors."""
    return torch.promote_types(tensor.dtype, torch.float32)


def part_size(classes: int, parts: int) -> int:
    """Classes of each part but the last ones, which may have fewer, or none."""
    return max(1, -(-classes // (parts * PART_ALIGNMENT))) * PART_ALIGNMENT


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, ELEMENTS_AT_ONCE // max(1, logits.shape[1]))
    yield from (slice(at, at + rows) for at in range(0, len(logits), rows))


def columns_of(labels: Tensor, first_class: int, classes: int) -> tuple[Tensor, Tensor]:
    """Column of each label, 0 for those that are not here, and which are."""
    column = labels - first_class
    here = (column >= 0) & (column < classes)
    return column.masked_fill(~here, 0).unsqueeze(-1), here


def statistics_of_labels(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> tuple[Tensor, list[slice]]:
    """Statistics [parts, 3, T] of parts that are yet to be read, but for the labels' logits; and the columns of each part that has any."""
    rows, classes = logits.shape
    step, compute = part_size(classes, parts), compute_dtype(logits)
    found = torch.zeros((parts, 3, rows), dtype=compute, device=logits.device)
    found[:, 0] = -torch.inf
    column, here = columns_of(labels, first_class, classes)
    column, label = column.squeeze(-1), logits.gather(-1, column).squeeze(-1).to(compute) if classes else found[0, 2]
    columns = [slice(start, min(start + step, classes)) for start in range(0, classes, step)]
    for part, each in enumerate(columns):
        found[part, 2] = label.masked_fill(~(here & (column >= each.start) & (column < each.stop)), 0)
    return found, columns


def row_statistics(logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
    """[parts, 3, T] in fp32 or wider: maximum, sum of exp(logit - maximum), label's logit."""
    found, columns = statistics_of_labels(logits, labels, first_class, parts)
    for part, each in enumerate(columns):
        for block in _blocks(logits):
            wide = logits[block, each].to(found.dtype)
            top = wide.amax(-1)
            found[part, 0, block] = top
            found[part, 1, block] = (wide - top.masked_fill(top == -torch.inf, 0).unsqueeze(-1)).exp_().sum(-1)
    return found


def combined(statistics: Tensor) -> tuple[Tensor, Tensor]:
    """The normalizer [2, T] and the label's logit [T] from the parts of all ranks [parts, 3, T]."""
    top, total, label = statistics.unbind(1)
    if len(statistics) == 1:
        return torch.stack((top[0], total[0].log())), label[0]
    largest = top.amax(0)
    return torch.stack((largest, (total * (top - largest).exp()).sum(0).log())), label.sum(0)


def losses(normalizer: Tensor, label: Tensor, z_loss: float) -> Tensor:
    """-log softmax(logits)[label] + z_loss * logsumexp(logits)^2 (arXiv 2204.02311 section 5), [T]."""
    found = normalizer[1] - (label - normalizer[0])
    return found if z_loss == 0 else found + z_loss * normalizer.sum(0).square()


def overwrite_with_gradient(
    logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float
) -> None:
    """logits <- grad * (softmax(logits) * (1 + 2 z_loss logsumexp(logits)) - onehot(labels)), in place; grad [T]."""
    compute = normalizer.dtype
    column, here = columns_of(labels, first_class, logits.shape[1])
    if logits.shape[1] == 0:
        return
    for block in _blocks(logits):
        top, log_sum, upstream = normalizer[0, block, None], normalizer[1, block, None], grad[block, None].to(compute)
        wide = (logits[block].to(compute) - top).sub_(log_sum).exp_()
        if z_loss:
            wide.mul_(1 + 2 * z_loss * (top + log_sum))
        wide.scatter_add_(-1, column[block], -here[block, None].to(compute))
        logits[block] = wide.mul_(upstream)
