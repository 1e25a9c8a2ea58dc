# SPDX-License-Identifier: Apache-2.0
"""Compares an attention kernel and its gradients with attention written out in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Largest relative error (Frobenius norm) of the result and of each gradient; fp32 products may be TF32.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 5e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
MAGNITUDES = (1.0, 6.0)  # of queries and keys: the second makes scores of about 36, where the softmax is nearly one-hot


def check_attention(
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    head_dim: int,
    rows: int,
    starts: Sequence[int],
) -> str | None:
    """Call `attend` on random tensors of two magnitudes and compare its result and gradients.

    Args:
        attend: (query [s, b, n, d], key and value [t, b, g, d], scale) -> [s, b, n * d].
        rows, starts: the queries are chunks of `rows` tokens at these positions of the keys; the last chunk ends them.

    Returns:
        What is wrong: an exception, a value that is not finite, a missing gradient or a difference. None if it agrees.
    """
    # A finished kernel is also right inside no_grad, for which it is chosen too; the check itself needs gradients.
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for magnitude in MAGNITUDES:
            found = _difference(attend, device, dtype, heads, groups, head_dim, rows, starts, magnitude)
            if found:
                return found
    return None


def _difference(attend, device, dtype, heads, groups, head_dim, rows, starts, magnitude) -> str | None:
    generator = torch.Generator().manual_seed(1)
    queries, keys, scale = rows * len(starts), starts[-1] + rows, head_dim**-0.5
    shapes = (queries, 2, heads, head_dim), *((keys, 2, groups, head_dim),) * 2, (queries, 2, heads * head_dim)
    query, key, value, weights = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [x.to(device, dtype).requires_grad_() for x in (query * magnitude, key * magnitude, value)]
    weights = weights.to(device, dtype)
    try:
        out = attend(*inputs, scale)
        got = (out, *torch.autograd.grad(out, inputs, weights, allow_unused=True))
    except Exception as error:  # any exception of a package counts as a version that does not work
        return f"{type(error).__name__}: {error}"
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = attention_written_out(*exact, rows, starts, scale)
    expected = (expected, *torch.autograd.grad(expected, exact, weights.double()))
    names = ("the result", *(f"the gradient of {name}" for name in ("query", "key", "value")))
    for name, mine, reference in zip(names, got, expected, strict=True):
        if mine is None:
            return f"{name} is missing"
        if not mine.isfinite().all():
            return f"{name} is not finite"
        error = ((mine.double() - reference).norm() / reference.norm()).item()
        if not error < TOLERANCES[dtype]:
            return f"{name} differs by {error:.2g} from attention written out (allowed: {TOLERANCES[dtype]:.2g})"
    return None


def attention_written_out(
    query: Tensor, key: Tensor, value: Tensor, rows: int, starts: Sequence[int], scale: float
) -> Tensor:
    """Compute causal attention with every score in memory. Shapes as in `check_attention`."""
    query = query.permute(1, 2, 0, 3)  # [b, n, s, d]
    repeats = query.shape[1] // key.shape[2]
    key, value = (x.permute(1, 2, 0, 3).repeat_interleave(repeats, dim=1) for x in (key, value))
    positions = torch.cat([torch.arange(start, start + rows, device=query.device) for start in starts])
    hidden = torch.arange(key.shape[2], device=query.device) > positions[:, None]
    scores = (query @ key.mT * scale).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2)
