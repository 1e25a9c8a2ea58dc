# SPDX-License-Identifier: Apache-2.0
"""A linear head and its cross-entropy in chunks of tokens: the logits of all tokens never exist at once.

A chunk's logits are in one buffer and are overwritten with their gradient, between three matrix products
(hip_ops/ops/dense_product).
Gradients are exact: nothing is filtered, and weight gradients are summed in fp32 (`main_grad.way_of_adding`).

With a promise (promised_grad: the gradient that the losses will get; in training the loss mask) the forward pass makes
both gradients while a chunk's logits exist, in one pass over them (`overwrite_with_exponentials`). Rows of the buffer
are then their gradient up to a factor per row. The product for the gradient of hidden applies the factor in fp32; for
the gradient of the weight, hidden is multiplied by it, which is one more rounding.

Without a promise a pass computes the sums (`row_statistics`), and the backward pass computes the logits again, a fourth
product, and overwrites them with their gradient. Results of the two ways differ by roundings.

hip_ops/saved_bytes.py lists the bytes saved for the backward pass and the working memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hip_ops.ops.dense_product import dense_product_
from hip_ops.ops.linear_cross_entropy import reference
from hip_ops.ops.linear_cross_entropy.passes import (
    finish_gradient,
    overwrite_with_exponentials,
    overwrite_with_gradient,
    parts_for,
    row_statistics,
)
from hip_ops.runtime.launch import wide
from hip_ops.runtime.main_grad import way_of_adding
from hip_ops.runtime.operator import Declaration
from hip_ops.saved_bytes import chunk_for, parts_of_exponentials

# At most 254 characters, the limit of asserts on the device.
BROKEN_PROMISE = (
    "hip_ops.linear_cross_entropy: the losses' gradient is not promised_grad, so the gradients made in the forward "
    "pass are wrong. "
    "Promise what backward brings (the loss mask, for a sum of losses * mask), or nothing"
)


_DECLARATION = Declaration(
    "linear_cross_entropy",
    ("hidden", "weight", "labels", "promised_grad", "main_grad"),
    takes="""
        hidden          [tokens, h]     bf16|fp32
        weight          [classes>0, h]  =hidden
        labels          [tokens]        int64
        promised_grad?  [tokens]        wide(hidden)
        main_grad?      [classes, h]    wide(weight)|=weight
    """,
)


@dataclass(frozen=True)
class _Head:
    """The arguments that all chunks share. group: the ranks that share the vocabulary, None for one."""

    weight: Tensor
    labels: Tensor
    z_loss: float
    group: object
    first_class: int
    chunk: int

    def chunks(self) -> Iterator[slice]:
        tokens = len(self.labels)
        return (slice(at, min(at + self.chunk, tokens)) for at in range(0, tokens, self.chunk))

    def buffer(self, hidden: Tensor) -> Tensor:
        return hidden.new_empty(min(self.chunk, len(hidden)), len(self.weight))

    def logits(self, hidden: Tensor, rows: slice, buffer: Tensor) -> Tensor:
        return dense_product_(buffer[: rows.stop - rows.start], hidden[rows], self.weight.t())

    def statistics(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return normalizer and label's logit over all ranks, with one exchange."""
        statistics = row_statistics(logits, self.labels[rows], self.first_class, parts_for(logits))
        return reference.combined(self._of_all_ranks(statistics))

    def gradient(self, logits: Tensor, rows: slice, grad: Tensor) -> Tensor:
        """Overwrite the logits with their gradient up to a factor per row. Return [2, T]: losses and factors. One
        exchange.
        """
        labels, parts = self.labels[rows], parts_of_exponentials(len(self.weight))
        statistics, first = overwrite_with_exponentials(logits, labels, self.first_class, parts), 0
        if self._ranks() > 1:
            # Ranks exchange three numbers per token, which contain this rank's sums too; its own parts then add only
            # their references.
            everyone, first = self._of_all_ranks(reference.joined(statistics)), self._ranks()
            statistics[:, 1:] = 0
            statistics = torch.cat((everyone, statistics))
        return finish_gradient(logits, labels, self.first_class, statistics, first, parts, grad, self.z_loss)

    def _ranks(self) -> int:
        return 1 if self.group is None else torch.distributed.get_world_size(self.group)

    def _of_all_ranks(self, parts: Tensor) -> Tensor:
        if (ranks := self._ranks()) == 1:
            return parts
        everyone = parts.new_empty(ranks * len(parts), *parts.shape[1:])
        torch.distributed.all_gather_into_tensor(everyone, parts, group=self.group)
        return everyone


@dataclass
class _Gradients:
    """The gradients of a call; None for one that is not needed."""

    hidden: Tensor | None
    weight: Tensor | None

    def add(self, head: _Head, hidden: Tensor, rows: slice, d_logits: Tensor, factors: Tensor | None = None) -> None:
        """Add a chunk's gradients. factors [T, 1] of the rows of d_logits; both products apply them to their
        tokens.
        """
        x = hidden[rows]
        if self.hidden is not None and factors is None:
            dense_product_(self.hidden[rows], d_logits, head.weight)
        elif self.hidden is not None:
            self._scaled_product(self.hidden[rows], d_logits, head.weight, factors)
        if self.weight is not None:
            x = x if factors is None else torch.mul(x, factors, out=torch.empty_like(x))
            dense_product_(self.weight, d_logits.t(), x, accumulate=True)

    @staticmethod
    def _scaled_product(out: Tensor, d_logits: Tensor, weight: Tensor, factors: Tensor) -> None:
        """Compute out = factors * (d_logits weight), rounded once where the device multiplies into fp32."""
        product = torch.empty_like(out, dtype=wide(out.dtype))
        if way_of_adding(product, d_logits) == "rounded":
            dense_product_(out, d_logits, weight).mul_(factors)
        else:
            torch.mul(dense_product_(product, d_logits, weight), factors, out=out)


def _empty_gradients(ctx, hidden: Tensor, weight: Tensor, main_grad: Tensor | None) -> _Gradients:
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    total = None
    if needs_weight:
        total = torch.zeros_like(weight, dtype=wide(weight.dtype)) if main_grad is None else main_grad
    return _Gradients(torch.empty_like(hidden) if needs_hidden else None, total)


def _handed_out(ctx, gradients: _Gradients, main_grad: Tensor | None, dtype: torch.dtype) -> tuple:
    weight = None if gradients.weight is None or main_grad is not None else gradients.weight.to(dtype)
    return gradients.hidden, weight, *[None] * (len(ctx.needs_input_grad) - 2)


def _scan(head: _Head, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses [T] and normalizer [2, T]."""
    compute = wide(hidden.dtype)
    losses, normalizer = hidden.new_empty(len(hidden), dtype=compute), hidden.new_empty((2, len(hidden)), dtype=compute)
    buffer = head.buffer(hidden)
    for rows in head.chunks():
        normalizer[:, rows], label = head.statistics(head.logits(hidden, rows, buffer), rows)
        losses[rows] = reference.losses(normalizer[:, rows], label, head.z_loss)
    return losses, normalizer


class _Promised(torch.autograd.Function):
    """Make the gradients in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, head, promised, main_grad):
        losses = hidden.new_empty(len(hidden), dtype=wide(hidden.dtype))
        gradients, buffer = _empty_gradients(ctx, hidden, weight, main_grad), head.buffer(hidden)
        for rows in head.chunks():
            logits = head.logits(hidden, rows, buffer)
            losses[rows], factors = head.gradient(logits, rows, promised[rows])
            gradients.add(head, hidden, rows, logits, factors.unsqueeze(-1))
        ctx.save_for_backward(promised)
        ctx.gradients, ctx.main_grad, ctx.dtype = gradients, main_grad, weight.dtype
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (promised,) = ctx.saved_tensors
        kept = grad == promised
        torch._assert_async(kept.all(), BROKEN_PROMISE)
        gradients = ctx.gradients
        if torch.version.hip is not None:  # torch for ROCm is built without asserts on the device
            poisoned = gradients.weight if gradients.hidden is None else gradients.hidden
            poisoned.masked_fill_(~kept.all(), torch.nan)
        return _handed_out(ctx, gradients, ctx.main_grad, ctx.dtype)


class _Recomputed(torch.autograd.Function):
    """Make the logits again in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, head, main_grad):
        losses, normalizer = _scan(head, hidden)
        ctx.save_for_backward(hidden, weight, head.labels, normalizer)
        ctx.head, ctx.main_grad = head, main_grad
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, labels, normalizer = ctx.saved_tensors
        head, grad = ctx.head, grad.contiguous()
        gradients, buffer = _empty_gradients(ctx, hidden, weight, ctx.main_grad), head.buffer(hidden)
        for rows in head.chunks():
            logits = head.logits(hidden, rows, buffer)
            overwrite_with_gradient(
                logits, labels[rows], head.first_class, normalizer[:, rows], grad[rows], head.z_loss
            )
            gradients.add(head, hidden, rows, logits)
        return _handed_out(ctx, gradients, ctx.main_grad, weight.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    promised_grad: Tensor | None = None,
    main_grad: Tensor | None = None,
    z_loss: float = 0.0,
    group=None,
    first_class: int = 0,
) -> Tensor:
    """Return the cross-entropy of softmax(hidden weight^T) and labels, in chunks of tokens with at most 1.25 GiB of
    logits (`chunk_for`).

    Args:
        hidden: [T, h]. weight: [V, h] of the same dtype, bf16 or fp32; with a group this rank's rows of it.
        labels: int64 [T], as classes of the whole vocabulary. A label that is no class raises no error: its loss
            is logsumexp(logits) and its gradient the softmax's, so such tokens must be masked, like padding.
        promised_grad: [T], the gradient that the backward pass will bring for the losses. Both gradients are then made
            in the forward pass. The backward pass compares on the device, without waiting for it: if the gradients
            differ, an assertion of the device fails. On ROCm, which has no such assertions, the gradient of hidden
            becomes NaN, or the weight's where hidden needs none. Ignored where nothing requires a gradient.
        main_grad: [V, h], fp32 or weight's dtype. The weight's gradient is added to it and autograd gets None for the
            weight. With a promise it is added in the forward pass, so backward must be called exactly once. Without
            main_grad autograd gets the gradient, summed in fp32.
        z_loss: factor of logsumexp(logits)^2 in the loss (arXiv 2204.02311).
        group: torch.distributed group whose ranks share the vocabulary; this rank's rows start at class first_class.
            One small all-gather per chunk. Every rank must have the same number of rows, which determines the chunks.
            Losses are the same on all ranks; the gradient of hidden is this rank's part, and the caller sums it.

    Returns:
        losses fp32 [T] (fp64 for fp64 tensors, which run in plain torch).

    Raises:
        ValueError: shapes, dtypes or devices do not go together.
    """
    promised = None if promised_grad is None else promised_grad.detach().to(wide(hidden.dtype)).contiguous()
    _DECLARATION.check((hidden, weight, labels, promised, main_grad))
    chunk = chunk_for(len(hidden), len(weight), weight.element_size())
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    head = _Head(weight.detach(), labels.contiguous(), float(z_loss), group, first_class, chunk)
    if not needs_gradient:
        return _scan(head, hidden)[0]
    if promised is None:
        return _Recomputed.apply(hidden, weight, head, main_grad)
    return _Promised.apply(hidden, weight, head, promised, main_grad)
