# SPDX-License-Identifier: Apache-2.0
"""Router statistics of all layers on every pipeline stage, from those of each stage's own layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from zaya_plugin.optim.balancing import RouterStatistics


@functools.cache
def _rows_of(layer_numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Kept on the device, since to bring it there every step would wait for what the device has to do."""
    return torch.tensor(layer_numbers, device=device) - 1


def over_pipeline_stages(
    statistics: RouterStatistics, layer_numbers: Sequence[int], num_layers: int, group
) -> RouterStatistics:
    """Statistics in the order of the model's layers.

    Args: statistics, rows in the order of layer_numbers (from 1, over the whole model); num_layers, of the model; group,
    the pipeline-parallel process group. To be called on all its ranks.
    """
    counts = statistics.tokens_per_expert
    # exact to 2^53 tokens
    rows = torch.zeros(num_layers, counts.shape[1] + 1, dtype=torch.float64, device=counts.device)
    rows[_rows_of(tuple(layer_numbers), counts.device)] = torch.cat(
        (counts.double(), statistics.entropy.double().unsqueeze(-1)), dim=1
    )
    torch.distributed.all_reduce(rows, group=group)
    return RouterStatistics(rows[:, :-1].to(torch.int64), rows[:, -1].float())
