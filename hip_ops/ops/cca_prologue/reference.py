# SPDX-License-Identifier: Apache-2.0
"""CCA's computation between its projections and attention in plain torch, forward and backward written out.

Source: arXiv 2510.04476 with the changes of arXiv 2605.05365, as in transformers `ZayaCCAProjection`, `ZayaQKNorm` and
`apply_rotary_pos_emb`. For a row t of one sequence, z its projected queries and keys, all heads of one query group j:

    u_t = a0 z_{t-1} + a1 z_t + b0          per channel                x_i = y_i + (q_i + k_j) / 2  of query head i
    y_t = W0 u_{t-1} + W1 u_t + b1          per head, d x d            x_j = y_j + (mean_i q_i + k_j) / 2  of key head j
    out = rope(x sqrt(d) / max(|x|, eps))   keys times temperature_j   v_t = (current_t, delayed_{t-1})

Before a sequence or a document z = 0, hence u = b0. So u_t and u_{t-1} depend only on z_t, z_{t-1} and z_{t-2}; the
last two are zero where they lie before the row's sequence or document.

Conventions of all versions: u is rounded to the tensors' dtype before the product (Triton's version rounds the products
of both convolutions' taps instead, and no u), as is the gradient of x; all other arithmetic is fp32 (fp64 for fp64
tensors), and each result is rounded once. eps is the machine epsilon of the arithmetic.

Shapes: s rows, b micro batch, n query heads, g query groups, d head channels, N = n + g, C = N d, w delayed channels.
projected [s, b, C + g d] is (queries, keys, current values, delayed values); rope [s, 1 or b, r] is (cos, sin) of the
first r/2 channels' angles, paired with the next r/2. The sequence may come in k chunks of c = s / k rows that are not
neighbours: halo [k, 2, b, C] and value_halo [k, b, w] precede each chunk. starts bool [k, c + 1, b] marks the first row
of each document, among the row before the chunk and the chunk's own rows.

Intermediate results are changed in place, because on a CPU passes over memory take the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import cast, wide


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
    """Return query [s, b, n, d], key and value [s, b, g, d], and 1 / max(|x|, eps) [N, s, b] in the compute dtype."""
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    chunks = chunk_count(halo, value_halo, starts)
    x = _before_norm(projected, *weights, halo, starts, chunks, query_groups)[0]
    inverse_norm = x.square().sum(-1).clamp_min(torch.finfo(x.dtype).eps ** 2).rsqrt()
    x.mul_(_factor(inverse_norm, temperature, x.shape[3]).unsqueeze(-1))
    _rotate_(x, rope)
    query, key = (
        part.to(projected.dtype, copy=True, memory_format=torch.contiguous_format)
        for part in (x[:, :, :-query_groups], x[:, :, -query_groups:])
    )
    current, late = _values(projected[..., len(grouped_bias) :], chunks, delayed_channels)
    first = _no_row(late) if value_halo is None else value_halo.unsqueeze(1)
    late = _masked(torch.cat((first, late), dim=1)[:, :-1], None if starts is None else starts[:, 1:])
    return query, key, torch.cat((current, late), dim=-1).view(key.shape), inverse_norm.permute(2, 0, 1).contiguous()


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of projected, the four convolution tensors, temperature, halo and value_halo (empty where there
    is none).

    The kernels compute x from query and key, which the forward returned; this function computes the convolutions again.
    """
    del query, key
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    chunks, dtype = chunk_count(halo, value_halo, starts), projected.dtype
    x, matrices, padded, taps = _before_norm(projected, *weights, halo, starts, chunks, query_groups)
    heads, d = x.shape[2:]
    inverse_norm = inverse_norm.permute(1, 2, 0)
    g = cast(torch.cat((d_query, d_key), dim=2), x.dtype).contiguous()
    _rotate_(g, rope, sign=-1)
    along = (g * x).sum(-1) * inverse_norm
    d_temperature = along[..., -query_groups:].sum((0, 1)) * d**0.5
    factor = _factor(inverse_norm, temperature, d)
    divided = inverse_norm < 1.0 / torch.finfo(x.dtype).eps  # below eps the length is not divided out
    along = torch.where(divided, along * inverse_norm * factor, 0.0)
    g.mul_(factor.unsqueeze(-1)).addcmul_(x, along.unsqueeze(-1), value=-1)
    dx = cast(cast(g, dtype), x.dtype)

    dy = dx.flatten(0, 1).transpose(0, 1)  # [N, rows, d]
    d_taps = [dy.mT.bmm(tap) for tap in taps]
    last, now = (dy.bmm(matrix).transpose(0, 1).view(*padded[:, 2:].shape[:3], heads, d) for matrix in matrices)
    du = torch.cat((_no_row(now), now), dim=1)
    du[:, :-1].add_(_masked(last, None if starts is None else starts[:, 1:].unsqueeze(-1)))
    du = du.flatten(3)
    du_before = _masked(du, starts)  # of z_{t-1}
    d_grouped_bias = dx.sum((0, 1))
    d_depthwise_bias = d_grouped_bias.unsqueeze(1).bmm(matrices.sum(0))  # the sum of both gradients of u
    d_depthwise = [(at * z).sum((0, 1, 2)) for at, z in ((du_before, padded[:, :-1]), (du, padded[:, 1:]))]

    a0, a1 = cast(depthwise_weight, x.dtype).squeeze(1).unbind(-1)
    d_z = 0.5 * dx
    by_chunk = d_z.view(padded[:, 2:].shape)
    by_chunk.addcmul_(du[:, 1:], a1)
    by_chunk[:, :-1].addcmul_(du_before[:, 2:], a0)
    (to_queries, to_keys), (of_queries, of_keys) = (_by_group(tensor, query_groups) for tensor in (d_z, dx))
    to_queries.add_(of_keys, alpha=0.5 / to_queries.shape[3])
    to_keys.add_(of_queries.sum(3, keepdim=True), alpha=0.5)
    d_current, d_late = _values(d_value.flatten(2), chunks, delayed_channels)
    d_late = torch.cat((_masked(d_late, None if starts is None else starts[:, 1:]), _no_row(d_late)), dim=1)
    d_halo = padded.new_zeros(0 if halo is None else halo.shape)
    if halo is not None:
        d_halo.addcmul_(du_before[:, :2], a0)
        d_halo[:, 1:].addcmul_(du[:, :1], a1)
    gradients = (torch.stack(d_depthwise, dim=-1), d_depthwise_bias, torch.stack(d_taps, dim=-1), d_grouped_bias)
    return (
        torch.cat((cast(by_chunk, dtype), d_current, d_late[:, 1:]), dim=-1).view(projected.shape),
        *(cast(gradient, dtype).view(weight.shape) for gradient, weight in zip(gradients, weights, strict=True)),
        cast(d_temperature, temperature.dtype),
        cast(d_halo, dtype),
        projected.new_empty(0) if value_halo is None else d_late[:, 0].contiguous(),
    )


def chunk_count(halo: Tensor | None, value_halo: Tensor | None, starts: Tensor | None) -> int:
    """Return the number of chunks of a sequence."""
    return next((len(t) for t in (halo, value_halo, starts) if t is not None), 1)


def _before_norm(
    projected, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, halo, starts, chunks, query_groups
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return x [s, b, N, d] and its operands.

    The operands are W0 and W1 [2, N, d, d], z with the two rows before each chunk [k, c + 2, b, C], and u_{t-1} and u_t
    [N, rows, d].
    """
    (s, b), d, compute = projected.shape[:2], grouped_weight.shape[1], wide(projected.dtype)
    heads = len(grouped_bias) // d
    z = cast(projected[..., : heads * d], compute).view(chunks, s // chunks, b, heads * d)
    first = z.new_zeros((chunks, 2, *z.shape[2:])) if halo is None else cast(halo, compute)
    padded = torch.cat((first, z), dim=1)
    before, b0 = _masked(padded[:, :-1], starts), cast(depthwise_bias, compute)
    a0, a1 = cast(depthwise_weight, compute).squeeze(1).unbind(-1)
    u = torch.addcmul(torch.addcmul(b0, padded[:, 1:], a1), before, a0)
    u = cast(cast(u, projected.dtype), compute)
    last = u[:, :-1] if starts is None else torch.where(starts[:, 1:].unsqueeze(-1), b0, u[:, :-1])
    taps = [operand.reshape(-1, heads, d).transpose(0, 1) for operand in (last, u[:, 1:])]
    # Contiguous: torch multiplies strided matrices one by one on a CPU.
    matrices = cast(grouped_weight, compute).view(heads, d, d, 2).permute(3, 0, 1, 2).contiguous()
    y = torch.baddbmm(cast(grouped_bias, compute).view(heads, 1, d), taps[0], matrices[0].mT)
    y.baddbmm_(taps[1], matrices[1].mT)
    x = 0.5 * padded[:, 2:].reshape(s, b, heads, d)
    queries, keys = _by_group(x, query_groups)
    mean = queries.mean(3, keepdim=True)
    queries += keys
    keys += mean
    x += y.transpose(0, 1).view(x.shape)
    return x, matrices, padded, taps


def _by_group(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return queries [s, b, g, n / g, d] and keys [s, b, g, 1, d] of x [s, b, N, d], as views."""
    s, b, heads, d = x.shape
    return x[:, :, :-groups].view(s, b, groups, heads // groups - 1, d), x[:, :, -groups:].unsqueeze(3)


def _masked(x: Tensor, starts: Tensor | None) -> Tensor:
    """Return x with zeros in the rows of `starts`."""
    return x if starts is None else x.masked_fill(starts.unsqueeze(-1), 0.0)


def _factor(inverse_norm: Tensor, temperature: Tensor, d: int) -> Tensor:
    """Return sqrt(d) / max(|x|, eps), times the temperature for the keys [s, b, N]."""
    factor = inverse_norm * d**0.5
    factor[..., -len(temperature) :].mul_(temperature)
    return factor


def _rotate_(x: Tensor, rope: Tensor | None, sign: int = 1) -> None:
    """Rotate the first channels in place; sign -1 rotates back."""
    if rope is None:
        return
    half = rope.shape[-1] // 2
    cos, sin = cast(rope, x.dtype).unsqueeze(2).split(half, dim=-1)
    first, second = x[..., :half], x[..., half : 2 * half]
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-sign)
    second.mul_(cos).add_(crossed, alpha=sign)


def _values(values: Tensor, chunks: int, delayed: int) -> tuple[Tensor, ...]:
    """Return the current and the delayed channels [k, c, b, *] of values [s, b, g d]."""
    s, b, channels = values.shape
    return values.view(chunks, s // chunks, b, channels).split((channels - delayed, delayed), dim=-1)


def _no_row(rows: Tensor) -> Tensor:
    """Return one row of zeros [k, 1, ...] for rows [k, c, ...]."""
    return rows.new_zeros((len(rows), 1, *rows.shape[2:]))
