# SPDX-License-Identifier: Apache-2.0
"""What must stay together in a bucket, and where it comes to lie: expert blocks unbroken, no matrix across a border between shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.optimizer.param_layout import pad_param_start, pad_to_divisor
from torch.nn import Parameter

from zaya_plugin.optim.newton_schulz_cost import muon_work


@dataclass(frozen=True)
class Unit:
    """An expert block in ascending order, or a single parameter.

    numel: elements; largest: of its largest piece that must not be cut; work: Muon's for all of it (`muon_work`).
    """

    params: tuple[Parameter, ...]
    numel: int
    largest: int
    is_block: bool
    is_whole: bool
    work: int

    @classmethod
    def of(cls, params: Sequence[Parameter]) -> Unit:
        is_block = hasattr(params[0], "expert_block")
        if is_block:
            params = sorted(params, key=lambda p: p.expert_block[1])
            assert len({p.numel() for p in params}) == 1, "the matrices of a block have one shape"
        is_whole = is_block or hasattr(params[0], "muon_matrices")
        return cls(
            tuple(params),
            sum(p.numel() for p in params),
            params[0].numel(),
            is_block,
            is_whole,
            sum(work_of(p) for p in params),
        )

    @property
    def kind(self) -> tuple:
        """Equal for units that may take each other's place."""
        return (self.numel, self.largest, self.is_block, self.is_whole, self.work)


def units_of(params: Iterable[Parameter]) -> list[Unit]:
    """Parameters, in order, as units."""
    found: list[list[Parameter]] = []
    for param in params:
        block = getattr(param, "expert_block", None)
        if found and block is not None and getattr(found[-1][0], "expert_block", (None,))[0] == block[0]:
            found[-1].append(param)
        else:
            found.append([param])
    return [Unit.of(each) for each in found]


def work_of(param: Parameter) -> int:
    """Muon's for a parameter, 0 for others."""
    count, m, n = getattr(param, "muon_matrices", (0, 1, 1))
    return count * muon_work(m, n)


@dataclass(frozen=True)
class Shards:
    """count of a bucket; divisor: what DDP wants the bucket's length to be divisible by."""

    count: int
    divisor: int

    def grain(self, units: Sequence[Unit]) -> int:
        """What a shard's size is a multiple of."""
        grain = self.divisor // self.count
        if self.count == 1:
            return grain
        # A matrix that had to move starts at a border between shards, and has to be aligned there too.
        return math.lcm(
            grain, pad_param_start(1) if any(unit.is_whole for unit in units) else 1, largest_of_a_block(units)
        )

    def least(self, units: Sequence[Unit]) -> int:
        """The size of a shard of a bucket for `units` if nothing but its grain were lost."""
        whole = max((unit.largest for unit in units if unit.is_whole), default=1) if self.count > 1 else 1
        return pad_to_divisor(max(math.ceil(sum(unit.numel for unit in units) / self.count), whole), self.grain(units))

    def size(self, units: Sequence[Unit]) -> int:
        """The size of a shard that holds `units` in one of their usual orders."""
        shard, orders = self.least(units), usual_orders(units)
        while (end := min(place(order, self.count, shard)[1] for order in orders)) > self.count * shard:
            shard = pad_to_divisor(max(shard + 1 + shard // 512, math.ceil(end / self.count)), self.grain(units))
        return shard


def largest_of_a_block(units: Sequence[Unit]) -> int:
    return max((unit.largest for unit in units if unit.is_block), default=1)


def usual_orders(units: Sequence[Unit]) -> list[list[Unit]]:
    """Blocks as they come, or those of the largest matrices first, which leave no gaps between them; what is whole but no block, largest first, so that it rarely
    straddles a border; and the rest, which fills gaps."""
    blocks, matrices, rest = sorted_out(units)
    return [[*order, *matrices, *rest] for order in (blocks, sorted(blocks, key=lambda unit: -unit.largest))]


def sorted_out(units: Sequence[Unit]) -> tuple[list[Unit], list[Unit], list[Unit]]:
    blocks = [unit for unit in units if unit.is_block]
    matrices = sorted((unit for unit in units if unit.is_whole and not unit.is_block), key=lambda unit: -unit.numel)
    return blocks, matrices, [unit for unit in units if not unit.is_whole]


def place(items: Sequence[Unit | int], shards: int, shard: int) -> tuple[list[tuple[Unit, int]], int]:
    """Offsets of units one behind the other in `shards` shards of `shard` elements, and the end of the last; a number among `items` is left free.

    What is free, or was skipped before a border or an aligned block, takes the single parameters that fit into it.
    """
    placed: list[tuple[Unit, int]] = []
    gaps: list[list[int]] = []
    cursor = end = 0
    # Aligned to the largest matrix, a block of matrices that divide it never straddles a multiple of it.
    alignment = largest_of_a_block([item for item in items if isinstance(item, Unit)])

    def aligned(offset: int) -> int:
        return pad_to_divisor(offset, alignment) if shards > 1 else pad_param_start(offset)

    for item in items:
        if isinstance(item, int):
            gaps.append([cursor, aligned(cursor) + item])
            cursor = gaps[-1][1]
            continue
        if item.is_block:
            begin = aligned(cursor)
            if begin > cursor:
                gaps.append([cursor, begin])
            cursor = begin + item.numel
        elif (
            gap := next(
                (gap for gap in gaps if gap[1] - gap[0] >= item.numel and _fits(item, *gap, shards, shard)), None
            )
        ) is not None:
            begin = pad_param_start(gap[0])
            gap[0] = begin + item.numel
        else:
            begin = pad_param_start(cursor)
            if item.is_whole and _straddles(begin, item.numel, shards, shard):
                begin = (begin // shard + 1) * shard
                gaps.append([cursor, begin])
            cursor = begin + item.numel
        placed.append((item, begin))
        end = max(end, begin + item.numel)
    return placed, end


def offsets(placed: Iterable[tuple[Unit, int]]) -> dict[Parameter, int]:
    """Of every parameter."""
    return {param: begin + index * unit.largest for unit, begin in placed for index, param in enumerate(unit.params)}


def _fits(unit: Unit, start: int, end: int, shards: int, shard: int) -> bool:
    begin = pad_param_start(start)
    return begin + unit.numel <= end and not (unit.is_whole and _straddles(begin, unit.numel, shards, shard))


def _straddles(begin: int, numel: int, shards: int, shard: int) -> bool:
    return shards > 1 and begin // shard != (begin + numel - 1) // shard
