# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the expert path and their host side, run on the CPU by Triton's interpreter; compiled ones are
in test_expert_path_gfx942.py.

fp32 only: the interpreter's bf16 rounding is its own.
"""

import pytest

from tests.hip_ops.cpu_kernels import run_python

PROGRAM = """
from unittest import mock
import torch
from hip_ops.ops.expert_permutation import triton as expert_permutation
from hip_ops.ops.weighted_swiglu import triton as weighted_swiglu
from tests.hip_ops.expert_path_cases import FP32, MIXES, Rows, Swiglu, check_rows, check_sort, check_swiglu, expert_ids

for mix in MIXES:
    check_sort(expert_permutation, expert_ids(mix, 600, 16), 16)
check_sort(expert_permutation, expert_ids("even", 0, 3), 3)
check_sort(expert_permutation, expert_ids("even", 1, 1), 1)
with mock.patch.object(expert_permutation, "PROGRAMS", 2):  # several tiles a program
    check_sort(expert_permutation, expert_ids("skewed", 1100, 5, torch.int32), 5)
check_sort(expert_permutation, expert_ids("even", 100, 256), 256)
for case in (Rows(9, 40, FP32), Rows(5, 1500, FP32, mix="no_expert", pad=3), Rows(0, 8, FP32),
    Rows(7, 1, FP32, mix="one"), Rows(6, 2048, FP32)):
    check_rows(expert_permutation, case)
rows, side = expert_permutation.gather_rows(torch.empty(3, 0), torch.tensor([2, -1, 0], dtype=torch.int32),
    torch.tensor([2, -2, 0], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0]))
assert rows.shape == (3, 0) and side.tolist() == [3.0, 0.0, 1.0]
for case in (
    Swiglu(7, 40, FP32), Swiglu(5, 1, FP32, offsets="none"), Swiglu(3, 2100, FP32, pad=3), Swiglu(4, 64, FP32,
        offsets="no_expert"),
    Swiglu(9, 256, FP32, offsets="all"), Swiglu(0, 8, FP32, offsets="none"),
):
    check_swiglu(weighted_swiglu, case)
print("right")
"""


@pytest.mark.slow
def test_in_the_interpreter():
    pytest.importorskip("triton")
    done = run_python(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]
