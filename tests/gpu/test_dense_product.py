# SPDX-License-Identifier: Apache-2.0
"""Test the head's products on an accelerator: the library's, and quack's where it is installed."""

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.ops.dense_product import dense_product_, quack
from hip_ops.runtime.main_grad import fp32_product
from hip_ops.runtime.quack_tiles import available
from tests.hip_ops.dense_cases import CASES, Dense, check

DEVICE = torch.device("cuda")
LARGE = [  # a chunk's logits, its gradient of hidden and of the weight, for an eighth of the vocabulary
    Dense(2048, 2048, 32_784, torch.bfloat16, "b"),
    Dense(2048, 32_784, 2048, torch.float32),
    Dense(32_784, 2048, 2048, torch.float32, "a", accumulate=True),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_the_library(case):
    assert fp32_product(DEVICE, torch.bfloat16), "this torch does not multiply bf16 matrices into fp32"
    with use_kernels("reference"):
        check(dense_product_, case, "cuda")


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_quack(case):
    if reason := available(DEVICE):
        pytest.skip(reason)
    check(quack.dense_product_, case, "cuda")
