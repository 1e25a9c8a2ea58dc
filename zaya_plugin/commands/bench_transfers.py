# SPDX-License-Identifier: Apache-2.0
"""`zaya bench collectives|storage|data`: rates of what a step waits for besides its own computation. No torch import."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from zaya_plugin.bench.collectives import OPERATIONS
from zaya_plugin.bench.options import Options as StepOptions
from zaya_plugin.bench.options import with_data_path
from zaya_plugin.commands.bench_rates import COMMIT, OUTPUT
from zaya_plugin.commands.parser import Parser, option
from zaya_plugin.config.train_help import DEMO_DATA
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import DAY, MOST_RANKS, MOST_STEPS, message_size, real_number, whole_number

COLLECTIVES = """\
Measures all-reduce, reduce-scatter, all-gather, broadcast and all-to-all over groups of every size, and checks every
element.

The command starts the ranks, one for each device (two on a CPU), or joins those of torchrun or srun; on several nodes
groups of whole nodes and of one rank a node are measured too. Without cluster=<name> the recipe is that of this
machine's devices. The result ends with the size from which each collective is fast, and with the size of gradient
buckets and the number of optimizer instances that follow; parallel.bucket_plan=<its collectives.json> applies them."""
COLLECTIVES_EXAMPLES = """\
examples:
  zaya bench collectives                                           all devices of this machine
  zaya bench collectives --op reduce_scatter --op all_gather --group 4 --max-bytes 1G cluster=h200_8 nproc=4
  zaya bench collectives cluster=cpu nproc=4 --max-bytes 64K       four processes over gloo
  zaya bench collectives cluster=mi300x_8 --table runs/rccl.csv    also a table with the columns of Primus
  srun zaya bench collectives cluster=mi300x_128x8 ...             several nodes; or torchrun --nnodes 2 ... -m
                                                                   zaya_plugin.cli bench collectives ...
  zaya train experiment=zaya1_base cluster=h200_8 data.path=data/corpus \\
    parallel.bucket_plan=runs/bench/collectives.json"""
STORAGE = """\
Measures the file system of a folder: a sequential write with fsync, reading it back, random reads of 4 KiB by 1 to 32
threads, and random writes of 4 KiB with an fsync each. It names the network interface behind the path, with a warning
where that is the training network.

The file has no name and ends with the command, also if it is killed. This machine's page cache is dropped before reads;
caches of servers, controllers and drives are not."""
STORAGE_EXAMPLES = """\
examples:
  zaya bench storage data                            where the data is
  zaya bench storage runs --size 8G --seconds 5      where checkpoints go, with a larger file
  srun --ntasks-per-node=1 sh -c 'zaya bench storage /shared/runs --output bench-$SLURM_NODEID'"""
DATA = """\
Reads micro-batches with the loader of a recipe's training, on every rank and with its workers (data.num_workers), without
a model: batches and tokens a second, the wait for the first batch, and the time for the data of a step."""
DATA_EXAMPLES = f"""\
examples:
  zaya bench data experiment=cpu_demo                              the demo's data, after:
    {DEMO_DATA}
  zaya bench data experiment=zaya1_base cluster=mi300x_8 data.path=data/corpus data.num_workers=2 --batches 500
  torchrun --nnodes 2 ... -m zaya_plugin.cli bench data ...        several nodes; or: srun zaya bench data ..."""
# Another process looks for devices: this one must not hold memory of a device while ranks use it.
DEVICES = """\
import json, torch
from zaya_plugin.bench.results import device_name
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([device_name(torch.device("cuda", 0)) if count else "", count]))
"""


def collectives() -> Parser:
    return Parser(
        "bench collectives",
        _collectives,
        COLLECTIVES,
        COLLECTIVES_EXAMPLES,
        option(
            "--min-bytes",
            dest="least",
            type=message_size,
            default=1024,
            metavar="SIZE",
            help="smallest size (1K = 1024)",
        ),
        option(
            "--max-bytes",
            dest="most",
            type=message_size,
            default=0,
            metavar="SIZE",
            help="largest size (8G; 4M on a CPU); the devices' free memory bounds it",
        ),
        option("--factor", type=whole_number(2, 1024), default=2, metavar="N", help="from one size to the next (2)"),
        option("--op", action="append", choices=OPERATIONS, help="this collective, once or several times (all)"),
        option(
            "--group",
            type=whole_number(1, MOST_RANKS),
            action="append",
            metavar="RANKS",
            help="groups of this many ranks, once or several times (all that divide a node, and whole nodes)",
        ),
        option("--table", metavar="FILE", help="also write the columns of Primus, as .md, .csv or .jsonl"),
        OUTPUT,
        COMMIT,
        recipe=True,
    )


def _collectives(options: argparse.Namespace) -> int:
    from zaya_plugin.bench.measurement import run_collectives
    from zaya_plugin.config.compose import compose

    least, most = options.least, options.most
    if most and most < least:
        raise mistake("--max-bytes", most, problem=f"is less than --min-bytes {least}", allowed=f"{least} or more")
    words = options.overrides
    if not any(word.startswith("cluster=") for word in words):
        words = [*of_this_machine(), *words]
    keys = ("least", "most", "factor", "op", "group", "table", "command", "commit")
    recipe = compose(with_data_path([*words, f"run_dir={options.output}"]))
    return run_collectives(recipe, {key: getattr(options, key) for key in keys})


def of_this_machine() -> list[str]:
    """Return the words of a recipe for this machine's devices."""
    from zaya_plugin.plan.known_machine import recipe_of

    done = subprocess.run([sys.executable, "-c", DEVICES], stdout=subprocess.PIPE, text=True, check=True)
    name, devices = json.loads(done.stdout.splitlines()[-1])
    return [f"cluster={recipe_of(name).cluster.name}", f"nproc={devices}"] if devices else ["cluster=cpu", "nproc=2"]


def storage() -> Parser:
    return Parser(
        "bench storage",
        _storage,
        STORAGE,
        STORAGE_EXAMPLES,
        option("path", type=Path, metavar="PATH", help="a folder of the file system to measure"),
        option("--size", type=message_size, default=2**30, metavar="SIZE", help="size of the file (1G = 1 GiB)"),
        option(
            "--seconds",
            type=real_number(0.01, DAY),
            default=1.0,
            metavar="S",
            help="time of each kind of random access (1)",
        ),
        OUTPUT,
        COMMIT,
    )


def _storage(options: argparse.Namespace) -> None:
    from zaya_plugin.bench.storage import BLOCK, run

    if options.size < BLOCK:
        raise mistake("--size", options.size, problem="is too small to measure", allowed="1M or more")

    run(options.path, options.size, options.seconds, options.output, options.command, options.commit)


def data() -> Parser:
    return Parser(
        "bench data",
        _data,
        DATA,
        DATA_EXAMPLES,
        option(
            "--batches",
            type=whole_number(1, MOST_STEPS),
            default=200,
            metavar="N",
            help="micro-batches that each rank reads after the first (200)",
        ),
        option("--output", metavar="DIR", help="folder of data.json, its picture and the logs (<run_dir>/bench)"),
        COMMIT,
        recipe=True,
    )


def _data(options: argparse.Namespace) -> int:
    from zaya_plugin.bench.measurement import recipe_of, run_loader

    steps = StepOptions(steps=options.batches + 1)  # a step has one micro-batch or more
    keys = ("batches", "command", "commit")
    recipe = recipe_of(steps, options.output, options.overrides)
    return run_loader(recipe, {key: getattr(options, key) for key in keys})
