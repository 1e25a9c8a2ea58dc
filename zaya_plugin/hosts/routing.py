# SPDX-License-Identifier: Apache-2.0
"""The routing of training samples: written by stage.record_routing, and read by stage.replay_routing.

Each rank writes the rows that it holds: its samples, and of each sequence its context-parallel part. The files lie
where all ranks reach them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.utils.data import Dataset

from zaya_plugin.checkpoint.restore import on_rank_0
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.routed_experts import begin_file, open_file
from zaya_plugin.parallel.context_order import ContextShard

NUMBER, ROUTED = "sample_number", "routed_experts"  # fields of a batch


class RoutedSamples(Dataset):
    """Training samples with their number in the stage, int64, and with their routing, int16 [s, layers, 1], where it is
    replayed.
    """

    def __init__(self, recipe: Recipe, dataset: Dataset):
        self.dataset, self.length = dataset, recipe.stage.seq_length
        self.routed = open_file(recipe, "stage.replay_routing") if recipe.stage.replay_routing else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = {**self.dataset[index], NUMBER: torch.tensor(index)}
        if self.routed is not None:
            sample[ROUTED] = torch.from_numpy(np.array(self.routed[index * self.length : (index + 1) * self.length]))
        return sample


def samples_with_routing(recipe: Recipe, dataset: Dataset | None) -> Dataset | None:
    """Return the training samples of a stage, as RoutedSamples if its routing is recorded or replayed."""
    routed = dataset is not None and (recipe.stage.record_routing or recipe.stage.replay_routing)
    return RoutedSamples(recipe, dataset) if routed else dataset


class RoutingRecord:
    """Writes stage.record_routing: what the routers chose for each training sample."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.stored = recipe, None

    def begin(self, resumed_at: int) -> None:
        """Make the file, or keep it in a run that continues after the step `resumed_at`. A collective."""
        on_rank_0(lambda: begin_file(self.recipe, resumed_at))
        self.stored = open_file(self.recipe, "stage.record_routing", "r+")

    def around(self, step: Callable) -> Callable:
        """Return the forward step `step` with the record of each training batch; model: with or without DDP."""

        def recorded(data_iterator, model):
            batch = next(data_iterator)
            replays = [layer.mlp.router.router_replay for layer in unwrap_model(model).decoder.layers]
            for replay in replays:
                replay.set_router_replay_action(RouterReplayAction.RECORD if NUMBER in batch else None)
            result = step(iter((batch,)), model)
            if NUMBER in batch:
                self.write(batch[NUMBER], torch.stack([replay.get_recorded_indices() for replay in replays], 1))
            return result

        return recorded

    def write(self, numbers: Tensor, chosen: Tensor) -> None:
        """Write a micro-batch. numbers: of its samples, int64 [b]; chosen: int64 [s * b, layers, 1]."""
        ids = chosen.to(torch.int16).cpu().numpy()
        length, order = self.recipe.stage.seq_length, self.recipe.parallel.context_parallel_order
        places = ContextShard.of(parallel_state.get_context_parallel_group(), order).positions(length).numpy()
        for column, number in enumerate(numbers.tolist()):
            self.stored[number * length + places] = ids[column :: len(numbers)]
