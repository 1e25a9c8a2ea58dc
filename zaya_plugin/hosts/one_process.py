# SPDX-License-Identifier: Apache-2.0
"""Set up a recipe's model in this process alone, without a run, to inspect or measure it."""

from __future__ import annotations

import argparse
from typing import Any

# With any of these Megatron makes folders or looks for a checkpoint while it validates its arguments.
OF_A_RUN = ("save", "save_interval", "load", "exit_on_missing_checkpoint", "tensorboard_dir")


def arguments(values: dict[str, Any]) -> argparse.Namespace:
    """Return Megatron's arguments from those of a run (zaya_plugin.config.arguments), without the run's files."""
    from zaya_plugin.hosts.pretrain import parse_arguments

    return parse_arguments({name: value for name, value in values.items() if name not in OF_A_RUN})


def begin(seed: int) -> None:
    """Start torch.distributed and Megatron's model-parallel groups of one rank if they are missing, and seed Megatron's
    random streams.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
