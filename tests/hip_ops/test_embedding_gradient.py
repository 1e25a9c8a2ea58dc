# SPDX-License-Identifier: Apache-2.0
"""Rows added to a matrix by their ids, on the CPU: the torch reference, and Triton's version in its interpreter."""

import re
from types import SimpleNamespace

import pytest
import torch

import hip_ops
from hip_ops import embedding_gradient
from hip_ops.hip_kernels import embedding_gradient as hip_kernels
from hip_ops.operator import OPERATORS
from hip_ops.reference import embedding_gradient as reference
from tests.hip_ops.cpu_kernels import SCHEDULES, run_python
from tests.hip_ops.embedding_gradient_bugs import BUGS
from tests.hip_ops.embedding_gradient_cases import CASES, FP64, Rows, check


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_against_fp64(case):
    check(reference, case)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_build_against_fp64(monkeypatch, case, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    check(hip_kernels, case)


@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_the_operator_adds_in_place(dtype):
    total = torch.zeros(4, 3, dtype=dtype)
    rows = torch.arange(15.0, dtype=dtype).view(5, 3)
    assert hip_ops.add_rows_(total, torch.tensor([2, 0, 2, 2, 3]), rows) is None
    assert total.tolist() == [[3, 4, 5], [0, 0, 0], [15, 18, 21], [12, 13, 14]]
    torch.library.opcheck(torch.ops.hip_ops.add_rows.default, (total, torch.tensor([1, 1, 0]), rows[:3]))


def test_the_self_check_would_not_pass_a_lost_row():
    operator = OPERATORS["add_rows"]
    total, ids, rows = operator.example(torch.device("cpu"))
    want, got = total.clone(), total.clone()
    embedding_gradient.add_rows_(want, ids, rows)
    embedding_gradient.add_rows_(got, ids[1:], rows[1:])
    assert (want - got).abs().max() > 10 * operator.tolerance * want.abs().max()


def in_any_order(total, ids, rows):
    order = torch.randperm(len(ids))
    total.index_add_(0, ids[order], rows[order])


def rounding_all_rows(total, ids, rows):
    reference.add_rows_(total, ids, rows)
    total *= 1 + 2**-22


@pytest.mark.parametrize(
    "add_rows_, said", [(in_any_order, "other bits"), (rounding_all_rows, "rows of no id changed")]
)
def test_the_check_sees_what_is_within_its_tolerance(add_rows_, said):
    with pytest.raises(AssertionError, match=said):
        check(SimpleNamespace(add_rows_=add_rows_), Rows(640, 3, 8, repeated="one"))


PROGRAM = """
import sys
from hip_ops.triton_kernels import embedding_gradient
from tests.hip_ops.embedding_gradient_cases import CASES, check

for case in CASES:
    if case.count <= int(sys.argv[1]):
        check(embedding_gradient, case)
print("right")
"""


@pytest.mark.parametrize("rows", [100, pytest.param(10**9, marks=pytest.mark.slow)])  # some milliseconds each
def test_triton_in_the_interpreter(rows):
    pytest.importorskip("triton")
    done = run_python(PROGRAM, rows, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]


@pytest.mark.slow  # it tests the tests
def test_each_bug_is_caught(tmp_path):
    program = "import sys; from pathlib import Path; from tests.hip_ops.embedding_gradient_bugs import main; main(Path(sys.argv[1]))"
    done = run_python(program, str(tmp_path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "right source: right" in done.stdout
    assert re.findall(r"(?:caught|MISSED) (\w+)", done.stdout) == list(BUGS) and "MISSED" not in done.stdout, (
        done.stdout[-4000:]
    )
