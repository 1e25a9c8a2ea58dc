# SPDX-License-Identifier: Apache-2.0
"""Observe Megatron's training loop for `zaya bench`: a call before every step, and optionally no optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.training import get_args

from zaya_plugin.optim.chained import ChainedMuonAdamW
from zaya_plugin.optim.gradient_buffers import group_layers, skip_zeroing_experts
from zaya_plugin.patches import hooks


@dataclass
class StepParts:
    """The parts of one step. `forward_step` (of one micro-batch) and `forward_backward` (of all) may be replaced for
    this step.
    """

    forward_step: Callable
    forward_backward: Callable
    model: list
    optimizer: object
    args: argparse.Namespace


@contextmanager
def before_steps(call: Callable[[StepParts], None]) -> Iterator[None]:
    """Let Megatron call `call` before each training step within a `with`. SystemExit(0) from it ends the run without a
    checkpoint.
    """

    def observed(
        train_step,
        forward_step,
        data_iterator,
        model,
        optimizer,
        scheduler,
        config,
        forward_backward,
        *positional,
        **named,
    ):
        parts = StepParts(forward_step, forward_backward, model, optimizer, get_args())
        call(parts)
        return train_step(
            parts.forward_step,
            data_iterator,
            model,
            optimizer,
            scheduler,
            config,
            parts.forward_backward,
            *positional,
            **named,
        )

    with hooks.wrapped([(hooks.TRAINING + "train_step", observed)]):
        yield


class NoOptimizer(ChainedMuonAdamW):
    """An optimizer without state and update. Its step only gathers ZeRO's parameters, since that is communication.

    The gradients are not divided by the number of tokens, because the update does that as it reads them.
    """

    def __init__(self, get_megatron_optimizer, config, model_chunks: list, *positional, **named):
        """Arguments as of the function that replaces Megatron's get_megatron_optimizer."""
        group_layers(model_chunks)
        super().__init__([], model_chunks)
        self.config, self.model_chunks = config, model_chunks
        skip_zeroing_experts(model_chunks)

    def step(self) -> tuple[bool, None, None]:
        for chunk in self.model_chunks:
            if chunk.ddp_config.use_distributed_optimizer and not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return True, None, None


def graph_warm_up(args: argparse.Namespace) -> int:
    """Return the number of steps before Megatron captures a graph of the whole step; 0 if it captures none."""
    return args.cuda_graph_warmup_steps if getattr(args, "cuda_graph_impl", "none") == "full_iteration" else 0
