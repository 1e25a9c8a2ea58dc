# SPDX-License-Identifier: Apache-2.0
"""A linear head and its cross-entropy in chunks of tokens, so that the logits of all tokens never exist.

A chunk's logits lie in one buffer, which becomes their gradient in place: three matrix products (torch's). Gradients are exact, nothing is
filtered, weight gradients are summed in fp32.

If the gradient that the losses will get is promised - in training it is the loss mask - both gradients are made on the way forward, while the
chunk's logits are there, by one pass over them (vocabulary_exponentials.py): rows of the buffer are then their gradient but for a factor, which the
gradient of hidden gets from its product in fp32, and that of the weight by one more rounding, of hidden times the factor. Without a promise a pass
of its own finds the sums (vocabulary_rows.py), and the backward pass makes the logits once more, a fourth product, and a second pass. Results differ
by roundings.

Saved for the backward: with a promise the gradient of hidden (and of weight, if there is no main_grad), else hidden, weight and a row's
maximum and sum. What it takes besides: one chunk of logits, and of a chunk's tokens a row of h in fp32 and three numbers for every 2,048 classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hip_ops.reference import vocabulary_rows as reference
from hip_ops.reference.vocabulary_exponentials import joined, parts_of_exponentials
from hip_ops.vocabulary_exponentials import finish_gradient, overwrite_with_exponentials
from hip_ops.vocabulary_rows import overwrite_with_gradient, parts_for, row_statistics
from hip_ops.weight_gradient import add_product_, scaled_product

DTYPES = (torch.bfloat16, torch.float32)
BUFFER_BYTES = 5 * 2**28  # of a chunk's logits, at most
# At most 254 characters: the device's assert takes no more.
BROKEN_PROMISE = (
    "hip_ops.linear_cross_entropy: the losses' gradient is not promised_grad, so the gradients made on the way forward are wrong. "
    "Promise what backward brings (the loss mask, for a sum of losses * mask), or nothing"
)


def chunk_for(tokens: int, classes: int, element_bytes: int) -> int:
    """Tokens of a chunk whose logits fit into BUFFER_BYTES.

    A multiple of 2048 if that is possible: on an H100 the gradient of 2048 tokens by 2048 channels is one round of 128 x 256 tiles on 132
    processors, and 2752 tokens took 1.7 times as long (docs/log.md).
    """
    fitting = BUFFER_BYTES // (max(1, classes) * element_bytes)
    for step in (2048, 256, 1):
        if fitting >= step:
            return max(1, min(tokens, fitting // step * step))
    return 1


@dataclass(frozen=True)
class _Head:
    """What does not change from chunk to chunk. group: the ranks that share the vocabulary, None for one."""

    weight: Tensor
    labels: Tensor
    z_loss: float
    group: object
    first_class: int
    chunk: int

    def chunks(self) -> Iterator[slice]:
        tokens = len(self.labels)
        yield from (slice(at, min(at + self.chunk, tokens)) for at in range(0, tokens, self.chunk))

    def buffer(self, hidden: Tensor) -> Tensor:
        return hidden.new_empty(min(self.chunk, len(hidden)), len(self.weight))

    def logits(self, hidden: Tensor, rows: slice, buffer: Tensor) -> Tensor:
        return torch.mm(hidden[rows], self.weight.t(), out=buffer[: rows.stop - rows.start])

    def statistics(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Normalizer and label's logit, over all ranks; one exchange."""
        return reference.combined(
            self._of_all_ranks(row_statistics(logits, self.labels[rows], self.first_class, parts_for(logits)))
        )

    def gradient(self, logits: Tensor, rows: slice, grad: Tensor) -> Tensor:
        """Makes the logits their gradient but for a factor a row. Returns [2, T]: losses and these factors. One exchange."""
        labels, parts = self.labels[rows], parts_of_exponentials(len(self.weight))
        statistics, first = overwrite_with_exponentials(logits, labels, self.first_class, parts), 0
        if (
            self._ranks() > 1
        ):  # three numbers a token are sent; of this rank's parts the references still count, all else is in the ranks' sums
            everyone, first = self._of_all_ranks(joined(statistics)), self._ranks()
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
    """Where the gradients of a call go; None for one that nobody needs."""

    hidden: Tensor | None
    weight: Tensor | None

    def add(self, head: _Head, hidden: Tensor, rows: slice, d_logits: Tensor, factors: Tensor | None = None) -> None:
        """factors [T, 1]: what rows of d_logits lack; both products take it on their side of tokens."""
        if self.hidden is not None and factors is None:
            torch.mm(d_logits, head.weight, out=self.hidden[rows])
        elif self.hidden is not None:
            scaled_product(d_logits, head.weight, factors, self.hidden[rows])
        if self.weight is not None:
            x = (
                hidden[rows]
                if factors is None
                else torch.mul(hidden[rows], factors, out=torch.empty_like(hidden[rows]))
            )
            add_product_(self.weight, d_logits, x)


def _empty_gradients(ctx, hidden: Tensor, weight: Tensor, main_grad: Tensor | None) -> _Gradients:
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    total = None
    if needs_weight:
        total = torch.zeros_like(weight, dtype=reference.compute_dtype(weight)) if main_grad is None else main_grad
    return _Gradients(torch.empty_like(hidden) if needs_hidden else None, total)


def _handed_out(ctx, gradients: _Gradients, main_grad: Tensor | None, dtype: torch.dtype) -> tuple:
    weight = None if gradients.weight is None or main_grad is not None else gradients.weight.to(dtype)
    return gradients.hidden, weight, *[None] * (len(ctx.needs_input_grad) - 2)


def _scan(head: _Head, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [T] and normalizer [2, T]."""
    compute = reference.compute_dtype(hidden)
    losses, normalizer = hidden.new_empty(len(hidden), dtype=compute), hidden.new_empty((2, len(hidden)), dtype=compute)
    buffer = head.buffer(hidden)
    for rows in head.chunks():
        normalizer[:, rows], label = head.statistics(head.logits(hidden, rows, buffer), rows)
        losses[rows] = reference.losses(normalizer[:, rows], label, head.z_loss)
    return losses, normalizer


class _Promised(torch.autograd.Function):
    """Gradients on the way forward."""

    @staticmethod
    def forward(ctx, hidden, weight, head, promised, main_grad):
        losses = hidden.new_empty(len(hidden), dtype=reference.compute_dtype(hidden))
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
        if torch.version.hip is not None:  # whose torch is built without asserts on the device
            poisoned = gradients.weight if gradients.hidden is None else gradients.hidden
            poisoned.masked_fill_(~kept.all(), torch.nan)
        return _handed_out(ctx, gradients, ctx.main_grad, ctx.dtype)


class _Recomputed(torch.autograd.Function):
    """Logits once more on the way back."""

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


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, promised: Tensor | None, main_grad: Tensor | None, chunk: int | None
) -> None:
    """Raises ValueError on shapes, dtypes or devices that do not go together."""

    def fail(name: str, what, must: str):
        raise ValueError(f"hip_ops.linear_cross_entropy: {name} {what}; it must be {must}")

    if hidden.dim() != 2:
        fail("hidden", f"has shape {tuple(hidden.shape)}", "[tokens, h]")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or len(weight) == 0:
        fail("weight", f"has shape {tuple(weight.shape)}", f"[classes, {hidden.shape[1]}] with at least one class")
    if hidden.dtype not in (*DTYPES, torch.float64):
        fail("hidden", f"is {hidden.dtype}", "torch.bfloat16 or torch.float32 (or all tensors torch.float64)")
    if weight.dtype != hidden.dtype:
        fail("weight", f"is {weight.dtype}", f"{hidden.dtype} like hidden")
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        fail(
            "labels", f"is {labels.dtype} {tuple(labels.shape)}", f"torch.int64 {tuple(hidden.shape[:1])}, one a token"
        )
    if promised is not None and promised.shape != hidden.shape[:1]:
        fail("promised_grad", f"has shape {tuple(promised.shape)}", f"{tuple(hidden.shape[:1])}, one number a token")
    if main_grad is not None and main_grad.shape != weight.shape:
        fail("main_grad", f"has shape {tuple(main_grad.shape)}", f"{tuple(weight.shape)} like weight")
    if main_grad is not None and main_grad.dtype not in (weight.dtype, reference.compute_dtype(weight)):
        fail("main_grad", f"is {main_grad.dtype}", f"{weight.dtype} like weight or {reference.compute_dtype(weight)}")
    if chunk is not None and chunk < 1:
        fail("chunk_tokens", f"is {chunk}", "at least 1")
    for name, tensor in {"weight": weight, "labels": labels, "promised_grad": promised, "main_grad": main_grad}.items():
        if tensor is not None and tensor.device != hidden.device:
            fail(name, f"is on {tensor.device}", f"on {hidden.device} like hidden")


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
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross-entropy of softmax(hidden weight^T) with labels, without the logits of more than a chunk of tokens.

    Args:
        hidden: [T, h]. weight: [V, h] of the same dtype, bf16 or fp32; with a group this rank's rows of it.
        labels: int64 [T], as classes of the whole vocabulary. One that is no class raises nothing: its loss is logsumexp(logits) and its
            gradient the softmax's, so such tokens have to be masked, as padding is.
        promised_grad: [T], the gradient that the backward pass will bring for the losses. Both gradients are then made on the way forward, and
            the backward pass compares on the device, without waiting for it: an assertion of the device fails (on ROCm, where these are not
            compiled, the gradient of hidden becomes NaN, or where that is not wanted the weight's) if the promise was broken. Ignored where nothing
            requires a gradient.
        main_grad: [V, h], fp32 or weight's dtype. The weight's gradient is added here - with a promise already on the way forward, so call backward
            exactly once - and autograd gets None for the weight. Without it autograd gets the gradient, summed in fp32.
        z_loss: factor of logsumexp(logits)^2 in the loss (arXiv 2204.02311).
        group: torch.distributed group over whose ranks the vocabulary is cut, with this rank's rows from class first_class on. One small
            all-gather a chunk; every rank has as many rows, since they decide its size. Losses are the same on all ranks; the gradient of hidden
            is this rank's part, and for the caller to sum.
        chunk_tokens: tokens of a chunk; None: as many as fit into 1.25 GiB of logits.

    Returns:
        losses fp32 [T] (fp64 for fp64 tensors, which run in plain torch).

    Raises:
        ValueError: shapes, dtypes or devices do not go together.
    """
    _check(hidden, weight, labels, promised_grad, main_grad, chunk_tokens)
    chunk = chunk_tokens or chunk_for(len(hidden), len(weight), weight.element_size())
    head = _Head(weight.detach(), labels.contiguous(), float(z_loss), group, first_class, chunk)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        return _scan(head, hidden)[0]
    if promised_grad is None:
        return _Recomputed.apply(hidden, weight, head, main_grad)
    promised = promised_grad.detach().to(reference.compute_dtype(hidden)).contiguous()
    return _Promised.apply(hidden, weight, head, promised, main_grad)
