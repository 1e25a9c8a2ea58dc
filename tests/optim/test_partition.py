# SPDX-License-Identifier: Apache-2.0
"""Which units share a bucket: against all ways to cut a few units."""

import itertools

import pytest
import torch

pytest.importorskip("megatron.core.optimizer.param_layout", reason="megatron-core 0.16 takes no layout")

from zaya_plugin.optim.sharding import partition  # noqa: E402
from zaya_plugin.optim.sharding.placement import Shards, units_of  # noqa: E402

SHARDS = Shards(4, 4)


def _matrices(*sizes):
    found = []
    for rows, columns in sizes:
        found.append(torch.nn.Parameter(torch.empty(rows, columns, device="meta")))
        found[-1].muon_matrices = (1, rows, columns)
    return units_of(found)


def _lengths(buckets):
    return [SHARDS.count * SHARDS.size(bucket) for bucket in buckets]


@pytest.mark.parametrize("seed", range(6))
def test_no_other_cuts_are_cheaper(seed):
    generator = torch.Generator().manual_seed(seed)
    units = _matrices(*torch.randint(8, 60, (9, 2), generator=generator).tolist())
    least = 2000
    found = partition.buckets(units, least, SHARDS)
    assert [unit for bucket in found for unit in bucket] == units
    numels = [sum(unit.numel for unit in bucket) for bucket in found]
    assert all(numel >= least for numel in numels[:-1])

    total = sum(unit.numel for unit in units)

    def cost(cuts):
        buckets = [units[a:b] for a, b in itertools.pairwise((0, *cuts, len(units)))]
        sizes = [sum(unit.numel for unit in bucket) for bucket in buckets]
        if min(sizes[:-1], default=least) < least or len(buckets) > 1 and sizes[-1] < least / partition.FINENESS:
            return float("inf")
        behind = [sum(sizes[index + 1 :]) for index in range(len(sizes))]
        return sum(
            partition._cost(length, after, total) for length, after in zip(_lengths(buckets), behind, strict=True)
        )

    ends = [sum(len(bucket) for bucket in found[: index + 1]) for index in range(len(found) - 1)]
    every = [cuts for count in range(len(units)) for cuts in itertools.combinations(range(1, len(units)), count)]
    assert cost(ends) == pytest.approx(min(map(cost, every))), "units are larger than the steps in which cuts are tried"


def test_a_large_parameter_that_may_be_cut_is_alone_unless_that_costs_much():
    matrices = [torch.nn.Parameter(torch.empty(64, 64, device="meta")) for _ in range(16)]
    for matrix in matrices:
        matrix.muon_matrices = (1, 64, 64)
    embedding = torch.nn.Parameter(torch.empty(64 * 1024, device="meta"))
    units = units_of([*matrices, embedding])
    assert partition.buckets(units, 2**20, SHARDS) == [units[:-1], units[-1:]]
    # Among 64 owners 16 matrices leave room for all of it.
    assert partition.buckets(units, 2**20, Shards(64, 64)) == [units]


def test_the_last_bucket_to_leave_is_small():
    units = _matrices(*[(32, 32)] * 64)
    lengths = _lengths(partition.buckets(units, 8 * 1024, SHARDS))
    assert sum(lengths) == 64 * 1024, "no padding"
    assert lengths[-1] == 4 * 1024 and max(lengths) <= 16 * 1024


def test_without_a_size_there_is_one_bucket():
    units = _matrices((8, 8), (16, 8))
    assert partition.buckets(units, None, SHARDS) == [units] and partition.buckets([], None, SHARDS) == []
    assert partition.cost([100, 50]) == pytest.approx(2 * 150 + partition.SIZE * (100**2 + 50**2) / 150 + 50)
