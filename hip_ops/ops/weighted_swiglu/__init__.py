# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with the routing weight in one pass, as torch operators: silu(gate) * up * prob, and all gradients with the
output again.

reference.py defines the roundings. Saved for the backward pass: gate_up, probs and offsets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hip_ops.ops.weighted_swiglu import reference
from hip_ops.runtime.launch import rows_for_a_second
from hip_ops.runtime.model_sizes import model_sizes
from hip_ops.runtime.operator import Operator

TAKES = """
    gate_up   [n, columns>0]  bf16|fp32
    probs     [n]             bf16|fp32
    offsets?  [experts>0]     int32
"""


def _two_halves(values: dict) -> tuple[str, str] | None:
    columns = values["columns"]
    return (f"gate_up has {columns} columns", "[n, 2 f], gate and up") if columns % 2 else None


def _example(device: torch.device) -> tuple:
    """Make inputs of the model's width and number of experts and ZAYA1's dtypes, which run the kernels of its training (Triton
    compiles others where rows or experts are no multiple of 16); the last rows are padding rows.
    """
    rows, width, experts = 48, model_sizes().moe_ffn_hidden_size, model_sizes().num_experts
    gate_up = (3 * torch.randn(rows, 2 * width, device=device)).bfloat16()
    offsets = torch.tensor([9, *[17] * (experts - 2), 33][-experts:], dtype=torch.int32)
    return gate_up, torch.rand(rows, device=device), offsets.to(device)


def _example_of_many_rows(device: torch.device) -> tuple:
    """Make narrow rows, enough of them that a wave takes a second one."""
    rows, width = rows_for_a_second(device), 64
    gate_up, offsets = torch.randn(rows, 2 * width, device=device).bfloat16(), torch.tensor([9, rows - 4])
    return gate_up, torch.rand(rows, device=device), offsets.int().to(device)


def _backward_example(example: Callable[[torch.device], tuple]) -> Callable[[torch.device], tuple]:
    def make(device: torch.device) -> tuple:
        gate_up, probs, offsets = example(device)
        grad = torch.randn(gate_up.shape[0], gate_up.shape[1] // 2, device=device).bfloat16()
        return grad, gate_up, probs, offsets, True

    return make


_forward = Operator(
    reference.weighted_swiglu,
    takes=TAKES,
    rule=_two_halves,
    example=_example,
    more_examples={"hip": (_example_of_many_rows,)},
)
_backward = Operator(
    reference.weighted_swiglu_backward,
    takes=TAKES + "grad [n, columns//2] =gate_up",
    rule=_two_halves,
    example=_backward_example(_example),
    more_examples={"hip": (_backward_example(_example_of_many_rows),)},
)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):
    d_gate_up, d_probs, _ = _backward(grad, *ctx.saved_tensors, False)
    return d_gate_up, d_probs, None


_forward.register_autograd(_gradients, setup_context=_save)


def weighted_swiglu(gate_up: Tensor, probs: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up * prob (SwiGLU: arXiv 2002.05202) in fp32, with gradients of gate_up and probs.

    Args: gate_up [n, 2 f], gate first, bf16 or fp32; rows may be strided. probs [n] bf16 or fp32. offsets int32
    [experts], the ends of the experts' rows (`ExpertOrder.offsets`): rows at and beyond offsets[-1] are not read; their
    results and gradients are zeros. Return [n, f] in gate_up's dtype. All-fp64 tensors are computed by the torch
    reference. Raises ValueError on wrong shapes, dtypes or devices.
    """
    return _forward(gate_up, probs, offsets)


def weighted_swiglu_backward(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None = None, with_output: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients for the output's gradient grad [n, f]: (d_gate_up [n, 2 f], d_probs [n], output [n, f] or
    None).

    For autograd functions that do not keep the output: the next product's weight gradient needs it, so it is computed
    again in the pass that reads gate and up. Arguments, dtypes and errors as weighted_swiglu.
    """
    d_gate_up, d_probs, output = _backward(grad, gate_up, probs, offsets, with_output)
    return d_gate_up, d_probs, output if with_output else None
