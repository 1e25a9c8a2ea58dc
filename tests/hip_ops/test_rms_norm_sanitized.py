# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm and LayerNorm sources under AddressSanitizer and UBSan, on arrays that end where their data ends.

In `make test` the emulator finds what lies outside (test_rms_norm_gfx942.py).
"""

import pytest

from tests.hip_ops import rms_norm_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_sanitized

# hidden size, rows, bf16 of x, residual and weight, columns beyond a row
CASES = [
    (2048, 3, 1, 0, 1, 0),
    (256, 19, 1, 1, 1, 8),
    (45, 3, 1, 0, 1, 0),
    (37, 2, 0, 0, 0, 3),
    (264, 2, 0, 1, 0, 0),
    (1, 3, 1, 1, 1, 0),
]

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.hip_ops.cpu_kernels import CpuKernels

library, *sources = map(Path, sys.argv[1:-1])
kernels = CpuKernels(library, sources)
generator = np.random.default_rng(0)

def array(shape, bf16):
    values = generator.standard_normal(shape, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if bf16 else values

def empty(shape, bf16):
    return np.empty(shape, np.uint16 if bf16 else np.float32)

for hidden, rows, bx, br, bw, pad in eval(sys.argv[-1]):
    for scaled, centered in ((0, 0), (1, 0), (0, 1), (1, 1)):
        stride = hidden + pad
        def padded(bf16):  # without the last row's padding: nothing behind the data may be touched
            return array(rows * stride - pad, bf16)
        x, residual, upstream, dy = padded(bx), padded(br), padded(br), padded(bw)
        vectors = [array(hidden, bw) for _ in range(6)]
        merge = vectors[:4] if scaled else [None] * 4
        aligned = 8 if not hidden % 8 and not pad % 8 and all(a.ctypes.data % 16 == 0 for a in (x, residual, upstream,
            dy, *vectors)) else 0
        types = bx | 2 * br | 4 * bw | aligned
        y, new, rstd = empty((rows, hidden), bw), empty((rows, hidden), br), empty(rows, 0)
        bias, mean = (vectors[5], empty(rows, 0)) if centered else (None, None)
        assert kernels.ho_rms_norm_forward(x, residual, *merge, vectors[4], bias, y, new, mean, rstd, rows, hidden,
            stride, stride, types, 1, 1e-5, None) == 0
        if not hasattr(kernels.library, "ho_rms_norm_backward"):
            continue
        for d_new in (upstream, None):
            blocks = kernels.ho_rms_norm_backward_blocks(rows, hidden, types, scaled, centered, 1)
            partial = empty((blocks, (4 if scaled else 1) + centered, hidden), 0)
            d_x, d_residual, out = empty((rows, hidden), bx), empty((rows, hidden), br), [empty(hidden, bw) for _ in range(6)]
            first, at = (residual, stride) if scaled else (new, hidden)
            assert kernels.ho_rms_norm_backward(dy, d_new, x if scaled else None, first, mean, rstd, *merge, vectors[4], d_x,
                d_residual, partial,
                                                rows, hidden, stride, stride, stride, at, types, blocks, None) == 0
            assert kernels.ho_rms_norm_backward_sum(partial, *merge, *(out[:4] if scaled else [None] * 4), out[4],
                out[5] if centered else None, blocks, hidden, types, None) == 0
print("done")
"""


def library(folder, *files: str, bug=None):
    for file in bugs.FILES:
        (folder / file).write_text(bugs.source(file, bug))
    sources = [folder / file for file in files]
    return [build_cpu_library(*sources, sanitize=True), *sources]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return library(tmp_path_factory.mktemp("right"), "rms_norm.hip", "rms_norm_backward.hip", "rms_norm_sum.hip")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_finding(right, schedule):
    assert "done" in run_sanitized(PROGRAM, *right, CASES, HO_CPU_SCHEDULE=schedule)


@pytest.mark.slow
def test_a_lost_tail_mask_is_detected(tmp_path):
    said = run_sanitized(
        PROGRAM, *library(tmp_path, "rms_norm.hip", bug=bugs.BUGS["lost_tail_mask"]), CASES[2:3], expect_failure=True
    )
    assert "heap-buffer-overflow" in said and "rms_norm_any.h" in said
