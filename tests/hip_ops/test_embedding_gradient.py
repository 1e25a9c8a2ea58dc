# SPDX-License-Identifier: Apache-2.0
"""Rows added to a matrix by their ids, on the CPU: the torch reference, and Triton's version in its interpreter."""

import re
from types import SimpleNamespace

import pytest
import torch

import hip_ops
from hip_ops.ops import embedding_gradient
from hip_ops.ops.embedding_gradient import hip as hip_kernels
from hip_ops.ops.embedding_gradient import reference
from hip_ops.runtime.operator import OPERATORS
from tests.hip_ops.cpu_kernels import SCHEDULES, run_python
from tests.hip_ops.embedding_gradient_bugs import BUGS
from tests.hip_ops.embedding_gradient_cases import BF16, CASES, FP64, Rows, check, copied


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
    torch.library.opcheck(torch.ops.hip_ops.add_rows_.default, (total, torch.tensor([1, 1, 0]), rows[:3]))


@pytest.mark.parametrize(
    "total",
    [torch.zeros(4, 6)[:, ::2], torch.zeros(4, 3, dtype=BF16), torch.zeros(4, 3, dtype=FP64)],
    ids=["strided", "bf16", "fp64"],
)
def test_the_reference_computes_what_the_kernels_do_not_take(chosen, total):
    total, rows = copied(total, "cpu"), torch.arange(15.0, dtype=FP64 if total.dtype == FP64 else BF16).view(5, 3)
    hip_ops.add_rows_(total, torch.tensor([2, 0, 2, 2, 3]), rows)
    assert total.tolist() == [[3, 4, 5], [0, 0, 0], [15, 18, 21], [12, 13, 14]]


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"rows": torch.zeros(3, 5)}, "rows has shape (3, 5). Allowed: (3, 4), [n, h]"),
        ({"ids": torch.zeros(2, dtype=torch.int64)}, "rows has shape (3, 4). Allowed: (2, 4), [n, h]"),
        ({"ids": torch.zeros(3, dtype=torch.int32)}, "ids is torch.int32. Allowed: torch.int64"),
        (
            {"rows": torch.zeros(3, 4, dtype=torch.float16)},
            "rows is torch.float16. Allowed: torch.bfloat16 or torch.float32",
        ),
        ({"rows": torch.zeros(3, 4, dtype=FP64)}, "rows is torch.float64. Allowed: torch.bfloat16 or torch.float32"),
    ],
)
def test_errors_name_what_is_wrong(changed, says):
    arguments = {
        "total": torch.zeros(9, 4),
        "ids": torch.zeros(3, dtype=torch.int64),
        "rows": torch.zeros(3, 4),
    } | changed
    with pytest.raises(ValueError, match=re.escape("hip_ops.add_rows_: " + says)):
        hip_ops.add_rows_(*arguments.values())


def test_the_self_check_does_not_pass_a_lost_row():
    operator = OPERATORS["add_rows_"]
    total, ids, rows = operator.examples[0](torch.device("cpu"))
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
from hip_ops.ops.embedding_gradient import triton as embedding_gradient
from tests.hip_ops.embedding_gradient_cases import CASES, check

for case in CASES:
    check(embedding_gradient, case)
print("right")
"""


@pytest.mark.slow  # test_embedding_gradient_gfx942.py runs the compiled kernels
def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    done = run_python(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]


@pytest.mark.slow  # it tests the tests
def test_each_bug_is_caught(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tests.hip_ops.embedding_gradient_bugs import main; "
        "main(Path(sys.argv[1]))"
    )
    done = run_python(program, str(tmp_path), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "right source: right" in done.stdout
    assert re.findall(r"(?:caught|MISSED) (\w+)", done.stdout) == list(BUGS) and "MISSED" not in done.stdout, (
        done.stdout[-4000:]
    )
