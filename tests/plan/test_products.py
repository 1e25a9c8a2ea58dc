# SPDX-License-Identifier: Apache-2.0
"""Test the list of products: its operations are those of plan/flops.py, its sizes those of the layouts."""

from dataclasses import replace

import pytest

from zaya_plugin.plan.flops import Shape, forward_flops_by_part, muon_matrices
from zaya_plugin.plan.parallelism import Batch, ParallelSizes
from zaya_plugin.plan.products import products, update_products

BASE = Shape(40, 2048, 8, 2, 128, 16, 2048, 256, 262272)
BATCH = Batch(4096, 4, micro_batches=3)


def by_name(layout, batch=BATCH):
    return {(product.name, product.direction): product for product in products(BASE, layout, batch)}


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (ParallelSizes(), {}),
        (ParallelSizes(data=4, expert=4), {}),
        (ParallelSizes(context=2), dict.fromkeys(("projections", "router", "experts", "head"), 2)),
        (ParallelSizes(tensor=2), dict.fromkeys(("projections", "router", "experts", "head"), 2)),
        (ParallelSizes(pipeline=4), dict.fromkeys(("projections", "router", "experts"), 4)),
    ],
)
def test_operations_of_every_direction_are_those_of_the_model(layout, share):
    tokens = 4096 * 4 * 3
    for direction in ("forward", "dgrad", "wgrad"):
        counted = dict.fromkeys(("projections", "router", "experts", "head"), 0.0)
        for product in products(BASE, layout, BATCH):
            if product.direction == direction:
                counted[product.part] += product.calls * product.flops
        wanted = forward_flops_by_part(BASE, 4096)
        assert counted == {part: tokens * wanted[part] / share.get(part, 1) for part in counted}


def test_sizes_of_zaya1():
    one = by_name(ParallelSizes())
    qkv = one["queries, keys, values", "forward"]
    assert (qkv.m, qkv.n, qkv.k, qkv.batch, qkv.calls, qkv.out_bytes) == (16384, 1536, 2048, 1, 120, 2)
    wgrad = one["queries, keys, values", "wgrad"]
    assert (wgrad.m, wgrad.n, wgrad.k, wgrad.out_bytes) == (1536, 2048, 16384, 4)
    dgrad = one["gate and up", "dgrad"]
    assert (dgrad.m, dgrad.n, dgrad.k, dgrad.batch, dgrad.library) == (1024, 2048, 4096, 16, False)
    head = one["head", "forward"]  # 1.25 GiB of logits: 2,048 tokens
    assert (head.m, head.n, head.calls, head.library) == (2048, 262272, 24, True)
    halves = by_name(ParallelSizes(tensor=2, expert=2))
    assert (halves["output", "forward"].m, halves["output", "forward"].k) == (16384, 512)
    assert (halves["down", "forward"].m, halves["down", "forward"].batch) == (1024, 8)


def test_rounded_sizes_are_multiples_and_never_smaller():
    odd = replace(by_name(ParallelSizes())["output", "forward"], m=190, n=4000, k=64)
    assert [(p.m, p.n, p.k) for p in map(odd.rounded, (64, 128, 256))] == [
        (192, 4032, 64),
        (256, 4096, 128),
        (256, 4096, 256),
    ]


def test_products_of_newton_schulz():
    gram, square, apply = update_products(BASE, ParallelSizes(data=8))
    # 40 layers of 16 experts with three matrices, on 8 ranks; 2^27 elements at once are 32 of them
    assert (gram.m, gram.n, gram.k, gram.batch, gram.calls) == (2048, 2048, 2048, 32, 5 * 8)
    assert {p.flops for p in (gram, square, apply)} == {2.0 * 2048**3 * 32}
    wide = update_products(BASE, ParallelSizes(data=8), split_gate_up=False)
    assert [(p.direction, p.m, p.n, p.k, p.batch) for p in wide[:3]] == [
        ("gram", 2048, 2048, 4096, 16),
        ("square", 2048, 2048, 2048, 16),
        ("apply", 2048, 4096, 2048, 16),
    ]
    assert muon_matrices(BASE)[1][:2] == [(1024, 2048), (256, 2048)]
