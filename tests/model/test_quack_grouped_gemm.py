# SPDX-License-Identifier: Apache-2.0
"""What quack's grouped GEMM is given, with a loop that stands for its kernel here; tests/gpu/test_grouped_product.py runs the kernel itself."""

from types import SimpleNamespace

import pytest
import torch

from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from zaya_plugin.model import quack_grouped_gemm
from zaya_plugin.model.grouped_gemm_implementations import FORMS, IMPLEMENTATIONS
from zaya_plugin.model.quack_grouped_gemm import TILE, borders

QUACK = IMPLEMENTATIONS["quack"]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch):
    """Keywords of the calls that reach quack; its operands as its documentation has them: A [rows, k] or [m, rows], B [E, n, k] or [n, rows], D is written."""
    seen = []

    def gemm(a, b, d, c, semaphore, *, cu_seqlens_m=None, cu_seqlens_k=None, add_to_output=False, **tile):
        assert c is None and semaphore is None and (cu_seqlens_m is None) != (cu_seqlens_k is None)
        ends = (cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m).tolist()
        for expert, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            if cu_seqlens_k is None:
                d[start:end] = (a[start:end].float() @ b[expert].float().T).to(d.dtype)
            else:
                product = a[:, start:end].float() @ b[:, start:end].float().T
                d[expert] = (d[expert] + product if add_to_output else product).to(d.dtype)
        seen.append(tile)

    monkeypatch.setattr(quack_grouped_gemm, "_gemm", lambda: gemm)
    return seen


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(
    "case", [Grouped((3, 0, 40, 5), 24, 40), Grouped((0, 0), 16, 8), Grouped((30,), 8, 16, nobody=0)], ids=str
)
def test_operands(calls, case, flag):
    backend = SimpleNamespace(grouped_rows=QUACK.rows, grouped_outer_=QUACK.add_outer)
    check_rows(backend, case, flag)
    check_outer(backend, case, flag)
    assert calls == 2 * [TILE.words()]
    check_outer(backend, case, False, out_dtype=case.random(1).dtype)


def test_a_block_that_the_copy_engine_does_not_take_is_added_to(calls):
    a, b, offsets = (
        torch.randn(20, 16).bfloat16(),
        torch.randn(20, 8).bfloat16(),
        torch.tensor([3, 3, 20], dtype=torch.int32),
    )
    total = torch.zeros(3 * 16 * 8 + 1)[1:].view(3, 16, 8)
    assert total.data_ptr() % 16
    QUACK.add_outer(total, a, b, offsets)
    assert torch.equal(total, QUACK.outer(a, b, offsets).float()) and total.abs().sum() > 0


def test_no_rows_at_all(calls):
    offsets = torch.zeros(3, dtype=torch.int32)
    assert QUACK.rows(torch.zeros(0, 8), torch.zeros(3, 8, 16), offsets).shape == (0, 16)
    total = torch.ones(3, 8, 16)
    QUACK.add_outer(total, torch.zeros(0, 8), torch.zeros(0, 16), offsets)
    assert (total == 1).all()
    QUACK.add_outer(total, torch.zeros(0, 8), torch.zeros(0, 16), offsets, accumulate=False)
    assert (total == 0).all() and not calls


def test_borders_are_made_once_and_again_when_offsets_change():
    offsets = torch.tensor([3, 3, 20], dtype=torch.int32)
    made = borders(offsets)
    assert made.tolist() == [0, 3, 3, 20] and borders(offsets) is made
    offsets[1] = 5
    assert borders(offsets).tolist() == [0, 3, 5, 20]
    with torch.inference_mode():
        assert borders(torch.tensor([3, 5], dtype=torch.int32)).tolist() == [0, 3, 5]


def test_borders_of_a_capture_are_made_in_it(monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    offsets = torch.tensor([3, 20], dtype=torch.int32).as_subclass(OnDevice)
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    before = borders(offsets)
    capturing.append(True)
    inside = borders(offsets)
    assert inside is not before and borders(offsets) is inside
    capturing.clear()
    assert borders(offsets) is not inside


@pytest.mark.parametrize(
    "tensor, taken",
    [
        (torch.zeros(9, 16), True),
        (torch.zeros(9, 24)[:, :16], True),
        (torch.zeros(9, 18)[:, :16], False),
        (torch.zeros(9, 14), False),
        (torch.zeros(9 * 16 + 1)[1:].view(9, 16), False),
        (torch.zeros(9, 32)[:, ::2], False),
        (torch.zeros(3, 8, 16), True),
        (torch.zeros(3, 8, 16).mT, True),
        (torch.zeros(3, 9, 16), False),
        (torch.zeros(3, 8, 16)[..., ::2], False),
        (torch.zeros(16, 16).T, False),
        (torch.zeros(1, 16).expand(9, 16), False),
        (torch.zeros(16, 8, 3).permute(2, 1, 0), False),
    ],
)
def test_what_it_takes(tensor, taken):
    """Zeros become bf16, strides and all."""
    half = (
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bfloat16)
        if tensor.storage_offset() == 0
        else tensor
    )
    assert QUACK.takes(half) == taken


def test_why_it_cannot_be_had_here(monkeypatch):
    assert QUACK.forms == FORMS
    monkeypatch.setattr(quack_grouped_gemm.importlib.util, "find_spec", lambda name: None)
    assert QUACK.available(CPU, torch.bfloat16) == "quack is not installed (package quack-kernels)"
    monkeypatch.setattr(quack_grouped_gemm.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(quack_grouped_gemm, "architecture", lambda device: "gfx942")
    assert "Hopper's" in QUACK.available(GPU, torch.bfloat16)
    monkeypatch.setattr(quack_grouped_gemm, "architecture", lambda device: "sm_90")
    assert QUACK.available(GPU, torch.float32) == "quack's gemm does not take torch.float32"


def test_its_products_are_compared_before_they_are_used(calls, monkeypatch):
    wrong_on = quack_grouped_gemm._wrong_on.__wrapped__
    assert wrong_on(CPU) is None and len(calls) == 5
    right = quack_grouped_gemm._gemm()

    def forgets_to_add(*operands, **words):
        right(*operands, **words | {"add_to_output": False} if "cu_seqlens_k" in words else words)

    def always_adds(*operands, **words):
        right(*operands, **words | {"add_to_output": True} if "cu_seqlens_k" in words else words)

    for wrong in (forgets_to_add, always_adds):
        monkeypatch.setattr(quack_grouped_gemm, "_gemm", lambda wrong=wrong: wrong)
        assert wrong_on(CPU).startswith("grouped_outer_: argument[0], element")
    monkeypatch.setattr(quack_grouped_gemm, "_gemm", lambda: lambda a, b, d: None)
    assert wrong_on(CPU).startswith("quack: TypeError")


def test_plans_do_not_pile_up(monkeypatch):
    plans = dict.fromkeys(range(quack_grouped_gemm.PLANS))
    module = SimpleNamespace(_gemm_plan_cache=plans, gemm="gemm")
    monkeypatch.setattr(quack_grouped_gemm.importlib, "import_module", lambda name: module)
    assert quack_grouped_gemm._gemm() == "gemm" and len(plans) == quack_grouped_gemm.PLANS
    plans["one more"] = None
    assert quack_grouped_gemm._gemm() == "gemm" and not plans
