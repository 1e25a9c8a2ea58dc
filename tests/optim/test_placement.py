# SPDX-License-Identifier: Apache-2.0
"""The search for a layout: cuts into buckets against all possible cuts of a few units, and the work of the shards'
owners.
"""

import itertools

import pytest
import torch

pytest.importorskip("megatron.core.optimizer.param_layout", reason="megatron-core 0.16 takes no layout")

from zaya_plugin.optim.parameter_role import ExpertBlock, ParameterRole  # noqa: E402
from zaya_plugin.optim.sharding import placement  # noqa: E402
from zaya_plugin.optim.sharding.placement import Arrangement, Shards, balanced, offsets, place, units_of, work_of  # noqa: E402

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
        if min(sizes[:-1], default=least) < least or len(buckets) > 1 and sizes[-1] < least / placement.FINENESS:
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
    assert placement.cost_of_buckets([100, 50]) == pytest.approx(2 * 150 + placement.SIZE * (100**2 + 50**2) / 150 + 50)


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
    orders = [list(itertools.permutations(bucket)) for bucket in buckets]
    free = (4 * shards.size(buckets[0]) - sum(unit.numel for unit in buckets[0])) // (64 * 32)
    every = [[each.items(bucket) for each in placement._arrangements(bucket, 4, free)] for bucket in buckets]

    def busiest_of(*chosen):
        placed = [place(items, 4, shards.size(bucket)) for items, bucket in zip(chosen, buckets, strict=True)]
        return max(_work([(at, 4 * shards.size(bucket)) for (at, _), bucket in zip(placed, buckets, strict=True)], 4))

    assert max(work) == min(itertools.starmap(busiest_of, itertools.product(*every)))
    assert max(work) < min(itertools.starmap(busiest_of, itertools.product(*orders))), "gaps make it more even"


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


def test_arrangements():
    first, second = units_of(_layer())
    matrix = torch.nn.Parameter(torch.empty(16, 32, device="meta"))
    matrix.zaya_role = ParameterRole(matrices=(1, 16, 32))
    units = [first, *units_of([matrix]), second]
    assert Arrangement((second.kind, first.kind), 1, gap=2).items(units) == [2 * 64 * 32, second, units[1], first]
    every = list(placement._arrangements(units, 4, 2))
    assert every[0].items(units) == every[1].items(units) == [first, second, units[1]]
    assert len(set(every[2:])) == len(every[2:]) == 2 * 3 * (1 + 2 * 2), (
        "orders, places of the matrix, and of what is free"
    )
    one_of_many = [(kind,) for kind in range(9)]
    assert len(list(placement._orders(one_of_many))) == placement.MAX_ORDERS
    assert sorted(placement._orders(["a", "b", "a"])) == [("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a")]


def test_squares_fit_into_63_bits_where_one_owner_has_all_work(monkeypatch):
    judge, judged = placement._best, []

    def checked(totals, busiest_first):
        key, index = judge(totals, busiest_first)
        row = totals[index].tolist()
        judged.append(max(row))
        assert sorted(key) == sorted((max(row), sum(each * each for each in row)))
        return key, index

    monkeypatch.setattr(placement, "_best", checked)
    placed, busiest = balanced([units_of(_block(1, 8192, 65_536))], Shards(8192, 8192))
    assert busiest == pytest.approx(max(_work(placed, 8192)), rel=1e-3) and max(judged) > 2**30


def test_what_is_left_free_across_a_border_takes_no_matrix_over_it():
    first, second = units_of(_layer())
    half, more = (
        torch.nn.Parameter(torch.empty(32, 32, device="meta")),
        torch.nn.Parameter(torch.empty(48, 32, device="meta")),
    )
    for matrix in (half, more):
        matrix.zaya_role = ParameterRole(matrices=(1, *matrix.shape))
    shard = 64 * 32
    starts = offsets(place([2 * shard, *units_of([half, more]), first, second], 16, shard)[0])
    assert starts[half] == 0 and all(
        start // shard == (start + param.numel() - 1) // shard for param, start in starts.items()
    )
