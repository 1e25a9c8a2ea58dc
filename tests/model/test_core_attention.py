# SPDX-License-Identifier: Apache-2.0
"""Core attention on a CPU: queries at the end of the keys, the table of versions, and the check before the first use."""

import functools
import importlib
import logging
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from hip_ops import errors
from hip_ops.runtime import aiter as runtime_aiter
from tests.stand_ins import aiter as stand_in
from zaya_plugin.model import core_attention as module
from zaya_plugin.model.core_attention import (
    attention_of,
    causal_attention,
    chunk_by_chunk,
    core_attention,
    lower_right_mask,
)

TE_PATH = Path(__file__).parents[1] / "stand_ins" / "te_path"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_kept():
    """Versions are made, and checked, again in every test."""
    yield
    forget()


def forget():
    errors._warnings.clear()
    core_attention.cache_clear()
    attention_of.cache_clear()
    module._missing.cache_clear()


def operator(version, form="whole", dtype=torch.float32, exact=False):
    return core_attention(version, form, dtype, 4, 2, 8, exact)


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
    message = (
        f"cluster.core_attention={name}: version '{name}' of core_attention is not available on cpu: .*Allowed: auto, "
    )
    with pytest.raises(ValueError, match=message):
        operator(name).choice(CPU, check=False)


def test_a_window_hides_what_is_before_it():
    """The mask, Megatron's formula of it, and flex_attention's blocks; in fp64 against attention written out."""
    for s, t, window in ((6, 6, 2), (3, 9, 4), (5, 5, 9)):
        mask = lower_right_mask(s, t, CPU, window)
        megatron = torch.ones(s, t, dtype=torch.bool).triu(t - s - window).tril(t - s)
        assert torch.equal(mask, megatron)
        query, key, value = qkv(s, t, dtype=torch.float64)
        expected = module.window_written_out(query, key, value, 0.3, window)
        for attend in (causal_attention, module.flex_window_attention):
            assert (attend(query, key, value, 0.3, window) - expected).abs().max() < 1e-13
    assert lower_right_mask(2, 5, CPU, 1).tolist() == [[False, False, True, True, False], [False] * 3 + [True] * 2]
    whole = module.attention_written_out(*qkv(5, 5), 0.3)
    assert torch.equal(module.window_written_out(*qkv(5, 5), 0.3, 4), whole), "a window of all previous tokens"


def flash_attn_func(query, key, value, softmax_scale, causal, deterministic, window_size=(-1, -1)):
    """FlashAttention-2's function, answering with a tuple as flash-attn-4 does."""
    assert window_size[1] == (-1 if window_size[0] == -1 else 0)
    window = None if window_size[0] == -1 else window_size[0]
    assert causal and len(query) == 1 and deterministic == torch.are_deterministic_algorithms_enabled()
    heads = query.shape[2:]
    context = causal_attention(*(x.transpose(0, 1) for x in (query, key, value)), softmax_scale, window)
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
    [
        "flash_attn",
        *(f"aiter {stand_in.VERSIONS[end]}" for end in (0, -1)),
        *(pytest.param(f"aiter {version}", marks=pytest.mark.slow) for version in stand_in.VERSIONS[1:-1]),
        "transformer_engine 2.12",
        "transformer_engine 2.20.2",
    ],
)
def test_a_package_passes_the_check_and_gives_the_results_of_sdpa(package, deterministic, monkeypatch, caplog):
    name = install(monkeypatch, package)
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    dtype, tolerance = (torch.bfloat16, 1e-2) if name == "aiter" else (torch.float32, 1e-6)
    for rows, form, place in ((5, "whole", ()), (3, "chunks", ((2,),)), (3, "window", (1,))):
        query, key, value = qkv(rows, 5, dtype=dtype)
        attend = operator(name, form, dtype, deterministic)
        assert attend.running(CPU) == (name,) and f"checking {name} for {form}" in caplog.text
        got = attend(query, key, value, 0.3, *place)
        expected = causal_attention(query, key, value, 0.3, *(place if form == "window" else ()))
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "defect, reason",
    [
        ("inf", "the gradient of key is not finite"),
        ("raises", "RuntimeError: HIP error: an illegal memory access"),
        ("lost", "the gradient of key is missing"),
        ("wrong", "the gradient of key differs by 0.1 from attention written out"),
    ],
)
@pytest.mark.parametrize("requested", ["auto", "aiter"])
def test_a_defect_of_aiter_makes_sdpa_the_version(requested, defect, reason, monkeypatch, caplog):
    """This project has not run AITER, so a request by name could not know the defect; the log says it."""
    monkeypatch.setattr(module, "architecture", lambda device: "gfx942")
    stand_in.install(monkeypatch, stand_in.VERSIONS[-1], defect)
    assert operator(requested, dtype=torch.bfloat16).running(CPU) == ("sdpa",)
    assert re.search(f"version aiter of core_attention failed its self-check on cpu .*{reason}", caplog.text), (
        caplog.text
    )


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_auto_takes_aiter_on_amd_where_it_is_installed(arch, monkeypatch, caplog):
    """In half precision, for whole sequences and chunks. A warning says where it is installed and not used."""
    monkeypatch.setattr(module, "architecture", lambda device: arch)
    monkeypatch.setattr(module, "takes_blocks", lambda *arguments: False)  # as on AMD: blocks are cuDNN's
    auto = functools.partial(operator, "auto", dtype=torch.bfloat16)
    monkeypatch.setattr(runtime_aiter, "installed", lambda: None)
    assert auto().choice(CPU).startswith("sdpa (cluster.core_attention=auto; no aiter: AITER is not installed")
    assert not caplog.records
    forget()
    stand_in.install(monkeypatch, stand_in.VERSIONS[-1])
    assert auto().running(CPU) == auto("chunks").running(CPU) == ("aiter",)
    assert operator("auto").running(CPU) == auto(exact=True).running(CPU) == ("sdpa",)

    versions = iter((("0.1.20.post1", "2.13.0+rocm"), ("0.1.20.post1", "2.14"), ("0.1.20.post1", None)))
    for expected in ("sdpa", "aiter", "aiter"):
        forget()
        pair = next(versions)
        monkeypatch.setattr(runtime_aiter, "installed_versions", lambda pair=pair: pair)
        assert auto().running(CPU) == (expected,), pair
        assert operator("aiter", dtype=torch.bfloat16).running(CPU) == ("aiter",), "a request by name"
    stale = "the installed AITER is not used: transformer-engine 2.13.0+rocm with amd-aiter 0.1.20.post1"
    assert f"core attention: {stale}" in caplog.text

    monkeypatch.setattr(runtime_aiter, "installed_versions", lambda: (None, None))
    for release in ("0.1.20.post1+gfx942", "0.1.19.post2"):
        forget()
        monkeypatch.setattr(runtime_aiter, "installed", lambda release=release: release)
        assert auto().running(CPU) == ("aiter",)
    for release in ("0.1.22.post1", "0.1.21.dev3+g12ab", "0.1.16"):
        forget()
        caplog.clear()
        monkeypatch.setattr(runtime_aiter, "installed", lambda release=release: release)
        assert auto().running(CPU) == auto("chunks").running(CPU) == ("sdpa",), release
        (record,) = (record for record in caplog.records if "AITER" in record.getMessage())
        assert f"AITER is not used: AITER {release} is not one of the releases" in record.getMessage()
        assert record.getMessage().endswith(". To request it: cluster.core_attention=aiter")
    forget()
    monkeypatch.setattr(runtime_aiter, "installed", lambda: "0.1.7")
    assert auto().running(CPU) == ("sdpa",) and "AITER is not used: AITER 0.1.7 is older than" in caplog.text
    forget()
    monkeypatch.setattr(runtime_aiter, "installed", lambda: "0.1.22.post1")
    assert operator("aiter", dtype=torch.bfloat16).running(CPU) == ("aiter",), "a request by name"
    assert runtime_aiter.READ_RELEASES == stand_in.VERSIONS


def test_auto_does_not_look_for_aiter_elsewhere(monkeypatch):
    monkeypatch.setattr(module, "architecture", lambda device: "gfx90a")
    stand_in.install(monkeypatch, stand_in.VERSIONS[-1])
    assert operator("auto", dtype=torch.bfloat16).choice(CPU) == "sdpa (cluster.core_attention=auto)"


@pytest.mark.parametrize("wrong", ["alignment", "scale", "constant", "beyond 256"])
def test_wrong_results_of_a_version_end_the_run_or_are_left_by_auto(wrong, monkeypatch, caplog):
    def attend(query, key, value, scale):
        if wrong == "alignment":  # a mask at the upper left
            return causal_attention(query, key[: len(query)], value[: len(query)], scale)
        out = causal_attention(query, key, value, scale * (1.1 if wrong == "scale" else 1.0))
        if wrong == "beyond 256":  # another kernel for longer sequences
            out = torch.cat((out[:256], out[256:] * torch.inf))
        return out.detach() if wrong == "constant" else out

    versions = {"flash_attn": attend, "sdpa": causal_attention}
    monkeypatch.setattr(module, "attention_of", versions.__getitem__)
    monkeypatch.setattr(module, "AUTO_ORDER", {"cpu": ("flash_attn",)})
    form = "chunks" if wrong == "alignment" else "whole"
    with pytest.raises(ValueError, match="cluster.core_attention=flash_attn: .* it failed its self-check: "):
        operator("flash_attn", form).choice(CPU)
    if form == "whole":
        automatic = operator("auto", dtype=torch.bfloat16)
        assert automatic.running(CPU) == ("sdpa",) and "no flash_attn: it failed its self-check" in automatic.choice(
            CPU
        )
        assert "version flash_attn of core_attention failed its self-check on cpu" in caplog.text


def test_what_auto_takes(monkeypatch):
    """The first that is installed of those measured on the architecture, in half precision; else torch's."""
    monkeypatch.setattr(module, "AUTO_ORDER", {"cpu": ("flash_attn", "cudnn")})
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    choice = operator("auto", dtype=torch.bfloat16).choice(CPU)
    assert choice.startswith("sdpa (cluster.core_attention=auto; no flash_attn: its package cannot be imported")
    assert "no cudnn: this torch is not built with cuDNN" in choice
    core_attention.cache_clear()
    module._missing.cache_clear()
    install(monkeypatch, "flash_attn")
    whole = operator("auto", dtype=torch.bfloat16)
    assert whole.choice(CPU) == "flash_attn (cluster.core_attention=auto)" and whole.running(CPU) == ("flash_attn",)
    for other in (operator("auto"), operator("auto", dtype=torch.bfloat16, exact=True), operator("auto", "documents")):
        assert other.choice(CPU) == "sdpa (cluster.core_attention=auto)"
    chunks = operator("auto", "chunks", torch.bfloat16).choice(CPU)
    assert chunks == "blocks where it takes the arguments, then sdpa (cluster.core_attention=auto)"


def test_chunks_of_torch_are_computed_in_blocks_or_chunk_by_chunk(monkeypatch):
    query, key, value = qkv(6, 9)
    expected = chunk_by_chunk(causal_attention, query, key, value, 0.3, (0, 6))
    torch.testing.assert_close(operator("sdpa", "chunks")(query, key, value, 0.3, (0, 6)), expected, rtol=0, atol=1e-6)
    core_attention.cache_clear()
    monkeypatch.setattr(module, "takes_blocks", lambda *arguments: False)
    choice, got = operator("sdpa", "chunks").choice(CPU), operator("sdpa", "chunks")(query, key, value, 0.3, (0, 6))
    assert choice.startswith("sdpa (cluster.core_attention=sdpa; no blocks: ") and torch.equal(got, expected)


def test_calls_that_the_requested_version_does_not_take_are_named(caplog):
    assert operator("cudnn", "chunks").choice(CPU).startswith("blocks where it takes the arguments, then sdpa (")
    assert (
        "cluster.core_attention=cudnn: this version takes no chunks of a sequence other than in blocks" in caplog.text
    )
    documents = operator("flash_attn", "documents")
    assert documents.running(CPU) == ("sdpa",) and "it has no version 'flash_attn'" in documents.choice(CPU)
    assert documents.running(torch.device("cuda", 0)) == ("flex_attention",)
    assert "cluster.core_attention=flash_attn: this version takes no packed documents" in caplog.text


def test_what_computes_windows(monkeypatch):
    monkeypatch.setattr(module, "AUTO_ORDER", {"cpu": ("flash_attn", "cudnn")})
    monkeypatch.setattr(module, "architecture", lambda device: device.type)
    install(monkeypatch, "flash_attn")
    cuda, auto = torch.device("cuda", 0), operator("auto", "window", torch.bfloat16)
    assert auto.running(CPU) == ("flash_attn",), "auto leaves out cudnn and takes what has a window"
    assert auto._order(cuda, auto.request()) == ("flex_attention",), "the order of another architecture"
    assert operator("sdpa", "window").running(CPU) == ("sdpa",)
    with pytest.raises(
        ValueError, match=r"^cluster\.core_attention=cudnn: .* no sliding window\. Allowed: auto, flash"
    ):
        operator("cudnn", "window")


@pytest.mark.parametrize("wrong", ["one more", "none"])
def test_a_wrong_window_fails_the_check(wrong, monkeypatch):
    def attend(query, key, value, scale, window):
        return causal_attention(query, key, value, scale, window + 1 if wrong == "one more" else None)

    monkeypatch.setattr(module, "attention_of", {"flash_attn": attend, "sdpa": causal_attention}.__getitem__)
    with pytest.raises(ValueError, match="cluster.core_attention=flash_attn: .* it failed its self-check: "):
        operator("flash_attn", "window").choice(CPU)


def test_where_no_version_is_right_the_run_ends(monkeypatch):
    monkeypatch.setattr(module.CoreAttention, "_failure", lambda self, *version: "it failed its self-check: x")
    with pytest.raises(
        ValueError, match="cluster.core_attention=auto: no version of core_attention is available on cpu"
    ):
        operator("auto").choice(CPU)
