# SPDX-License-Identifier: Apache-2.0
"""The search for a layout: the parameters of each bucket, their order and their offsets.

A unit is an expert block or a single parameter. First the units, in the order of the backward pass, are cut into
buckets, so that whole matrices cost little padding and gradients are sent early. Then the units of each bucket are
arranged. Muon orthogonalises whole matrices, and the cost of an element depends on its matrix's size, so the order of a
bucket's blocks and the places of its gaps decide how much work each rank has. Several arrangements of each bucket are
tried; the chosen ones give the owners of the shards equal work over all buckets. Work is summed in integers, because
every rank computes the layout for itself and all ranks must get the same one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from megatron.core.optimizer.param_layout import pad_param_start, pad_to_divisor
from torch import Tensor
from torch.nn import Parameter

from hip_ops.ops.newton_schulz.plan import newton_schulz_flops
from zaya_plugin.optim.parameter_role import role_of

# FLOPs of Newton-Schulz in the time of reading and writing an element's gradient, momentum and weight. For all of
# ZAYA1-base these passes take 60 of 596 ms on one H200 (benchmarks/results/optimizer_step-h200.json), where
# Newton-Schulz ran at 470 TFLOP/s.
FLOPS_PER_ELEMENT = 3_000
# Factors of the requested bucket size that are tried: blocks of larger buckets can be ordered in more ways, and leave
# less padding.
SIZES = (1, 2, 4)
# A parameter that may be cut, such as the embedding, gets its own bucket unless that adds more padding than this share.
MAX_PADDING = 0.10
# A bucket may close after every `least` / FINENESS elements.
FINENESS = 4
# A bucket of n of N elements costs SIZE * n * n / N elements, because its gradients are sent together and its
# parameters arrive together. A split is worth as much padding.
SIZE = 0.2
# Elements that are reduced during the backward pass over one element: on four H200s 90 to 138 ms beside 225 ms, of
# 16,384 tokens (docs/benchmarks.md). Elements whose reduction the remaining backward pass cannot hide count as padding
# too.
HIDDEN = 2
# Largest number of orders of a bucket's blocks that are tried.
MAX_ORDERS = 200
# Effort for the arrangements of a bucket: units placed plus shards summed, over all its arrangements; but at least 24
# arrangements.
TRIED = 60_000
# Largest number of passes over all buckets that improve the choice of arrangements.
SWEEPS = 20
# The unit of work is 1 / RESOLUTION of a shard's mean work; larger if the square of all work would not fit into 63
# bits.
RESOLUTION = 2**20


def placed_buckets(
    params: Sequence[Parameter], bucket_size: int | None, shards: int, divisor: int
) -> list[tuple[dict[Parameter, int], int]]:
    """Return offsets of its parameters and length of each bucket. Arguments as for
    `zaya_plugin.optim.sharding.layout.layout`.
    """
    of = Shards(shards, divisor)
    units = units_of(reversed(params))
    tried = [
        balanced(cut_into_buckets(units, bucket_size and times * bucket_size, of), of)
        for times in (SIZES if bucket_size is not None and shards > 1 else (1,))
    ]
    # An element of a bucket costs about as much on the links as its owner's passes over it.
    chosen, _ = min(
        tried, key=lambda each: each[1] + FLOPS_PER_ELEMENT * cost_of_buckets([numel for _, numel in each[0]])
    )
    return [(offsets(in_bucket), numel) for in_bucket, numel in chosen]


@dataclass(frozen=True)
class Unit:
    """An expert block in ascending order, or a single parameter.

    params: in ascending order of their index in the block.
    numel: elements of all of them.
    largest: elements of one parameter.
    is_block: whether it is an expert block.
    is_whole: whether no parameter of it may be cut: an expert block or a Muon matrix.
    work: of Muon for all of it (`work_of`).
    """

    params: tuple[Parameter, ...]
    numel: int
    largest: int
    is_block: bool
    is_whole: bool
    work: int

    @classmethod
    def of(cls, params: Sequence[Parameter]) -> Unit:
        is_block = role_of(params[0]).block is not None
        if is_block:
            params = sorted(params, key=lambda p: role_of(p).index)
            assert len({p.numel() for p in params}) == 1, "the matrices of a block have one shape"
        is_whole = is_block or role_of(params[0]).matrices is not None
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
        """Equal for units that are interchangeable in a layout."""
        return (self.numel, self.largest, self.is_block, self.is_whole, self.work)


def units_of(params: Iterable[Parameter]) -> list[Unit]:
    """Group `params`, in order, into units."""
    found: list[list[Parameter]] = []
    for param in params:
        block = role_of(param).block
        if found and block is not None and role_of(found[-1][0]).block is block:
            found[-1].append(param)
        else:
            found.append([param])
    return [Unit.of(each) for each in found]


def work_of(param: Parameter) -> int:
    """Return Muon's work for a parameter in FLOPs, Newton-Schulz and the passes over its elements; 0 under AdamW."""
    count, m, n = role_of(param).matrices or (0, 1, 1)
    # The form that Newton-Schulz takes in fp16, as ZAYA1's recipes; under bf16 the owners' shares differ in the fifth digit.
    return count * (round(newton_schulz_flops(m, n, dtype=torch.float16)) + FLOPS_PER_ELEMENT * m * n)


@dataclass(frozen=True)
class Shards:
    """The shards of a bucket. count: their number; divisor: DDP requires bucket lengths divisible by it."""

    count: int
    divisor: int

    def grain(self, units: Sequence[Unit]) -> int:
        """Return a divisor of the shard's size."""
        grain = self.divisor // self.count
        if self.count == 1:
            return grain
        # A matrix moved behind a border between shards starts there, and must be aligned.
        return math.lcm(
            grain, pad_param_start(1) if any(unit.is_whole for unit in units) else 1, largest_of_a_block(units)
        )

    def least(self, units: Sequence[Unit]) -> int:
        """Return the size of a shard for `units` if they left no gaps."""
        whole = max((unit.largest for unit in units if unit.is_whole), default=1) if self.count > 1 else 1
        return pad_to_divisor(max(math.ceil(sum(unit.numel for unit in units) / self.count), whole), self.grain(units))

    def size(self, units: Sequence[Unit]) -> int:
        """Return the size of a shard with which the bucket holds `units` in one of their usual orders."""
        shard, orders = self.least(units), usual_orders(units)
        while (end := min(place(order, self.count, shard)[1] for order in orders)) > self.count * shard:
            shard = pad_to_divisor(max(shard + 1 + shard // 512, math.ceil(end / self.count)), self.grain(units))
        return shard


def largest_of_a_block(units: Sequence[Unit]) -> int:
    """Return the elements of the largest matrix of an expert block; 1 without blocks."""
    return max((unit.largest for unit in units if unit.is_block), default=1)


def usual_orders(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return two orders of `units`: blocks as given or by descending size of their matrices, then single matrices, then
    other parameters.

    Blocks by descending size leave no gaps between them. Single matrices by descending size rarely straddle a border.
    The other parameters fill gaps.
    """
    blocks, matrices, rest = sorted_out(units)
    return [[*order, *matrices, *rest] for order in (blocks, sorted(blocks, key=lambda unit: -unit.largest))]


def sorted_out(units: Sequence[Unit]) -> tuple[list[Unit], list[Unit], list[Unit]]:
    """Return the expert blocks, the single matrices that must not be cut, largest first, and the other parameters."""
    blocks = [unit for unit in units if unit.is_block]
    matrices = sorted((unit for unit in units if unit.is_whole and not unit.is_block), key=lambda unit: -unit.numel)
    return blocks, matrices, [unit for unit in units if not unit.is_whole]


def place(items: Sequence[Unit | int], shards: int, shard: int) -> tuple[list[tuple[Unit, int]], int]:
    """Return offsets of units placed in sequence in `shards` shards of `shard` elements, and the end of the last unit.

    items: units; a number leaves so many elements free. Free elements, and gaps before borders and aligned blocks, take
    the single parameters that fit into them.
    """
    placed: list[tuple[Unit, int]] = []
    gaps: list[list[int]] = []
    cursor = end = 0
    # Blocks are aligned to the largest matrix: a smaller matrix whose size divides it then never straddles a multiple
    # of it.
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
    """Return the offset of every parameter of the placed units."""
    return {param: begin + index * unit.largest for unit, begin in placed for index, param in enumerate(unit.params)}


def _fits(unit: Unit, start: int, end: int, shards: int, shard: int) -> bool:
    """Return whether `unit` fits into the gap [start, end)."""
    begin = pad_param_start(start)
    return begin + unit.numel <= end and not (unit.is_whole and _straddles(begin, unit.numel, shards, shard))


def _straddles(begin: int, numel: int, shards: int, shard: int) -> bool:
    """Return whether a border between shards lies inside [begin, begin + numel)."""
    return shards > 1 and begin // shard != (begin + numel - 1) // shard


def cut_into_buckets(units: Sequence[Unit], least: int | None, shards: Shards) -> list[list[Unit]]:
    """Cut `units` into buckets of at least `least` elements, or into as few buckets as possible if it is None.

    The last bucket, and a bucket of a single parameter, may be smaller.
    """
    found: list[list[Unit]] = []
    section: list[Unit] = []
    largest = max((unit.largest for unit in units if unit.is_whole), default=None) if shards.count > 1 else None
    for unit in units:
        large = largest is not None and unit.numel >= largest and not unit.is_whole
        # An embedding shared between pipeline stages, which reduce it by itself, has a bucket of its own.
        shared = getattr(unit.params[0], "shared_embedding", False)
        if shared or (large and _spreads_better_alone(unit, units, shards)):
            found += [*_cut(section, least, shards), [unit]]
            section = []
        else:
            section.append(unit)
    return found + _cut(section, least, shards)


def cost_of_buckets(lengths: Sequence[int]) -> float:
    """Return the cost of buckets of these lengths, in elements; comparable between buckets of the same parameters."""
    total = sum(lengths)
    return sum(_cost_of_bucket(numel, total - sum(lengths[: index + 1]), total) for index, numel in enumerate(lengths))


def _cost_of_bucket(numel: int, behind: int, total: int) -> float:
    """Return the cost of a bucket. Elements count twice, on the links and in memory. behind: elements of the buckets
    reduced later.
    """
    return 2 * numel + SIZE * numel * numel / total + max(0, numel - HIDDEN * behind)


def _spreads_better_alone(unit: Unit, units: Sequence[Unit], shards: Shards) -> bool:
    """Return whether a large parameter that may be cut gets its own bucket, because that adds little padding.

    Among matrices it would fill whole shards, whose owners would have less work.
    """
    apart = shards.size([other for other in units if other is not unit]) + shards.size([unit])
    return apart <= (1 + MAX_PADDING) * shards.size(units)


def _cut(units: list[Unit], least: int | None, shards: Shards) -> list[list[Unit]]:
    """Cut `units`, none of which stays alone, into buckets."""
    if not units or least is None:
        return [units] if units else []
    if shards.count == 1 or not any(unit.is_whole for unit in units):
        # As soon as a bucket is full, as Megatron does.
        return [units[start:end] for start, end in pairwise([0, *_possible_ends(units, least)])]
    return _cheapest(units, least, shards)


def _cheapest(units: list[Unit], least: int, shards: Shards) -> list[list[Unit]]:
    """Return the buckets with the least cost, by dynamic programming over their ends."""
    ends = _possible_ends(units, least / FINENESS)
    total = sum(unit.numel for unit in units)
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(unit.kind for unit in units))}
    counts, elements = [[0] * len(kinds)], [0]  # units of each kind, and elements, before each unit
    for unit in units:
        counts.append(list(counts[-1]))
        counts[-1][kinds[unit.kind]] += 1
        elements.append(elements[-1] + unit.numel)
    lengths: dict[tuple[int, ...], int] = {}

    def length(start: int, end: int) -> int:
        key = tuple(b - a for a, b in zip(counts[start], counts[end], strict=True))
        if key not in lengths:
            lengths[key] = shards.count * shards.size(units[start:end])
        return lengths[key]

    # end -> (least cost of the units before it, start of their last bucket)
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for end in ends:
        for start in list(best):
            all_in_one = start == 0 and end == len(units)
            if elements[end] - elements[start] < (least if end < len(units) else least / FINENESS) and not all_in_one:
                continue
            cost = best[start][0] + _cost_of_bucket(length(start, end), total - elements[end], total)
            if end not in best or cost < best[end][0]:
                best[end] = (cost, start)
    found, end = [], len(units)
    while end:
        start = best[end][1]
        found.insert(0, units[start:end])
        end = start
    return found


def _possible_ends(units: list[Unit], least: float) -> list[int]:
    """Return the ends, as numbers of units, that lie at least `least` elements apart, and the end of all units."""
    found, since = [], 0
    for count, unit in enumerate(units, start=1):
        since += unit.numel
        if since >= least or count == len(units):
            found.append(count)
            since = 0
    return found


@dataclass(frozen=True)
class Arrangement:
    """An order of a bucket's units.

    kinds: the kinds of its blocks, in order.
    matrices: number of blocks before the single matrices.
    gap_after: number of blocks before the gap.
    gap: its size, in matrices of the largest size. Other free elements of the bucket lie at its end.
    """

    kinds: tuple[tuple, ...]
    matrices: int
    gap_after: int = 0
    gap: int = 0

    def items(self, units: Sequence[Unit]) -> list[Unit | int]:
        """Return `units` in this order, for `place`."""
        blocks, matrices, rest = sorted_out(units)
        of_kind: dict[tuple, list[Unit]] = {}
        for block in blocks:
            of_kind.setdefault(block.kind, []).append(block)
        found: list[Unit | int] = []
        for before in range(len(self.kinds) + 1):
            if before == self.matrices:
                found += matrices
            if self.gap and before == self.gap_after:
                found.append(self.gap * largest_of_a_block(units))
            if before < len(self.kinds):
                found.append(of_kind[self.kinds[before]].pop(0))
        return found + rest


@dataclass(frozen=True)
class Candidates:
    """Arrangements of a bucket.

    shard: elements of a shard.
    work: of the shards' owners in each arrangement, int64 [arrangements, shards], in the unit that all buckets share.
    """

    shard: int
    arrangements: list[Arrangement]
    work: Tensor


def balanced(buckets: Sequence[Sequence[Unit]], shards: Shards) -> tuple[list[tuple[list[tuple[Unit, int]], int]], int]:
    """Arrange the units of all buckets.

    Return of each bucket the units with their offsets and the bucket's length, and the largest work of an owner over
    all buckets (as `work_of`).
    """
    parts = min(shards.count * RESOLUTION, 2**31)
    unit_of_work = max(1, -(-sum(unit.work for bucket in buckets for unit in bucket) // parts))
    by_kinds: dict[tuple, Candidates] = {}
    candidates = []
    for bucket in buckets:
        blocks, *others = sorted_out(bucket)
        key = (*sorted(block.kind for block in blocks), *(unit.kind for units in others for unit in units))
        if key not in by_kinds:
            by_kinds[key] = _candidates(bucket, shards, unit_of_work)
        candidates.append(by_kinds[key])
    chosen, work = _choose([each.work for each in candidates], shards.count)
    placed = []
    for bucket, each, index in zip(buckets, candidates, chosen, strict=True):
        in_bucket, end = place(each.arrangements[index].items(bucket), shards.count, each.shard)
        assert end <= shards.count * each.shard, "buckets of the same kinds have the same size"
        placed.append((in_bucket, shards.count * each.shard))
    return placed, int(work.max()) * unit_of_work


def _candidates(units: Sequence[Unit], shards: Shards, unit_of_work: int) -> Candidates:
    """Return arrangements of a bucket in the shortest shards that hold it, each with different work of the owners."""
    shard = shards.size(units)
    end = min(place(order, shards.count, shard)[1] for order in usual_orders(units))
    free = (shards.count * shard - end) // largest_of_a_block(units)
    arrangements, works = [], {}
    for arrangement in _arrangements(units, shards.count, free):
        placed, end = place(arrangement.items(units), shards.count, shard)
        if end > shards.count * shard:
            continue
        work = [0] * shards.count
        for unit, begin in placed if shards.count > 1 else ():
            each = unit.work // len(unit.params) // unit_of_work
            for index in range(len(unit.params) if each else 0):
                work[(begin + index * unit.largest) // shard] += each
        if works.setdefault(tuple(work), arrangement) is arrangement:
            arrangements.append(arrangement)
    return Candidates(shard, arrangements, torch.tensor(list(works), dtype=torch.int64, device="cpu"))


def _arrangements(units: Sequence[Unit], shards: int, free: int) -> Iterator[Arrangement]:
    """Yield the usual orders and other arrangements, or a sample if there are many: the same on every rank.

    free: number of the largest matrices for which the bucket has free elements.
    """
    blocks, matrices, _ = sorted_out(units)
    for order in usual_orders(units):
        yield Arrangement(tuple(unit.kind for unit in order if unit.is_block), len(blocks))
    if not any(unit.work for unit in blocks):
        return
    orders = _orders([block.kind for block in blocks])
    places = len(blocks) + 1 if matrices else 1
    gaps = [(0, 0)] + [(before, count) for before in range(len(blocks)) for count in range(1, free + 1)]
    number = len(orders) * places * len(gaps)
    most = max(24, TRIED // (len(units) + shards))
    for index in range(number) if number <= most else sorted(random.Random(number).sample(range(number), most)):
        index, gap = divmod(index, len(gaps))
        order, before = divmod(index, places)
        yield Arrangement(orders[order], before, *gaps[gap])


def _orders(kinds: list[tuple]) -> list[tuple[tuple, ...]]:
    """Return the distinct orders of `kinds`, or a sample if there are more than MAX_ORDERS."""
    orders: list[tuple[tuple, ...]] = [()]
    for _ in kinds:
        orders = [
            (*order, kind) for order in orders for kind in dict.fromkeys(kinds) if order.count(kind) < kinds.count(kind)
        ]
        if len(orders) > MAX_ORDERS:  # beginnings of orders; each has at least one continuation
            generator = random.Random(len(kinds))
            return list(dict.fromkeys(tuple(generator.sample(kinds, len(kinds))) for _ in range(MAX_ORDERS)))
    return orders


def _choose(works: Sequence[Tensor], shards: int) -> tuple[list[int], Tensor]:
    """Return an index into each of `works` so that the largest work of a shard is small, and the work of all shards.

    Each choice is made in view of those before, then all are improved one by one.
    """
    total, chosen = torch.zeros(shards, dtype=torch.int64, device="cpu"), []
    for work in works:
        chosen.append(_best(total + work, busiest_first=True)[1])
        total = total + work[chosen[-1]]
    for busiest_first in (False, True) * 2:  # the sum of squares leaves local minima of the largest work
        for _ in range(SWEEPS):
            before = list(chosen)
            for index, work in enumerate(works):
                others = total - work[chosen[index]]
                key, best = _best(others + work, busiest_first)
                if key < _best(total[None], busiest_first)[0]:
                    chosen[index], total = best, others + work[best]
            if chosen == before:
                break
    return chosen, total


def _best(totals: Tensor, busiest_first: bool) -> tuple[tuple[int, int], int]:
    """Return the key and the index of the best row of `totals` [rows, shards], the first of equals.

    The key is (largest work, sum of squares), or reversed without `busiest_first`.
    """
    keys = totals.amax(1).tolist(), (totals * totals).sum(1).tolist()
    return min((key, index) for index, key in enumerate(zip(*(keys if busiest_first else keys[::-1]), strict=True)))
