# SPDX-License-Identifier: Apache-2.0
"""The two exchanges of a context-parallel rank in attention: the rows before its chunks, and keys and values.

CCA's convolutions and value shift read the rows before each chunk. All ranks' boundary rows are gathered (2 C + g d / 2
values a chunk, 5 KB in bf16 at ZAYA1's width), and each rank picks the rows before its chunks. One collective of a few
KB costs one latency, as a send and a receive would, and is the same for both orders. A row has at most one reader, so
its gradient is no sum: the readers' gradients are gathered the same way, and each owner picks its own. Both directions
run while the projections, or their gradients, are computed.

A rank's queries read the keys and values of the whole sequence. ZAYA1's have 512 channels a token together, an eighth
of plain attention's, so gathering them costs less than a ring of blocks would save. The gradient of a row is the sum
over the ranks that read it: a reduce-scatter.

A layer with a sliding window reads the rows of its window alone. Each rank then sends the other ranks only the rows
that they reach (`Halo`), unless that would be as many as gathering receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.halo import halo


@dataclass
class _Exchange:
    """The state that the two halves of one exchange share.

    work: the running collective. rows, gathered: the tensors that it reads and writes, kept while it runs.
    """

    shard: ContextShard
    group: Any
    work: Any = None
    rows: Tensor | None = None
    gathered: Tensor | None = None

    def gather(self, rows: Tensor) -> Tensor:
        """Start to gather all ranks' rows [slots, n] from each rank's rows [chunks, n]; return the tensor being
        written.
        """
        self.rows = rows.contiguous()
        self.gathered = rows.new_empty(self.shard.total_chunks, rows.shape[1])
        self.work = torch.distributed.all_gather_into_tensor(self.gathered, self.rows, group=self.group, async_op=True)
        return self.gathered

    def pick(self, slots: Sequence[int | None]) -> Tensor:
        """Wait for the collective. Return the rows [chunks, n] of `slots`; zeros for None."""
        self.work.wait()
        gathered = self.gathered
        self.work = self.rows = self.gathered = None
        nothing = gathered.new_zeros(gathered.shape[1]) if None in slots else None
        return torch.stack([nothing if slot is None else gathered[slot] for slot in slots])


class _Start(torch.autograd.Function):
    """Own rows -> the gathered rows, which must not be read before `_Finish` has waited for them."""

    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.gather(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_gathered):
        # grad_gathered is the buffer of the collective that _Finish.backward started; the projections' gradients were
        # computed meanwhile.
        return ctx.exchange.pick(ctx.exchange.shard.next_slots), None


class _Finish(torch.autograd.Function):
    """Gathered rows -> the rows before this rank's chunks."""

    @staticmethod
    def forward(ctx, gathered, exchange):
        ctx.exchange = exchange
        return exchange.pick(exchange.shard.previous_slots)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_rows):
        # It has the shape of `gathered`, as autograd requires, but its slots are those of the readers, not of the
        # owners.
        return ctx.exchange.gather(grad_rows), None


class BoundaryExchange:
    """A running exchange of the rows before each chunk of this rank; `finish` waits and returns them.

    Args:
        z: the last two rows of each chunk's convolution input [k, 2, b, C], for k chunks a rank.
        delayed: the last row of each chunk's delayed values [k, b, D].
        shard: this rank's part of the sequence.
        group: context-parallel process group.
    """

    def __init__(self, z: Tensor, delayed: Tensor, shard: ContextShard, group):
        assert z.shape[0] == delayed.shape[0] == len(shard.chunks) and z.shape[1] == 2
        self.exchange = _Exchange(shard, group)
        self.shapes = z.shape[1:], delayed.shape[1:]
        self.gathered = _Start.apply(torch.cat((z.flatten(1), delayed.flatten(1)), dim=1), self.exchange)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return z before each chunk [k, 2, b, C] and delayed values before each chunk [k, b, D]; zeros before the
        sequence.
        """
        rows = _Finish.apply(self.gathered, self.exchange)
        z, delayed = rows.split([shape.numel() for shape in self.shapes], dim=1)
        return z.unflatten(1, self.shapes[0]), delayed.unflatten(1, self.shapes[1])


def last_rows(x: Tensor, chunks: int, count: int) -> Tensor:
    """Return the last `count` rows of each of `chunks` equal chunks of x [s, ...]: [chunks, count, ...]."""
    return x.unflatten(0, (chunks, -1))[:, -count:]


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


class _ExchangeHalo(torch.autograd.Function):
    """x [s / size, ...] of all ranks -> for each chunk of this rank its halo and its own rows, one chunk behind the
    other. A row's gradient is summed over its readers.
    """

    @staticmethod
    def forward(ctx, x, halo, group):
        sends, receives, sent, chunks = halo.plan
        ctx.halo, ctx.group, ctx.count = halo, group, len(x)
        outgoing = torch.cat([x[:0], *(x[part] for part in sent)])
        incoming = x.new_empty(sum(receives), *x.shape[1:])
        torch.distributed.all_to_all_single(incoming, outgoing, receives, sends, group=group)
        rows = torch.cat((x, incoming))
        return torch.cat([rows[part] for parts in chunks for part in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        sends, receives, sent, chunks = ctx.halo.plan
        rows = grad.new_zeros(ctx.count + sum(receives), *grad.shape[1:])
        _add_pieces(rows, [part for parts in chunks for part in parts], grad)
        mine, outgoing = rows.split((ctx.count, sum(receives)))
        incoming = grad.new_empty(sum(sends), *grad.shape[1:])
        torch.distributed.all_to_all_single(incoming, outgoing.contiguous(), sends, receives, group=ctx.group)
        _add_pieces(mine, sent, incoming)
        return mine, None, None


def _add_pieces(total: Tensor, parts: Sequence[slice], pieces: Tensor) -> None:
    """Add the rows of `pieces`, one part behind the other, to total[part]."""
    for part, piece in zip(parts, pieces.split([part.stop - part.start for part in parts]), strict=True):
        total[part] += piece


def key_value_in_reach(
    key: Tensor, value: Tensor, window: int, shard: ContextShard, group
) -> list[tuple[Tensor, Tensor]]:
    """Return for each chunk of this rank the keys and values [t, b, g, d] from `window` rows before the chunk, or the
    sequence's start, to the chunk's end.

    key, value: this rank's rows [s / size, b, g, d]; of one rank they are returned as they are.
    """
    if shard.size == 1:
        return [(key, value)]
    packed, sizes = torch.cat((key, value), dim=-2), (key.shape[-2], value.shape[-2])
    rows, starts = len(key) // len(shard.chunks), shard.starts(len(key))
    begins = [max(start - window, 0) for start in starts]
    exchange = halo(shard, rows, window)
    if exchange.is_shorter:
        lengths = [start + rows - begin for start, begin in zip(starts, begins, strict=True)]
        parts = _ExchangeHalo.apply(packed, exchange, group).split(lengths)
    else:
        whole = _GatherSequence.apply(packed, shard, group)
        parts = [whole[begin : start + rows] for start, begin in zip(starts, begins, strict=True)]
    return [part.split(sizes, dim=-2) for part in parts]
