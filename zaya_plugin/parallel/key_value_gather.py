# SPDX-License-Identifier: Apache-2.0
"""All ranks' keys and values for one rank's queries: an all-gather over the context-parallel group.

ZAYA1's keys and values are 512 channels a token together, an eighth of a plain attention's, so that gathering them costs
less than passing blocks around a ring would save. The gradient is the sum over the ranks that read a row: a reduce-scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zaya_plugin.parallel.context_order import ContextShard


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, group):
        ctx.shard, ctx.group = shard, group
        gathered = x.new_empty(shard.size * x.shape[0], *x.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return _reordered(gathered, shard.slots)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        shard = ctx.shard
        # The inverse permutation: slot -> chunk.
        chunks = [shard.slots.index(slot) for slot in range(shard.total_chunks)]
        grad = _reordered(grad, chunks).contiguous()
        mine = grad.new_empty(grad.shape[0] // shard.size, *grad.shape[1:])
        torch.distributed.reduce_scatter_tensor(mine, grad, group=ctx.group)
        return mine, None, None


def _reordered(x: Tensor, order) -> Tensor:
    """Equal pieces of x [s, ...] in `order`."""
    if list(order) == list(range(len(order))):
        return x
    pieces = x.chunk(len(order))
    return torch.cat([pieces[i] for i in order])


def gather_sequence(x: Tensor, shard: ContextShard, group) -> Tensor:
    """x [s / size, ...] of all ranks in the order of the sequence [s, ...]; its gradient is summed over the ranks."""
    return _GatherSequence.apply(x, shard, group)


def gather_key_value(key: Tensor, value: Tensor, shard: ContextShard, group) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, [s, b, g, d] each, from this rank's [s / size, b, g, d], in one collective."""
    packed = gather_sequence(torch.cat((key, value), dim=-2), shard, group)
    return packed.split((key.shape[-2], value.shape[-2]), dim=-2)
