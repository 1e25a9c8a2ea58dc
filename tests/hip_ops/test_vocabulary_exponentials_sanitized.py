# SPDX-License-Identifier: Apache-2.0
"""The source of the kernels that make exponentials of rows of logits, and gradients of these, under AddressSanitizer
and UBSan, on arrays that end where their data ends.
"""

import pytest

from tests.hip_ops import vocabulary_exponentials_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_sanitized
from tests.hip_ops.injected_bug import write_source
from tests.hip_ops.kernel_files import kernel_source

SOURCE = kernel_source("vocabulary_exponentials.hip")

# torch does not run under a sanitizer: numpy arrays, bf16 as its bits, and numbers that it holds exactly. Parts lie 120
# apart, so that all but the largest are scaled; `others`: parts of another rank, of smaller logits.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.hip_ops.cpu_kernels import CpuKernels
from tests.hip_ops.numpy_dtypes import bits, values

library, source = map(Path, sys.argv[1:])
kernels = CpuKernels(library, [source])
generator = np.random.default_rng(0)

for rows, classes, size, pad, parts, others in ((5, 1040, 2, 8, 3, 0), (9, 45, 2, 0, 1, 2), (4, 33, 4, 3, 2, 1),
    (6, 68, 4, 0, 1, 0), (3, 1, 2, 0, 4, 66),
                                                (2, 2048, 2, 0, 1, 0), (2, 2048, 4, 1, 1, 0)):
    stride, step = classes + pad, -(-classes // (parts * 16)) * 16
    aligned = classes * size % 16 == 0 and pad * size % 16 == 0
    whole = generator.integers(-4, 5, (rows, stride)) + 120 * (np.arange(stride) // step == 0)
    stored = bits(whole.reshape(-1)[: rows * stride - pad], size)  # without the last row's padding
    logits = whole[:, :classes].astype(np.float64)
    labels = (generator.integers(-1, classes + 1, rows) + 7).astype(np.int64)
    found = np.empty((parts, 3, rows), np.float32)
    assert kernels.ho_overwrite_with_exponentials(stored, labels, found, rows, classes, stride, 7, parts, step, size,
        aligned, 1, None) == 0
    tops = np.stack([logits[:, p * step : (p + 1) * step].max(1, initial=-np.inf) for p in range(parts)])
    assert (found[:, 0] == 80 * np.ceil((tops - 40) / 80)).all()
    here = (labels >= 7) & (labels < 7 + classes)
    column = np.where(here, labels - 7, 0)
    assert (found[:, 2].sum(0) == np.where(here, logits[np.arange(rows), column], 0)).all()
    everyone = np.concatenate((np.full((others, 3, rows), [[0.0], [3.0], [0.0]], np.float32), found))
    total = np.exp(logits).sum(1) + 3.0 * others
    grad, results = generator.random(rows).astype(np.float32), np.empty((2, rows), np.float32)
    assert kernels.ho_finish_gradient(stored, labels, everyone, grad, results, rows, classes, stride, 7, step,
        others + parts, others, parts, 0.5, size,
                                      aligned, 1, None) == 0
    log_sum = np.log(total)
    assert np.allclose(results[0], log_sum - found[:, 2].sum(0) + 0.5 * log_sum**2, rtol=1e-5)
    want = np.exp(logits - log_sum[:, None]) * (1 + log_sum)[:, None]
    want[np.arange(rows), column] -= here
    got = np.lib.stride_tricks.as_strided(values(stored), (rows, classes), (4 * stride, 4)) * results[1][:, None]
    assert np.allclose(got, want * grad[:, None], rtol=1e-2, atol=1e-5)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_finding(schedule):
    assert "done" in run_sanitized(PROGRAM, build_cpu_library(SOURCE, sanitize=True), SOURCE, HO_CPU_SCHEDULE=schedule)


@pytest.mark.slow
def test_one_element_too_many_is_detected(tmp_path):
    source = write_source(tmp_path, bugs.ONE_TOO_MANY, "vocabulary_exponentials")
    said = run_sanitized(PROGRAM, build_cpu_library(source, sanitize=True), source, expect_failure=True)
    assert "heap-buffer-overflow" in said and "row_vectors.h" in said
