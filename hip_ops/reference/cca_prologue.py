# SPDX-License-Identifier: Apache-2.0
"""What CCA does between its projections and attention, in plain torch operations, forward and backward written out.

Source: arXiv 2510.04476 with the changes of arXiv 2605.05365, as in transformers `ZayaCCAProjection`, `ZayaQKNorm` and
`apply_rotary_pos_emb`. For a row t of one sequence, z its projected queries and keys, all heads of one query group j:

    u_t = a0 z_{t-1} + a1 z_t + b0          per channel                x_i = y_i + (q_i + k_j) / 2            of query head i
    y_t = W0 u_{t-1} + W1 u_t + b1          per head, d x d            x_j = y_j + (mean_i q_i + k_j) / 2     of key head j
    out = rope(x sqrt(d) / max(|x|, eps))   keys times temperature_j   v_t = (current_t, delayed_{t-1})

What precedes a sequence or a document is z = 0, hence u = b0. So u_t and u_{t-1} are functions of z_t and of z_{t-1} and z_{t-2},
which are zero where the row reaches back less far: no row needs to know more than that.

Conventions that all back ends share: u is rounded to the tensors' dtype before the product, as is the gradient of x; all other
arithmetic is fp32 (fp64 for fp64 tensors), and each result is rounded once. eps is the machine epsilon of the arithmetic.

Shapes: s rows, b micro batch, n query heads, g query groups, d head channels, N = n + g, C = N d, w delayed channels.
projected [s, b, C + g d] is (queries, keys, current values, delayed values); rope [s, 1 or b, r] is (cos, sin) of the first r/2
channels' angles, paired with the next r/2; the sequence may come in k chunks of s / k rows that are not neighbours: halo
[k, 2, b, C] and value_halo [k, b, w] are what precedes each; starts bool [k, s / k + 1, b] tells whether the row before
the chunk and its own rows are the first of a document.
"""

from __future__ import annotations

import torch
from torch import Tensor

Rows = tuple[Tensor, Tensor, Tensor]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 tensors."""
    return torch.promote_types(tensor.dtype, torch.float32)


def cca_prologue(
    projected: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    rope: Tensor | None,
    halo: Tensor | None,
    value_halo: Tensor | None,
    starts: Tensor | None,
    query_groups: int,
    delayed_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """query [s, b, n, d], key and value [s, b, g, d], and 1 / max(|x|, eps) [N, s, b] in the compute dtype."""
    d, compute = grouped_weight.shape[1], compute_dtype(projected)
    heads = len(grouped_bias) // d
    x = _before_norm(
        projected,
        depthwise_weight,
        depthwise_bias,
        grouped_weight,
        grouped_bias,
        halo,
        value_halo,
        starts,
        query_groups,
    )
    inverse_norm = _inverse_norm(x)
    out = _rotate(x * (inverse_norm * _scale(temperature, heads, d, compute)).unsqueeze(-1), rope)
    parts = out.split((heads - query_groups, query_groups), dim=2)
    query, key = (part.to(projected.dtype).clone(memory_format=torch.contiguous_format) for part in parts)
    value = _shifted_values(projected[..., heads * d :], value_halo, halo, starts, delayed_channels)
    return query, key, value.unflatten(-1, (query_groups, d)), inverse_norm.permute(2, 0, 1).contiguous()


def cca_prologue_backward(
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    projected: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    rope: Tensor | None,
    halo: Tensor | None,
    value_halo: Tensor | None,
    starts: Tensor | None,
    query: Tensor,
    key: Tensor,
    inverse_norm: Tensor,
    query_groups: int,
    delayed_channels: int,
) -> tuple[Tensor, ...]:
    """Gradients of projected, the four convolution tensors, temperature, halo and value_halo (empty where there is none).

    query, key and inverse_norm, which the forward gave, save the other back ends the convolutions; here x is computed again.
    """
    del query, key, inverse_norm
    d, compute, dtype = grouped_weight.shape[1], compute_dtype(projected), projected.dtype
    heads = len(grouped_bias) // d
    x = _before_norm(
        projected,
        depthwise_weight,
        depthwise_bias,
        grouped_weight,
        grouped_bias,
        halo,
        value_halo,
        starts,
        query_groups,
    )
    inverse_norm, scale = _inverse_norm(x), _scale(temperature, heads, d, compute)
    unit = x * inverse_norm.unsqueeze(-1)
    g = _rotate(torch.cat((d_query, d_key), dim=2).to(compute), rope, back=True)
    along = (g * unit).sum(-1)
    d_temperature = (along[..., heads - query_groups :] * d**0.5).sum_to_size(temperature.shape).to(temperature.dtype)
    free = (inverse_norm < 1.0 / torch.finfo(compute).eps).to(compute)  # below eps the length is not divided out
    dx = ((g - unit * (along * free).unsqueeze(-1)) * (inverse_norm * scale).unsqueeze(-1)).to(dtype).to(compute)

    chunks = _chunk_count(halo, value_halo, starts)
    dy = dx.unflatten(0, (chunks, -1))  # [k, c, b, N, d]
    (z0, z1, z2), (near, far) = _rows_before(projected, heads * d, halo, value_halo, starts)
    a0, a1 = depthwise_weight.to(compute).squeeze(1).unbind(-1)
    before, now = _depthwise(z0, z1, z2, depthwise_weight, depthwise_bias)
    taps = grouped_weight.to(compute).view(heads, d, d, 2).unbind(-1)
    d_taps = [torch.einsum("kcbno,kcbni->noi", dy, u.unflatten(-1, (heads, d))) for u in (before, now)]
    du_before, du_now = (torch.einsum("kcbno,noi->kcbni", dy, tap).flatten(-2) for tap in taps)
    d_a0 = (du_now * z1 + du_before * z2).sum((0, 1, 2))
    d_a1 = (du_now * z0 + du_before * z1).sum((0, 1, 2))
    d_b0 = (du_now + du_before).sum((0, 1, 2))

    d_padded = dy.new_zeros((chunks, z0.shape[1] + 2, *z0.shape[2:]))  # gradient of (halo, z)
    d_padded[:, 2:] += a1 * du_now
    d_padded[:, 1:-1] += near * (a0 * du_now + a1 * du_before)
    d_padded[:, :-2] += far * (a0 * du_before)
    d_queries, d_keys = dx.split((heads - query_groups, query_groups), dim=2)
    d_queries = d_queries.unflatten(2, (query_groups, -1))
    to_queries = 0.5 * (d_queries + d_keys.unsqueeze(3) / d_queries.shape[3])
    to_keys = 0.5 * (d_queries.sum(3) + d_keys)
    d_z = d_padded[:, 2:].flatten(0, 1) + torch.cat((to_queries.flatten(2), to_keys.flatten(2)), dim=-1)
    d_values, d_value_halo = _shifted_values_backward(d_value.flatten(2), value_halo, halo, starts, delayed_channels)
    gradients = (
        torch.stack((d_a0, d_a1), dim=-1).view(depthwise_weight.shape),
        d_b0,
        torch.stack(d_taps, dim=-1).view(grouped_weight.shape),
        dy.sum((0, 1, 2)).flatten(),
    )
    d_projected = torch.cat((d_z.to(dtype), d_values), dim=-1)
    d_halo = d_padded[:, :2].to(dtype).contiguous() if halo is not None else projected.new_empty(0)
    return d_projected, *(gradient.to(dtype) for gradient in gradients), d_temperature, d_halo, d_value_halo


def _chunk_count(halo: Tensor | None, value_halo: Tensor | None, starts: Tensor | None) -> int:
    return next((len(t) for t in (halo, value_halo, starts) if t is not None), 1)


def _rows_before(projected, channels, halo, value_halo, starts) -> tuple[Rows, tuple[Tensor, Tensor]]:
    """z at t, t-1 and t-2 [k, c, b, C], zero where the row does not reach so far, and whether it does [k, c, b, 1]."""
    compute = compute_dtype(projected)
    z = projected[..., :channels].to(compute).unflatten(0, (_chunk_count(halo, value_halo, starts), -1))
    first = z.new_zeros((len(z), 2, *z.shape[2:])) if halo is None else halo.to(compute)
    padded = torch.cat((first, z), dim=1)
    if starts is None:
        near = far = padded.new_ones((1, 1, 1, 1))
    else:
        near = (~starts[:, 1:]).to(compute).unsqueeze(-1)
        far = near * (~starts[:, :-1]).to(compute).unsqueeze(-1)
    return (z, padded[:, 1:-1] * near, padded[:, :-2] * far), (near, far)


def _depthwise(z0, z1, z2, weight, bias) -> tuple[Tensor, Tensor]:
    """u_{t-1} and u_t, rounded to the dtype of the weight."""
    a0, a1 = weight.to(z0.dtype).squeeze(1).unbind(-1)
    u = (torch.addcmul(torch.addcmul(bias.to(z0.dtype), near, a1), far, a0) for near, far in ((z1, z2), (z0, z1)))
    return tuple(each.to(weight.dtype).to(z0.dtype) for each in u)


def _before_norm(
    projected, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, halo, value_halo, starts, groups
):
    """x [s, b, N, d]."""
    d = grouped_weight.shape[1]
    heads = len(grouped_bias) // d
    (z0, z1, z2), _ = _rows_before(projected, heads * d, halo, value_halo, starts)
    u = torch.stack(
        [each.unflatten(-1, (heads, d)) for each in _depthwise(z0, z1, z2, depthwise_weight, depthwise_bias)]
    )
    rows = u.permute(4, 1, 2, 3, 0, 5).reshape(heads, -1, 2 * d)  # N batches of (k, c, b) rows by (tap, in)
    matrix = grouped_weight.to(z0.dtype).view(heads, d, d, 2).permute(0, 3, 2, 1).reshape(heads, 2 * d, d)
    y = torch.baddbmm(grouped_bias.to(z0.dtype).view(heads, 1, d), rows, matrix).transpose(0, 1)
    q, k = z0.unflatten(-1, (heads, d)).flatten(0, 1).split((heads - groups, groups), dim=2)
    q = q.unflatten(2, (groups, -1))
    to_queries, to_keys = 0.5 * (q + k.unsqueeze(3)), 0.5 * (q.mean(3) + k)
    return y.reshape(*projected.shape[:2], heads, d) + torch.cat((to_queries.flatten(2, 3), to_keys), dim=2)


def _inverse_norm(x: Tensor) -> Tensor:
    return x.square().sum(-1).clamp_min(torch.finfo(x.dtype).eps ** 2).rsqrt()


def _scale(temperature: Tensor, heads: int, d: int, compute: torch.dtype) -> Tensor:
    """sqrt(d), times the temperature for the keys [N]."""
    lengths = temperature.to(compute)
    return torch.cat((lengths.new_ones(heads - len(lengths)), lengths)) * d**0.5


def _rotate(x: Tensor, rope: Tensor | None, back: bool = False) -> Tensor:
    if rope is None:
        return x
    half = rope.shape[-1] // 2
    cos, sin = rope.to(x.dtype).unsqueeze(2).split(half, dim=-1)
    sin = -sin if back else sin
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _shifted_values(values, value_halo, halo, starts, delayed: int) -> Tensor:
    values = values.unflatten(0, (_chunk_count(halo, value_halo, starts), -1))
    current, late = values.split((values.shape[-1] - delayed, delayed), dim=-1)
    first = torch.zeros_like(late[:, :1]) if value_halo is None else value_halo.unsqueeze(1)
    late = torch.cat((first, late[:, :-1]), dim=1)
    if starts is not None:
        late = late.masked_fill(starts[:, 1:].unsqueeze(-1), 0.0)
    return torch.cat((current, late), dim=-1).flatten(0, 1)


def _shifted_values_backward(d_values, value_halo, halo, starts, delayed: int) -> tuple[Tensor, Tensor]:
    """Of the value channels of projected, and of value_halo."""
    d_values = d_values.unflatten(0, (_chunk_count(halo, value_halo, starts), -1))
    d_current, d_late = d_values.split((d_values.shape[-1] - delayed, delayed), dim=-1)
    if starts is not None:
        d_late = d_late.masked_fill(starts[:, 1:].unsqueeze(-1), 0.0)
    d_delayed = torch.cat((d_late[:, 1:], torch.zeros_like(d_late[:, :1])), dim=1)
    d_halo = d_late[:, 0] if value_halo is not None else d_values.new_empty(0)
    return torch.cat((d_current, d_delayed), dim=-1).flatten(0, 1), d_halo.contiguous()
