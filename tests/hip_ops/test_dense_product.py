# SPDX-License-Identifier: Apache-2.0
"""The head's products, against fp64, and the arguments that quack's GEMM gets, with torch in place of its kernel;
tests/gpu/test_dense_product.py runs the kernel itself.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from hip_ops.ops.dense_product import quack
from hip_ops.runtime import main_grad
from hip_ops.runtime.main_grad import dense_product_
from hip_ops.runtime.operator import OPERATORS, all_operators
from tests.hip_ops.dense_cases import CASES, check
from tests.hip_ops.fake_gpu import CPU


@pytest.fixture
def calls(monkeypatch):
    """Keywords of the calls that reach quack; its operands as its documentation has them: A [m, k], B [n, k], D [m, n] is
    written.
    """
    seen = []

    def gemm(a, b, d, c, semaphore, *, add_to_output=False, **tile):
        assert c is None and semaphore is None
        product = a.float() @ b.float().T
        d.copy_(d + product if add_to_output else product)
        seen.append(tile)

    module = SimpleNamespace(gemm=gemm)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(gemm=module))
    monkeypatch.setitem(sys.modules, "quack.gemm", module)
    return SimpleNamespace(seen=seen, module=module)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(calls, case):
    check(dense_product_, case, "cpu")
    check(quack.dense_product_, case, "cpu")
    assert len(calls.seen) == 1


def test_without_products_into_fp32_it_is_rounded_before_the_sum(monkeypatch):
    monkeypatch.setattr(main_grad, "way_of_adding", lambda total, a: "rounded")
    a, b, out = torch.randn(40, 16).bfloat16(), torch.randn(16, 24).bfloat16(), torch.randn(40, 24)
    before = out.clone()
    dense_product_(out, a, b, accumulate=True)
    assert torch.equal(out, before + (a @ b))
    assert torch.equal(dense_product_(out, a, b), (a @ b).float())


def test_what_quack_takes():
    a, b, out = torch.randn(40, 16).bfloat16(), torch.randn(16, 24).bfloat16(), torch.randn(40, 24)
    assert quack.fits(out, a, b, True) and quack.fits(out.bfloat16(), a, b, False)
    assert quack.fits(out, torch.randn(16, 40).bfloat16().t(), b, True)
    assert not quack.fits(out.bfloat16(), a, b, True)  # the sum would be rounded at every call
    assert not quack.fits(out, a.float(), b.float(), True)
    assert not quack.fits(out, torch.randn(40, 32).bfloat16()[:, ::2], b, True)  # contiguous in no direction
    assert not quack.fits(out, torch.randn(40, 20).bfloat16()[:, 4:], b, True)  # starts between addresses
    assert not quack.fits(out[:39], a[:39], b, True) and not quack.fits(out[:0], a[:0], b, True)


def test_tiles_of_a_chunk():
    """2,048 tokens: logits, the gradient of hidden, which has 88 tiles of the first kind for 132 processors, and the
    weight's.
    """
    assert quack.tile(2048, 262_272, False) == quack.STORED
    assert quack.tile(2048, 2048, False) == quack.FEW
    assert quack.tile(262_272, 2048, True) == quack.ADDED


def test_its_products_are_compared_before_they_are_used(calls):
    all_operators()
    operator = OPERATORS["dense_product_"]
    assert operator._check("quack", CPU) == "passed"
    assert [*map(quack.Tile.words, (quack.STORED, quack.FEW, quack.ADDED))] == calls.seen
    right = calls.module.gemm
    for wrong in ({"add_to_output": False}, {"add_to_output": True}):
        calls.module.gemm = lambda *operands, wrong=wrong, **words: right(*operands, **words | wrong)
        assert ", element" in operator._check("quack", CPU), wrong
    calls.module.gemm = lambda a, b, d, *others, **words: right(a, torch.zeros_like(b), d, *others, **words)
    assert ", element" in operator._check("quack", CPU)
