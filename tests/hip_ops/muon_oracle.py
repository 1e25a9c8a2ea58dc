# SPDX-License-Identifier: Apache-2.0
"""fp64 oracle of Muon's momentum and update with bounds in units in the last place, and lists of tensors to try them
on.

Tolerances. A result stored in a type of p bits may differ from the exact value by half a unit of that type (its one
rounding), plus what fp32 arithmetic may lose before: each fp32 operation half a unit of its own result, so

    momentum, output   2 fp32 units of |gradient * grad_scale| + |momentum|
    weight             1.5 fp32 units of |weight|, 2 of |lr * scale * update|

Scalars are rounded to fp32 first, as every kernel gets them. Outputs are checked against the momentum as stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

BITS = {torch.bfloat16: 8, torch.float32: 24}


def unit(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unit in the last place of `dtype` at fp64 |x|, never below that of the smallest normal number."""
    exponent = torch.frexp(x.abs().double()).exponent.clamp(min=-125)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - BITS[dtype])


def assert_rounded(got: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor, what: str) -> None:
    """|got - exact| <= half a unit of got's dtype + slack, everywhere."""
    bound = 0.5 * unit(exact.abs() + slack, got.dtype) + slack
    error = (got.double() - exact).abs()
    wrong = ~(error <= bound)
    if wrong.any():
        i = int(wrong.flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements off, first at {i}: got "
            f"{got.flatten()[i].item()!r}, exact "
            f"{exact.flatten()[i].item()!r}, error {error.flatten()[i].item():.3e}, bound "
            f"{bound.flatten()[i].item():.3e}"
        )


def single(x: float) -> float:
    """x rounded to fp32."""
    return float(np.float32(x))


def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    return start + weight * (end - start)


def check_momentum(gradient, before, after, output, *, momentum=0.95, nesterov=True, grad_scale=1.0, what="") -> None:
    """One tensor: gradient and momentum before, momentum and output after."""
    g, b, stored = gradient.double() * single(grad_scale), before.double(), after.double()
    exact = lerp(b, g, single(1 - momentum))
    assert_rounded(after, exact, 2 * unit(g.abs() + b.abs(), torch.float32), f"{what} momentum")
    out = lerp(g, stored, single(momentum)) if nesterov else stored
    slack = torch.zeros_like(out) if not nesterov else 2 * unit(g.abs() + stored.abs(), torch.float32)
    assert_rounded(output, out, slack, f"{what} output")


def check_update(update, before, after, *, lr, weight_decay, scale, what="") -> None:
    """One tensor: the weight before and after."""
    w, u, rate = before.double(), update.double(), single(lr)
    step = rate * single(scale) * u
    exact = w * (1 - rate * single(weight_decay)) - step
    slack = 1.5 * unit(w, torch.float32) + 2 * unit(step, torch.float32)
    assert_rounded(after, exact, slack, f"{what} weight")


@dataclass
class Lists:
    """Parallel lists for both operators; `offset` elements lie before each tensor in its storage."""

    gradients: list[torch.Tensor]
    momenta: list[torch.Tensor]
    outputs: list[torch.Tensor]
    masters: list[torch.Tensor]
    params: list[torch.Tensor]


GUARD = 64


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values at `offset` elements from an aligned address, with GUARD elements of 7 on both sides."""
    flat = torch.full((values.numel() + offset + 2 * GUARD,), 7.0, dtype=values.dtype)
    assert flat.data_ptr() % 16 == 0
    begin = GUARD + offset
    view = flat[begin : begin + values.numel()].view(values.shape)
    view.copy_(values)
    return view


def guards_intact(view: torch.Tensor) -> bool:
    """Whether everything in the storage of placed(...) outside the view is still 7."""
    flat = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    begin = view.storage_offset()
    return bool((flat[:begin] == 7).all() and (flat[begin + view.numel() :] == 7).all())


def random(shape, dtype, generator, size=1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * size).to(dtype)


def make_lists(
    shapes,
    seed=0,
    gradient=torch.bfloat16,
    momentum=torch.float32,
    output=torch.bfloat16,
    master=torch.float32,
    param=torch.bfloat16,
    offsets=None,
) -> Lists:
    """Random lists. `offsets[i]` shifts all tensors of place i by as many elements, or each by its own if it is a
    tuple.
    """
    generator = torch.Generator().manual_seed(seed)
    columns = [[], [], [], [], []]
    for i, shape in enumerate(shapes):
        shift = offsets[i] if offsets else 0
        shifts = shift if isinstance(shift, tuple) else (shift,) * 5
        for column, dtype, size, by in zip(
            columns, (gradient, momentum, output, master, param), (1, 0.3, 1, 0.05, 0.05), shifts, strict=True
        ):
            column.append(placed(random(shape, dtype, generator, size), by))
    return Lists(*columns)


def numel(shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
