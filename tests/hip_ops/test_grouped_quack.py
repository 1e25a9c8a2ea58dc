# SPDX-License-Identifier: Apache-2.0
"""The arguments that quack's grouped GEMM gets, with a loop in place of its kernel; tests/gpu/test_grouped_product.py
runs the kernel itself.
"""

from types import SimpleNamespace

import pytest
import torch

from hip_ops.ops import grouped_product
from hip_ops.ops.grouped_product import quack
from hip_ops.ops.grouped_product.quack import TILE, borders
from hip_ops.runtime import quack_tiles
from tests.hip_ops.fake_gpu import CPU, GPU
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows


@pytest.fixture
def calls(monkeypatch):
    """Keywords of the calls that reach quack; its operands as its documentation has them: A [rows, k] or [m, rows], B
    [E, n, k] or [n, rows], D is written.
    """
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

    monkeypatch.setattr(quack, "gemm", lambda: gemm)
    return seen


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(
    "case", [Grouped((3, 0, 40, 5), 24, 40), Grouped((0, 0), 16, 8), Grouped((30,), 8, 16, padding_rows=0)], ids=str
)
def test_operands(calls, case, flag):
    check_rows(quack, case, flag)
    check_outer(quack, case, flag)
    assert calls == 2 * [TILE.words()]
    check_outer(quack, case, False, out_dtype=case.random(1).dtype)


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


def test_why_it_is_not_available(monkeypatch):
    monkeypatch.setattr(quack_tiles.importlib.util, "find_spec", lambda name: None)
    assert quack_tiles.available(GPU) == "quack is not installed (package quack-kernels)"
    monkeypatch.setattr(quack_tiles.importlib.util, "find_spec", lambda name: name)
    assert "Hopper's" in quack_tiles.available(CPU)
    monkeypatch.setattr(quack_tiles, "architecture", lambda device: "gfx942")
    assert "Hopper's" in quack_tiles.available(GPU)
    monkeypatch.setattr(quack_tiles, "architecture", lambda device: "sm_90")
    assert quack_tiles.available(GPU) is None


def test_its_products_are_compared_before_they_are_used(calls, monkeypatch):
    rows, outer = grouped_product._rows, grouped_product._outer
    assert rows._check("quack", CPU) == outer._check("quack", CPU) == "passed" and len(calls) == 5
    right = quack.gemm()

    def forgets_to_add(*operands, **words):
        right(*operands, **words | {"add_to_output": False} if "cu_seqlens_k" in words else words)

    def always_adds(*operands, **words):
        right(*operands, **words | {"add_to_output": True} if "cu_seqlens_k" in words else words)

    def takes_one_layout(a, b, *operands, **words):
        right(a, b if "cu_seqlens_k" in words or b.stride(2) == 1 else torch.zeros_like(b), *operands, **words)

    for operator, wrong in ((outer, forgets_to_add), (outer, always_adds), (rows, takes_one_layout)):
        monkeypatch.setattr(quack, "gemm", lambda wrong=wrong: wrong)
        assert ", element" in operator._check("quack", CPU), wrong
    monkeypatch.setattr(quack, "gemm", lambda: lambda a, b, d: None)
    assert rows._check("quack", CPU).startswith("TypeError") and outer._check("quack", CPU).startswith("TypeError")


def test_plans_do_not_pile_up(monkeypatch):
    plans = dict.fromkeys(range(quack_tiles.MAX_PLANS))
    module = SimpleNamespace(_gemm_plan_cache=plans, gemm="gemm")
    monkeypatch.setattr(quack_tiles.importlib, "import_module", lambda name: module)
    assert quack_tiles.gemm() == "gemm" and len(plans) == quack_tiles.MAX_PLANS
    plans["one more"] = None
    assert quack_tiles.gemm() == "gemm" and not plans
