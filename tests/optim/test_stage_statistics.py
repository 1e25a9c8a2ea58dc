# SPDX-License-Identifier: Apache-2.0
"""Router statistics of two pipeline stages, each with every second layer, become one table in the model's order."""

import pytest
import torch
import torch.multiprocessing as multiprocessing

from zaya_plugin.optim.balancing import RouterStatistics, over_pipeline_stages

LAYERS, COUNTS = 4, torch.arange(4 * 3).view(4, 3) + 2**40  # more than fp32 could count
ENTROPY = torch.tensor([0.5, 1.5, 2.5, 0.25])


def stage(rank: int, path: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    own = [rank, rank + 2]
    statistics = over_pipeline_stages(
        RouterStatistics(COUNTS[own], ENTROPY[own]), [layer + 1 for layer in own], LAYERS, torch.distributed.group.WORLD
    )
    torch.save((statistics.tokens_per_expert, statistics.entropy), f"{path}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_stage_gets_the_layers_of_all(tmp_path):
    multiprocessing.spawn(stage, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        counts, entropy = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(counts, COUNTS) and counts.dtype == torch.int64
        assert torch.equal(entropy, ENTROPY) and entropy.dtype == torch.float32
