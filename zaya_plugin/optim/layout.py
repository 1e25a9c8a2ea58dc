# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie in Megatron's flat buffers, so that a layer's experts stay one block and no matrix is cut.

Megatron's DDP copies all weights of one dtype into a flat buffer, cuts the buffer into buckets and every bucket into
as many equal shards as there are data-parallel ranks (ZeRO-1). Its own layout lets bucket and shard borders fall
anywhere. Here

* the matrices of an expert block (parameters tagged `expert_block = (name, index)`, e.g. the 16 gate+up matrices of a
  layer) are neighbours in ascending order, so the grouped GEMM reads them in place as one [E, out, in] tensor, and the
  shard size is a multiple of the largest expert matrix, so shard borders fall only between them;
* a parameter that Muon updates (tagged `muon_matrices = (b, m, n)`) lies whole in one shard, its owner's; blocks are
  ordered so that every owner gets the same Newton-Schulz work over all buckets;
* everything else fills the rest and may be cut, as AdamW does not mind.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.optimizer.param_layout import (
    PerBufferParamLayout,
    bucket_end_divisor,
    pad_param_start,
    pad_to_divisor,
)
from torch.nn import Parameter

from zaya_plugin.optim.newton_schulz_cost import newton_schulz_flops

# A bucket grows over more layers until the padding that whole matrices cost is at most this share of it.
MAX_PADDING = 0.10
# Orders of a bucket's blocks that are tried for balance.
MAX_ORDERS = 24


@dataclass(frozen=True)
class Unit:
    """What must stay together: an expert block in ascending order, or a single parameter.

    largest: elements of its largest piece that must not be cut. flops: Newton-Schulz work of all of it.
    """

    params: tuple[Parameter, ...]
    numel: int
    largest: int
    is_block: bool
    is_whole: bool
    flops: float

    @classmethod
    def of(cls, params: Sequence[Parameter]) -> Unit:
        is_block = hasattr(params[0], "expert_block")
        if is_block:
            params = sorted(params, key=lambda p: p.expert_block[1])
            assert len({p.numel() for p in params}) == 1, "the matrices of a block have one shape"
        is_whole = is_block or hasattr(params[0], "muon_matrices")
        return cls(
            tuple(params), sum(p.numel() for p in params), params[0].numel(), is_block, is_whole,
            sum(_flops(p) for p in params),
        )


def compute_expert_block_layout(
    params: list[Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config,
    param_indices: list[int] | None = None,
) -> PerBufferParamLayout:
    """Layout of one buffer; takes the place of DistributedOptimizer._compute_per_buffer_param_layout.

    Args:
        params: parameters in forward order; those with an attribute `expert_block` belong to a block, those with
            `muon_matrices` are kept whole.
        bucket_size: elements after which a bucket may close; None puts all into one bucket.
        data_parallel_world_size: shards of a bucket.
        ddp_config: Megatron's DistributedDataParallelConfig (bucket padding for NCCL).
        param_indices: passed through.

    Returns:
        A layout whose buckets follow the order of the backward pass, as DDP demands.
    """
    shards = data_parallel_world_size
    divisor = bucket_end_divisor(shards, ddp_config.pad_buckets_for_high_nccl_busbw)
    layout = PerBufferParamLayout(
        param_indices=param_indices if param_indices is not None else [], num_optimizer_shards=shards
    )
    work = [0.0] * shards  # Newton-Schulz FLOPs of every shard over the buckets so far
    chunk: list[Unit] = []

    def close() -> None:
        if chunk:
            start = layout.bucket_indices[-1][1] if layout.bucket_indices else 0
            starts, numel = _place_evenly(chunk, shards, divisor, work)
            bucket = len(layout.bucket_indices)
            # DDP walks parameters in backward order; the map only has to name each one's place.
            for param, offset in starts.items():
                layout.param_index_map[param] = (start + offset, start + offset + param.numel(), bucket)
            layout.bucket_indices.append((start, start + numel))
            # Padding included. Where it is left out, `fully_reshardable` checkpoints (distrib_optimizer.py,
            # get_parameter_state_dp_zero) join the buckets without it but look parameters up by their place in the
            # buffer: from the second bucket on they hold shifted state.
            layout.per_bucket_numel_unpadded.append(numel)
            chunk.clear()

    units = list(_units(reversed(params)))
    for index, unit in enumerate(units):
        # Pipeline stages reduce a shared embedding by itself; a large one is spread evenly only by itself.
        alone = getattr(unit.params[0], "shared_embedding", False) or _spreads_better_alone(unit, units, shards)
        if alone:
            close()
        chunk.append(unit)
        if alone or (bucket_size is not None and _worth_closing(chunk, units[index + 1 :], bucket_size, shards, divisor)):
            close()
    close()
    return layout


def newton_schulz_work(layout: PerBufferParamLayout, shards: int) -> list[float]:
    """Newton-Schulz FLOPs of each shard's owner under `layout`."""
    work = [0.0] * shards
    for param, (start, _, bucket) in layout.param_index_map.items():
        low, high = layout.bucket_indices[bucket]
        work[(start - low) * shards // (high - low)] += _flops(param)
    return work


def _units(params: Iterable[Parameter]) -> Iterable[Unit]:
    """Splits parameters into what must stay together."""
    unit: list[Parameter] = []
    for param in params:
        block = getattr(param, "expert_block", None)
        if unit and (block is None or block[0] != unit[0].expert_block[0]):
            yield Unit.of(unit)
            unit = []
        if block is None:
            yield Unit.of([param])
        else:
            unit.append(param)
    if unit:
        yield Unit.of(unit)


def _flops(param: Parameter) -> float:
    b, m, n = getattr(param, "muon_matrices", (0, 1, 1))
    return b * newton_schulz_flops(m, n)


def _place_evenly(
    units: Sequence[Unit], shards: int, divisor: int, work: list[float]
) -> tuple[dict[Parameter, int], int]:
    """The order of blocks that keeps the busiest shard least busy; adds the bucket's work to `work`."""
    best = None
    for candidate, padding_first in itertools.product(_orders(units, shards), (False, True)):
        starts, numel = _place(candidate, shards, divisor, padding_first)
        total = list(work)
        for param, start in starts.items():
            total[start * shards // numel] += _flops(param)
        key = (numel, max(total), sum(t * t for t in total))
        if best is None or key < best[0]:
            best = (key, starts, numel, total)
    _, starts, numel, work[:] = best
    return starts, numel


def _orders(units: Sequence[Unit], shards: int) -> Iterable[list[Unit]]:
    """Orders worth trying: all of a few blocks, some of many; one where nothing would change."""
    blocks = [u for u in units if u.is_block]
    # What is whole but no block goes behind, largest first, so that it rarely straddles a border.
    matrices = sorted((u for u in units if u.is_whole and not u.is_block), key=lambda u: -u.numel)
    rest = [u for u in units if not u.is_whole]
    if shards == 1 or not any(u.flops for u in blocks):
        yield [*blocks, *matrices, *rest]
        return
    if math.factorial(len(blocks)) <= MAX_ORDERS:
        permutations = itertools.permutations(blocks)
    else:
        generator = random.Random(len(blocks))  # the same on every rank
        permutations = (generator.sample(blocks, len(blocks)) for _ in range(MAX_ORDERS))
    for order in permutations:
        yield [*order, *matrices, *rest]
        yield [*matrices, *order, *rest]


def _place(
    units: Sequence[Unit], shards: int, divisor: int, padding_first: bool = False
) -> tuple[dict[Parameter, int], int]:
    """Offsets of the parameters of one bucket in the given order, and the bucket's length."""
    shard = _least_shard(units, shards, divisor)
    while True:
        starts, end = _place_in(units, shards, shard)
        if end <= shards * shard:
            break
        shard = pad_to_divisor(max(shard + 1, math.ceil(end / shards)), _grain(units, shards, divisor))
    if padding_first:
        largest = max((u.largest for u in units if u.is_block), default=1)
        moved, end = _place_in(units, shards, shard, (shards * shard - end) // largest * largest)
        if end <= shards * shard:
            starts = moved
    return starts, shards * shard


def _place_in(
    units: Sequence[Unit], shards: int, shard: int, first: int = 0
) -> tuple[dict[Parameter, int], int]:
    """Offsets from `first` on with shards of `shard` elements, and the end of the last parameter.

    What was skipped before a border or an aligned block takes the small parameters that fit into it.
    """
    starts: dict[Parameter, int] = {}
    gaps: list[list[int]] = []
    cursor = first
    largest = max((u.largest for u in units if u.is_block), default=1)
    for unit in units:
        if unit.is_block:
            # Aligned to the largest matrix, a block of matrices that divide it never straddles a multiple of it.
            begin = pad_to_divisor(cursor, largest) if shards > 1 else pad_param_start(cursor)
            _note_gap(gaps, cursor, begin)
            for index, param in enumerate(unit.params):
                starts[param] = begin + index * unit.largest
            cursor = begin + unit.numel
            continue
        param, size = unit.params[0], unit.numel
        gap = next((g for g in gaps if pad_param_start(g[0]) + size <= g[1]), None)
        if gap is not None:
            starts[param] = pad_param_start(gap[0])
            gap[0] = starts[param] + size
            continue
        begin = pad_param_start(cursor)
        if shards > 1 and unit.is_whole and begin // shard != (begin + size - 1) // shard:
            begin = (begin // shard + 1) * shard
            _note_gap(gaps, cursor, begin)
        starts[param] = begin
        cursor = begin + size
    return starts, max(start + p.numel() for p, start in starts.items())


def _note_gap(gaps: list[list[int]], start: int, end: int) -> None:
    if end > start:
        gaps.append([start, end])


def _numel(units: Sequence[Unit], shards: int, divisor: int) -> int:
    blocks = [u for u in units if u.is_block]
    matrices = sorted((u for u in units if u.is_whole and not u.is_block), key=lambda u: -u.numel)
    return _place([*blocks, *matrices, *(u for u in units if not u.is_whole)], shards, divisor)[1] if units else 0


def _spreads_better_alone(unit: Unit, units: Sequence[Unit], shards: int) -> bool:
    """Whether a parameter that may be cut, such as the embedding, would take whole shards among expert blocks."""
    if shards == 1 or unit.is_whole:
        return False
    largest = max((u.largest for u in units if u.is_block), default=None)
    return largest is not None and unit.largest >= largest


def _worth_closing(units: list[Unit], remaining: list[Unit], bucket_size: int, shards: int, divisor: int) -> bool:
    numel = _total(units)
    if numel < bucket_size:
        return False
    if not any(unit.is_whole for unit in units):
        return True
    if _least_numel(units, shards, divisor) > (1 + MAX_PADDING) * numel:
        return False
    # What remains has to find room as well: with a thousand shards one bucket may be all there can be.
    remaining = [u for u in remaining if not _spreads_better_alone(u, units, shards)]
    both = _numel(units, shards, divisor) + _least_numel(remaining, shards, divisor)
    alternative = _least_numel([*units, *remaining], shards, divisor)
    return _numel(units, shards, divisor) <= (1 + MAX_PADDING) * numel and both <= (1 + MAX_PADDING) * alternative


def _total(units: Sequence[Unit]) -> int:
    return sum(unit.numel for unit in units)


def _grain(units: Sequence[Unit], shards: int, divisor: int) -> int:
    """What a shard's size is a multiple of."""
    grain = divisor // shards
    largest = max((unit.largest for unit in units if unit.is_block), default=1)
    return math.lcm(grain, largest) if shards > 1 else grain


def _least_numel(units: Sequence[Unit], shards: int, divisor: int) -> int:
    """The length of a bucket for `units` if nothing but the grain of its shards were lost."""
    return shards * _least_shard(units, shards, divisor) if units else 0


def _least_shard(units: Sequence[Unit], shards: int, divisor: int) -> int:
    whole = max((unit.largest for unit in units if unit.is_whole), default=1) if shards > 1 else 1
    return pad_to_divisor(max(math.ceil(_total(units) / shards), whole), _grain(units, shards, divisor))
