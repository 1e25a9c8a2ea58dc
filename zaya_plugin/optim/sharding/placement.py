# SPDX-License-Identifier: Apache-2.0
"""The layout of DDP's flat buffers: the parameters of each bucket, their order and their offsets.

Megatron's DDP copies all weights of one dtype into a flat buffer (experts into one of their own) and cuts the buffer
into buckets. ZeRO-1 cuts every bucket into equal shards, one a data-parallel rank. In Megatron's own layout bucket and
shard borders may lie inside a parameter. `layout` plans buffers in which

* the matrices of an expert block (e.g. the 16 gate+up matrices of a layer) are neighbours in ascending order, so that
  the grouped GEMM reads them in place as one [E, out, in] tensor; shard borders lie only between them;
* a parameter that Muon updates lies whole in one shard; the rank of that shard is its owner and alone keeps its
  momentum and updates it; owners have about equal work over all buckets;
* every other parameter fills the gaps and may be cut, because AdamW works element by element.

megatron-core has what this file imports from 0.19 on. Before, hence in Primus, its own layout stays, which cuts about
one matrix at each shard border (distributed.py, `MatrixExchange`).

A unit is an expert block or a single parameter. First the units, in the order of the backward pass, are cut into
buckets, so that whole matrices cost little padding and gradients are sent early. Then the units of each bucket are
ordered. Muon orthogonalises whole matrices, and the cost of an element depends on its matrix's size, so the order of a
bucket's blocks decides how much work each rank has. The bucket with the most work is ordered first, and each takes the
order that leaves the busiest owner the least work. Work is summed in integers, because every rank computes the layout
for itself and all ranks must get the same one.

A checkpoint holds no layout: it stores boxes of whole parameters (boxes.py), so a run may resume with another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.core.optimizer.param_layout import (
    PerBufferParamLayout,
    bucket_end_divisor,
    pad_param_start,
    pad_to_divisor,
)
from torch.nn import Parameter

from hip_ops.newton_schulz_form import newton_schulz_flops
from zaya_plugin.optim.parameter_role import role_of
from zaya_plugin.optim.sharding.distributed import BufferLayout

# Cost of reading and writing an element's gradient, momentum and weight, as FLOPs of Newton-Schulz that take as long.
# For all of ZAYA1-base these passes take 60 of 596 ms on one H200 (benchmarks/results/optimizer_step-h200.json), where
# Newton-Schulz ran at 470 TFLOP/s.
FLOPS_PER_ELEMENT = 3_000
# Factors of the requested bucket size that `placed_buckets` tries: larger buckets leave less padding.
BUCKET_SIZE_FACTORS = (1, 2, 4)
# A parameter that may be cut, such as the embedding, gets its own bucket unless that adds more padding than this share.
MAX_PADDING = 0.10
# A bucket may close after every `least` / ENDS_PER_BUCKET elements.
ENDS_PER_BUCKET = 4
# A bucket of n of N elements costs BUCKET_SIZE_COST * n * n / N elements, because its gradients are sent together and
# its parameters arrive together. A split is worth as much padding.
BUCKET_SIZE_COST = 0.2
# Elements that are reduced during the backward pass over one element: on four H200s 90 to 138 ms during 225 ms, of
# 16,384 tokens (docs/predictions.md). Elements whose reduction the remaining backward pass cannot hide count as padding
# too.
HIDDEN_ELEMENTS = 2


def layout(params: Sequence[Parameter], bucket_size: int | None, shards: int, divisor: int) -> BufferLayout:
    """Plan the layout of one buffer. Every rank plans for itself and gets the same result.

    Args:
        params: parameters in forward order, with their roles.
        bucket_size: elements after which a bucket may close; None puts all parameters into one bucket.
        shards: shards of a bucket.
        divisor: a divisor of every bucket's length.
    """
    places, buckets, start = {}, [], 0
    for bucket, (offsets, numel) in enumerate(placed_buckets(params, bucket_size, shards, divisor)):
        for param, offset in offsets.items():
            places[param] = (start + offset, start + offset + param.numel(), bucket)
        buckets.append((start, start + numel))
        start += numel
    return BufferLayout(places, buckets, shards)


def compute_expert_block_layout(
    params: list[Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config,
    param_indices: list[int] | None = None,
):
    """Return `layout` as Megatron's PerBufferParamLayout; takes the place of
    DistributedOptimizer._compute_per_buffer_param_layout.

    ddp_config: Megatron's DistributedDataParallelConfig (bucket padding for NCCL). param_indices: passed through.
    """
    divisor = bucket_end_divisor(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)
    planned = layout(params, bucket_size, data_parallel_world_size, divisor)
    return PerBufferParamLayout(
        param_index_map=dict(planned.places),
        bucket_indices=list(planned.buckets),
        # Padding included. Without it, `fully_reshardable` checkpoints (distrib_optimizer.py,
        # get_parameter_state_dp_zero) join the buckets without padding but look parameters up by their place in the
        # buffer: from the second bucket on they hold shifted state.
        per_bucket_numel_unpadded=[end - start for start, end in planned.buckets],
        param_indices=param_indices if param_indices is not None else [],
        num_optimizer_shards=data_parallel_world_size,
    )


def placed_buckets(
    params: Sequence[Parameter], bucket_size: int | None, shards: int, divisor: int
) -> list[tuple[dict[Parameter, int], int]]:
    """Return, of each bucket, the offsets of its parameters and its length. Arguments as for `layout`."""
    bucket_shards = Shards(shards, divisor)
    units = units_of(reversed(params))
    candidates = [
        balanced(cut_into_buckets(units, bucket_size and times * bucket_size, bucket_shards), bucket_shards)
        for times in (BUCKET_SIZE_FACTORS if bucket_size is not None and shards > 1 else (1,))
    ]
    # An element of a bucket costs about as much on the links as its owner's passes over it.
    chosen, _ = min(
        candidates,
        key=lambda layout: layout[1] + FLOPS_PER_ELEMENT * cost_of_buckets([numel for _, numel in layout[0]]),
    )
    return [(offsets(placed), numel) for placed, numel in chosen]


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
    units: list[list[Parameter]] = []
    for param in params:
        block = role_of(param).block
        if units and block is not None and role_of(units[-1][0]).block is block:
            units[-1].append(param)
        else:
            units.append([param])
    return [Unit.of(members) for members in units]


def work_of(param: Parameter) -> int:
    """Return Muon's work for a parameter in FLOPs, Newton-Schulz and the passes over its elements; 0 under AdamW."""
    count, m, n = role_of(param).matrices or (0, 1, 1)
    # The form that Newton-Schulz takes in fp16, as ZAYA1's recipes; under bf16 the owners' shares differ in the fifth
    # digit.
    return count * (round(newton_schulz_flops(m, n)) + FLOPS_PER_ELEMENT * m * n)


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
    blocks = [unit for unit in units if unit.is_block]
    matrices = sorted((unit for unit in units if unit.is_whole and not unit.is_block), key=lambda unit: -unit.numel)
    rest = [unit for unit in units if not unit.is_whole]
    return [[*order, *matrices, *rest] for order in (blocks, sorted(blocks, key=lambda unit: -unit.largest))]


def place(units: Sequence[Unit], shards: int, shard: int) -> tuple[list[tuple[Unit, int]], int]:
    """Return offsets of `units`, placed in sequence in `shards` shards of `shard` elements, and the end of the last
    one.

    Gaps before borders and aligned blocks take the single parameters that fit into them.
    """
    placed: list[tuple[Unit, int]] = []
    gaps: list[list[int]] = []
    cursor = end = 0
    # Blocks are aligned to the largest matrix: a smaller matrix whose size divides it then never straddles a multiple
    # of it.
    alignment = largest_of_a_block(units)

    for unit in units:
        if unit.is_block:
            begin = pad_to_divisor(cursor, alignment) if shards > 1 else pad_param_start(cursor)
            if begin > cursor:
                gaps.append([cursor, begin])
            cursor = begin + unit.numel
        elif (
            gap := next(
                (gap for gap in gaps if gap[1] - gap[0] >= unit.numel and _fits(unit, *gap, shards, shard)), None
            )
        ) is not None:
            begin = pad_param_start(gap[0])
            gap[0] = begin + unit.numel
        else:
            begin = pad_param_start(cursor)
            if unit.is_whole and _straddles(begin, unit.numel, shards, shard):
                begin = (begin // shard + 1) * shard
                gaps.append([cursor, begin])
            cursor = begin + unit.numel
        placed.append((unit, begin))
        end = max(end, begin + unit.numel)
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
    buckets: list[list[Unit]] = []
    section: list[Unit] = []
    largest = max((unit.largest for unit in units if unit.is_whole), default=None) if shards.count > 1 else None
    for unit in units:
        large = largest is not None and unit.numel >= largest and not unit.is_whole
        # An embedding shared between pipeline stages, which reduce it by itself, has a bucket of its own.
        shared = getattr(unit.params[0], "shared_embedding", False)
        if shared or (large and _spreads_better_alone(unit, units, shards)):
            buckets += [*_cut(section, least, shards), [unit]]
            section = []
        else:
            section.append(unit)
    return buckets + _cut(section, least, shards)


def cost_of_buckets(lengths: Sequence[int]) -> float:
    """Return the cost of buckets of these lengths, in elements; comparable between buckets of the same parameters."""
    total = sum(lengths)
    return sum(_cost_of_bucket(numel, total - sum(lengths[: index + 1]), total) for index, numel in enumerate(lengths))


def _cost_of_bucket(numel: int, behind: int, total: int) -> float:
    """Return the cost of a bucket. Elements count twice, on the links and in memory. behind: elements of the buckets
    reduced later.
    """
    return 2 * numel + BUCKET_SIZE_COST * numel * numel / total + max(0, numel - HIDDEN_ELEMENTS * behind)


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
    ends = _possible_ends(units, least / ENDS_PER_BUCKET)
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
            if (
                elements[end] - elements[start] < (least if end < len(units) else least / ENDS_PER_BUCKET)
                and not all_in_one
            ):
                continue
            cost = best[start][0] + _cost_of_bucket(length(start, end), total - elements[end], total)
            if end not in best or cost < best[end][0]:
                best[end] = (cost, start)
    buckets, end = [], len(units)
    while end:
        start = best[end][1]
        buckets.insert(0, units[start:end])
        end = start
    return buckets


def _possible_ends(units: list[Unit], least: float) -> list[int]:
    """Return the ends, as numbers of units, that lie at least `least` elements apart, and the end of all units."""
    ends, since = [], 0
    for count, unit in enumerate(units, start=1):
        since += unit.numel
        if since >= least or count == len(units):
            ends.append(count)
            since = 0
    return ends


def balanced(buckets: Sequence[Sequence[Unit]], shards: Shards) -> tuple[list[tuple[list[tuple[Unit, int]], int]], int]:
    """Order the units of all buckets, beginning with the bucket of the most work.

    Return of each bucket the units with their offsets and the bucket's length, and the largest work of an owner over
    all buckets (as `work_of`).
    """
    work, placed = [0] * shards.count, {}
    for index in sorted(range(len(buckets)), key=lambda index: -sum(unit.work for unit in buckets[index])):
        shard, choices = shards.size(buckets[index]), []
        orders = usual_orders(buckets[index])  # each begins with the blocks
        blocks = sum(unit.is_block for unit in buckets[index])
        for order in orders + [[*reversed(order[:blocks]), *order[blocks:]] for order in orders]:
            units, end = place(order, shards.count, shard)
            if end <= shards.count * shard:
                total = [before + more for before, more in zip(work, _owners_work(units, shards, shard), strict=True)]
                choices.append((max(total), sum(owner * owner for owner in total), len(choices), total, units))
        *_, work, units = min(choices)
        placed[index] = units, shards.count * shard
    return [placed[index] for index in range(len(buckets))], max(work)


def _owners_work(placed: Iterable[tuple[Unit, int]], shards: Shards, shard: int) -> list[int]:
    """Return the work of each shard's owner for the placed units."""
    work = [0] * shards.count
    for unit, begin in placed:
        for index in range(len(unit.params) if unit.work else 0):
            work[(begin + index * unit.largest) // shard] += unit.work // len(unit.params)
    return work
