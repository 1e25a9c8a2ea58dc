# SPDX-License-Identifier: Apache-2.0
"""hip_ops/ops/newton_schulz/symmetric_product.hip built by g++ under AddressSanitizer and UBSan, and its launchers'
refusals.
"""

import pytest

from tests.hip_ops.cpu_kernels import build_cpu_library, cpu_kernels, run_sanitized
from tests.hip_ops.kernel_files import kernel_source

# Without torch, which does not run under a sanitizer. Every array ends where its allocation does: one element too many
# is detected.
PROGRAM = """
import sys
import numpy as np
from pathlib import Path
from tests.hip_ops.cpu_kernels import CpuKernels

kernels = CpuKernels(sys.argv[1], [Path(sys.argv[2])])
rng = np.random.default_rng(0)

def half(*shape):
    return rng.standard_normal(shape).astype(np.float16)

def bf16(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)

def widen(x):
    return x.astype(np.float64) if x.dtype == np.float16 else (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

def check(code, got, want):
    assert code == 0, code
    assert np.abs(widen(got) - want).max() <= 2**-7 * np.abs(want).max(), np.abs(widen(got) - want).max()

for n, k, tile, is_half in ((40, 168, 128, 0), (72, 168, 64, 0), (200, 72, 256, 0), (40, 40, 64, 1), (77, 45, 64, 0), (1, 1, 64, 1)):
    a, d = half(1, n, k), half(1, n, n)
    d = d + d.transpose(0, 2, 1)
    if not is_half:
        a, d = bf16(a), bf16(d)
    c = np.empty_like(d)
    code = kernels.ho_symmetric_product(a, a, d, c, 1, n, k, 1.5, -0.5, 2.0, is_half, tile, None)
    x = widen(a)
    check(code, c, 1.5 * x @ x.transpose(0, 2, 1) - 0.5 * widen(d) + 2 * np.eye(n))
    assert (c == c.transpose(0, 2, 1)).all()
for m, n, k, tile, to_bf16 in ((40, 72, 40, 128, 0), (72, 40, 40, 64, 1), (136, 200, 40, 256, 1), (35, 31, 33, 64, 0)):
    a, b, d = half(1, m, k), half(1, n, k), half(1, m, n)
    c = np.empty((1, m, n), np.uint16 if to_bf16 else np.float16)
    t = np.empty((1, n, m), c.dtype)
    code = kernels.ho_general_product(a, b, d, c, t, 1, m, n, k, 1.5, -0.5, 1, to_bf16, tile, None)
    check(code, c, 1.5 * widen(a) @ widen(b).transpose(0, 2, 1) - 0.5 * widen(d))
    assert (t == c.transpose(0, 2, 1)).all()
print("right")
"""


@pytest.mark.slow  # in `make test` the emulator finds what lies outside (test_symmetric_product_gfx942.py)
@pytest.mark.parametrize("defines", [(), ("HO_WIDE_MFMA=1",)], ids=["gfx942", "gfx950"])
def test_sanitizers_find_nothing(defines):
    assert "right" in run_sanitized(
        PROGRAM,
        build_cpu_library("symmetric_product", defines=defines, sanitize=True),
        kernel_source("symmetric_product.hip"),
        HO_CPU_SCHEDULE="random:3",
    )


def test_refused_arguments():
    kernels = cpu_kernels("symmetric_product")
    assert kernels.ho_symmetric_product(None, None, None, None, 1, 8, 0, 1.0, 0.0, 0.0, 0, 64, None) == -1  # no k
    # no such tile
    assert kernels.ho_symmetric_product(None, None, None, None, 1, 8, 8, 1.0, 0.0, 0.0, 0, 96, None) == -1
    # offsets beyond 32 bits
    assert kernels.ho_symmetric_product(None, None, None, None, 1, 2**17, 2**16, 1.0, 0.0, 0.0, 0, 64, None) == -1
    # no batch
    assert kernels.ho_general_product(None, None, None, None, None, 0, 8, 8, 8, 1.0, 0.0, 0, 0, 64, None) == -1
