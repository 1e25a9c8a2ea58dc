# SPDX-License-Identifier: Apache-2.0
"""One rank of tests/distributed/test_moved_checkpoints.py: loads a run's checkpoint as `zaya train` does at the layout of
the job's recipe, and saves at once what it holds, in `run_dir`/moved. A program of rank_server.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

from zaya_plugin import patches


class Moved(BaseException):
    """The checkpoint is loaded and saved again."""


def main(job_file: str) -> None:
    """One rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment."""
    with open(f"{job_file}.rank{os.environ['RANK']}.log", "w") as out, contextlib.redirect_stdout(out):
        move(json.loads(Path(job_file).read_text())["recipe"])


def move(overrides: list[str]) -> None:
    """Load, save and end."""
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.run.rank_plan import rank_environment

    recipe = compose(overrides)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.update(rank_environment(recipe, world, os.environ))
    validate(recipe, world)
    patches.apply()
    import torch
    from megatron.core import dist_checkpointing

    from zaya_plugin.data.sources import find_sources
    from zaya_plugin.hosts import pretrain
    from zaya_plugin.training.lifecycle import Lifecycle
    from zaya_plugin.training.metrics import Reporter

    class Trainer(pretrain.Trainer):
        def load(self, load_checkpoint, model, optimizer, *positional, **named):
            super().load(load_checkpoint, model, optimizer, *positional, **named)
            metadata = {
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False,
                "chained_optim_avoid_prefix": True,  # as megatron.training.checkpointing sets it
            }
            state = {}
            for index, chunk in enumerate(model):
                while not hasattr(chunk, "decoder"):
                    chunk = chunk.module
                state["model" if len(model) == 1 else f"model{index}"] = chunk.sharded_state_dict()
            state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata)
            folder = Path(recipe.run_dir) / "moved"
            folder.mkdir(exist_ok=True)
            torch.distributed.barrier()
            dist_checkpointing.save(state, str(folder))
            raise Moved

    pretrain.Trainer = Trainer
    try:
        pretrain.run(recipe, find_sources(recipe), Lifecycle(recipe), Reporter(recipe, rank, world, sys.stdout))
    except Moved:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
