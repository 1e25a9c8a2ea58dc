# SPDX-License-Identifier: Apache-2.0
"""The source of the kernels on rows of logits under AddressSanitizer and UBSan, on arrays that end where their data
ends.
"""

import pytest

from tests.hip_ops import vocabulary_rows_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_sanitized
from tests.hip_ops.injected_bug import write_source
from tests.hip_ops.kernel_files import kernel_source

SOURCE = kernel_source("vocabulary_rows.hip")

# torch does not run under a sanitizer: numpy arrays, bf16 as its bits, and numbers that it holds exactly.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.hip_ops.cpu_kernels import CpuKernels
from tests.hip_ops.numpy_dtypes import bits, values

library, source = map(Path, sys.argv[1:])
kernels = CpuKernels(library, [source])
generator = np.random.default_rng(0)

for rows, classes, size, pad, parts in ((5, 1040, 2, 8, 3), (9, 45, 2, 0, 1), (4, 33, 4, 3, 2), (6, 68, 4, 0, 1),
    (3, 1, 2, 0, 4)):
    stride, step = classes + pad, -(-classes // (parts * 16)) * 16
    aligned = classes * size % 16 == 0 and pad * size % 16 == 0
    stored = bits(generator.integers(-4, 5, rows * stride - pad), size)  # without the last row's padding
    logits = np.lib.stride_tricks.as_strided(values(stored).copy(), (rows, classes), (4 * stride, 4)).astype(np.float64)
    labels = (generator.integers(-1, classes + 1, rows) + 7).astype(np.int64)
    found = np.empty((parts, 3, rows), np.float32)
    assert kernels.ho_row_statistics(stored, labels, found, rows, classes, stride, 7, parts, step, size, aligned, 1,
        None) == 0
    top = found[:, 0].max(0)
    assert (top == logits.max(1)).all()
    total = (found[:, 1] * np.exp(found[:, 0] - top)).sum(0)
    assert np.allclose(total, np.exp(logits - top[:, None]).sum(1), rtol=1e-5)
    here = (labels >= 7) & (labels < 7 + classes)
    column = np.where(here, labels - 7, 0)
    assert (found[:, 2].sum(0) == np.where(here, logits[np.arange(rows), column], 0)).all()
    normalizer, grad = np.stack((top, np.log(total))).astype(np.float32), generator.random(rows).astype(np.float32)
    assert kernels.ho_overwrite_with_gradient(stored, labels, normalizer, grad, rows, classes, stride, rows, 7, parts,
        step, 0.5, size, aligned, 1, None) == 0
    p = np.exp(logits - top[:, None] - np.log(total)[:, None])
    want = p * (1 + (top + np.log(total))[:, None])
    want[np.arange(rows), column] -= here
    got = np.lib.stride_tricks.as_strided(values(stored), (rows, classes), (4 * stride, 4))
    assert np.allclose(got, want * grad[:, None], rtol=1e-2, atol=1e-5)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_finding(schedule):
    assert "done" in run_sanitized(PROGRAM, build_cpu_library(SOURCE, sanitize=True), SOURCE, HO_CPU_SCHEDULE=schedule)


@pytest.mark.slow
def test_one_element_too_many_is_detected(tmp_path):
    source = write_source(tmp_path, bugs.ONE_TOO_MANY, "vocabulary_rows")
    said = run_sanitized(PROGRAM, build_cpu_library(source, sanitize=True), source, expect_failure=True)
    assert "heap-buffer-overflow" in said and "row_vectors.h" in said
