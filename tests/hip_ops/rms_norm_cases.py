# SPDX-License-Identifier: Apache-2.0
"""Inputs for residual merge + RMSNorm or LayerNorm, what is exactly right for them in fp64, and the comparison that
every back end must pass. The exact LayerNorm and its gradients are torch's.

An implementation is a pair of functions with the arguments of hip_ops.ops.rms_norm.reference: `forward(inputs)` gives (y,
new_residual, rstd), or (y, new_residual, mean, rstd) of LayerNorm, and `backward(inputs, new_residual, *statistics)` a
dict of gradients; see Implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
VECTORS = ("output_bias", "output_scale", "residual_bias", "residual_scale", "weight")
GRADIENTS = ("d_x", "d_residual", *(f"d_{name}" for name in VECTORS), "d_bias")


@dataclass(frozen=True)
class Case:
    """x, residual and vectors of these dtypes; `pad`: columns that x, residual and the gradients have beyond the row
    (strided rows). centered: LayerNorm.
    """

    scaled: bool
    rows: int
    hidden: int
    x_dtype: torch.dtype = BF16
    residual_dtype: torch.dtype = FP32
    weight_dtype: torch.dtype = BF16
    d_new_residual: bool = True
    pad: int = 0
    eps: float = 1e-3
    scale: float = 0.3  # of x and residual: mean squares not far above eps, so that its place matters
    seed: int = 0
    centered: bool = False
    offset: float = 0.0  # of residual: a mean far above the deviation

    def __str__(self) -> str:
        names = {BF16: "bf16", FP32: "fp32", FP64: "fp64"}
        form = ("zaya" if self.scaled else "plain") + "-layer_norm" * self.centered
        options = (
            (f"-offset{self.offset:g}" if self.offset else "")
            + ("" if self.d_new_residual else "-y_only")
            + (f"-pad{self.pad}" if self.pad else "")
        )
        dtypes = "-".join(names[d] for d in (self.x_dtype, self.residual_dtype, self.weight_dtype))
        return f"{form}-{self.rows}x{self.hidden}-{dtypes}{options}"


@dataclass
class Inputs:
    case: Case
    x: Tensor
    residual: Tensor
    vectors: dict[str, Tensor]
    dy: Tensor
    d_new_residual: Tensor | None
    bias: Tensor | None

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Of the public function, without eps."""
        vectors = self.vectors.values() if self.case.scaled else (self.vectors["weight"],)
        return (self.x, self.residual, *vectors, *(() if self.bias is None else (self.bias,)))

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        """Of `merge_norm`, without eps."""
        *merge, weight = self.vectors.values()
        return (self.x, self.residual, *(merge if self.case.scaled else [None] * 4), weight, self.bias)


def make(case: Case, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(case.seed + case.rows + 131 * case.hidden)

    def stream(dtype: torch.dtype, scale: float) -> Tensor:
        whole = torch.randn(case.rows, case.hidden + case.pad, generator=generator) * scale
        return whole.to(dtype).to(device)[:, : case.hidden]

    def vector(middle: float) -> Tensor:
        return (torch.randn(case.hidden, generator=generator) * 0.3 + middle).to(case.weight_dtype).to(device)

    vectors = {name: vector(0.0 if name.endswith("bias") else 1.0) for name in VECTORS}
    d_new_residual = stream(case.residual_dtype, 1.0) if case.d_new_residual else None
    x, residual = stream(case.x_dtype, case.scale), stream(case.residual_dtype, case.scale)
    residual += case.offset
    dy, bias = stream(case.weight_dtype, 1.0), vector(0.5) if case.centered else None
    return Inputs(case, x, residual, vectors, dy, d_new_residual, bias)


@dataclass(frozen=True)
class Implementation:
    """backward gets new_residual and the statistics of `forward`, and gives d_x, d_residual, d_weight, of LayerNorm
    d_bias, and of ZAYA's form d_output_bias ... too.
    """

    forward: Callable[[Inputs], tuple[Tensor, ...]]
    backward: Callable[..., dict[str, Tensor]]


def of_module(module) -> Implementation:
    """hip_ops.ops.rms_norm.reference, hip_ops.ops.rms_norm.triton or hip_ops.ops.rms_norm.hip."""

    def forward(i: Inputs):
        y, new_residual, mean, rstd = module.merge_norm(*i.operands, i.case.eps)
        assert i.case.centered or mean.numel() == 0
        return y, new_residual, *((mean, rstd) if i.case.centered else (rstd,))

    def backward(i: Inputs, new_residual: Tensor, *statistics: Tensor) -> dict[str, Tensor]:
        found = dict(
            zip(GRADIENTS, module.merge_norm_backward(*backward_arguments(i, new_residual, *statistics)), strict=True)
        )
        if not i.case.scaled and i.case.x_dtype == i.case.residual_dtype:
            assert found["d_x"].numel() == 0
            found["d_x"] = found["d_residual"]
        return {name: gradient for name, gradient in found.items() if gradient.numel()}

    return Implementation(forward, backward)


def backward_arguments(i: Inputs, new_residual: Tensor, *statistics: Tensor) -> tuple:
    """Of `merge_norm_backward`. statistics: rstd, or mean and rstd."""
    rows = (i.x, i.residual) if i.case.scaled else (None, new_residual)
    mean = statistics[0] if i.case.centered else None
    return i.dy, i.d_new_residual, *rows, mean, statistics[-1], *i.operands[2:7], i.case.x_dtype


@dataclass
class Exact:
    """fp64 value of a result, and the size of the terms it is made of: fp32 arithmetic errs by some ULP of those."""

    value: Tensor
    terms: Tensor = field(repr=False)


def _normalized(i: Inputs, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if i.case.centered:
        return torch.nn.functional.layer_norm(value, value.shape[-1:], weight, bias, i.case.eps)
    return value / (value.square().mean(-1, keepdim=True) + i.case.eps).sqrt() * weight


def _statistics(i: Inputs, stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (0 of RMSNorm), rstd, and the size of the terms of stored - mean, all fp64."""
    mean = stored.mean(-1, keepdim=True) * i.case.centered
    rstd = 1.0 / ((stored - mean).square().mean(-1, keepdim=True) + i.case.eps).sqrt()
    return mean, rstd, stored.abs() + mean.abs()


def exact_forward(i: Inputs, stored: Tensor) -> dict[str, Exact]:
    """y and the statistics are those of `stored`, the new_residual that the implementation wrote: so the statistics' convention
    is checked too.
    """
    x, residual, stored = i.x.double(), i.residual.double(), stored.double()
    v = {name: vector.double() for name, vector in i.vectors.items()}
    if i.case.scaled:
        merged = (x + v["output_bias"]) * v["output_scale"] + (residual + v["residual_bias"]) * v["residual_scale"]
        terms = (x.abs() + v["output_bias"].abs()) * v["output_scale"].abs() + (
            residual.abs() + v["residual_bias"].abs()
        ) * v["residual_scale"].abs()
    else:
        merged, terms = x + residual, x.abs() + residual.abs()
    mean, rstd, size = _statistics(i, stored)
    bias = i.bias.double() if i.case.centered else None
    y = _normalized(i, stored, v["weight"], bias)
    found = {"new_residual": Exact(merged, terms), "rstd": Exact(rstd, rstd), "y": Exact(y, y.abs())}
    if i.case.centered:
        found["rstd"].terms = rstd + rstd**3 * ((stored - mean).abs() * size).mean(-1, keepdim=True)
        found["y"].terms = size * rstd * v["weight"].abs() + bias.abs()
        found["mean"] = Exact(mean, stored.abs().mean(-1, keepdim=True))
    return found


def exact_backward(i: Inputs, stored: Tensor) -> dict[str, Exact]:
    """Return the gradients of the published formula by autograd in fp64; the rounding of the stored value passes
    gradients on unchanged.
    """
    x, residual, stored = i.x.double().requires_grad_(), i.residual.double().requires_grad_(), stored.double()
    v = {name: vector.double().requires_grad_() for name, vector in i.vectors.items()}
    bias = i.bias.double().requires_grad_() if i.case.centered else None
    if i.case.scaled:
        merged = (x + v["output_bias"]) * v["output_scale"] + (residual + v["residual_bias"]) * v["residual_scale"]
    else:
        merged = x + residual
    merged.retain_grad()
    value = merged + (stored - merged).detach()
    y = _normalized(i, value, v["weight"], bias)
    outputs, gradients = [y], [i.dy.double()]
    if i.d_new_residual is not None:
        outputs, gradients = [y, merged], [i.dy.double(), i.d_new_residual.double()]
    torch.autograd.backward(outputs, gradients)

    with torch.no_grad():
        _, rstd, size = _statistics(i, stored)
        d_normalized, normalized = (i.dy.double() * v["weight"]).abs(), size * rstd
        g = (d_normalized + normalized * (d_normalized * normalized).mean(-1, keepdim=True)) * rstd
        if i.case.centered:
            g = g + d_normalized.mean(-1, keepdim=True) * rstd
        if i.d_new_residual is not None:
            g = g + i.d_new_residual.double().abs()
        large = {name: vector.abs() for name, vector in v.items()}
        terms = {"d_x": g, "d_residual": g, "d_weight": (i.dy.double().abs() * normalized).sum(0)}
        if i.case.scaled:
            terms |= {
                "d_x": g * large["output_scale"],
                "d_residual": g * large["residual_scale"],
                "d_output_bias": g.sum(0) * large["output_scale"],
                "d_residual_bias": g.sum(0) * large["residual_scale"],
                "d_output_scale": (g * x.abs()).sum(0) + g.sum(0) * large["output_bias"],
                "d_residual_scale": (g * residual.abs()).sum(0) + g.sum(0) * large["residual_bias"],
            }
        if i.case.centered:
            terms["d_bias"] = i.dy.double().abs().sum(0)
            v["bias"] = bias
    values = {"d_x": x.grad, "d_residual": residual.grad, **{f"d_{name}": vector.grad for name, vector in v.items()}}
    return {name: Exact(values[name], size) for name, size in terms.items()}


MANTISSA = {BF16: 7, FP32: 23, FP64: 52}
# Of fp32 arithmetic on the terms: sums of up to some thousand terms in trees and chains, a reciprocal square root of 1
# to 2 ULP.
ULPS_OF_TERMS = 8.0


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of neighbouring numbers of `dtype` at the size of `values`, fp64."""
    exponent = torch.floor(torch.log2(values.abs().clamp_min(2.0**-100)))
    return torch.exp2(exponent - MANTISSA[dtype])


def compare(name: str, got: Tensor, want: Exact) -> None:
    """Raises AssertionError unless got is within half an ULP of its dtype (the one rounding) plus ULPS_OF_TERMS ULP of
    fp32 of the terms.
    """
    assert got.shape == want.value.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.value.shape)}"
    rounding = 0.5 * ulp(want.value, got.dtype) if got.dtype == BF16 else 0.0
    arithmetic = FP64 if got.dtype == FP64 else FP32
    allowed = rounding + ULPS_OF_TERMS * ulp(torch.maximum(want.terms, want.value.abs()), arithmetic)
    error = (got.double() - want.value).abs()
    excess = torch.where(torch.isfinite(error), error / allowed, torch.inf)
    if excess.numel() and excess.max() > 1.0:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{name}: {int((excess > 1).sum())} of {excess.numel()} elements are wrong; the worst is "
            f"{got.flatten()[worst].item():.9g}, "
            f"exact {want.value.flatten()[worst].item():.9g}, error {error.flatten()[worst].item():.3g} of "
            f"{allowed.flatten()[worst].item():.3g} "
            "allowed, which is "
            f"{error.flatten()[worst].item() / ulp(want.value, got.dtype).flatten()[worst].item():.2f} ULP of "
            f"{got.dtype}"
        )


def check(implementation: Implementation, case: Case, device: str = "cpu") -> None:
    """Forward and backward of `case` against fp64."""
    inputs = make(case, device)
    y, new_residual, *statistics = implementation.forward(inputs)
    assert (y.dtype, new_residual.dtype) == (case.weight_dtype, case.residual_dtype)
    given = {"y": y, "new_residual": new_residual} | dict(zip(("rstd", "mean"), reversed(statistics), strict=False))
    for name, want in exact_forward(inputs, new_residual).items():
        compare(name, given[name], want)
    found = implementation.backward(inputs, new_residual, *statistics)
    expected_dtypes = {"d_x": case.x_dtype, "d_residual": case.residual_dtype}
    for name, want in exact_backward(inputs, new_residual).items():
        assert found[name].dtype == expected_dtypes.get(name, case.weight_dtype), name
        compare(name, found[name], want)
