# SPDX-License-Identifier: Apache-2.0
"""The parameters of ZAYA's modules: created as Megatron would, read where their module is not called, and the
gradients of a layer's vectors added together; and buffers that stay fp32.

Everything that this module creates is the same on all tensor-, expert- and data-parallel ranks: with
`use_cpu_initialization` values come from the default CPU generator, else from Megatron's data-parallel tracker, and
both are seeded alike on these ranks. Megatron's own linears and embedding, which are split over tensor-parallel ranks,
are drawn by Megatron's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from hip_ops.runtime.main_grad import handed_over, main_grad_of

ParameterView = Callable[[Tensor], Tensor]  # from a parameter to the tensor to compute with


def initial_device(config: TransformerConfig) -> torch.device | int | None:
    """Return the device for new tensors; None under CPU initialisation, so that `torch.device("meta")` works as a
    context.
    """
    return None if config.use_cpu_initialization else torch.cuda.current_device()


def initialize(config: TransformerConfig, tensor: Tensor, init_method: Callable[[Tensor], object]) -> None:
    """Fill `tensor` in place with `init_method`, unless config.perform_initialization is off."""
    if config.perform_initialization:
        stream = nullcontext()
        if not config.use_cpu_initialization:
            stream = get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name())
        with torch.no_grad(), stream:
            init_method(tensor)


def constant_parameter(config: TransformerConfig, shape: tuple[int, ...], value: float) -> nn.Parameter:
    """Create a parameter of config.params_dtype filled with `value`."""
    tensor = torch.full(shape, value, dtype=config.params_dtype, device=initial_device(config))
    return _tag(nn.Parameter(tensor), config)


def random_parameter(config: TransformerConfig, shape: tuple[int, ...], init_method: Callable) -> nn.Parameter:
    """Create a parameter of config.params_dtype drawn with `init_method`."""
    tensor = torch.empty(shape, dtype=config.params_dtype, device=initial_device(config))
    initialize(config, tensor, init_method)
    return _tag(nn.Parameter(tensor), config)


def _tag(parameter: nn.Parameter, config: TransformerConfig) -> nn.Parameter:
    # Replicated over tensor-parallel ranks: Megatron sums such gradients when this is set.
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def gathered(module: nn.Module) -> nn.Module:
    """Return `module`, whose own parameters (not its submodules') may then be read without a call of it.

    With `overlap_param_gather` Megatron gathers updated parameters while the model already runs, and waits in a forward
    pre-hook on every module for that module's own parameters. Where several matrices are applied as one product, or
    vectors go into one kernel, their modules are never called. So this function runs the pre-hooks, with no input:
    without them a rank would compute with the other ranks' parameters of the previous step (if a bucket holds no module
    that is called earlier).
    """
    for key, hook in module._forward_pre_hooks.items():
        if key not in module._forward_pre_hooks_with_kwargs:  # Megatron's takes none
            hook(module, ())
    return module


def direct(parameter: Tensor) -> Tensor:
    """Return the parameter itself: the view that leaves its gradient to autograd."""
    return parameter


class ViewTogether(torch.autograd.Function):
    """Return the parameters, sharing their memory. The backward pass runs when all their gradients have arrived, adds
    them to `main_grad` together and marks that for DDP.

    DDP's hook adds each gradient with a kernel of its own: 13 a layer and micro-batch at 3 us each. In a step of 40
    layers as a graph on H200s two launches a layer take 2.0 instead of 13.0 ms (`gradients`, backward, in
    benchmarks/results/step40-h200-graphs.json and, before it, step40-2xh200-graphs.json). Each sum has DDP's order, so
    the bits are the same.
    """

    @staticmethod
    def forward(ctx, *parameters):
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        totals = [main_grad_of(p) for p, g in zip(ctx.parameters, gradients, strict=True) if g is not None]
        if totals:
            add_together_(totals, [gradient for gradient in gradients if gradient is not None])
        return tuple([None if g is None else handed_over(p) for p, g in zip(ctx.parameters, gradients, strict=True)])


def add_together_(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Compute totals[i] += parts[i], all parts in one dtype. Two launches on an accelerator, one where the totals have
    that dtype too.
    """
    parts, wide_dtype = [part.contiguous() for part in parts], torch.promote_types(parts[0].dtype, totals[0].dtype)
    if parts[0].dtype != wide_dtype:
        # torch adds tensors of two dtypes one by one, but converts them together.
        wide = _unflatten_dense_tensors(
            parts[0].new_empty(sum(part.numel() for part in parts), dtype=wide_dtype), parts
        )
        torch._foreach_copy_(wide, parts)
        parts = wide
    torch._foreach_add_(totals, parts)


def view_together(parameters: Iterable[Tensor]) -> ParameterView:
    """Return a function that maps each of `parameters` to the tensor to compute with, and any other tensor to itself.

    A parameter without a main gradient, or that needs no gradient, is mapped to itself. The others may be used through
    the function any number of times but not directly, since DDP drops gradients that reach them otherwise. They may not
    be used inside a part of the model that is recomputed by itself: its backward pass runs within the other one and
    would find only some of the gradients. Not for matrices: one block of threads adds up to 65,536 elements.
    """
    if not torch.is_grad_enabled():
        return direct
    with_main_grad = [p for p in parameters if p.requires_grad and main_grad_of(p) is not None]
    if not with_main_grad:
        return direct
    views = dict(zip(with_main_grad, ViewTogether.apply(*with_main_grad), strict=True))
    return lambda parameter: views.get(parameter, parameter)


class Float32BuffersMixin:
    """Put before nn.Module among the bases: the fp32 buffers of the class follow device moves, not dtype casts.

    `.bfloat16()`, `.half()` and Megatron's Float16Module cast all buffers of other modules.
    """

    def _apply(self, fn, recurse=True):
        kept = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            # A meta buffer has no values to keep; the new storage stays uninitialised, as to_empty promises.
            self._buffers[name] = after.float() if before.is_meta else before.to(after.device)
        return self
