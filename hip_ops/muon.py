# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum and weight update on lists of matrices, each in one launch however many there are and whatever their shapes.

One step of Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) with the update scale of Liu et al. 2025
(arXiv 2502.16982) is

    batches = MatrixBatches([p.shape for p in params], device)  # matrices of one shape lie together

    muon_momentum_(gradients, momenta, batches.slots, square_sums=batches.square_sums)
    updates = batches.split([newton_schulz(x, square_sums=s) for x, s in zip(batches.tensors, batches.sums())])
    muon_update_(updates, masters, params, lr=lr, weight_decay=weight_decay)

Matrices keep the parameter's orientation everywhere: a tall one is transposed as a view inside Newton-Schulz, so neither
of these kernels reads or writes transposed. Nothing here waits for the device. Gradient scale, skip flag and, where it is a
tensor, the learning rate are read by the kernels, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hip_ops.operator import Operator
from hip_ops.reference import muon as reference

CONVENTIONS = ("ema", "sum")
DTYPES = (torch.bfloat16, torch.float32)


def rms_matching_scale(shape: Sequence[int]) -> float:
    """0.2 * sqrt(max(m, n)) for a matrix [..., m, n]: the update's root mean square becomes AdamW's (arXiv 2502.16982, section 2.2)."""
    return 0.2 * math.sqrt(max(shape[-2:]))


def _same_shapes(operator: str, **lists: Sequence[Tensor]) -> None:
    """Raises ValueError unless all lists are parallel: as many tensors, of the same shapes, contiguous, on one device."""
    (first_name, first), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(first):
            raise ValueError(
                f"hip_ops.{operator}: {name} holds {len(tensors)} tensors; it must hold one for each of the {len(first)} {first_name}"
            )
    device = first[0].device
    for name, tensors in lists.items():
        for i, tensor in enumerate(tensors):
            if tensor.device != device:
                raise ValueError(
                    f"hip_ops.{operator}: {name}[{i}] is on {tensor.device}; all tensors must be on the device of {first_name}[0], {device}"
                )
            if not tensor.is_contiguous():
                raise ValueError(
                    f"hip_ops.{operator}: {name}[{i}] of shape {tuple(tensor.shape)} has strides {tensor.stride()}; it must be "
                    f"contiguous: pass {name}[{i}].contiguous(), or the transpose of all tensors of this place"
                )
    for name, tensors in others:
        for i, (tensor, like) in enumerate(zip(tensors, first, strict=True)):
            if tensor.shape != like.shape:
                raise ValueError(
                    f"hip_ops.{operator}: {name}[{i}] has shape {tuple(tensor.shape)}; it must be that of {first_name}[{i}], {tuple(like.shape)}"
                )


def _dtypes(operator: str, **lists: Sequence[Tensor]) -> None:
    """bf16 and fp32 in any mixture; fp64 only if everything is, which is for checking and runs in plain torch."""
    found = {t.dtype for tensors in lists.values() for t in tensors}
    if found <= set(DTYPES) or found == {torch.float64}:
        return
    name, i, dtype = next((n, i, t.dtype) for n, ts in lists.items() for i, t in enumerate(ts) if t.dtype not in DTYPES)
    raise ValueError(
        f"hip_ops.{operator}: {name}[{i}] is {dtype}; it must be torch.bfloat16 or torch.float32 (or all tensors torch.float64)"
    )


def _scalar(operator: str, name: str, value: Tensor | None, device: torch.device) -> None:
    if value is not None and (value.dtype != torch.float32 or value.numel() != 1 or value.device != device):
        raise ValueError(
            f"hip_ops.{operator}: {name} is {value.dtype} of shape {tuple(value.shape)} on {value.device}; "
            f"it must be one torch.float32 number on {device}"
        )


def _example_lists(device: torch.device) -> list[list[Tensor]]:
    """Three parallel lists - bf16, fp32, bf16 - with whole and ragged chunks, an empty tensor and a few elements."""
    shapes = [(96, 256), (0, 4), (17, 33), (1, 3)]
    return [
        [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)
    ]


def _momentum_example(device: torch.device) -> tuple:
    scale, found_inf = torch.full((1,), 0.37, device=device), torch.zeros(1, device=device)
    return (*_example_lists(device), torch.zeros(4, device=device), scale, found_inf, 0.95, True, True)


def _update_example(device: torch.device) -> tuple:
    return (
        *_example_lists(device),
        [3.2, 0.4, 1.1, 0.5],
        0.0,
        torch.full((1,), 0.1, device=device),
        0.1,
        torch.zeros(1, device=device),
    )


_momentum = Operator(
    "muon_momentum_",
    torch=reference.momentum_reference,
    triton="hip_ops.triton_kernels.muon:momentum",
    hip="hip_ops.hip_kernels.muon:momentum",
    example=_momentum_example,
)
_update = Operator(
    "muon_update_",
    torch=reference.update_reference,
    triton="hip_ops.triton_kernels.muon:update",
    hip="hip_ops.hip_kernels.muon:update",
    example=_update_example,
)


@torch.library.custom_op("hip_ops::muon_momentum_", mutates_args=("momenta", "outputs", "square_sums"))
def _momentum_op(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    outputs: Sequence[Tensor],
    square_sums: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    momentum: float,
    nesterov: bool,
    ema: bool,
) -> None:
    run = reference.momentum_reference if momenta[0].dtype == torch.float64 else _momentum
    run(gradients, momenta, outputs, square_sums, grad_scale, found_inf, momentum, nesterov, ema)


@torch.library.custom_op("hip_ops::muon_update_", mutates_args=("masters", "params"))
def _update_op(
    updates: Sequence[Tensor],
    masters: Sequence[Tensor],
    params: Sequence[Tensor],
    scales: Sequence[float],
    lr: float,
    lr_tensor: Tensor | None,
    weight_decay: float,
    found_inf: Tensor | None,
) -> None:
    run = reference.update_reference if params[0].dtype == torch.float64 else _update
    run(updates, masters, params, scales, lr, lr_tensor, weight_decay, found_inf)


@_momentum_op.register_fake
def _momentum_fake(*arguments) -> None:
    return None


@_update_op.register_fake
def _update_fake(*arguments) -> None:
    return None


@torch.no_grad()
def muon_momentum_(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    convention: str = "ema",
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    square_sums: Tensor | None = None,
) -> None:
    """Updates `momenta` in place and writes what Newton-Schulz is to orthogonalise into `outputs`.

    With g = gradient * grad_scale and b the momentum,

        convention "ema"   b = lerp(b, g, 1 - momentum)    output = lerp(g, b, momentum) if nesterov else b
        convention "sum"   b = momentum * b + g            output = g + momentum * b     if nesterov else b

    "ema" is what torch.optim.Muon, KellerJordan/Muon and emerging_optimizers compute; "sum" is torch.optim.SGD's form, in
    which torch documents Muon and which arXiv 2502.16982 prints. Newton-Schulz normalises its input, so at constant
    momentum both train alike; momenta of one cannot be continued in the other. `momentum` 0 gives output = b = g.

    gradients, momenta, outputs: lists of equally many contiguous tensors on one device, shapes equal place by place, bf16 or
        fp32 in any mixture (one launch a combination of dtypes). Arithmetic is fp32; the output is computed from the
        momentum as stored. Empty lists and empty tensors are fine; addresses need no alignment beyond their dtype's.
    grad_scale: None or one fp32 number on the device: a clipping factor, the inverse of a loss scale, or their product.
    found_inf: None or one fp32 number on the device; unless it is 0, nothing at all is written.
    square_sums: None or fp32 [len(outputs)]: receives the sum of squares of every output as stored, summed in a fixed
        order: equal inputs give equal bits.

    Raises ValueError for lists that do not match, other dtypes, tensors that are not contiguous, and unknown conventions.
    """
    if convention not in CONVENTIONS:
        raise ValueError(
            f"hip_ops.muon_momentum_: convention is {convention!r}; it must be one of {', '.join(CONVENTIONS)}"
        )
    if not 0 <= momentum <= 1:
        raise ValueError(f"hip_ops.muon_momentum_: momentum is {momentum}; it must be between 0 and 1")
    lists = dict(gradients=list(gradients), momenta=list(momenta), outputs=list(outputs))
    if not any(lists.values()):
        return
    _same_shapes("muon_momentum_", **lists)
    _dtypes("muon_momentum_", **lists)
    device = lists["gradients"][0].device
    _scalar("muon_momentum_", "grad_scale", grad_scale, device)
    _scalar("muon_momentum_", "found_inf", found_inf, device)
    if square_sums is not None and (square_sums.dtype, square_sums.shape, square_sums.device) != (
        torch.float32,
        (len(outputs),),
        device,
    ):
        raise ValueError(
            f"hip_ops.muon_momentum_: square_sums is {square_sums.dtype} of shape {tuple(square_sums.shape)} on {square_sums.device}; "
            f"it must be torch.float32 of shape ({len(outputs)},) on {device}"
        )
    if square_sums is not None and not square_sums.is_contiguous():
        raise ValueError("hip_ops.muon_momentum_: square_sums must be contiguous")
    _momentum_op(*lists.values(), square_sums, grad_scale, found_inf, momentum, nesterov, convention == "ema")


@torch.no_grad()
def muon_update_(
    updates: Sequence[Tensor],
    masters: Sequence[Tensor] | None,
    params: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    scales: Sequence[float] | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """weight = weight * (1 - lr * weight_decay) - lr * scale * update, in place; weight decay is decoupled (arXiv 1711.05101).

    updates: the results of Newton-Schulz, bf16 or fp32.
    masters: the weights, fp32; the result is written to them and, rounded once, to `params` (bf16 or fp32) in the same pass.
        None: `params`, bf16 or fp32, are the weights themselves.
    lr: a number, or one fp32 number on the device, which the kernel reads when it runs.
    scales: one a tensor; by default `rms_matching_scale` of each shape.
    found_inf: None or one fp32 number on the device; unless it is 0, nothing at all is written.

    Lists, shapes, contiguity and errors as in `muon_momentum_`.
    """
    lists = dict(params=list(params), updates=list(updates))
    if masters is not None:
        lists["masters"] = list(masters)
    if not any(lists.values()):
        return
    _same_shapes("muon_update_", **lists)
    _dtypes("muon_update_", **lists)
    for i, master in enumerate(lists.get("masters", ())):
        if master.dtype == torch.bfloat16:
            raise ValueError(
                f"hip_ops.muon_update_: masters[{i}] is torch.bfloat16; it must be torch.float32: pass masters=None where bf16 parameters are the weights"
            )
    device = lists["params"][0].device
    _scalar("muon_update_", "found_inf", found_inf, device)
    if isinstance(lr, Tensor):
        _scalar("muon_update_", "lr", lr, device)
    if scales is None:
        flat = next((i for i, p in enumerate(params) if p.ndim < 2), None)
        if flat is not None:
            raise ValueError(
                f"hip_ops.muon_update_: params[{flat}] has shape {tuple(params[flat].shape)}, no matrix to take a scale from; pass scales"
            )
        scales = [rms_matching_scale(p.shape) for p in lists["params"]]
    elif len(scales) != len(lists["params"]):
        raise ValueError(
            f"hip_ops.muon_update_: scales holds {len(scales)} numbers; it must hold one for each of the {len(lists['params'])} params"
        )
    rate, rate_tensor = (0.0, lr) if isinstance(lr, Tensor) else (float(lr), None)
    _update_op(
        lists["updates"],
        lists.get("masters", []),
        lists["params"],
        [float(s) for s in scales],
        rate,
        rate_tensor,
        weight_decay,
        found_inf,
    )
