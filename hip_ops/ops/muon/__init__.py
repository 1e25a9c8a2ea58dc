# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum and weight update on lists of matrices: one launch a call, for any number of matrices of any
shapes, and one more for the sums of squares.

One step of Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) with the update scale of Liu et al.
2025 (arXiv 2502.16982) is

    batches = MatrixBatches([p.shape for p in params], device)  # matrices of one shape lie together

    muon_momentum_(gradients, momenta, batches.slots, square_sums=batches.square_sums)
    updates = batches.split([newton_schulz(x, square_sums=s) for x, s in zip(batches.tensors, batches.sums())])
    muon_update_(updates, masters, params, lr=lr, weight_decay=weight_decay)

Matrices keep the parameter's orientation: Newton-Schulz transposes tall ones as a view, so neither of these kernels
reads or writes transposed. The host never waits for the device: the kernels read gradient scale, skip flag and a
learning rate that is a tensor, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hip_ops.errors import mistake
from hip_ops.ops.muon import reference
from hip_ops.runtime.operator import Operator


class MatrixBatches:
    """One contiguous tensor [batch, m, n] for every shape in `shapes`, with a slot for every matrix.

    shapes: (m, n) of every matrix. Lists of matrices keep this order, also within a batch.
    tensors: list of [batch, m, n], uninitialised, in order of a shape's first appearance: the inputs of
        `newton_schulz`.
    slots: list of [m, n] views into them, one a matrix: the outputs of `muon_momentum_`.
    square_sums: fp32 [matrices], for `muon_momentum_` to fill; `sums()` gives it to `newton_schulz`.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], device: torch.device | str, dtype: torch.dtype = torch.bfloat16
    ):
        grouped: dict[tuple[int, int], list[int]] = {}
        for i, shape in enumerate(shapes):
            if len(shape) != 2:
                raise mistake("hip_ops.MatrixBatches", f"shapes[{i}] is {tuple(shape)}", "(m, n)")
            grouped.setdefault(tuple(shape), []).append(i)
        self.places = list(grouped.values())
        self.tensors = [
            torch.empty((len(places), *shape), dtype=dtype, device=device) for shape, places in grouped.items()
        ]
        self.slots = self.split(self.tensors)
        self.square_sums = torch.zeros(len(shapes), dtype=torch.float32, device=device)
        order = [place for places in self.places for place in places]
        self._order = None if order == sorted(order) else torch.tensor(order, device=device)

    def split(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Split tensors shaped like `self.tensors` into matrices, in the order of `shapes`: the updates of
        `muon_update_`.
        """
        matrices: list[Tensor | None] = [None] * sum(map(len, self.places))
        for like, batch, places in zip(self.tensors, batches, self.places, strict=True):
            if batch.shape != like.shape:
                problem = f"a batch has shape {tuple(batch.shape)}"
                raise mistake("hip_ops.MatrixBatches", problem, str(tuple(like.shape)))
            for place, matrix in zip(places, batch.unbind(0), strict=True):
                matrices[place] = matrix
        return matrices

    def sums(self) -> list[Tensor]:
        """Return `square_sums` by batch, fp32 [batch] each: views where equal shapes are adjacent in `shapes`,
        otherwise copies.
        """
        sums = self.square_sums if self._order is None else self.square_sums.index_select(0, self._order)
        return list(sums.split([len(places) for places in self.places])) if self.places else []


def rms_matching_scale(shape: Sequence[int]) -> float:
    """Return 0.2 * sqrt(max(m, n)) for a matrix [..., m, n]: the update's root mean square becomes AdamW's (arXiv
    2502.16982, section 2.2).
    """
    return 0.2 * math.sqrt(max(shape[-2:]))


def _check(operator: Operator, lists: dict[str, list[Tensor]], **numbers: Tensor | None) -> None:
    """Raise ValueError unless the lists are parallel and `numbers` are fp32 on their device: `square_sums` one per
    tensor, others one.

    Parallel: equally many contiguous tensors of the same shapes on one device; bf16 and fp32 in any mixture (`masters`
    fp32), or all fp64, which is for checks and runs the reference.
    """
    fail = operator.declaration.fail
    first_name, first = next(iter(lists.items()))
    for name, tensors in lists.items():
        if len(tensors) != len(first):
            fail(name, f"holds {len(tensors)} tensors", f"a list of {len(first)}, as many as {first_name}")
    device, double = first[0].device, first[0].dtype == torch.float64
    for name, tensors in lists.items():
        half = () if name == "masters" else (torch.bfloat16,)
        allowed = (torch.float64,) if double else (*half, torch.float32)
        for i, (tensor, like) in enumerate(zip(tensors, first, strict=True)):
            if tensor.device != device:
                fail(f"{name}[{i}]", f"is on {tensor.device}", f"on {device} like {first_name}[0]")
            if tensor.shape != like.shape:
                fail(f"{name}[{i}]", f"has shape {tuple(tensor.shape)}", f"{tuple(like.shape)} like {first_name}[{i}]")
            if not tensor.is_contiguous():
                fail(f"{name}[{i}]", f"has shape {tuple(tensor.shape)}, strides {tensor.stride()}", "contiguous")
            if tensor.dtype not in allowed:
                double_too = "" if double else " (or all tensors torch.float64)"
                fail(f"{name}[{i}]", f"is {tensor.dtype}", " or ".join(map(str, allowed)) + double_too)
    for name, value in numbers.items():
        expected = (torch.float32, len(first) if name == "square_sums" else 1, device)
        if value is not None and ((value.dtype, value.numel(), value.device) != expected or not value.is_contiguous()):
            what = f"is {value.dtype} of shape {tuple(value.shape)} on {value.device}"
            fail(name, what, f"torch.float32 of {expected[1]} elements on {device}, contiguous")


def _example_lists(device: torch.device, *dtypes: torch.dtype) -> list[list[Tensor]]:
    """Make parallel lists of these dtypes with whole and ragged chunks, an empty tensor and a few elements."""
    shapes = [(96, 256), (0, 4), (17, 33), (1, 3)]
    return [[torch.randn(shape, device=device).to(dtype) for shape in shapes] for dtype in dtypes]


def _momentum_example(
    device: torch.device, gradients: torch.dtype = torch.bfloat16, with_sums: bool = True, with_flag: bool = True
) -> tuple:
    lists = _example_lists(device, gradients, torch.float32, torch.bfloat16)
    sums, found_inf = (torch.zeros(count, device=device) for count in (4, 1))
    scale = torch.full((1,), 0.37, device=device)
    return *lists, sums if with_sums else None, scale, found_inf if with_flag else None, 0.95, True


def _update_example(
    device: torch.device, with_masters: bool = True, with_flag: bool = True, lr_on_device: bool = True
) -> tuple:
    updates, masters, params = _example_lists(device, torch.bfloat16, torch.float32, torch.bfloat16)
    lists = (updates, masters, params) if with_masters else (updates, [], masters)
    lr = (0.0, torch.full((1,), 0.1, device=device)) if lr_on_device else (0.1, None)
    found_inf = torch.zeros(1, device=device) if with_flag else None
    return *lists, [3.2, 0.4, 1.1, 0.5], *lr, 0.1, found_inf


# The first example of each mixes dtypes; training has fp32 gradients and a learning rate of the host.
_momentum = Operator(
    reference.muon_momentum_,
    mutates=("momenta", "outputs", "square_sums"),
    example=(
        _momentum_example,
        *(
            functools.partial(_momentum_example, gradients=torch.float32, with_sums=a, with_flag=b)
            for a, b in itertools.product((True, False), repeat=2)
        ),
    ),
)
_update = Operator(
    reference.muon_update_,
    mutates=("masters", "params"),
    example=(
        _update_example,
        *(
            functools.partial(_update_example, with_masters=a, with_flag=b, lr_on_device=False)
            for a, b in itertools.product((True, False), repeat=2)
        ),
    ),
)


@torch.no_grad()
def muon_momentum_(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    square_sums: Tensor | None = None,
) -> None:
    """Update `momenta` in place and write the matrices for Newton-Schulz into `outputs`.

    With g = gradient * grad_scale and b the momentum,

        b = lerp(b, g, 1 - momentum)
        output = lerp(g, b, momentum) if nesterov else b

    torch.optim.Muon, KellerJordan/Muon and emerging_optimizers compute the same. torch.optim.SGD's form,
    b = momentum * b + g, which arXiv 2502.16982 prints, trains alike at constant momentum, because Newton-Schulz
    normalises its input; its momenta cannot be continued by this one. `momentum` 0 gives output = b = g.

    gradients, momenta, outputs: lists of equally many contiguous tensors on one device, shapes equal place by place,
        bf16 or fp32 in any mixture (one launch a combination of dtypes). Arithmetic is fp32; the output is computed
        from the momentum as stored. Empty lists and empty tensors are fine; addresses need no alignment beyond their
        dtype's.
    grad_scale: None or one fp32 number on the device: a clipping factor, the inverse of a loss scale, or their product.
    found_inf: None or one fp32 number on the device; unless it is 0, nothing is written.
    square_sums: None or fp32 [len(outputs)]: receives the sum of squares of every output as stored, summed in a fixed
        order: equal inputs give equal bits.

    Raises ValueError for lists that do not match, other dtypes and tensors that are not contiguous.
    """
    if not 0 <= momentum <= 1:
        _momentum.declaration.fail("momentum", f"is {momentum}", "between 0 and 1")
    lists = dict(gradients=list(gradients), momenta=list(momenta), outputs=list(outputs))
    if not any(lists.values()):
        return
    numbers = dict(square_sums=square_sums, grad_scale=grad_scale, found_inf=found_inf)
    _check(_momentum, lists, **numbers)
    _momentum(*lists.values(), *numbers.values(), momentum, nesterov)


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
    """Compute weight = weight * (1 - lr * weight_decay) - lr * scale * update in place; weight decay is decoupled
    (arXiv 1711.05101).

    updates: the results of Newton-Schulz, bf16 or fp32.
    masters: the weights, fp32; the result is written to them and, rounded once, to `params` (bf16 or fp32) in the same
        pass.
        None: `params`, bf16 or fp32, are the weights themselves.
    lr: a number, or one fp32 number on the device, which the kernel reads when it runs.
    scales: one per tensor; by default `rms_matching_scale` of each shape.
    found_inf: None or one fp32 number on the device; unless it is 0, nothing is written.

    Lists, shapes, contiguity and errors as in `muon_momentum_`.
    """
    lists = dict(params=list(params), updates=list(updates))
    if masters is not None:
        lists["masters"] = list(masters)
    if not any(lists.values()):
        return
    rate, rate_tensor = (0.0, lr) if isinstance(lr, Tensor) else (float(lr), None)
    _check(_update, lists, lr=rate_tensor, found_inf=found_inf)
    params = lists["params"]
    if scales is None:
        for i, param in enumerate(params):
            if param.ndim < 2:
                _update.declaration.fail(f"params[{i}]", f"has shape {tuple(param.shape)}", "a matrix, or pass scales")
        scales = [rms_matching_scale(param.shape) for param in params]
    elif len(scales) != len(params):
        _update.declaration.fail(
            "scales", f"holds {len(scales)} numbers", f"a list of {len(params)}, as many as params"
        )
    scales = [float(scale) for scale in scales]
    _update(lists["updates"], lists.get("masters", []), params, scales, rate, rate_tensor, weight_decay, found_inf)
