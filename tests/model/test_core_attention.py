# SPDX-License-Identifier: Apache-2.0
"""Core attention on a CPU: queries at the end of the keys, the table of versions, and the check before the first use."""

import importlib
import logging
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.stand_ins import aiter as stand_in
from zaya_plugin.model import core_attention as module
from zaya_plugin.model.attention_check import check_attention
from zaya_plugin.model.core_attention import (
    causal_attention,
    checked_attention,
    core_attention,
    lower_right_mask,
    running,
)

TE_PATH = Path(__file__).parents[1] / "stand_ins" / "te_path"


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """Versions are made, and checked, anew in every test."""
    yield
    core_attention.cache_clear()
    module._checked.cache_clear()


def qkv(rows, keys, heads=4, groups=2, d=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = (rows, 2, heads, d), (keys, 2, groups, d), (keys, 2, groups, d)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def test_queries_at_the_end_of_the_keys_see_what_they_see_in_the_whole_sequence():
    query, key, value = qkv(11, 11, dtype=torch.float64)
    whole = causal_attention(query, key, value, 0.3)
    for start, end in ((0, 4), (4, 11), (5, 8), (10, 11)):
        part = causal_attention(query[start:end], key[:end], value[:end], 0.3)
        assert (part - whole[start:end]).abs().max() < 1e-13
    assert lower_right_mask(2, 4, "cpu").tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize(
    "name, blocked", [("flash_attn", "flash_attn"), ("aiter", "aiter"), ("transformer_engine", "transformer_engine")]
)
def test_a_version_without_its_package_is_named(name, blocked, monkeypatch):
    monkeypatch.setitem(sys.modules, blocked, None)
    monkeypatch.delitem(sys.modules, f"{blocked}.pytorch", raising=False)
    with pytest.raises(ValueError, match=f"core_attention={name}: .*Fix: cluster.core_attention=sdpa"):
        core_attention(name)


def test_an_unknown_version_is_named():
    allowed = "sdpa, cudnn, flash_attn, flash_attn_4, aiter, transformer_engine"
    with pytest.raises(ValueError, match=f"core_attention=flash: no such version. Allowed: {allowed}"):
        core_attention("flash")


def flash_attn_func(query, key, value, softmax_scale, causal, deterministic):
    """FlashAttention-2's function, answering with a tuple as flash-attn-4 does."""
    assert causal and len(query) == 1 and deterministic == torch.are_deterministic_algorithms_enabled()
    heads = query.shape[2:]
    context = causal_attention(*(x.transpose(0, 1) for x in (query, key, value)), softmax_scale)
    return (context.unflatten(-1, heads).transpose(0, 1),)


def transformer_engine(monkeypatch, version):
    """The stand-in of tests/stand_ins/te_path in place of the package."""
    monkeypatch.syspath_prepend(str(TE_PATH))
    monkeypatch.setenv("STAND_IN_TE", version)
    for name in [each for each in sys.modules if each.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.import_module("transformer_engine.pytorch")
    for name in [each for each in sys.modules if each.split(".")[0] == "transformer_engine"]:
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))


def install(monkeypatch, package):
    name, _, version = package.partition(" ")
    if name == "flash_attn":
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(flash_attn_func=flash_attn_func))
    elif name == "aiter":
        stand_in.install(monkeypatch, version)
    else:
        transformer_engine(monkeypatch, version)
    return name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "package",
    ["flash_attn", *(f"aiter {v}" for v in stand_in.VERSIONS), "transformer_engine 2.12", "transformer_engine 2.20.2"],
)
def test_a_package_passes_the_check_and_gives_the_results_of_sdpa(package, deterministic, monkeypatch, caplog):
    name = install(monkeypatch, package)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    dtype, tolerance = (torch.bfloat16, 1e-2) if name == "aiter" else (torch.float32, 1e-6)
    for rows in (5, 3):
        query, key, value = qkv(rows, 5, dtype=dtype)
        attend = checked_attention(name, query, key)
        assert attend is core_attention(name)
        got, expected = attend(query, key, value, 0.3), causal_attention(query, key, value, 0.3)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    assert f"{name} for whole sequences" in caplog.text and f"{name} for queries at the end" in caplog.text


@pytest.mark.parametrize(
    "defect, reason",
    [
        ("inf", "the gradient of key is not finite"),
        ("raises", "RuntimeError: HIP error: an illegal memory access"),
        ("lost", "the gradient of key is missing"),
    ],
)
def test_a_reported_defect_of_aiter_makes_sdpa_the_version(defect, reason, monkeypatch, caplog):
    stand_in.install(monkeypatch, stand_in.VERSIONS[-1], defect)
    query, key, _ = qkv(5, 5, dtype=torch.bfloat16)
    assert checked_attention("aiter", query, key) is causal_attention
    assert re.search(f"core_attention=aiter is not used for whole sequences: .*{reason}", caplog.text), caplog.text


@pytest.mark.parametrize("wrong", ["alignment", "scale", "constant", "beyond 256"])
def test_wrong_results_of_a_version_make_sdpa_the_version(wrong, monkeypatch, caplog):
    def attend(query, key, value, scale):
        if wrong == "alignment":  # a mask at the upper left
            return causal_attention(query, key[: len(query)], value[: len(query)], scale)
        out = causal_attention(query, key, value, scale * (1.1 if wrong == "scale" else 1.0))
        if wrong == "beyond 256":  # another kernel for longer sequences
            out = torch.cat((out[:256], out[256:] * torch.inf))
        return out.detach() if wrong == "constant" else out

    monkeypatch.setitem(module.VERSIONS, "cudnn", lambda name: attend)
    query, key, _ = qkv(3, 5)
    assert checked_attention("cudnn", query, key) is causal_attention
    assert "core_attention=cudnn is not used for queries at the end of the keys" in caplog.text
    whole = checked_attention("cudnn", key, key)
    assert whole is (attend if wrong == "alignment" else causal_attention)


def test_the_names_of_what_runs(monkeypatch):
    """They are known before a call, and the check of a call is the same one."""
    sizes, checks = (torch.device("cpu"), torch.float32, 4, 2, 8), []

    def check(*positional, **named):
        checks.append(named["starts"])
        return check_attention(*positional, **named)

    def upper_left(query, key, value, scale):
        return causal_attention(query, key[: len(query)], value[: len(query)], scale)

    monkeypatch.setattr(module, "check_attention", check)
    monkeypatch.setitem(module.VERSIONS, "flash_attn", lambda name: upper_left)
    assert running("sdpa", *sizes, False) == ("sdpa",) and running("sdpa", *sizes, True) == ("sdpa in blocks",)
    assert running("flash_attn", *sizes, False) == ("flash_attn",)
    assert running("flash_attn", *sizes, True) == ("flash_attn", "sdpa")
    before = len(checks)
    assert checked_attention("flash_attn", *qkv(3, 5)[:2]) is causal_attention
    assert checked_attention("flash_attn", *qkv(5, 5)[:2]) is upper_left and len(checks) == before


def test_where_torch_itself_is_wrong_the_run_ends(monkeypatch):
    monkeypatch.setitem(module.VERSIONS, "cudnn", lambda name: lambda query, key, value, scale: query.flatten(2))
    monkeypatch.setitem(module.VERSIONS, "sdpa", lambda name: lambda query, key, value, scale: query.flatten(2))
    query, key, _ = qkv(5, 5)
    with pytest.raises(RuntimeError, match="core_attention=sdpa: torch's attention is wrong on cpu"):
        checked_attention("cudnn", query, key)
