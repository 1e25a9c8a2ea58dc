# SPDX-License-Identifier: Apache-2.0
"""Arrangements of the buckets' units in which the owners of the shards have the same work over all buckets.

Muon orthogonalises whole matrices, and matrices of one size cost another time an element than those of another, so the order of a bucket's
blocks, and where what has to be left free lies, decides whose work it is. All sums are of integers: every rank computes the layout for itself, and all must
find the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_plugin.optim.sharding.placement import Shards, Unit, largest_of_a_block, place, sorted_out, usual_orders

MAX_ORDERS = 200  # of a bucket's blocks
TRIED = 60_000  # units placed and shards added up, in all arrangements of a bucket, or 24 arrangements
SWEEPS = 20
# parts of the mean work of a shard that are told apart, fewer where squares of all work would leave 63 bits
RESOLUTION = 2**20


@dataclass(frozen=True)
class Arrangement:
    """kinds: of the blocks, in order; matrices: blocks before the matrices that are in no block; free: blocks before, and number of, the largest matrices
    that fit into what is left free there (the rest is free at the end)."""

    kinds: tuple[tuple, ...]
    matrices: int
    free: tuple[int, int] = (0, 0)

    def items(self, units: Sequence[Unit]) -> list[Unit | int]:
        """`units` in this order, for `place`."""
        blocks, matrices, rest = sorted_out(units)
        of_kind: dict[tuple, list[Unit]] = {}
        for block in blocks:
            of_kind.setdefault(block.kind, []).append(block)
        found: list[Unit | int] = []
        for before in range(len(self.kinds) + 1):
            if before == self.matrices:
                found += matrices
            if self.free[1] and before == self.free[0]:
                found.append(self.free[1] * largest_of_a_block(units))
            if before < len(self.kinds):
                found.append(of_kind[self.kinds[before]].pop(0))
        return found + rest


@dataclass(frozen=True)
class Candidates:
    """shard: elements; arrangements, and work [arrangements, shards] of each: int64, of any unit."""

    shard: int
    arrangements: list[Arrangement]
    work: Tensor


def balanced(buckets: Sequence[Sequence[Unit]], shards: Shards) -> tuple[list[tuple[list[tuple[Unit, int]], int]], int]:
    """Of each bucket the units with their offsets, and its length; and the busiest owner's work over all buckets (FLOPs, see `muon_work`)."""
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
        assert end <= shards.count * each.shard, "what fits for one bucket fits for all of the same kinds"
        placed.append((in_bucket, shards.count * each.shard))
    return placed, int(work.max()) * unit_of_work


def _candidates(units: Sequence[Unit], shards: Shards, unit_of_work: int) -> Candidates:
    """Ways to place a bucket in the shortest shards that hold it, each with another share of work."""
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
    """The usual ones, and others, a sample of them where they are many: the same on every rank."""
    blocks, matrices, _ = sorted_out(units)
    for order in usual_orders(units):
        yield Arrangement(tuple(unit.kind for unit in order if unit.is_block), len(blocks))
    if not any(unit.work for unit in blocks):
        return
    orders = list(_orders([block.kind for block in blocks]))
    places = len(blocks) + 1 if matrices else 1
    splits = [(0, 0)] + [(before, count) for before in range(len(blocks)) for count in range(1, free + 1)]
    number = len(orders) * places * len(splits)
    most = max(24, TRIED // (len(units) + shards))
    for index in range(number) if number <= most else sorted(random.Random(number).sample(range(number), most)):
        index, split = divmod(index, len(splits))
        order, before = divmod(index, places)
        yield Arrangement(orders[order], before, splits[split])


def _orders(kinds: list[tuple]) -> Iterator[tuple[tuple, ...]]:
    """Distinct orders of `kinds`; many are sampled."""
    left, order = Counter(kinds), []

    def extend() -> Iterator[tuple[tuple, ...]]:
        if len(order) == len(kinds):
            yield tuple(order)
            return
        for kind in left:
            if left[kind]:
                left[kind] -= 1
                order.append(kind)
                yield from extend()
                left[kind] += 1
                order.pop()

    every = []
    for found, each in enumerate(extend()):
        if found == MAX_ORDERS:
            break
        every.append(each)
    else:
        yield from every
        return
    generator = random.Random(len(kinds))
    yield from dict.fromkeys(tuple(generator.sample(kinds, len(kinds))) for _ in range(MAX_ORDERS))


def _choose(works: Sequence[Tensor], shards: int) -> tuple[list[int], Tensor]:
    """An index into each of `works`, so that the busiest shard has least to do: one after the other, then each again in view of all others."""
    total, chosen = torch.zeros(shards, dtype=torch.int64, device="cpu"), []
    for work in works:
        chosen.append(_best(total + work, busiest_first=True)[1])
        total = total + work[chosen[-1]]
    for busiest_first in (False, True) * 2:  # the sum of squares leads out of where the busiest one alone would stay
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
    """What the best row of `totals` [rows, shards] is judged by, and its index, the first of equals."""
    keys = totals.amax(1).tolist(), (totals * totals).sum(1).tolist()
    return min((key, index) for index, key in enumerate(zip(*(keys if busiest_first else keys[::-1]), strict=True)))
