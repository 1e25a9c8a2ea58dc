# SPDX-License-Identifier: Apache-2.0
"""Causal attention of some chunks of a sequence, each chunk in two blocks: the keys before it (all visible) and its own
keys (causal).

Context parallelism needs a causal mask that is aligned at the end of more keys than queries. torch's only GPU kernel
for such a mask is FlashAttention-2. cuDNN's kernel, twice as fast on Hopper, takes full blocks and causal blocks with
as many queries as keys. The results of both blocks are joined by their log-sum-exps. With the joined result and
log-sum-exp each block's backward pass gives its share of the gradients (FlashAttention-2, arXiv 2307.08691, section
3.1; Ring Attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hip_ops

aten = torch.ops.aten


class CudnnKernel:
    """cuDNN's attention of queries [b, n, s, d] to keys and values [b, g, t, d], through torch's operators.
    causal: s = t, and each query sees the keys up to its own.

    forward returns the result [b, n, s, d], the log-sum-exp of the scaled scores [b, n, s, 1], and further tensors that
    backward needs. backward returns the gradients of query, key and value; out and sums cover all keys, of which key
    and value may be a part.
    """

    def forward(self, query, key, value, causal, scale):
        out, sums, _, _, _, _, *philox, _ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return out, sums.view(*out.shape[:-1], 1), *philox

    def backward(self, grad, query, key, value, out, sums, *philox, causal, scale):
        none, rows = (None, None, None), (query.shape[2], key.shape[2])  # no bias, no packed sequences
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, sums, *philox, *none, *rows, 0.0, causal, scale=scale
        )


class CpuKernel:
    """The same by torch's attention for CPUs. It has no grouped heads, so keys and values are repeated for the heads
    that share them.
    """

    def forward(self, query, key, value, causal, scale):
        key, value = (repeated(x, query.shape[1]) for x in (key, value))
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return out, sums.unsqueeze(-1)

    def backward(self, grad, query, key, value, out, sums, causal, scale):
        wide = (repeated(x, query.shape[1]) for x in (key, value))
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, *wide, out, sums.squeeze(-1), 0.0, causal, scale=scale
        )
        return grads[0], *(x.unflatten(1, (key.shape[1], -1)).sum(2) for x in grads[1:])


def repeated(x: Tensor, heads: int) -> Tensor:
    """Repeat each group for the heads that share it: [b, g, t, d] -> [b, heads, t, d]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


@hip_ops.formula
def joined(out: Tensor, sums: Tensor, earlier: Tensor, earlier_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Join results [b, n, s, d] over two sets of keys by their log-sum-exps [b, n, s, 1]; computed in the sums'
    dtype.
    """
    total = torch.logaddexp(sums, earlier_sums)
    wide = out * (sums - total).exp() + earlier * (earlier_sums - total).exp()
    return wide.to(out.dtype), total


class BlockAttention(torch.autograd.Function):
    """Autograd of `block_attention`. Saves the inputs, the result and the log-sum-exps."""

    @staticmethod
    def forward(ctx, query, key, value, scale, starts):
        kernel = CudnnKernel() if query.is_cuda else CpuKernel()
        rows = len(query) // len(starts)
        context, sums, more = torch.empty_like(query), [], []
        for q, result, start in zip(query.split(rows), context.split(rows), starts, strict=True):
            own, before = slice(start, start + rows), slice(0, start)
            out, total, *rest = kernel.forward(*heads_first(q, key[own], value[own]), True, scale)
            if start:
                earlier, earlier_sums, *_ = kernel.forward(*heads_first(q, key[before], value[before]), False, scale)
                out, total = joined(out, total, earlier, earlier_sums)
            result.copy_(out.permute(2, 0, 1, 3))
            sums.append(total)
            more.append(rest)
        ctx.save_for_backward(query, key, value, context, *sums, *(x for rest in more for x in rest))
        ctx.starts, ctx.scale, ctx.kernel = starts, scale, kernel
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        query, key, value, context, *kept = ctx.saved_tensors
        chunks = len(ctx.starts)
        rows, sums, rest = len(query) // chunks, kept[:chunks], kept[chunks:]
        count = len(rest) // chunks  # of a chunk
        grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        pieces = zip(*(x.split(rows) for x in (query, context, grad, grad_query)), strict=True)
        for chunk, (q, out, g, grad_q) in enumerate(pieces):
            start, more = ctx.starts[chunk], rest[chunk * count : (chunk + 1) * count]
            for keys, causal in ((slice(start, start + rows), True), (slice(0, start), False)):
                if keys.stop == 0:
                    continue
                g_, q_, k_, v_, out_ = heads_first(g, q, key[keys], value[keys], out)
                shares = ctx.kernel.backward(g_, q_, k_, v_, out_, sums[chunk], *more, causal=causal, scale=ctx.scale)
                for total, share in zip((grad_q, grad_key[keys], grad_value[keys]), shares, strict=True):
                    total += share.permute(2, 0, 1, 3)
        return grad_query, grad_key, grad_value, None, None


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views [b, heads, s, d] of [s, b, heads, d]."""
    return tuple(x.permute(1, 2, 0, 3) for x in tensors)


def block_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, starts: Sequence[int]) -> Tensor:
    """Compute softmax(scale * q k^T + causal mask) v of chunks of a sequence that begin at positions `starts`.

    Args: query [s, b, n, d], equal chunks one behind the other; key and value [t, b, g, d] of the sequence, at least up
    to the last chunk's end, n a multiple of g. Returns [s, b, n * d]. Not differentiable twice.
    """
    return BlockAttention.apply(query, key, value, scale, tuple(starts)).flatten(2)


def takes_blocks(query: Tensor, key: Tensor, *_) -> bool:
    """Return whether `block_attention` takes such queries [s, b, n, d] and keys [t, b, g, d].

    On a GPU it does where torch would choose cuDNN's kernel for a whole sequence. That kernel's backward pass is not
    deterministic.
    """
    if not query.is_cuda:
        return True
    if torch.are_deterministic_algorithms_enabled():
        return False
    query, key = heads_first(query, key)
    parameters = torch.backends.cuda.SDPAParams(query, key, key, None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)
