# SPDX-License-Identifier: Apache-2.0
"""A matrix product into a given tensor, or added to it, as a torch operator: the head's products with the vocabulary
(hip_ops/ops/linear_cross_entropy), which call it by `main_grad.dense_product_`.

Versions: quack on Hopper, with which the products of a chunk of 2,048 tokens take a sixth less time than with torch's
library, and the reference, which is that library.
"""

from __future__ import annotations

import functools

import torch

from hip_ops.ops.dense_product import quack, reference
from hip_ops.runtime.operator import Operator
from hip_ops.runtime.quack_tiles import available


def _example(device: torch.device, rows: int, depth: int, columns: int, fp32: bool, accumulate: bool) -> tuple:
    """Make operands in the layouts of training: `a` by columns where the product is added, else by rows; b [k, n] by
    columns where `out` is bf16.
    """
    a = (torch.randn(depth, rows, device=device).t() if accumulate else torch.randn(rows, depth, device=device)) / 16
    b = torch.randn(depth, columns, device=device) if fp32 else torch.randn(columns, depth, device=device).t()
    out = torch.randn(rows, columns, device=device)
    return out if fp32 else out.bfloat16(), a.bfloat16(), b.bfloat16(), accumulate


Operator(
    reference.dense_product_,
    takes="""
        out  [m, n]  wide(a)|=a
        a    [m, k]  bf16|fp16|fp32
        b    [k, n]  =a
    """,
    mutates=("out",),
    example=(  # a chunk's logits, the gradient of hidden and the weight's; tails of tiles in all directions
        functools.partial(_example, rows=520, depth=136, columns=13_000, fp32=False, accumulate=False),
        functools.partial(_example, rows=264, depth=1_112, columns=520, fp32=True, accumulate=False),
        functools.partial(_example, rows=1_112, depth=264, columns=136, fp32=True, accumulate=True),
    ),
    available={"quack": available},
    fits={"quack": quack.fits},
)
