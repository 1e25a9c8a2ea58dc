# SPDX-License-Identifier: Apache-2.0
"""Router statistics of all layers on every pipeline stage, from those of each stage's own layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zaya_plugin.optim.balancing import RouterStatistics


def over_pipeline_stages(
    statistics: RouterStatistics, layer_numbers: Sequence[int], num_layers: int, group
) -> RouterStatistics:
    """Statistics in the order of the model's layers.

    Args: statistics, rows in the order of layer_numbers (from 1, over the whole model); num_layers, of the model; group,
    the pipeline-parallel process group. To be called on all its ranks.
    """
    counts = statistics.tokens_per_expert
    rows = torch.zeros(num_layers, counts.shape[1] + 1, dtype=torch.float64, device=counts.device)  # exact to 2^53 tokens
    here = torch.tensor(layer_numbers, device=counts.device) - 1
    rows[here] = torch.cat((counts.double(), statistics.entropy.double().unsqueeze(-1)), dim=1)
    torch.distributed.all_reduce(rows, group=group)
    return RouterStatistics(rows[:, :-1].to(torch.int64), rows[:, -1].float())
