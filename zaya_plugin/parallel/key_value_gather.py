# SPDX-License-Identifier: Apache-2.0
"""An all-gather of keys and values over the context-parallel group, for each rank's queries.

ZAYA1's keys and values have 512 channels a token together, an eighth of plain attention's. Gathering them costs less
than a ring of blocks would save. The gradient of a row is the sum over the ranks that read it: a reduce-scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zaya_plugin.parallel.context_order import ContextShard


class _GatherSequence(torch.autograd.Function):
    """x [s / size, ...] of all ranks in the order of the sequence [s, ...]; its gradient is summed over the ranks."""

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
    """Return equal pieces of x [s, ...] in `order`."""
    if list(order) == list(range(len(order))):
        return x
    pieces = x.chunk(len(order))
    return torch.cat([pieces[i] for i in order])


def gather_key_value(key: Tensor, value: Tensor, shard: ContextShard, group) -> tuple[Tensor, Tensor]:
    """Gather keys and values of the whole sequence, [s, b, g, d] each, from each rank's [s / size, b, g, d], in one
    collective.
    """
    packed = _GatherSequence.apply(torch.cat((key, value), dim=-2), shard, group)
    return packed.split((key.shape[-2], value.shape[-2]), dim=-2)
