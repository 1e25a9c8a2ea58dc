# SPDX-License-Identifier: Apache-2.0
"""Core attention on a CPU: queries at the end of the keys, and back ends that are not there."""

import pytest
import torch

from zaya_plugin.model.core_attention import PACKAGES, causal_attention, core_attention, lower_right_mask


def test_queries_at_the_end_of_the_keys_see_what_they_see_in_the_whole_sequence():
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(11, 2, heads, 8, generator=generator).double() for heads in (4, 2, 2))
    whole = causal_attention(query, key, value, 0.3)
    for start, end in ((0, 4), (4, 11), (5, 8), (10, 11)):
        part = causal_attention(query[start:end], key[:end], value[:end], 0.3)
        assert (part - whole[start:end]).abs().max() < 1e-13
    assert lower_right_mask(2, 4, "cpu").tolist() == [[True, True, True, False], [True] * 4]


def test_a_back_end_that_is_not_there_is_named():
    with pytest.raises(
        ValueError, match="core_attention=flash: no such version. Allowed: sdpa, flash_attn, flash_attn_4, aiter"
    ):
        core_attention("flash")
    for name, package in PACKAGES.items():
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(
                ValueError, match=f"core_attention={name}: {package} .* cannot be imported .* Allowed: sdpa"
            ):
                core_attention(name)


def test_a_package_gets_the_heads_of_all_sequences_as_one_s_and_may_answer_with_a_tuple(monkeypatch):
    import sys
    import types

    asked = []

    def flash_attn_func(query, key, value, softmax_scale, causal, deterministic):
        asked.append(deterministic)
        assert causal and query.shape == (1, 3, 8, 8) and key.shape == (1, 5, 4, 8)
        context = causal_attention(*(x.transpose(0, 1) for x in (query, key, value)), softmax_scale)
        return (context.unflatten(-1, (8, 8)).transpose(0, 1),)

    monkeypatch.setitem(sys.modules, "aiter", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    core_attention.cache_clear()
    query, key, value = torch.randn(3, 2, 4, 8), torch.randn(5, 2, 2, 8), torch.randn(5, 2, 2, 8)
    got = core_attention("aiter").whole(query, key, value, 0.3)
    torch.testing.assert_close(got, causal_attention(query, key, value, 0.3), rtol=0, atol=1e-6)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    core_attention("aiter").whole(query, key, value, 0.3)
    assert asked == [False, True]
    core_attention.cache_clear()
