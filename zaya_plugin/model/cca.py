# SPDX-License-Identifier: Apache-2.0
"""Compressed convolutional attention as pure functions: what happens between the projections and the softmax.

Source: arXiv 2510.04476 (CCA) with the changes of arXiv 2605.05365, as in transformers `ZayaCCAProjection` and
`ZayaQKNorm`. Unusual: time is padded with zeros once, before the first convolution, so the depthwise output at step -1
is its bias and not zero; half of the value heads carry the previous token; keys have a learned length.

A sequence may come in k chunks that are not neighbours (context parallelism): then `halo` brings what precedes each of
them. Documents packed into one sequence are told by `starts`, and each sees what it would see alone.

Shapes: s sequence, b micro batch, n query heads, g key-value heads (query groups), N = n + g, d head channels,
C = N * d. Heads are ordered q0..q(n-1), k0..k(g-1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zaya_plugin.model.fusion import fused_on_accelerator


def depthwise_conv(
    z: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """u_t = weight[:, 0] * z_{t-1} + weight[:, 1] * z_t + bias for t = -1 .. s-1.

    Args: z [..., s, b, C], weight [C, 1, 2], bias [C]; halo [..., 2, b, C], z at steps -2 and -1, zeros if None; starts
    bool [..., s + 1, b], steps -1 .. s-1 before which z counts as zero. Returns [..., s + 1, b, C]; row 0 is step -1,
    which at the start of a sequence is `bias`.
    """
    padded = F.pad(z, (0, 0, 0, 0, 2, 0)) if halo is None else torch.cat((halo, z), dim=-3)
    before = padded[..., :-1, :, :]
    if starts is not None:
        before = before.masked_fill(starts.unsqueeze(-1), 0.0)
    previous, current = weight.squeeze(1).unbind(-1)
    return torch.addcmul(torch.addcmul(bias, padded[..., 1:, :, :], current), before, previous)


def grouped_conv(
    u: Tensor, weight: Tensor, bias: Tensor, heads: int, starts: Tensor | None = None, u_at_start: Tensor | None = None
) -> Tensor:
    """y_t = W[..., 0] u_{t-1} + W[..., 1] u_t + bias, mixing channels inside each head, as one batched matmul.

    Args: u [..., s + 1, b, C] from depthwise_conv, weight [C, d, 2], bias [C], heads N; starts as in depthwise_conv, and
    u_at_start [C], which stands for u_{t-1} there. Returns [..., s, b, N, d].
    """
    before, now = u[..., :-1, :, :], u[..., 1:, :, :]
    if starts is not None:
        before = torch.where(starts[..., 1:, :, None], u_at_start, before)
    d = u.shape[-1] // heads
    taps = torch.stack(
        (before.unflatten(-1, (heads, d)), now.unflatten(-1, (heads, d))), dim=-2
    )  # [..., s, b, N, 2, d]
    taps = taps.view(-1, heads, 2 * d).transpose(0, 1)  # [N, rows, 2d]
    matrix = weight.view(heads, d, d, 2).permute(0, 3, 2, 1).reshape(heads, 2 * d, d)  # [N, (tap, in), out]
    y = torch.baddbmm(bias.view(heads, 1, d), taps, matrix)  # [N, rows, d]
    return y.transpose(0, 1).unflatten(0, now.shape[:-1])


def qk_mean(z: Tensor, query_groups: int) -> Tensor:
    """The residual that bypasses the convolutions: m_i = (q_i + k_j(i)) / 2, and its mean over each query group.

    Args: z [s, b, N, d], projected queries and keys. Returns [s, b, N, d]: m for the query heads, then its group means
    for the key heads (arXiv 2510.04476 equation 9).
    """
    s, b, total, d = z.shape
    query, key = z.split((total - query_groups, query_groups), dim=2)
    query = query.reshape(s, b, query_groups, -1, d)
    query_mean = (query + key.unsqueeze(3)) * 0.5
    key_mean = (query.mean(dim=3) + key) * 0.5
    return torch.cat((query_mean.flatten(2, 3), key_mean), dim=2)


def key_scale(temperature: Tensor, form: str) -> Tensor:
    """Length of the keys relative to sqrt(d); temperature [g] -> [g]. `form` as ZayaConfig.temperature_form."""
    if form == "linear":
        return temperature
    if form == "exp":
        return temperature.exp()
    assert form == "clamped_exp", form
    return temperature.clamp(1e-7, 2.0).exp()


def normalize_heads(x: Tensor, scale: Tensor) -> Tensor:
    """x * sqrt(d) * scale / max(|x|, eps) per head, eps being the machine epsilon of x's dtype as in transformers.

    Args: x [s, b, N, d], scale [N]. Returns [s, b, N, d].
    """
    eps = torch.finfo(x.dtype).eps
    inverse_norm = x.square().sum(-1, keepdim=True).clamp_min(eps * eps).rsqrt()
    return x * (inverse_norm * (scale * x.shape[-1] ** 0.5).unsqueeze(-1))


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first r channels of each head, pairing channel i with i + r/2 (NeoX halves); the rest passes.

    Args: x [s, b, N, d], angles [s, 1 or b, 1, r] in radians (Megatron's rotary_pos_emb, both halves equal).
    """
    half = angles.shape[-1] // 2
    cos, sin = angles[..., :half].cos().to(x.dtype), angles[..., :half].sin().to(x.dtype)
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


_rope_tables = WeakTensorKeyDictionary()


def rope_table(angles: Tensor) -> Tensor:
    """(cos, sin) of angles [s, 1 or b, 1, r] as `hip_ops.cca_prologue` takes them; computed once for all layers that get the same angles."""
    table = _rope_tables.get(angles)
    if table is None:
        from hip_ops import rope_table as make

        table = _rope_tables[angles] = make(angles)
    return table


@fused_on_accelerator
def mix_qk(
    z: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    angles: Tensor | None,
    *,
    query_groups: int,
    head_dim: int,
    temperature_form: str,
    in_fp32: bool,
    halo: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Projected queries and keys to attention queries and keys: convolve, add the mean, normalise, scale, rotate.

    Args: z [s, b, C], in k chunks of equal length if halo or starts say so; convolution weights as in depthwise_conv and
    grouped_conv; temperature [g]; angles [s, 1 or b, 1, r] or None; halo [k, 2, b, C], the two rows of z before each
    chunk; starts bool [k, s / k + 1, b], the row before each chunk and its own that are the first of a document.
    Returns query [s, b, n, d] and key [s, b, g, d] in z's dtype.
    """
    heads = z.shape[-1] // head_dim
    chunked = halo if halo is not None else starts
    chunks = z if chunked is None else z.unflatten(0, (len(chunked), -1))
    u = depthwise_conv(chunks, depthwise_weight, depthwise_bias, halo, starts)
    y = grouped_conv(u, grouped_weight, grouped_bias, heads, starts, depthwise_bias)
    if chunked is not None:
        y = y.flatten(0, 1)
    compute = torch.promote_types(z.dtype, torch.float32) if in_fp32 else z.dtype
    x = y.to(compute) + qk_mean(z.unflatten(-1, (heads, head_dim)).to(compute), query_groups)
    query_scale = torch.ones(heads - query_groups, dtype=compute, device=z.device)
    x = normalize_heads(x, torch.cat((query_scale, key_scale(temperature.to(compute), temperature_form))))
    if angles is not None:
        x = apply_rope(x, angles)
    return x.to(z.dtype).split((heads - query_groups, query_groups), dim=2)


@fused_on_accelerator
def shift_values(
    current: Tensor, delayed: Tensor, query_groups: int, halo: Tensor | None = None, starts: Tensor | None = None
) -> Tensor:
    """v_t = concat(current_t, delayed_{t-1}) with delayed_{-1} = 0: the second half of the heads lags one token.

    Args: current and delayed [s, b, g*d/2]; halo [k, b, g*d/2], delayed before each of k equal chunks, zeros if None;
    starts as in mix_qk. Returns [s, b, g, d] (arXiv 2510.04476 equation 10).
    """
    if halo is None:
        lagged = F.pad(delayed[:-1], (0, 0, 0, 0, 1, 0))
    else:
        lagged = torch.cat((halo.unsqueeze(1), delayed.unflatten(0, (len(halo), -1))[:, :-1]), dim=1).flatten(0, 1)
    if starts is not None:
        lagged = lagged.masked_fill(starts[:, 1:].flatten(0, 1).unsqueeze(-1), 0.0)
    return torch.cat((current, lagged), dim=-1).unflatten(-1, (query_groups, -1))
