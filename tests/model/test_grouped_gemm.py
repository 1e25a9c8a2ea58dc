# SPDX-License-Identifier: Apache-2.0
"""Which grouped GEMM runs, and that accumulating into a block gives the bits that a product and a sum give on a CPU."""

import logging

import pytest
import torch

from zaya_plugin.model import grouped_gemm, grouped_gemm_rule
from zaya_plugin.model.grouped_gemm import add_grouped_outer, grouped_outer, grouped_rows
from zaya_plugin.model.grouped_gemm_implementations import FORMS, IMPLEMENTATIONS
from zaya_plugin.model.grouped_gemm_rule import CHOICES, OTHERS, RULES, choices, choose

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OFFSETS = torch.tensor([3, 3, 20], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total_dtype", [torch.float32, None])
def test_adding_to_a_block_is_the_product_and_a_sum(dtype, total_dtype):
    if dtype == torch.float64:
        total_dtype = None
    a, b = torch.randn(24, 16).to(dtype), torch.randn(24, 8).to(dtype)
    total = torch.randn(3, 16, 8).to(total_dtype or dtype)
    wanted = total.clone().add_(grouped_outer(a, b, OFFSETS))
    add_grouped_outer(total, a, b, OFFSETS)
    assert torch.equal(total, wanted)


def test_a_cpu_keeps_its_paths_whatever_is_asked():
    assert choose("auto", "rows", CPU, torch.float32) is None and choose("torch", "rows_t", CPU, torch.bfloat16) is None
    assert (
        choose("auto", "outer", CPU, torch.float32).name == "torch"
        and choose("auto", "outer", CPU, torch.float64) is None
    )
    x, w = torch.randn(24, 16), torch.randn(3, 16, 8)
    assert torch.equal(grouped_rows(x, w, OFFSETS, "torch"), grouped_rows(x, w, OFFSETS))
    with pytest.raises(
        ValueError, match=r"grouped_gemm='triton': on a CPU allowed are auto and torch; set cluster.grouped_gemm=auto"
    ):
        grouped_rows(x, w, OFFSETS, "triton")


def test_a_name_that_does_not_exist_is_told_what_does():
    with pytest.raises(
        ValueError,
        match=r"grouped_gemm='te': allowed are auto, torch, triton, quack, primus_turbo; .*wait for the host",
    ):
        grouped_outer(torch.randn(24, 4), torch.randn(24, 4), OFFSETS, "te")


def test_every_rule_names_what_exists_and_says_where_it_comes_from():
    for rule in (*RULES.values(), OTHERS):
        assert rule.source
        for form in FORMS:
            assert getattr(rule, form) and all(form in IMPLEMENTATIONS[name].forms for name in getattr(rule, form))
    assert CHOICES == ("auto", *IMPLEMENTATIONS)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """What `choose` finds on an accelerator of a given architecture that lacks some implementations; there is none here."""

    def set_up(architecture, **missing):
        monkeypatch.setattr(grouped_gemm_rule, "architecture", lambda device: architecture)
        for name, each in IMPLEMENTATIONS.items():
            monkeypatch.setattr(each, "available", lambda device, dtype, name=name: missing.get(name))
        choices.cache_clear()

    yield set_up
    choices.cache_clear()


def test_auto_follows_the_rule_and_announces_it_once(on_a_gpu, caplog):
    on_a_gpu("sm_90")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert [choose("auto", form, GPU, torch.bfloat16).name for form in FORMS] == [
                getattr(RULES["sm_90"], form)[0] for form in FORMS
            ]
    assert len(caplog.records) == len(FORMS) and RULES["sm_90"].source in caplog.text
    on_a_gpu("sm_90", quack="quack is not installed")
    with caplog.at_level(logging.INFO):
        assert {choose("auto", form, GPU, torch.bfloat16).name for form in FORMS} == {"triton"}
    assert "no quack: quack is not installed" in caplog.text
    on_a_gpu("sm_80")
    assert {choose("auto", form, GPU, torch.bfloat16).name for form in FORMS} == {"torch"}


def test_sizes_that_the_best_does_not_take_go_to_the_next(on_a_gpu, monkeypatch):
    on_a_gpu("sm_90")
    assert [each.name for each in choices("auto", "rows", GPU, torch.bfloat16)] == ["quack", "triton", "torch"]
    assert [each.name for each in choices("torch", "rows", GPU, torch.bfloat16)] == ["torch", "quack", "triton"]
    monkeypatch.setattr(grouped_gemm, "choices", lambda asked, form, device, dtype: choices(asked, form, GPU, dtype))
    taken = [
        grouped_gemm._implementation("auto", "rows", torch.zeros(8, width, dtype=torch.bfloat16)).name
        for width in (16, 12)
    ]
    assert taken == ["quack", "triton"], "rows of 24 bytes"


def test_auto_takes_torchs_where_the_rules_cannot_be_had(on_a_gpu, caplog):
    on_a_gpu("gfx942", triton="it is 3 away from torch")
    with caplog.at_level(logging.INFO):
        assert choose("auto", "outer", GPU, torch.bfloat16).name == "torch"
    assert "no triton: it is 3 away from torch" in caplog.text
    on_a_gpu("gfx942", triton="no", torch="no")
    assert choose("auto", "outer", GPU, torch.float32) is None


def test_a_named_one_counts_for_the_forms_it_has(on_a_gpu):
    on_a_gpu("gfx942")
    assert [choose("primus_turbo", form, GPU, torch.bfloat16).name for form in FORMS] == [
        "primus_turbo",
        "primus_turbo",
        "triton",
    ]
    on_a_gpu("gfx942", primus_turbo="primus_turbo is not installed")
    with pytest.raises(
        ValueError,
        match=r"grouped_gemm='primus_turbo' cannot be had on cuda:0: primus_turbo is not installed; set cluster.grouped_gemm=auto",
    ):
        choose("primus_turbo", "rows", GPU, torch.bfloat16)


def test_triton_says_why_it_cannot_be_had_here():
    triton = IMPLEMENTATIONS["triton"]
    assert "do not take torch.float32" in triton.available(CPU, torch.float32)
    assert "backend on cpu is torch" in triton.available(CPU, torch.bfloat16)


def test_primus_turbos_arguments(monkeypatch):
    """Rows of no expert go to the last expert; matrices as they lie. Its own function cannot run here: a loop stands for it."""
    import sys
    from types import ModuleType

    seen = []

    def stand_in(a, b, group_lens, group_offs=None, trans_b=False, num_cu=None):
        seen.append((group_lens.tolist(), trans_b, b.is_contiguous()))
        parts = zip(a.split(group_lens.tolist()), b.mT if trans_b else b, strict=True)
        return torch.cat([rows @ matrix for rows, matrix in parts])

    for name in ("primus_turbo", "primus_turbo.pytorch", "primus_turbo.pytorch.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["primus_turbo.pytorch.ops"].grouped_gemm = stand_in
    x, w = torch.randn(24, 4, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)
    for matrices in (w, w.mT.contiguous().mT):
        got = IMPLEMENTATIONS["primus_turbo"].rows(x, matrices, OFFSETS)
        torch.testing.assert_close(got[:20], grouped_gemm.grouped_rows(x, w, OFFSETS)[:20])
    assert seen == [([3, 0, 21], False, True), ([3, 0, 21], True, True)] and OFFSETS.tolist() == [3, 3, 20]
