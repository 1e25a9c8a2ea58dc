# SPDX-License-Identifier: Apache-2.0
"""The source of the kernels that add rows by their ids under AddressSanitizer and UBSan, on arrays that end where their
data ends.
"""

import pytest

from tests.hip_ops import embedding_gradient_hip_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_sanitized
from tests.hip_ops.injected_bug import write_source
from tests.hip_ops.kernel_files import kernel_source

SOURCE = kernel_source("embedding_gradient.hip")

# torch does not run under a sanitizer: numpy arrays, bf16 as its bits, and whole numbers, of which every sum is exact.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.hip_ops.cpu_kernels import CpuKernels
from tests.hip_ops.numpy_dtypes import bits, values

library, source = map(Path, sys.argv[1:])
kernels = CpuKernels(library, [source])
generator = np.random.default_rng(0)
run = kernels.ho_add_rows_run()

def strided(array, rows, width, stride):
    return np.lib.stride_tricks.as_strided(array, (rows, width), (4 * stride, 4))

for count, classes, width, size, pad in ((1, 3, 7, 2, 0), (run + 3, 2, 2056, 2, 8), (3 * run, 1, 45, 2, 0),
    (5 * run + 1, 4, 33, 4, 3), (4 * run - 1, 90, 1028, 4, 4),
                                         (2 * run + 3, 1, 8, 4, 0), (run + 1, 9, 1, 2, 5)):
    stride = width + pad
    aligned = width * size % 16 == 0 and pad * size % 16 == 0
    stored = bits(generator.integers(-8, 9, count * stride - pad), size)  # without the last row's padding
    total = generator.integers(-8, 9, classes * stride - pad).astype(np.float32)
    ids = generator.integers(0, classes, count)
    order = np.argsort(ids, kind="stable")
    heads, tails = (np.full(-(-count // run) * width, np.nan, np.float32) for _ in range(2))
    want = total.copy()
    np.add.at(strided(want, classes, width, stride), ids, strided(values(stored), count, width, stride))
    assert kernels.ho_add_rows(total, ids[order], order, stored, heads, tails, count, width, stride, stride, size,
        aligned, None) == 0
    assert (total == want).all()  # padding too
assert kernels.ho_add_rows(total, ids, order, stored, heads, tails, count, width, stride, stride, 8, 0, None) == -1
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_finding(schedule):
    assert "done" in run_sanitized(PROGRAM, build_cpu_library(SOURCE, sanitize=True), SOURCE, HO_CPU_SCHEDULE=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bugs.ONE_TOO_MANY, bugs.ONE_COLUMN_TOO_MANY], ids=["id", "column"])
def test_one_too_many_is_detected(tmp_path, bug):
    source = write_source(tmp_path, bug, "embedding_gradient")
    said = run_sanitized(PROGRAM, build_cpu_library(source, sanitize=True), source, expect_failure=True)
    assert "heap-buffer-overflow" in said and "embedding_gradient.hip" in said
