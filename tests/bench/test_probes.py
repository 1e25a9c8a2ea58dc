# SPDX-License-Identifier: Apache-2.0
"""Test the measured kernels and products: what each computes is known, and one wrong element is found."""

from dataclasses import replace

import pytest
import torch

import hip_ops
from zaya_plugin.bench import probes
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.parallelism import Batch, ParallelSizes
from zaya_plugin.plan.products import products, square_product, update_products

CPU = torch.device("cpu")
SMALL = Shape(2, 64, 4, 2, 16, 4, 48, 32, 250)
LISTED = products(SMALL, ParallelSizes(), Batch(24, 2, dtype_bytes=2)) + update_products(SMALL, ParallelSizes())


@pytest.mark.parametrize(("kernel", "arrays"), [("copy", 2), ("scale", 2), ("add", 3), ("triad", 3)])
def test_kernels_count_the_bytes_of_babelstream(kernel, arrays):
    measured = probes.stream(kernel, 4 * 1000, CPU, 1)
    assert (measured.work, measured.wrong, measured.elements) == (4000 * arrays, 0, 1000)
    assert measured.rate == measured.work / measured.seconds


def test_a_wrong_element_of_a_kernel_is_found(monkeypatch):
    add, weights = torch.add, dict(probes.STREAM)

    def damaged(*given, **named):
        out = add(*given, **named)
        out[-1] += 1
        return out

    monkeypatch.setattr(torch, "add", damaged)
    assert [probes.stream(name, 4096, CPU, 1).wrong for name in weights] == [0, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_product_of_a_model_is_computed_as_listed(dtype):
    for product in LISTED:
        measured = probes.product(product, CPU, dtype, 1)
        assert measured.wrong == 0, product
        assert measured.elements == product.batch * product.m * product.n and measured.work == product.flops
        left, right, call = probes.operands(product, CPU, dtype)
        left.normal_()
        right.normal_()
        got = call().view(product.batch, product.m, product.n)
        torch.testing.assert_close(got.double(), left.double() @ right.double(), rtol=0.02, atol=0.1)


def test_a_wrong_element_of_a_product_is_found(monkeypatch):
    def damaged(function, place):
        def call(*given, **named):
            out = function(*given, **named)
            out.view(-1)[place] *= 1.05
            return out

        return call

    monkeypatch.setattr(torch, "mm", damaged(torch.mm, 3))
    assert probes.product(square_product(32), CPU, torch.bfloat16, 1).wrong == 1
    monkeypatch.setattr(hip_ops, "grouped_rows", damaged(hip_ops.grouped_rows, -1))
    grouped = next(product for product in LISTED if product.part == "experts")
    assert probes.product(grouped, CPU, torch.bfloat16, 1).wrong == 1
    assert probes.product(replace(grouped, part="head", batch=1), CPU, torch.bfloat16, 1).wrong == 1
