# SPDX-License-Identifier: Apache-2.0
"""One rank of `zaya bench step|data|collectives`, started like a rank of training:

    python -m zaya_plugin.bench.rank <recipe.yaml> <step_rank, data_rank or collectives_rank> <options as JSON>

`measure` of the named module measures, as a collective of all ranks, and returns the function with which rank 0 prints
and writes the results; what it returns is the rank's exit code. TRAINS of the module: whether the recipe is validated.
"""

import contextlib
import importlib
import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path


def main(argv: list[str]) -> int:
    """Return the exit status, as zaya_plugin.hosts.worker.main does."""
    from zaya_plugin.hosts import worker

    module = importlib.import_module(f"zaya_plugin.bench.{argv[1]}")
    return worker.main(argv[:1], partial(run_rank, module, Namespace(**json.loads(argv[2]))), trains=module.TRAINS)


def run_rank(module, options: Namespace, recipe, rank: int, world_size: int, console) -> int:
    """Run one rank; return its exit code. options: gets `output`, the folder of the results."""
    from torch import distributed

    options.output = Path(recipe.run_dir)

    def say(line: str) -> None:
        if rank == 0:
            print(f"bench: {line}", file=console, flush=True)

    report, code = module.measure(options, recipe, rank, world_size, console, say), 0
    if rank == 0:
        with contextlib.redirect_stdout(console):
            code = report() or 0
    distributed.barrier()  # all ranks read the files of rank 0 afterwards
    distributed.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
