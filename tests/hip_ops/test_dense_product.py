# SPDX-License-Identifier: Apache-2.0
"""The head's products, against fp64, and the arguments that quack's GEMM gets, with torch in place of its kernel;
tests/gpu/test_dense_product.py runs the kernel itself.
"""

from types import SimpleNamespace

import pytest
import torch

import hip_ops
from hip_ops.ops import dense_product
from hip_ops.ops.dense_product import dense_product_, quack
from hip_ops.runtime import main_grad
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

    found = SimpleNamespace(seen=seen, gemm=gemm)
    monkeypatch.setattr(quack, "gemm", lambda: found.gemm)
    return found


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
    assert not quack.fits(torch.randn(24, 40).t(), a, b, True)  # another way of storing, which nothing compares
    assert not quack.fits(out.bfloat16(), a, b, True)  # the sum would be rounded at every call
    assert not quack.fits(out, a.float(), b.float(), True)
    assert not quack.fits(out, torch.randn(40, 32).bfloat16()[:, ::2], b, True)  # contiguous in no direction
    assert not quack.fits(out, torch.randn(40, 20).bfloat16()[:, 4:], b, True)  # starts between addresses
    assert not quack.fits(out[:39], a[:39], b, True) and not quack.fits(out[:0], a[:0], b, True)


def test_chunks_that_are_faster_with_it():
    """Up to 2,048 tokens, which are the rows of the logits and of the gradient of hidden, and the depth of the weight's."""
    vocabulary = torch.empty(2056, 16, dtype=torch.bfloat16)
    for tokens in (2048, 2056):
        hidden, d_logits = torch.empty(tokens, 16), torch.empty(tokens, 2056)
        calls = [
            (d_logits.bfloat16(), hidden.bfloat16(), vocabulary.t(), False),
            (hidden, d_logits.bfloat16(), vocabulary, False),
            (vocabulary.float(), d_logits.bfloat16().t(), hidden.bfloat16(), True),
        ]
        assert all(quack.fits(*call) for call in calls)
        assert [quack.faster(*call) for call in calls] == 3 * [tokens == 2048]
        assert [quack.tile(*call[2:]) for call in calls] == [quack.LOGITS, quack.HIDDEN, quack.WEIGHT]


def test_the_head_compiles_whole():
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(48, 16, requires_grad=True)
    labels, mask = torch.randint(48, (40,)), torch.ones(40)

    def loss(hidden, weight):
        return hip_ops.linear_cross_entropy(hidden, weight, labels, promised_grad=mask)

    want, found = loss(hidden, weight), torch.compile(loss, backend="eager", fullgraph=True)(hidden, weight)
    torch.testing.assert_close(found, want)


def test_its_products_are_compared_before_they_are_used(calls):
    operator = dense_product._product
    assert operator._check("quack", CPU) == "passed"
    tiles = (quack.LOGITS, quack.HIDDEN, quack.HIDDEN, quack.WEIGHT)
    assert [tile.words() for tile in tiles] == calls.seen
    right = calls.gemm
    for wrong in ({"add_to_output": False}, {"add_to_output": True}):
        calls.gemm = lambda *operands, wrong=wrong, **words: right(*operands, **words | wrong)
        assert ", element" in operator._check("quack", CPU), wrong
    calls.gemm = lambda a, b, d, *others, **words: right(a, torch.zeros_like(b), d, *others, **words)
    assert ", element" in operator._check("quack", CPU)
