# SPDX-License-Identifier: Apache-2.0
"""The sources of the expert path under AddressSanitizer and UBSan, on arrays that end where their data ends.

In `make test` the emulator finds what lies outside (test_expert_path_gfx942.py).
"""

import pytest

from tests.hip_ops import expert_path_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_sanitized
from tests.hip_ops.injected_bug import write_source
from tests.hip_ops.kernel_files import kernel_source

SOURCES = [kernel_source(f"{name}.hip") for name in ("expert_sort", "expert_rows", "weighted_swiglu")]

# torch does not run under a sanitizer: numpy arrays, bf16 as its bits, and small whole numbers, which every dtype holds
# exactly.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.hip_ops.cpu_kernels import CpuKernels
from tests.hip_ops.numpy_dtypes import bits, values

library, *sources = map(Path, sys.argv[1:])
kernels = CpuKernels(library, sources)
generator = np.random.default_rng(0)

def sort(ids, experts):
    n = len(ids)
    maps, ends = [np.empty(n, np.int32) for _ in range(2)], [np.empty(experts, np.int32) for _ in range(2)]
    counted = np.empty((kernels.ho_expert_sort_blocks(n, experts), experts + 1), np.int32)
    assert kernels.ho_expert_sort(ids, counted, *maps, *ends, n, experts, ids.itemsize, None) == 0
    classes = np.where((ids >= 0) & (ids < experts), ids, experts)
    order = np.argsort(classes, kind="stable")
    assert (np.where(maps[0] < 0, ~maps[0],
        maps[0]) == order).all() and ((maps[0] < 0) == (classes[order] == experts)).all()
    assert (maps[1][order] == np.where(maps[0] < 0, ~np.arange(n), np.arange(n))).all()
    assert (ends[0] == np.bincount(classes, minlength=experts + 1)[:-1]).all() and (ends[1] == ends[0].cumsum()).all()
    return *maps, ends[1]

for n, experts, dtype in ((1, 1, np.int64), (300, 16, np.int64), (130, 32, np.int32), (130, 33, np.int64),
    (70, 256, np.int32)):
    sort(generator.integers(-2, experts + 2, n).astype(dtype), experts)
for n, hidden, size, prob_size, pad in ((9, 1032, 2, 4, 8), (5, 45, 2, 2, 0), (6, 33, 4, 4, 3), (5, 68, 4, 2, 0),
    (3, 1, 2, 4, 0)):
    token_of_row, row_of_token, ends = sort(generator.integers(0, 4, n), 3)
    live, stride, aligned = int(ends[-1]), hidden + pad, hidden * size % 16 == 0 and pad * size % 16 == 0
    def whole(columns, rows=n):  # without the last row's padding: nothing behind the data may be touched
        array = bits(generator.integers(-4, 5, rows * (columns + pad) - pad), size)
        return array, np.lib.stride_tricks.as_strided(values(array), (rows, columns), (4 * (columns + pad), 4))
    source, table = whole(hidden)
    probs, out, side = bits(generator.integers(1, 3, n), prob_size), bits(np.empty((n, hidden)), size), bits(np.empty(n), prob_size)
    assert kernels.ho_gather_rows(source, token_of_row, probs, out, side, n, hidden, stride, size, prob_size, aligned,
        1, None) == 0
    assert (values(out)[:live] == table[token_of_row[:live]]).all() and (values(out)[live:] == 0).all()
    assert (values(side)[:live] == values(probs)[token_of_row[:live]]).all() and (values(side)[live:] == 0).all()
    grad, _ = whole(hidden)
    gate_up, both = whole(2 * hidden)
    out, d_gate_up = bits(np.empty((n, hidden)), size), bits(np.empty((n, 2 * hidden)), size)
    wide = 2 * hidden + pad
    assert kernels.ho_weighted_swiglu(gate_up, probs, ends, out, n, hidden, wide, 3, size, prob_size, aligned, 1,
        None) == 0
    gate, up = both[:, :hidden], both[:, hidden:]
    want = gate / (1 + np.exp(-gate)) * up * values(probs)[:, None]
    assert np.allclose(values(out)[:live], want[:live], rtol=1e-2, atol=1e-6) and (values(out)[live:] == 0).all()
    for result in (out, None):
        assert kernels.ho_weighted_swiglu_backward(grad, gate_up, probs, ends, d_gate_up, side, result, n, hidden,
            stride, wide, 3, size, prob_size, aligned, 1, None) == 0
    assert (values(d_gate_up)[live:] == 0).all() and (values(side)[live:] == 0).all()
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_finding(schedule):
    assert "done" in run_sanitized(
        PROGRAM, build_cpu_library(*SOURCES, sanitize=True), *SOURCES, HO_CPU_SCHEDULE=schedule
    )


@pytest.mark.slow
def test_one_element_too_many_is_detected(tmp_path):
    sources = [SOURCES[0], write_source(tmp_path, bugs.ONE_TOO_MANY, "expert_rows"), SOURCES[2]]
    said = run_sanitized(PROGRAM, build_cpu_library(*sources, sanitize=True), *sources, expect_failure=True)
    assert "heap-buffer-overflow" in said and "row_vectors.h" in said
