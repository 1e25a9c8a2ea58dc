# SPDX-License-Identifier: Apache-2.0
"""The functions of CCA against plain loops over time and against finite differences."""

import math

import pytest
import torch

from zaya_plugin.model.cca import (
    apply_rope,
    depthwise_conv,
    grouped_conv,
    key_scale,
    mix_qk,
    normalize_heads,
    qk_mean,
    shift_values,
)

S, B, HEADS, GROUPS, D = 5, 2, 6, 2, 3
C = HEADS * D


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def weights():
    return normal(C, 1, 2), normal(C), normal(C, D, 2), normal(C)


@pytest.mark.parametrize("s", [1, 2, 5])
def test_convolutions_follow_the_recurrence_from_a_zero_past(weights, s):
    w0, b0, w1, b1 = weights
    z = normal(s, B, C)
    y = grouped_conv(depthwise_conv(z, w0, b0), w1, b1, HEADS)
    zero = torch.zeros(B, C, dtype=torch.float64)
    past = {-2: zero, -1: zero} | dict(enumerate(z))
    u = {t: w0[:, 0, 0] * past[t - 1] + w0[:, 0, 1] * past[t] + b0 for t in range(-1, s)}
    assert torch.equal(u[-1], b0.expand(B, C))
    for t in range(s):
        for head in range(HEADS):
            rows = slice(head * D, (head + 1) * D)
            expected = u[t - 1][:, rows] @ w1[rows, :, 0].T + u[t][:, rows] @ w1[rows, :, 1].T + b1[rows]
            torch.testing.assert_close(y[t, :, head], expected)


def test_convolutions_equal_conv1d_on_once_padded_input(weights):
    w0, b0, w1, b1 = weights
    z = normal(S, B, C)
    x = torch.nn.functional.pad(z.permute(1, 2, 0), (2, 0))
    x = torch.nn.functional.conv1d(x, w0, b0, groups=C)
    x = torch.nn.functional.conv1d(x, w1, b1, groups=HEADS)
    torch.testing.assert_close(grouped_conv(depthwise_conv(z, w0, b0), w1, b1, HEADS).flatten(2), x.permute(2, 0, 1))


def test_qk_mean_averages_inside_each_query_group():
    z = normal(S, B, HEADS, D)
    m = qk_mean(z, GROUPS)
    queries = HEADS - GROUPS
    per_group = queries // GROUPS
    for i in range(queries):
        torch.testing.assert_close(m[:, :, i], (z[:, :, i] + z[:, :, queries + i // per_group]) / 2)
    for j in range(GROUPS):
        group = m[:, :, j * per_group : (j + 1) * per_group]
        torch.testing.assert_close(m[:, :, queries + j], group.mean(dim=2))


def test_values_of_the_second_half_of_heads_lag_one_token():
    current, delayed = normal(S, B, D), normal(S, B, D)
    v = shift_values(current, delayed, 2)
    assert v.shape == (S, B, 2, D)
    assert torch.equal(v[:, :, 0], current)
    assert torch.equal(v[1:, :, 1], delayed[:-1]) and not v[0, :, 1].any()
    assert torch.equal(shift_values(current[:1], delayed[:1], 2)[:, :, 0], current[:1])


def test_keys_have_temperature_length_and_queries_sqrt_d():
    scale = torch.cat((torch.ones(4), torch.tensor([0.5, 3.0]))).double()
    x = normalize_heads(normal(S, B, HEADS, D), scale)
    torch.testing.assert_close(x.norm(dim=-1), (math.sqrt(D) * scale).expand(S, B, HEADS))
    assert not normalize_heads(torch.zeros(1, 1, HEADS, D), scale.float()).any()


def test_temperature_forms():
    t = torch.tensor([-1.0, 0.5, 3.0])
    assert torch.equal(key_scale(t, "linear"), t)
    assert torch.equal(key_scale(t, "exp"), t.exp())
    assert torch.equal(key_scale(t, "clamped_exp"), torch.tensor([1e-7, 0.5, 2.0]).exp())


def test_rope_rotates_channel_pairs_of_the_first_channels_only():
    x = normal(4, 1, 1, 6)
    angle = torch.arange(4.0, dtype=torch.float64) * 0.7
    y = apply_rope(x, angle[:, None, None, None].expand(4, 1, 1, 2))  # one pair: channels 0 and 1
    rotated = torch.view_as_complex(x[..., :2].contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    torch.testing.assert_close(torch.view_as_complex(y[..., :2].contiguous()), rotated)
    assert torch.equal(y[..., 2:], x[..., 2:])


def test_temperature_comes_after_the_norm_and_before_rope(weights):
    """Keys' length is T sqrt(d) whatever the angles are, and doubling T doubles keys and leaves queries."""
    angles = torch.randn(S, 1, 1, 2, dtype=torch.float64).repeat(1, 1, 1, 1)
    z, t = normal(S, B, C), torch.tensor([1.0, 2.0], dtype=torch.float64)
    options = dict(query_groups=GROUPS, head_dim=D, temperature_form="linear", in_fp32=True)
    q, k = mix_qk(z, *weights, t, angles, **options)
    q2, k2 = mix_qk(z, *weights, 2 * t, angles, **options)
    torch.testing.assert_close(k.norm(dim=-1), (t * math.sqrt(D)).expand(S, B, GROUPS))
    torch.testing.assert_close(k2, 2 * k)
    assert torch.equal(q2, q)


@pytest.mark.parametrize("form", ["linear", "exp", "clamped_exp"])
def test_gradients_against_finite_differences(weights, form):
    z, temperature = normal(3, 1, C), torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    angles = torch.rand(3, 1, 1, 1, dtype=torch.float64).repeat(1, 1, 1, 2)

    def f(z, w0, b0, w1, b1, temperature):
        return mix_qk(
            z, w0, b0, w1, b1, temperature, angles, query_groups=GROUPS, head_dim=D, temperature_form=form, in_fp32=True
        )

    assert torch.autograd.gradcheck(f, (z, *weights, temperature))
    assert torch.autograd.gradcheck(lambda a, b: shift_values(a, b, 2), (normal(3, 2, D), normal(3, 2, D)))


def test_bf16_keeps_norms_in_fp32(weights):
    z = normal(S, B, C).detach()
    w = [x.detach().bfloat16() for x in weights]
    options = dict(query_groups=GROUPS, head_dim=D, temperature_form="linear")
    t = torch.ones(GROUPS, dtype=torch.bfloat16)
    exact = mix_qk(z.bfloat16().double(), *[x.double() for x in w], t.double(), None, in_fp32=True, **options)
    error = {}
    for in_fp32 in (True, False):
        got = mix_qk(z.bfloat16(), *w, t, None, in_fp32=in_fp32, **options)
        assert got[0].dtype == torch.bfloat16
        error[in_fp32] = max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True))
    assert error[True] < 6e-3 < 2e-2
    assert error[True] < error[False] < 3e-2


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_chunks_with_a_halo_give_what_the_whole_sequence_gives(rows):
    """Cut a sequence into chunks, give each the two rows of z and the delayed value before it."""
    chunks = 3
    z, w0, b0 = normal(chunks * rows, 2, C), normal(C, 1, 2), normal(C)
    w1, b1, temperature = normal(C, D, 2), normal(C), normal(GROUPS)
    options = dict(query_groups=GROUPS, head_dim=D, temperature_form="linear", in_fp32=True)
    padded = torch.cat((torch.zeros_like(z[:2]), z))
    halo = torch.stack([padded[i * rows : i * rows + 2] for i in range(chunks)])
    whole = mix_qk(z, w0, b0, w1, b1, temperature, None, **options)
    cut = mix_qk(z, w0, b0, w1, b1, temperature, None, halo=halo, **options)
    assert whole[0].abs().mean() > 0.1 and all((a - b).abs().max() < 1e-12 for a, b in zip(whole, cut, strict=True))

    current, delayed = normal(chunks * rows, 2, D), normal(chunks * rows, 2, D)
    before = torch.cat((torch.zeros_like(delayed[:1]), delayed))[:-1:rows]
    assert torch.equal(shift_values(current, delayed, 2, before), shift_values(current, delayed, 2))
