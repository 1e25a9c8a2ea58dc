# SPDX-License-Identifier: Apache-2.0
"""The HIP kernel that begins Newton-Schulz: torch's bits and their transpose, on the CPU, in the emulator and under
sanitizers; bytes moved; known mistakes.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from hip_ops.ops.newton_schulz import hip
from hip_ops.ops.newton_schulz.reference import normalised
from tests.gfx942.emulator import SCHEDULES, Counters, Device
from tests.gfx942.toolchain import code_object
from tests.hip_ops.cpu_kernels import build_cpu_library, cpu_kernels, run_sanitized
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.product_cases import DTYPES, bits, from_bits

SOURCE, SCALE, EPS = "newton_schulz_start", 2.0**8, 1e-7
INPUTS = {**DTYPES, "fp32": torch.float32}


def matrices(batch: int, rows: int, columns: int, dtype: str) -> Tensor:
    """Matrices of different size; the first one is smaller than EPS."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn((batch, rows, columns), generator=generator)
    return (x * torch.logspace(-9 if dtype != "fp16" else 0, 2, batch)[:, None, None]).to(INPUTS[dtype])


def check(x: Tensor, start: Tensor, turned: Tensor) -> None:
    want = normalised(x, None, EPS, SCALE, torch.empty(x.shape, dtype=start.dtype))
    assert torch.equal(start, want) and torch.equal(turned, want.mT)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("result", DTYPES)
@pytest.mark.parametrize("dtype", INPUTS)
def test_torchs_bits_on_the_cpu(dtype, result, sums):
    for x in (matrices(2, 72, 136, dtype), matrices(3, 35, 71, dtype), matrices(2, 64, 72, dtype).mT):
        square_sums = torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32).square() if sums else None
        start, turned = hip._start(x, square_sums, EPS, SCALE, DTYPES[result])
        want = normalised(x, square_sums, EPS, SCALE, torch.empty_like(start))
        assert torch.equal(start, want) and torch.equal(turned, want.mT)
        assert start.is_contiguous() and turned.is_contiguous()
    broken = matrices(2, 8, 8, dtype)
    broken[0, 1, 2] = torch.nan
    start, _ = hip._start(broken, None, EPS, SCALE, DTYPES[result])
    assert start[0].isnan().all() and start[1].isfinite().all()


def on_device(device: Device, x: Tensor, result: str) -> tuple[Tensor, Tensor, Counters]:
    (batch, rows, columns), dtype = x.shape, next(name for name, dtype in INPUTS.items() if dtype == x.dtype)
    factors = SCALE / torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32).clamp_min(EPS)
    start, turned = (device.alloc(shape, np.uint16) for shape in ((batch, rows, columns), (batch, columns, rows)))
    counters = device.launch(
        code_object(SOURCE),
        f"ho_start_{'any_' * bool(rows % 8 or columns % 8)}{dtype}_to_{result}",
        batch * -(-rows // 64) * -(-columns // 64),
        256,
        [
            device.put(x.numpy() if dtype == "fp32" else bits(x)),
            device.put(factors.numpy()),
            start,
            turned,
            np.int32(rows),
            np.int32(columns),
        ],
    )
    return from_bits(start.read(), DTYPES[result]), from_bits(turned.read(), DTYPES[result]), counters


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape, dtype, result", [((2, 72, 136), "bf16", "fp16"), ((2, 35, 71), "fp32", "bf16")])
def test_torchs_bits_on_gfx942(schedule, shape, dtype, result):
    x = matrices(*shape, dtype)
    start, turned, _ = on_device(Device(schedule=schedule), x, result)
    check(x, start, turned)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 72, 136), (2, 35, 71)])
@pytest.mark.parametrize("result", DTYPES)
@pytest.mark.parametrize("dtype", INPUTS)
def test_every_kernel_on_gfx942(dtype, result, shape):
    x = matrices(*shape, dtype)
    start, turned, _ = on_device(Device(schedule="reverse"), x, result)
    check(x, start, turned)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_it_reads_once_and_writes_twice_in_whole_segments(dtype):
    x = matrices(2, 128, 192, dtype)
    _, _, counters = on_device(Device(), x, "fp16")
    assert counters.global_load_bytes == counters.distinct_load_bytes == x.numel() * x.itemsize
    assert counters.global_store_bytes == counters.distinct_store_bytes == 2 * 2 * x.numel()
    assert counters.global_store_transactions * 64 == counters.global_store_bytes


@pytest.mark.parametrize(
    "bug",
    [
        "WITHOUT_BARRIER",
        *(pytest.param(bug, marks=pytest.mark.slow) for bug in ("WITHOUT_FACTOR", "TRANSPOSED_IN_EIGHTS")),
    ],
)
def test_a_mistake_is_detected(monkeypatch, bug):
    monkeypatch.setenv("HO_CPU_SCHEDULE", "reverse")
    x, right = matrices(2, 72, 136, "bf16"), []
    factors = SCALE / torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float32).clamp_min(EPS)
    for kernels in (cpu_kernels(SOURCE), cpu_kernels(SOURCE, defines=[f"BUG_START_{bug}"])):
        start, turned = torch.empty(x.shape, dtype=torch.float16), torch.empty((2, 136, 72), dtype=torch.float16)
        assert kernels.ho_newton_schulz_start(x, factors, start, turned, 2, 72, 136, 0, 1, None) == 0
        want = normalised(x, None, EPS, SCALE, torch.empty_like(start))
        right.append(torch.equal(start, want) and torch.equal(turned, want.mT))
    assert right == [True, False]


# Without torch, which does not run under a sanitizer. Every array ends where its allocation does.
PROGRAM = """
import sys
import numpy as np
from pathlib import Path
from tests.hip_ops.cpu_kernels import CpuKernels

kernels = CpuKernels(sys.argv[1], [Path(sys.argv[2])])
for batch, rows, columns in ((2, 72, 40), (1, 35, 71), (1, 1, 1)):
    for code, dtype in ((1, np.float16), (2, np.float32)):
        x = np.random.default_rng(0).standard_normal((batch, rows, columns)).astype(dtype)
        factors = np.full(batch, 0.37, np.float32)
        start, turned = np.empty(x.shape, np.float16), np.empty((batch, columns, rows), np.float16)
        assert kernels.ho_newton_schulz_start(x, factors, start, turned, batch, rows, columns, code, 1, None) == 0
        assert np.array_equal(start, (x.astype(np.float32) * np.float32(0.37)).astype(np.float16))
        assert np.array_equal(turned, start.transpose(0, 2, 1))
assert kernels.ho_newton_schulz_start(None, None, None, None, 1, 8, 0, 0, 0, None) == -1  # no columns
assert kernels.ho_newton_schulz_start(None, None, None, None, 1, 8, 8, 3, 0, None) == -1  # no such input
print("right")
"""


@pytest.mark.slow
def test_sanitizers_find_nothing():
    done = run_sanitized(
        PROGRAM, build_cpu_library(SOURCE, sanitize=True), kernel_source(f"{SOURCE}.hip"), HO_CPU_SCHEDULE="random:3"
    )
    assert "right" in done
