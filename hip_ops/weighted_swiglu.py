# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with the routing weight in one pass, as torch operators: silu(gate) * up * prob, and all gradients with the output again.

Conventions that all back ends share are in hip_ops/reference/weighted_swiglu.py. Saved for the backward: gate_up and probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import weighted_swiglu as reference

DTYPES = (torch.bfloat16, torch.float32)


def _example(backward: bool):
    """ZAYA1's width and dtypes, hence the kernels that it trains with; the last rows are of no expert."""

    def make(device: torch.device) -> tuple:
        rows, width = 37, 2048
        gate_up = (3 * torch.randn(rows, 2 * width, device=device)).bfloat16()
        probs, offsets = torch.rand(rows, device=device), torch.tensor([9, 9, 33], dtype=torch.int32).to(device)
        if not backward:
            return gate_up, probs, offsets
        return torch.randn(rows, width, device=device).bfloat16(), gate_up, probs, offsets, True

    return make


def _operator(name: str) -> Operator:
    return Operator(
        name,
        torch=getattr(reference, name),
        triton=f"hip_ops.triton_kernels.weighted_swiglu:{name}",
        hip=f"hip_ops.hip_kernels.weighted_swiglu:{name}",
        example=_example(name.endswith("backward")),
    )


_forward, _backward = _operator("weighted_swiglu"), _operator("weighted_swiglu_backward")


def _chosen(operator: Operator, like: Tensor):
    """fp64 is for checking and runs in plain torch."""
    return operator.reference if like.dtype == torch.float64 else operator


@direct_operator("hip_ops::weighted_swiglu", mutates_args=())
def _forward_op(gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> Tensor:
    return _chosen(_forward, gate_up)(gate_up, probs, offsets).contiguous()  # torch follows the strides of its input


@_forward_op.register_fake
def _(gate_up, probs, offsets):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@direct_operator("hip_ops::weighted_swiglu_backward", mutates_args=())
def _backward_op(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    results = _chosen(_backward, gate_up)(grad, gate_up, probs, offsets, with_output)
    return tuple([result.contiguous() for result in results])


@_backward_op.register_fake
def _(grad, gate_up, probs, offsets, with_output):
    return (
        gate_up.new_empty(gate_up.shape),
        probs.new_empty(probs.shape),
        gate_up.new_empty(grad.shape if with_output else 0),
    )


def _save(ctx, inputs, output) -> None:
    gate_up, probs, offsets = inputs
    ctx.save_for_backward(gate_up, probs, offsets)


def _gradients(ctx, grad):
    gate_up, probs, offsets = ctx.saved_tensors
    d_gate_up, d_probs, _ = _backward_op(grad, gate_up, probs, offsets, False)
    return d_gate_up, d_probs, None


_forward_op.register_autograd(_gradients, setup_context=_save)


def _agree(gate_up: Tensor, probs: Tensor, offsets: Tensor | None, grad: Tensor | None = None) -> bool:
    """Whether these are all right, in bf16 and fp32. Else `_check` finds what is wrong, if anything is."""
    shape, device, dtype = gate_up.shape, gate_up.device, gate_up.dtype
    if len(shape) != 2 or shape[1] % 2 or shape[1] == 0 or probs.shape != shape[:1] or probs.device != device:
        return False
    if offsets is not None and (
        offsets.dim() != 1 or offsets.shape[0] == 0 or offsets.dtype != torch.int32 or offsets.device != device
    ):
        return False
    if grad is not None and (grad.shape != (shape[0], shape[1] // 2) or grad.dtype != dtype or grad.device != device):
        return False
    return dtype in DTYPES and probs.dtype in DTYPES


def _check(operator: str, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, grad: Tensor | None = None) -> None:
    """Raises ValueError on shapes, dtypes or devices that do not go together."""

    def fail(name: str, what, must: str):
        raise ValueError(f"hip_ops.{operator}: {name} {what}; it must be {must}")

    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        fail("gate_up", f"has shape {tuple(gate_up.shape)}", "[n, 2 f] with f > 0")
    half = (gate_up.shape[0], gate_up.shape[1] // 2)
    if grad is not None and grad.shape != half:
        fail("grad", f"has shape {tuple(grad.shape)}", f"{half}, half as wide as gate_up")
    if grad is not None and grad.dtype != gate_up.dtype:
        fail("grad", f"is {grad.dtype}", f"{gate_up.dtype} like gate_up")
    if probs.shape != half[:1]:
        fail("probs", f"has shape {tuple(probs.shape)}", f"{half[:1]}, one entry a row of gate_up")
    if offsets is not None and (offsets.dim() != 1 or offsets.numel() == 0 or offsets.dtype != torch.int32):
        fail("offsets", f"is {offsets.dtype} {tuple(offsets.shape)}", "torch.int32 [experts] with at least one expert")
    for name, tensor in {"probs": probs, "offsets": offsets, "grad": grad}.items():
        if tensor is not None and tensor.device != gate_up.device:
            fail(name, f"is on {tensor.device}", f"on {gate_up.device} like gate_up")
    all_fp64 = gate_up.dtype == probs.dtype == torch.float64
    for name, tensor in {"gate_up": gate_up, "probs": probs}.items():
        if tensor.dtype not in DTYPES and not all_fp64:
            fail(name, f"is {tensor.dtype}", "torch.bfloat16 or torch.float32 (or all tensors torch.float64)")


def weighted_swiglu(gate_up: Tensor, probs: Tensor, offsets: Tensor | None = None) -> Tensor:
    """silu(gate) * up * prob (SwiGLU: arXiv 2002.05202), in fp32 inside, with gradients of gate_up and probs.

    Args: gate_up [n, 2 f], gate first, bf16 or fp32; rows may be strided. probs [n] bf16 or fp32. offsets int32 [experts], the ends of the
    experts' rows (`ExpertOrder.offsets`): rows at and beyond offsets[-1] are not read, and come out as zeros, as do their gradients.
    Returns [n, f] in gate_up's dtype. All-fp64 tensors run in plain torch. Raises ValueError on wrong shapes, dtypes or devices.
    """
    if not _agree(gate_up, probs, offsets):
        _check("weighted_swiglu", gate_up, probs, offsets)
    return _forward_op(gate_up, probs, offsets)


def weighted_swiglu_backward(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None = None, with_output: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients for the output's gradient grad [n, f]: (d_gate_up [n, 2 f], d_probs [n], output [n, f] or None).

    For autograd functions that do not keep the output, which the next matrix product's weight gradient needs: it is formed again here, in
    the pass that has gate and up at hand. Arguments, dtypes and errors as weighted_swiglu.
    """
    if not _agree(gate_up, probs, offsets, grad):
        _check("weighted_swiglu_backward", gate_up, probs, offsets, grad)
    d_gate_up, d_probs, output = _backward_op(grad, gate_up, probs, offsets, with_output)
    return d_gate_up, d_probs, output if with_output else None
