# SPDX-License-Identifier: Apache-2.0
"""Test the addition of a bf16 gradient to an fp32 main gradient on the CPU: the torch reference, gradient_addition.hip
built by g++, under sanitizers, and with one mistake each.
"""

import re

import pytest
import torch

import hip_ops.runtime.launchers
from hip_ops.ops.gradient_addition import add_gradient_, reference
from hip_ops.ops.gradient_addition import hip as hip_kernels
from hip_ops.runtime import main_grad
from hip_ops.runtime.operator import OPERATORS
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_sanitized
from tests.hip_ops.gradient_addition_cases import BUGS, COUNTS, ONE_TOO_MANY, check
from tests.hip_ops.injected_bug import cpu_copy, write_source
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.operators_seen import OperatorsSeen

SOURCE = kernel_source("gradient_addition.hip")


@pytest.mark.parametrize("count", COUNTS)
def test_against_fp64(monkeypatch, count):
    for schedule in SCHEDULES:
        monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
        for offset in (0, 3):
            check(hip_kernels.add_gradient_, count, offset=offset)
    check(reference.add_gradient_, count)


def test_the_operator_adds_in_place():
    total, part = torch.zeros(3, 5, 2), torch.arange(30.0).view(3, 5, 2).bfloat16()
    assert add_gradient_(total, part) is None and torch.equal(total, part.float())
    add_gradient_(total[:, ::2], part[:, ::2])
    assert total[0, :, 0].tolist() == [0, 2, 8, 6, 16]
    torch.library.opcheck(torch.ops.hip_ops.add_gradient_.default, (total, part))


def test_the_kernel_takes_whole_bf16_gradients_alone():
    takes = OPERATORS["add_gradient_"].fits["hip"]
    total, part = torch.zeros(4, 6), torch.zeros(4, 6).bfloat16()
    assert takes(total, part) and takes(total[1:3], part[1:3])
    assert not takes(total[:, ::2], part[:, ::2]) and not takes(total, part.half()) and not takes(total.t(), part.t())


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"part": torch.zeros(3, 5)}, "part has shape (3, 5). Allowed: (3, 4)"),
        ({"part": torch.zeros(3, 4, dtype=torch.int32)}, "part is torch.int32. Allowed: torch.bfloat16 or"),
        ({"total": torch.zeros(3, 4).bfloat16()}, "total is torch.bfloat16. Allowed: torch.float32"),
    ],
)
def test_errors_name_what_is_wrong(changed, says):
    arguments = {"total": torch.zeros(3, 4), "part": torch.zeros(3, 4)} | changed
    with pytest.raises(ValueError, match=re.escape("hip_ops.add_gradient_: " + says)):
        add_gradient_(*arguments.values())


def test_rounded_products_are_added_by_the_operator(monkeypatch):
    """On a device without products into fp32, whose way is "rounded"."""
    monkeypatch.setattr(main_grad, "way_of_adding", lambda total, a: "rounded")
    a, b, total = torch.randn(9, 10).bfloat16(), torch.randn(9, 4).bfloat16(), torch.randn(10, 4)
    want = total + a.t() @ b
    with OperatorsSeen() as seen:
        main_grad.add_product_(total, a, b)
    assert seen.names.count("hip_ops::add_gradient_") == 1 and torch.equal(total, want)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "one_piece" else pytest.mark.slow) for name in BUGS]
)
def test_each_bug_is_caught(tmp_path, monkeypatch, name):
    copy = cpu_copy(tmp_path, BUGS[name], "gradient_addition")
    monkeypatch.setattr(hip_ops.runtime.launchers, "library", lambda target: copy)
    with pytest.raises(AssertionError, match="off by"):
        for count in COUNTS:
            check(hip_kernels.add_gradient_, count)


# torch does not run under a sanitizer: numpy arrays, bf16 as its bits, whole numbers.
PROGRAM = (
    f"COUNTS = {COUNTS}\n"
    + """
import sys
from pathlib import Path
import numpy as np
from tests.hip_ops.cpu_kernels import CpuKernels
from tests.hip_ops.numpy_dtypes import bits, values

library, source = map(Path, sys.argv[1:])
kernels = CpuKernels(library, [source])
generator = np.random.default_rng(0)
for count in filter(None, COUNTS):
    part = bits(generator.integers(-8, 9, count), 2)
    total = generator.integers(-8, 9, count).astype(np.float32)
    want = total + values(part)
    assert kernels.ho_add_gradient(total, part, count, count % 8 == 0, None) == 0
    assert (total == want).all()
print("done")
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_finding(schedule):
    assert "done" in run_sanitized(PROGRAM, build_cpu_library(SOURCE, sanitize=True), SOURCE, HO_CPU_SCHEDULE=schedule)


@pytest.mark.slow
def test_one_too_many_is_found(tmp_path):
    source = write_source(tmp_path, ONE_TOO_MANY, "gradient_addition")
    text = run_sanitized(PROGRAM, build_cpu_library(source, sanitize=True), source, expect_failure=True)
    assert "heap-buffer-overflow" in text and "gradient_addition.hip" in text
