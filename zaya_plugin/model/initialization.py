# SPDX-License-Identifier: Apache-2.0
"""Creating parameters where Megatron would: on its device, in its dtype, drawn from its random stream.

Everything created here is the same on all tensor-, expert- and data-parallel ranks: with `use_cpu_initialization`
values come from the default CPU generator, else from Megatron's data-parallel tracker, and both are seeded alike on
these ranks. Megatron's own linears and embedding, which are split over tensor-parallel ranks, are drawn by Megatron's
rules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


def initial_device(config: TransformerConfig) -> torch.device | int | None:
    """Return the device for new tensors; None under CPU initialisation, so that `torch.device("meta")` works as a
    context.
    """
    return None if config.use_cpu_initialization else torch.cuda.current_device()


def random_stream(config: TransformerConfig):
    """Return the context manager in which initial values are drawn."""
    if config.use_cpu_initialization:
        return nullcontext()
    return get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name())


def initialize(config: TransformerConfig, tensor: Tensor, init_method: Callable[[Tensor], object]) -> None:
    """Fill `tensor` in place with `init_method`, unless config.perform_initialization is off."""
    if config.perform_initialization:
        with torch.no_grad(), random_stream(config):
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
