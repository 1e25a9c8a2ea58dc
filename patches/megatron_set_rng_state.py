# SPDX-License-Identifier: Apache-2.0
"""megatron.core.tensor_parallel.random._set_cuda_rng_state: sets the CPU generator."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


PATCH = Patch(
    symbol="megatron.core.tensor_parallel.random._set_cuda_rng_state",
    reason="queued for a CUDA start that never comes; recomputation would draw other random numbers",
    install=install,
)
