# SPDX-License-Identifier: Apache-2.0
"""The choice of a layout: cuts into buckets against all possible cuts of a few units, and the work of the shards'
owners.
"""

import itertools

import pytest
import torch

pytest.importorskip("megatron.core.optimizer.param_layout", reason="megatron-core 0.16 takes no layout")

from zaya_plugin.optim.parameter_role import ExpertBlock, ParameterRole  # noqa: E402
from zaya_plugin.optim.sharding import placement  # noqa: E402
from zaya_plugin.optim.sharding.placement import Shards, balanced, offsets, place, units_of, work_of  # noqa: E402

SHARDS = Shards(4, 4)


def _matrices(*sizes):
    found = []
    for rows, columns in sizes:
        found.append(torch.nn.Parameter(torch.empty(rows, columns, device="meta")))
        found[-1].zaya_role = ParameterRole(matrices=(1, rows, columns))
    return units_of(found)


def _lengths(buckets):
    return [SHARDS.count * SHARDS.size(bucket) for bucket in buckets]


@pytest.mark.parametrize("seed", range(6))
def test_no_other_cuts_are_cheaper(seed):
    generator = torch.Generator().manual_seed(seed)
    units = _matrices(*torch.randint(8, 60, (9, 2), generator=generator).tolist())
    least = 2000
    found = placement.cut_into_buckets(units, least, SHARDS)
    assert [unit for bucket in found for unit in bucket] == units
    numels = [sum(unit.numel for unit in bucket) for bucket in found]
    assert all(numel >= least for numel in numels[:-1])

    total = sum(unit.numel for unit in units)

    def cost(cuts):
        buckets = [units[a:b] for a, b in itertools.pairwise((0, *cuts, len(units)))]
        sizes = [sum(unit.numel for unit in bucket) for bucket in buckets]
        if min(sizes[:-1], default=least) < least or len(buckets) > 1 and sizes[-1] < least / placement.ENDS_PER_BUCKET:
            return float("inf")
        behind = [sum(sizes[index + 1 :]) for index in range(len(sizes))]
        return sum(
            placement._cost_of_bucket(length, after, total)
            for length, after in zip(_lengths(buckets), behind, strict=True)
        )

    ends = [sum(len(bucket) for bucket in found[: index + 1]) for index in range(len(found) - 1)]
    every = [cuts for count in range(len(units)) for cuts in itertools.combinations(range(1, len(units)), count)]
    assert cost(ends) == pytest.approx(min(map(cost, every))), "units are larger than the steps in which cuts are tried"


def test_a_large_parameter_that_may_be_cut_is_alone_unless_that_costs_much():
    matrices = [torch.nn.Parameter(torch.empty(64, 64, device="meta")) for _ in range(16)]
    for matrix in matrices:
        matrix.zaya_role = ParameterRole(matrices=(1, 64, 64))
    embedding = torch.nn.Parameter(torch.empty(64 * 1024, device="meta"))
    units = units_of([*matrices, embedding])
    assert placement.cut_into_buckets(units, 2**20, SHARDS) == [units[:-1], units[-1:]]
    # With 64 shards 16 matrices leave free shards for the whole embedding.
    assert placement.cut_into_buckets(units, 2**20, Shards(64, 64)) == [units]


def test_the_last_bucket_to_leave_is_small():
    units = _matrices(*[(32, 32)] * 64)
    lengths = _lengths(placement.cut_into_buckets(units, 8 * 1024, SHARDS))
    assert sum(lengths) == 64 * 1024, "no padding"
    assert lengths[-1] == 4 * 1024 and max(lengths) <= 16 * 1024


def test_without_a_size_there_is_one_bucket():
    units = _matrices((8, 8), (16, 8))
    assert (
        placement.cut_into_buckets(units, None, SHARDS) == [units]
        and placement.cut_into_buckets([], None, SHARDS) == []
    )
    assert placement.cost_of_buckets([100, 50]) == pytest.approx(
        2 * 150 + placement.BUCKET_SIZE_COST * (100**2 + 50**2) / 150 + 50
    )


def _block(count, rows, columns):
    found = [torch.nn.Parameter(torch.empty(rows, columns, device="meta")) for _ in range(count)]
    block = ExpertBlock(1, count)
    for index, param in enumerate(found):
        param.zaya_role = ParameterRole(block, index, matrices=(1, rows, columns))
    return found


def _layer(experts=4):
    return [*_block(experts, 64, 32), *_block(experts, 32, 32)]


def _work(placed, shards):
    work = [0] * shards
    for bucket, length in placed:
        for param, start in offsets(bucket).items():
            assert start * shards // length == (start + param.numel() - 1) * shards // length, "whole"
            work[start * shards // length] += work_of(param)
    return work


def test_two_layers_of_opposite_order_are_even():
    """Two layers placed in opposite orders balance the shards, although four down matrices are more work than two
    gate+up matrices.
    """
    buckets = [units_of(_layer()), units_of(_layer())]
    shards = Shards(4, 4)
    placed, busiest = balanced(buckets, shards)
    work = _work(placed, 4)
    assert max(work) == pytest.approx(busiest, rel=1e-5)
    usual = _work([(place(bucket, 4, shards.size(bucket))[0], 4 * shards.size(bucket)) for bucket in buckets], 4)
    assert max(work) < max(usual) and sum(work) == sum(usual)
    orders = itertools.product(*(itertools.permutations(bucket) for bucket in buckets))
    assert max(work) == min(
        max(_work([(place(order, 4, shards.size(order))[0], 4 * shards.size(order)) for order in pair], 4))
        for pair in orders
    ), "no other orders are more even"
    firsts = [min(bucket, key=lambda placed: placed[1])[0].largest for bucket, _ in placed]
    assert sorted(firsts) == [32 * 32, 64 * 32], "the layers have opposite orders"


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_never_worse_than_the_usual_order_and_never_longer(shards):
    buckets = [units_of([*_layer(8), torch.nn.Parameter(torch.empty(700, device="meta"))]) for _ in range(5)]
    of = Shards(shards, shards)
    placed, _ = balanced(buckets, of)
    usual = [
        (place(placement.usual_orders(bucket)[0], shards, of.size(bucket))[0], shards * of.size(bucket))
        for bucket in buckets
    ]
    assert [length for _, length in placed] == [length for _, length in usual]
    assert max(_work(placed, shards)) <= max(_work(usual, shards))
    for bucket, (in_bucket, length) in zip(buckets, placed, strict=True):
        places = sorted((begin, begin + unit.numel) for unit, begin in in_bucket)
        assert len(places) == len(bucket) and places[-1][1] <= length
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
