# SPDX-License-Identifier: Apache-2.0
"""Test the row-by-row embedding gradient on an accelerator: Triton, and embedding_gradient.hip compiled for it (by
nvcc on NVIDIA).
"""

import importlib

import pytest
import torch

import hip_ops
from hip_ops import use_kernels
from hip_ops.runtime.operator import OPERATORS, all_operators, warm_up
from tests.hip_ops.embedding_gradient_cases import BF16, CASES, FP32, Rows, check
from tests.no_waiting import no_waiting

DEVICE = torch.device("cuda")
LARGE = [Rows(16384, 262272, 256, BF16, "half"), Rows(16384, 1000, 2048, FP32), Rows(20000, 300, 1100, BF16, "runs")]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_against_fp64(chosen, case):
    check(importlib.import_module(f"hip_ops.ops.embedding_gradient.{chosen}"), case, "cuda")


def test_the_self_check_passes_and_nothing_waits(chosen):
    all_operators()
    assert warm_up(DEVICE, [OPERATORS["add_rows_"]])["add_rows_"].startswith(chosen)
    total, ids, rows = (
        torch.zeros(9, 64, device=DEVICE),
        torch.arange(300, device=DEVICE) % 9,
        torch.ones(300, 64, device=DEVICE),
    )
    with no_waiting():
        hip_ops.add_rows_(total, ids, rows)
    assert total[:, 0].tolist() == [34.0] * 3 + [33.0] * 6
    with use_kernels("reference"):
        hip_ops.add_rows_(total, ids, rows)
    assert total[:, 0].tolist() == [68.0] * 3 + [66.0] * 6
