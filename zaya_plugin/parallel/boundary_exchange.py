# SPDX-License-Identifier: Apache-2.0
"""The few rows that CCA's convolutions and value shift need from before each chunk of a context-parallel rank.

All ranks' boundary rows are gathered (2 C + g d / 2 values a chunk, 5 KB in bf16 at ZAYA1's width) and each rank picks
those of its chunks' predecessors. One collective of a few KB is one latency, as a send and a receive would be, and is the
same for both orders. A row has one reader at most, so the gradient needs no sum: the readers' gradients are gathered the
same way and each owner picks its own. Both directions run while the projections, or their gradients, are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zaya_plugin.parallel.context_order import ContextShard


@dataclass
class _Exchange:
    """What the two halves of one exchange share: where the rows go, and the collective under way."""

    shard: ContextShard
    group: Any
    work: Any = None
    rows: Tensor | None = None  # what the collective reads, and
    gathered: Tensor | None = None  # what it writes, kept while it runs

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows [slots, n], in flight, from this rank's [chunks, n]."""
        self.rows = rows.contiguous()
        self.gathered = rows.new_empty(self.shard.total_chunks, rows.shape[1])
        self.work = torch.distributed.all_gather_into_tensor(self.gathered, self.rows, group=self.group, async_op=True)
        return self.gathered

    def pick(self, slots: Sequence[int | None]) -> Tensor:
        """Rows [chunks, n] of `slots` once they have arrived; zeros for None."""
        self.work.wait()
        gathered = self.gathered
        self.work = self.rows = self.gathered = None
        nothing = gathered.new_zeros(gathered.shape[1]) if None in slots else None
        return torch.stack([nothing if slot is None else gathered[slot] for slot in slots])


class _Start(torch.autograd.Function):
    """Own rows -> the gathered rows, which nobody may read before `_Finish` has waited for them."""

    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.gather(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_gathered):
        # grad_gathered is the buffer of the collective that _Finish.backward started, by now hidden behind the projections' gradients.
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
        # Has the shape of `gathered` as autograd demands, though its slots mean readers here and owners there.
        return ctx.exchange.gather(grad_rows), None


class BoundaryExchange:
    """Rows before each chunk of this rank, under way; `finish` waits and gives them.

    Args: z, the last two rows of each chunk's convolution input [k, 2, b, C]; delayed, the last row of each chunk's delayed
    values [k, b, D]; shard; group, the context-parallel process group. k chunks a rank.
    """

    def __init__(self, z: Tensor, delayed: Tensor, shard: ContextShard, group):
        assert z.shape[0] == delayed.shape[0] == len(shard.chunks) and z.shape[1] == 2
        self.exchange = _Exchange(shard, group)
        self.shapes = z.shape[1:], delayed.shape[1:]
        self.gathered = _Start.apply(torch.cat((z.flatten(1), delayed.flatten(1)), dim=1), self.exchange)

    def finish(self) -> tuple[Tensor, Tensor]:
        """z before each chunk [k, 2, b, C] and delayed values before each chunk [k, b, D]; zeros before the sequence."""
        rows = _Finish.apply(self.gathered, self.exchange)
        z, delayed = rows.split([shape.numel() for shape in self.shapes], dim=1)
        return z.unflatten(1, self.shapes[0]), delayed.unflatten(1, self.shapes[1])


def last_rows(x: Tensor, chunks: int, count: int) -> Tensor:
    """The last `count` rows of each of `chunks` equal chunks of x [s, ...]: [chunks, count, ...]."""
    return x.unflatten(0, (chunks, -1))[:, -count:]
