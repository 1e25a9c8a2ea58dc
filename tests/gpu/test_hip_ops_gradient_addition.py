# SPDX-License-Identifier: Apache-2.0
"""Test the addition of a bf16 gradient to an fp32 one on an accelerator: gradient_addition.hip compiled for it (by nvcc
on NVIDIA) and torch.compile.
"""

import pytest
import torch

from hip_ops.ops.gradient_addition import hip as hip_kernels
from hip_ops.runtime.operator import OPERATORS, all_operators, warm_up
from tests.hip_ops.gradient_addition_cases import COUNTS, check

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("count", [*COUNTS, 2**25, 2**28 + 24], ids=str)
def test_against_fp64(count):
    check(hip_kernels.add_gradient_, count, "cuda")
    check(hip_kernels.add_gradient_, count, "cuda", offset=3)


def test_the_self_check_passes():
    all_operators()
    version = "hip" if torch.version.hip else "compiled"
    assert warm_up(DEVICE, [OPERATORS["add_gradient_"]])["add_gradient_"].startswith(version)
