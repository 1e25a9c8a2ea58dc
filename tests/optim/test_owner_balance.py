# SPDX-License-Identifier: Apache-2.0
"""The same work for the owners of all shards, against every choice where there are few."""

import itertools

import pytest
import torch

pytest.importorskip("megatron.core.optimizer.param_layout", reason="megatron-core 0.16 takes no layout")

from zaya_plugin.optim.sharding import owner_balance  # noqa: E402
from zaya_plugin.optim.sharding.owner_balance import Arrangement, balanced  # noqa: E402
from zaya_plugin.optim.sharding.placement import Shards, offsets, place, units_of, work_of  # noqa: E402


def _block(name, count, rows, columns):
    found = [torch.nn.Parameter(torch.empty(rows, columns, device="meta")) for _ in range(count)]
    for index, param in enumerate(found):
        param.expert_block, param.muon_matrices = (name, index), (1, rows, columns)
    return found


def _layer(name, experts=4):
    return [*_block(f"{name}.fc1", experts, 64, 32), *_block(f"{name}.fc2", experts, 32, 32)]


def _work(placed, shards):
    work = [0] * shards
    for bucket, length in placed:
        for param, start in offsets(bucket).items():
            assert start * shards // length == (start + param.numel() - 1) * shards // length, "whole"
            work[start * shards // length] += work_of(param)
    return work


def test_two_layers_of_opposite_order_are_even():
    """A shard holds two gate+up matrices, or twice as many down matrices, which are more work."""
    buckets = [units_of(_layer(0)), units_of(_layer(1))]
    shards = Shards(4, 4)
    placed, busiest = balanced(buckets, shards)
    work = _work(placed, 4)
    assert max(work) == pytest.approx(busiest, rel=1e-5)
    usual = _work([(place(bucket, 4, shards.size(bucket))[0], 4 * shards.size(bucket)) for bucket in buckets], 4)
    assert max(work) < max(usual) and sum(work) == sum(usual)
    orders = [list(itertools.permutations(bucket)) for bucket in buckets]
    free = (4 * shards.size(buckets[0]) - sum(unit.numel for unit in buckets[0])) // (64 * 32)
    every = [[each.items(bucket) for each in owner_balance._arrangements(bucket, 4, free)] for bucket in buckets]

    def busiest_of(*chosen):
        placed = [place(items, 4, shards.size(bucket)) for items, bucket in zip(chosen, buckets, strict=True)]
        return max(_work([(at, 4 * shards.size(bucket)) for (at, _), bucket in zip(placed, buckets, strict=True)], 4))

    assert max(work) == min(itertools.starmap(busiest_of, itertools.product(*every)))
    assert max(work) < min(itertools.starmap(busiest_of, itertools.product(*orders))), "what is left free helps too"


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_never_worse_than_the_usual_order_and_never_longer(shards):
    buckets = [units_of([*_layer(layer, 8), torch.nn.Parameter(torch.empty(700, device="meta"))]) for layer in range(5)]
    of = Shards(shards, shards)
    placed, _ = balanced(buckets, of)
    usual = [
        (place(owner_balance.usual_orders(bucket)[0], shards, of.size(bucket))[0], shards * of.size(bucket))
        for bucket in buckets
    ]
    assert [length for _, length in placed] == [length for _, length in usual]
    assert max(_work(placed, shards)) <= max(_work(usual, shards))
    for bucket, (in_bucket, length) in zip(buckets, placed, strict=True):
        places = sorted((begin, begin + unit.numel) for unit, begin in in_bucket)
        assert len(places) == len(bucket) and places[-1][1] <= length
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))


def test_arrangements():
    first, second = units_of(_layer(0))
    matrix = torch.nn.Parameter(torch.empty(16, 32, device="meta"))
    matrix.muon_matrices = (1, 16, 32)
    units = [first, *units_of([matrix]), second]
    assert Arrangement((second.kind, first.kind), 1, (0, 2)).items(units) == [2 * 64 * 32, second, units[1], first]
    every = list(owner_balance._arrangements(units, 4, 2))
    assert every[0].items(units) == every[1].items(units) == [first, second, units[1]]
    assert len(set(every[2:])) == len(every[2:]) == 2 * 3 * (1 + 2 * 2), (
        "orders, places of the matrix, and of what is free"
    )
    one_of_many = [(kind,) for kind in range(9)]
    assert len(list(owner_balance._orders(one_of_many))) == owner_balance.MAX_ORDERS
    assert sorted(owner_balance._orders(["a", "b", "a"])) == [("a", "a", "b"), ("a", "b", "a"), ("b", "a", "a")]


def test_squares_fit_into_63_bits_where_one_owner_has_all_work(monkeypatch):
    judge, judged = owner_balance._best, []

    def checked(totals, busiest_first):
        key, index = judge(totals, busiest_first)
        row = totals[index].tolist()
        judged.append(max(row))
        assert sorted(key) == sorted((max(row), sum(each * each for each in row)))
        return key, index

    monkeypatch.setattr(owner_balance, "_best", checked)
    placed, busiest = balanced([units_of(_block("huge", 1, 8192, 65_536))], Shards(8192, 8192))
    assert busiest == pytest.approx(max(_work(placed, 8192)), rel=1e-3) and max(judged) > 2**30


def test_what_is_left_free_across_a_border_takes_no_matrix_over_it():
    first, second = units_of(_layer(0))
    half, more = (
        torch.nn.Parameter(torch.empty(32, 32, device="meta")),
        torch.nn.Parameter(torch.empty(48, 32, device="meta")),
    )
    for matrix in (half, more):
        matrix.muon_matrices = (1, *matrix.shape)
    shard = 64 * 32
    starts = offsets(place([2 * shard, *units_of([half, more]), first, second], 16, shard)[0])
    assert starts[half] == 0 and all(
        start // shard == (start + param.numel() - 1) // shard for param, start in starts.items()
    )
