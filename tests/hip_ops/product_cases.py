# SPDX-License-Identifier: Apache-2.0
"""Inputs of matrix products, their exact results, and how far a right result may be from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DIGITS = {torch.bfloat16: 8, torch.float16: 11}
SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}


def bits(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array.view(np.int16).copy()).view(dtype)


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    exponent = torch.floor(torch.log2(exact.abs().clamp_min(2.0 ** SMALLEST_EXPONENT[dtype])))
    return torch.exp2(exponent - (DIGITS[dtype] - 1))


@dataclass
class Case:
    """alpha a b^T + beta d + gamma I; b None: a."""

    a: Tensor
    b: Tensor | None
    d: Tensor | None
    alpha: float = 1.5
    beta: float = -0.5
    gamma: float = 0.0

    def exact(self) -> tuple[Tensor, Tensor]:
        """The result in fp64 and the sum of the magnitudes of its terms."""
        a, b = self.a.double(), (self.a if self.b is None else self.b).double()
        result, size = self.alpha * a @ b.mT, abs(self.alpha) * a.abs() @ b.abs().mT
        if self.d is not None:
            result, size = result + self.beta * self.d.double(), size + abs(self.beta) * self.d.double().abs()
        if self.gamma:
            result = result + self.gamma * torch.eye(result.shape[-1], dtype=torch.float64)
        return result, size + abs(self.gamma)

    def worst_ulps(self, got: Tensor) -> float:
        """Largest error in ULP of got's dtype, after what fp32 sums of k products in any order may be off: (k + 2)
        2^-24 of the magnitudes.
        """
        assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} results are not finite"
        exact, size = self.exact()
        excess = ((got.double() - exact).abs() - (self.a.shape[-1] + 2) * 2.0**-24 * size).clamp_min(0)
        return (excess / ulp(exact, got.dtype)).max().item()


def symmetric_case(
    batch: int, n: int, k: int, dtype: str, *, with_d: bool = True, gamma: float = 0.0, seed: int = 0
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn((batch, n, n), generator=generator)
    a = torch.randn((batch, n, k), generator=generator).to(DTYPES[dtype])
    return Case(a, None, (d + d.mT).to(DTYPES[dtype]) if with_d else None, gamma=gamma)


def general_case(batch: int, m: int, n: int, k: int, dtype: str, *, with_d: bool = True, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    a, b, d = (
        torch.randn((batch, *shape), generator=generator).to(DTYPES[dtype]) for shape in ((m, k), (n, k), (m, n))
    )
    return Case(a, b, d if with_d else None)


ROUNDED_ONCE = (
    0.5 + 2**-12
)  # ULP: one rounding to nearest; the remainder is for results on the edge between two binades
