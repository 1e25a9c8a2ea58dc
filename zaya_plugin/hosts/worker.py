# SPDX-License-Identifier: Apache-2.0
"""Run one rank: `python -m zaya_plugin.hosts.worker <recipe.yaml>`, started by torchrun, SLURM or `zaya train`.

Expects RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment.

The way to the first step: in `main` the ranks meet (start_waits.py); pretrain.py makes Megatron's arguments
(stage_model.py) and the trainer, and calls Megatron's pretrain(); that calls, in this order, the trainer's model,
optimizer, load, datasets and train (pretrain.py over adapter.py), and for each micro-batch `forward_step` (adapter.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from zaya_plugin import patches
from zaya_plugin.ground import phases
from zaya_plugin.ground.errors import LOADER_KILLED, RunEndedError, of_the_machine, replace_unprintable
from zaya_plugin.ground.parent_death import adopt_children, follow_launcher, follow_rank
from zaya_plugin.training import heartbeat

# At import and not in main(): processes that write checkpoints are spawned and import this module again.
if __name__ == "__mp_main__":
    follow_rank()
patches.apply_torch()

LAUNCHER = "zaya_plugin.run.launch"  # its become_rank runs this module in its own process
EXIT_SECONDS = 120


class RankLog(io.FileIO):
    """A log file whose writes never raise: on a full disk lines are lost and the training continues."""

    def write(self, data) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def main(argv: list[str], work: Callable | None = None, trains: bool = True) -> int:
    """Train the recipe in the file argv[0]. Return the exit status: 0, 2 for a mistake of the user, or ENDED_EARLY.

    work: called as work(recipe, rank, world_size, console) in place of the training; returns an exit status or None.
    trains: False: `work` runs no step of the recipe, which is not validated.
    """
    from zaya_plugin.config.compose import load_recipe

    replace_unprintable()
    faulthandler.enable()  # names the place of a SIGBUS or SIGSEGV
    adopt_children()
    follow_launcher()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heartbeat.start(rank)
    recipe = load_recipe(Path(argv[0]))
    heartbeat.stage(recipe.stage.name)
    logs = Path(recipe.run_dir) / "logs"
    console = sys.stdout
    # Megatron prints some hundred lines, its arguments among them; they go to the log and not to the console.
    try:
        logs.mkdir(parents=True, exist_ok=True)
        log_file = RankLog(logs / f"rank{rank}.log", "a")
    except OSError as error:
        print(f"zaya: rank {rank}: {of_the_machine(error, logs) or error}", file=sys.stderr, flush=True)
        return 1
    with io.TextIOWrapper(log_file, "utf-8", line_buffering=True) as log, contextlib.redirect_stdout(log):
        logging.basicConfig(stream=log, level=logging.INFO, force=True)
        logging.captureWarnings(True)
        phases.show(console if rank == 0 else None)
        phases.begin("importing Megatron")
        try:
            from zaya_plugin.config.validate import validate
            from zaya_plugin.hosts.start_waits import Start

            # A launcher that becomes the rank has validated the recipe; a file of another process may be edited.
            if trains and LAUNCHER not in sys.modules:
                validate(recipe, world_size)
            Start(rank, world_size, console).join(60 * recipe.cluster.distributed_timeout_minutes)
            return (work or _train)(recipe, rank, world_size, console) or 0
        except BaseException as error:
            if not isinstance(error, SystemExit):  # a run that exits on request may still have to write
                _end_in_any_case()
            traceback.print_exc(file=log)
            text = str(error) if isinstance(error, (ValueError, RunEndedError)) else None
            if text is None and re.search(LOADER_KILLED, str(error)):
                from zaya_plugin.data.sources import damaged_data

                text = damaged_data(recipe)
            if text is None and (text := of_the_machine(error, recipe.run_dir)) is not None:
                text += f" Log: {logs / f'rank{rank}.log'}"
            if text is None:
                raise
            print(f"zaya: {text}" if rank == 0 else f"zaya: rank {rank}: {text}", file=sys.stderr, flush=True)
            if os.environ.get("ZAYA_TRACEBACK") == "1":
                traceback.print_exc()
            return 2 if isinstance(error, ValueError) else getattr(error, "exit_code", 1)
        finally:
            phases.show(None)


def _end_in_any_case() -> None:
    """End this process in EXIT_SECONDS in any case.

    After an error the exit may wait for ever for ranks or a device that do not answer (NCCL's destructors did after a
    failed capture of a graph), and the launcher notices a failure only when the rank has ended.
    """
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=open(os.devnull, "w"))


def prepare(recipe) -> None:
    """Select the kernels and apply the patches, before any use of Megatron in a rank. recipe: a validated one."""
    import torch

    from zaya_plugin.training.kernels import select_kernels

    select_kernels(recipe)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    patches.apply()


def _train(recipe, rank: int, world_size: int, console) -> int:
    prepare(recipe)
    from zaya_plugin.data.sources import find_sources

    return train_on(find_sources(recipe), recipe, rank, world_size, console)


def train_on(sources, recipe, rank: int, world_size: int, console) -> int:
    """Train the recipe on `sources`, after `prepare`. Return the exit status."""
    import torch

    from zaya_plugin.hosts import pretrain
    from zaya_plugin.training.lifecycle import Lifecycle
    from zaya_plugin.training.metrics import Reporter

    code = pretrain.run(recipe, sources, Lifecycle(recipe), Reporter(recipe, rank, world_size, console))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
