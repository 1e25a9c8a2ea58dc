# SPDX-License-Identifier: Apache-2.0
"""Which units share a bucket, in the order of the backward pass, so that whole matrices cost little padding and gradients leave early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zaya_plugin.optim.sharding.placement import Shards, Unit

# A parameter that may be cut evenly, such as the embedding, has a bucket of its own unless that costs more padding than this share.
MAX_PADDING = 0.10
# Cuts are tried every so many parts of the least bucket.
FINENESS = 4
# A bucket of n of N elements costs SIZE * n / N of them, because its gradients leave together and its parameters come together: that
# much padding is worth a split.
SIZE = 0.2
# Elements that are reduced while the backward pass goes on over one: on four H200s 90 to 138 ms beside 225 of 16,384 tokens (docs/benchmarks.md). What the
# rest of the pass is too short to hide counts as padding as well.
HIDDEN = 2


def buckets(units: Sequence[Unit], least: int | None, shards: Shards) -> list[list[Unit]]:
    """`units` cut into buckets of at least `least` elements, but for the last and those of a parameter alone; None: as few as can be."""
    found: list[list[Unit]] = []
    section: list[Unit] = []
    largest = max((unit.largest for unit in units if unit.is_whole), default=None) if shards.count > 1 else None
    for unit in units:
        large = largest is not None and unit.numel >= largest and not unit.is_whole
        if _stays_alone(unit) or (large and _spreads_better_alone(unit, units, shards)):
            found += [*_cut(section, least, shards), [unit]]
            section = []
        else:
            section.append(unit)
    return found + _cut(section, least, shards)


def cost(lengths: Sequence[int]) -> float:
    """Of buckets of these lengths, in elements; equal but for a constant where they hold the same parameters."""
    total = sum(lengths)
    return sum(_cost(numel, total - sum(lengths[: index + 1]), total) for index, numel in enumerate(lengths))


def _cost(numel: int, behind: int, total: int) -> float:
    """Elements count twice, on the links and in memory. behind: those of the buckets that are reduced later."""
    return 2 * numel + SIZE * numel * numel / total + max(0, numel - HIDDEN * behind)


def _stays_alone(unit: Unit) -> bool:
    """Pipeline stages reduce a shared embedding by itself."""
    return bool(getattr(unit.params[0], "shared_embedding", False))


def _spreads_better_alone(unit: Unit, units: Sequence[Unit], shards: Shards) -> bool:
    """Whether a large parameter that may be cut, which would take whole shards among matrices and leave their owners less to do, can be apart for little padding."""
    apart = shards.size([other for other in units if other is not unit]) + shards.size([unit])
    return apart <= (1 + MAX_PADDING) * shards.size(units)


def _cut(units: list[Unit], least: int | None, shards: Shards) -> list[list[Unit]]:
    if not units or least is None:
        return [units] if units else []
    if shards.count == 1 or not any(unit.is_whole for unit in units):
        return list(_as_soon_as_full(units, least))
    return _cheapest(units, least, shards)


def _as_soon_as_full(units: list[Unit], least: int) -> Iterator[list[Unit]]:
    """As Megatron does."""
    bucket: list[Unit] = []
    for unit in units:
        bucket.append(unit)
        if sum(each.numel for each in bucket) >= least:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _cheapest(units: list[Unit], least: int, shards: Shards) -> list[list[Unit]]:
    """The cuts with the least padding, and what counts as padding."""
    ends = _possible_ends(units, least)
    total = sum(unit.numel for unit in units)
    kinds = {kind: index for index, kind in enumerate(dict.fromkeys(unit.kind for unit in units))}
    counts, elements = [[0] * len(kinds)], [0]  # of the units before each
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

    # of the units before an end: cost, and where its last bucket starts
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for end in ends:
        for start in list(best):
            all_in_one = start == 0 and end == len(units)
            if elements[end] - elements[start] < (least if end < len(units) else least / FINENESS) and not all_in_one:
                continue
            cost = best[start][0] + _cost(length(start, end), total - elements[end], total)
            if end not in best or cost < best[end][0]:
                best[end] = (cost, start)
    found, end = [], len(units)
    while end:
        start = best[end][1]
        found.insert(0, units[start:end])
        end = start
    return found


def _possible_ends(units: list[Unit], least: int) -> list[int]:
    """How many units may lie before a border."""
    found, since = [], 0
    for count, unit in enumerate(units, start=1):
        since += unit.numel
        if since * FINENESS >= least or count == len(units):
            found.append(count)
            since = 0
    return found
