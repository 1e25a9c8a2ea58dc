# SPDX-License-Identifier: Apache-2.0
"""AITER's attention behind the arguments of core attention, on stand-ins of the recorded releases; AITER has not been run on a device."""

import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from hip_ops.runtime import aiter as runtime_aiter
from tests.stand_ins import aiter as stand_in
from zaya_plugin.model.aiter_attention import FLASH_FUNCTION, aiter_flash

EVERY = pytest.mark.parametrize("version", stand_in.VERSIONS)


@pytest.fixture
def install(monkeypatch):
    return functools.partial(stand_in.install, monkeypatch)


def operands(s: int, t: int) -> list[torch.Tensor]:
    """query [2, s, 4, 16], key and value [2, t, 2, 16]."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, s, 4, 16), (2, t, 2, 16), (2, t, 2, 16))
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


def by_torch(query, key, value, scale):
    query, key, value = (x.float().transpose(1, 2) for x in (query, key, value))
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    return context.transpose(1, 2)


@EVERY
def test_the_recorded_facts(version):
    """What aiter_attention.py states of each release: arguments, defaults, layouts and the mask's alignment."""
    data = stand_in.recorded(version)["aiter.flash_attn_func"]
    signature = stand_in.signature_of(data["parameters"])
    signature.bind(**dict.fromkeys(FLASH_FUNCTION.arguments))
    defaults = {name: each.default for name, each in signature.parameters.items()}
    assert (defaults["deterministic"], defaults["return_lse"], defaults["causal"]) == (True, False, False)
    assert (defaults["dropout_p"], defaults["window_size"], defaults["return_attn_probs"]) == (0.0, (-1, -1, 0), False)
    text = " ".join(data["doc"])
    assert "aligned to the bottom right corner" in text and "q: (batch_size, seqlen, nheads, headdim" in text


@EVERY
@pytest.mark.parametrize(("s", "t"), [(12, 12), (5, 12)])
def test_context_and_gradients(install, version, s, t, caplog):
    calls = install(version)["flash_attn_func"]
    flash = aiter_flash()
    given = operands(s, t)
    context = flash(*given, softmax_scale=0.3, causal=True, deterministic=True)
    want = by_torch(*given, 0.3)
    assert context.shape == (2, s, 4, 16) and context.dtype == torch.bfloat16
    torch.testing.assert_close(context.float(), want, atol=2**-7, rtol=2**-7)
    gradient = torch.randn(context.shape, generator=torch.Generator().manual_seed(4))
    got = torch.autograd.grad(context, given, gradient.bfloat16())
    for mine, theirs in zip(got, torch.autograd.grad(want, given, gradient.bfloat16().float()), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2**-6, rtol=2**-6)
    with torch.no_grad():
        flash(*given, softmax_scale=0.3, causal=True, deterministic=False)
    assert [(each["deterministic"], each["return_lse"]) for each in calls] == [(True, True), (False, True)]
    assert f"core attention of aiter {version}: this project has not run it on any device" in caplog.messages


def test_the_stand_in_shows_the_reported_defects(install):
    """For gradient checks at first use: Inf, a missing gradient, and an exception in the backward pass."""
    found = {}
    for defect in stand_in.DEFECTS:
        install(stand_in.VERSIONS[-1], defect)
        given = operands(4, 4)
        total = aiter_flash()(*given, softmax_scale=0.3, causal=True, deterministic=False).sum()
        try:
            found[defect] = torch.autograd.grad(total, given, allow_unused=True)
        except RuntimeError as error:
            found[defect] = str(error)
    assert found["inf"][1].isinf().any() and found["lost"][1] is None and "illegal memory access" in found["raises"]


def test_what_cannot_be_used_is_refused(install, monkeypatch):
    install(stand_in.VERSIONS[-1])
    for version, reason in (
        (None, "AITER is not installed (package amd-aiter"),
        ("0.1.7.post2", "is older than 0.1.14"),
    ):
        monkeypatch.setattr(runtime_aiter, "installed", lambda version=version: version)
        with pytest.raises(ValueError) as raised:
            aiter_flash()
        assert reason in str(raised.value) and "(allowed: the releases 0.1.14.post1" in str(raised.value)
    monkeypatch.setattr(runtime_aiter, "installed", lambda: "0.1.20.post1")
    older = types.SimpleNamespace(flash_attn_func=lambda q, k, v, softmax_scale, causal: None)
    for module, reason in (
        (
            older,
            "aiter.flash_attn_func does not take the arguments of this project (got an unexpected keyword argument 'dete",
        ),
        (types.SimpleNamespace(), "aiter.flash_attn_func cannot be imported ("),
        (None, "aiter.flash_attn_func cannot be imported (import of aiter halted"),
    ):
        monkeypatch.setitem(sys.modules, "aiter", module)
        with pytest.raises(ValueError) as raised:
            aiter_flash()
        assert str(raised.value).startswith(reason)
