# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for gfx942 run in the emulator: loads with masks, reductions across lanes and waves, a matrix
product.
"""

import numpy as np
import pytest

from tests.gfx942.budgets import resources
from tests.gfx942.emulator import Device
from tests.gfx942.inner_loop import inner_loop
from tests.gfx942.triton_objects import triton_code_object

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def row_softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=-float("inf"))
    weights = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * columns + offsets, weights / tl.sum(weights, axis=0), mask=offsets < columns)


@triton.jit
def product(a_ptr, b_ptr, c_ptr, k, SIZE: tl.constexpr, STEP: tl.constexpr):
    rows, steps = tl.arange(0, SIZE), tl.arange(0, STEP)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, k, STEP):
        a = tl.load(a_ptr + rows[:, None] * k + start + steps[None, :])
        b = tl.load(b_ptr + rows[None, :] * k + start + steps[:, None])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + rows[:, None] * SIZE + rows[None, :], total)


@pytest.mark.parametrize("schedule", ["lockstep", "serial", "reverse"])
@pytest.mark.parametrize("columns", [1000, 1024])
def test_softmax(schedule, columns):
    compiled = triton_code_object(row_softmax, {"x_ptr": "*fp32", "y_ptr": "*fp32", "columns": "i32"}, {"BLOCK": 1024})
    device = Device(schedule=schedule)
    x = np.random.default_rng(0).standard_normal((5, columns)).astype(np.float32)
    source, target = device.put(x), device.alloc(x.shape, np.float32)
    counters = compiled.launch(device, 5, [source, target, np.int32(columns)])
    weights = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    assert np.allclose(target.read(), weights / weights.sum(axis=1, keepdims=True), rtol=2e-6, atol=0)
    assert counters.global_load_bytes == counters.global_store_bytes == x.nbytes
    assert compiled.threads == 256 and compiled.shared > 0


@pytest.mark.parametrize("schedule", ["lockstep", "serial", "reverse"])
def test_product(schedule):
    size, k = 64, 96
    compiled = triton_code_object(
        product,
        {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "k": "i32"},
        {"SIZE": size, "STEP": 32},
        divisible_by_16=["a_ptr", "b_ptr", "c_ptr", "k"],
    )
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, (size, k)).astype(np.float32) for _ in range(2))
    device = Device(schedule=schedule)
    bits = [device.put((x.view(np.uint32) >> 16).astype(np.uint16)) for x in (a, b)]
    target = device.alloc((size, size), np.float32)
    counters = compiled.launch(device, 1, [*bits, target, np.int32(k)])
    assert np.array_equal(target.read(), a @ b.T)
    flops = {"32x32x8": 16384, "16x16x16": 8192, "32x32x16": 32768, "16x16x32": 16384}
    assert (
        sum(count * flops[shape] for name, count in counters.mfma_by_opcode.items() for shape in flops if shape in name)
        == 2 * size * size * k
    )


def test_resources_and_loop_of_a_triton_object():
    compiled = triton_code_object(
        product,
        {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "k": "i32"},
        {"SIZE": 64, "STEP": 32},
        divisible_by_16=["a_ptr", "b_ptr", "c_ptr", "k"],
    )
    found = resources(compiled.path, compiled.name, compiled.shared, compiled.threads)
    assert found.lds == compiled.shared > 0 and found.scratch == found.vgpr_spills == 0 and found.waves_per_simd >= 2
    assert inner_loop(compiled.path, compiled.name).mfma_passes > 0


def test_signature_must_be_complete():
    with pytest.raises(ValueError, match="no signature for columns"):
        triton_code_object(row_softmax, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BLOCK": 1024})
