# SPDX-License-Identifier: Apache-2.0
"""The CCA prologue's sources under AddressSanitizer and UBSan, on arrays that end where their data ends.

In `make test` the emulator finds what lies outside (test_cca_prologue_gfx942.py).
"""

import pytest

from tests.hip_ops import cca_prologue_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_sanitized

# rows of a chunk, micro batch, query heads, groups, chunks, halo, documents, rotary channels, delayed channels,
# temperature
CASES = [
    (37, 1, 2, 1, 1, 0, 0, 64, 64, 1.0),
    (3, 5, 4, 2, 2, 1, 1, 8, 4, 0.0),
    (1, 2, 2, 1, 1, 1, 0, 0, 0, 1.0),
    (2, 1, 5, 1, 1, 0, 1, 128, 128, 0.0),
]

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.hip_ops.cpu_kernels import CpuKernels

library, *sources = map(Path, sys.argv[1:-1])
kernels = CpuKernels(library, sources)
generator = np.random.default_rng(0)

def bf16(*shape):
    return (generator.standard_normal(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)

def empty(*shape, dtype=np.uint16):
    return np.empty(shape, dtype)

for c, b, n, g, k, halo, documents, rotary, late, length in eval(sys.argv[-1]):
    s, heads, d = c * k, n + g, 128
    total, channels, values = s * b, heads * d, g * d
    width = channels + values
    projected = bf16(s * b * width)
    weights = [bf16(channels, 2), bf16(channels), bf16(channels, d, 2), bf16(channels)]
    temperature = np.full(g, length, np.float32)
    rope = generator.standard_normal((s, rotary), dtype=np.float32) if rotary else None
    before, value_before = (bf16(k, 2, b, channels), bf16(k, b, late)) if halo else (None, None)
    starts = (generator.random((k, c + 1, b)) < 0.4) if documents else None
    turns, rotary = ([rotary, 0], rotary) if rotary else ([0, 0], d)
    query, key, value, norms = empty(s, b, n, d), empty(s, b, g, d), empty(s, b, g, d), empty(heads, s, b,
        dtype=np.float32)
    sizes = (total, c, b, n, g, rotary)
    assert kernels.ho_cca_prologue(projected, *weights, temperature, rope, before, value_before, starts, query, key,
        value, norms, b * width, width,
                                   *turns, *sizes, late, 1, None) == 0
    if not hasattr(kernels.library, "ho_cca_prologue_parameters"):
        continue
    upstream = [bf16(s, b, count, d) for count in (n, g, g)]
    strides = [x for count in (n, g, g) for x in (b * count * d, count * d, d)]
    runs, zero_runs = kernels.ho_cca_prologue_backward_blocks(total, c, b, n, g, halo, 1), 3
    dy, d_projected = empty(s, b, heads, d), empty(s, b, width)
    d_halo, d_value_halo = (np.empty_like(before), np.empty_like(value_before)) if halo else (None, None)
    bias, along, zero = empty(runs, heads, d, dtype=np.float32), empty(runs, g, dtype=np.float32), empty(zero_runs, g,
        dtype=np.float32)
    partial, d_temperature = empty(runs, heads, 3, d, d, dtype=np.float32), np.empty_like(temperature)
    assert kernels.ho_cca_prologue_backward(*upstream, query, key, norms, temperature, rope, projected, before,
        weights[0], weights[2], starts, dy, d_projected,
                                            d_halo, d_value_halo, partial, bias, along, *strides, b * width, width,
                                                *turns, *sizes, late, 1, None) == 0
    assert kernels.ho_cca_prologue_parameters(upstream[1], projected, *weights, temperature, rope, before, starts,
        partial, bias, along, zero,
                                              *(np.empty_like(w) for w in weights), d_temperature, b * width, width,
                                                  *turns, *strides[3:6], *sizes, runs,
                                              zero_runs, None) == 0
print("done")
"""


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    sources = bugs.copy(tmp_path_factory.mktemp("right"))
    return [build_cpu_library(*sources, sanitize=True), *sources]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_finding(right, schedule):
    assert "done" in run_sanitized(PROGRAM, *right, CASES, HO_CPU_SCHEDULE=schedule, timeout=800)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["second_quad_as_the_first"])
def test_a_wrong_place_is_detected(tmp_path, name):
    sources = bugs.copy(tmp_path, bugs.OUTSIDE[name])
    said = run_sanitized(PROGRAM, build_cpu_library(*sources, sanitize=True), *sources, CASES[:1], expect_failure=True)
    assert "out of bounds" in said or "overflow" in said
