# SPDX-License-Identifier: Apache-2.0
"""`zaya bench`: a recipe's speed by part of the step; rates of memory, matrix products, collectives, storage and a
recipe's loader. No torch import.
"""

import argparse
import importlib
import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

from zaya_plugin.bench import measurement
from zaya_plugin.bench.collectives import OPERATIONS
from zaya_plugin.bench.options import VOCABULARY, Options, with_data_path
from zaya_plugin.commands.parser import command, option
from zaya_plugin.config.run_directory import check_creatable
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import (
    DAY,
    INT32,
    MOST_RANKS,
    MOST_STEPS,
    MOST_TOKENS,
    message_size,
    real_number,
    whole_number,
)
from zaya_plugin.ground.whole_file import check_ending

TABLES = (".md", ".csv", ".jsonl")  # of --table
OUTPUT = option(
    "--output", type=Path, default=Path("runs/bench"), metavar="DIR", help="folder of the JSON and PNG (runs/bench)"
)
COUNT = whole_number(1, MOST_TOKENS)
COMMIT = option("--commit", metavar="TEXT", help="commit for the record, where there is no git checkout")

# Another process looks for devices: this one must not hold memory of a device while ranks use it.
DEVICES = """\
import json, torch
from zaya_plugin.bench.results import device_name
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([device_name(torch.device("cuda", 0)) if count else "", count]))
"""


def settings_of(options: argparse.Namespace) -> Options:
    return Options(**{field.name: getattr(options, field.name) for field in fields(Options)})


@command(
    "bench step",
    option("--steps", type=whole_number(1, MOST_STEPS), default=5, metavar="N", help="timed steps (5)"),
    option(
        "--warmup",
        type=whole_number(1, MOST_STEPS),
        default=3,
        metavar="N",
        help="steps before them (3): compilation, allocation, self-checks",
    ),
    option("--output", metavar="DIR", help="folder of step.json, step.png and the trace (<run_dir>/bench)"),
    option(
        "--trace",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the trace, trace.json.gz, for ui.perfetto.dev (default), or delete it after the report",
    ),
    option(
        "--forward-backward-only",
        dest="optimizer",
        action="store_false",
        help="no optimizer: neither its memory nor its step; ZeRO's communication stays",
    ),
    option(
        "--random-tokens",
        type=whole_number(2, INT32),
        default=0,
        metavar="ROWS",
        help=f"random tokens in place of a corpus: --random-tokens for a vocabulary of {VOCABULARY} rows, or "
        "--random-tokens=ROWS",
    ),
    COMMIT,
    recipe=True,
    bare={"--random-tokens": VOCABULARY},
)
def step(options: argparse.Namespace) -> int:
    """Measures a few steps of a recipe in the loop of `zaya train`.

    After a warm-up, steps are timed without a profiler; one further step is traced. The report divides the traced
    step's time among attention prologue, attention, projections, router, experts, norms, head and loss, embedding,
    gradient buffers, optimizer, exposed communication and idle, and compares each with the matrix-product and copy
    rates of the same device. No checkpoint is saved; W&B runs offline.

    Columns: ms and share are of the traced step on rank 0, and the rows add up to the step. Forward and backward: the
    time outside and inside nodes of the backward pass; recomputed activations count as backward. TFLOP and GB:
    operations of rank 0 and the least bytes that it moves, by the formulas of predictions; every operand of every
    product and pass counts once, so a working set that stays in the cache can exceed 100 %; of the optimizer, those of
    the busiest rank. GEMM and copy: these against the measured rates. Roofline: the larger of the two; parts far below
    100 % in both have another limit: small matrices, many small kernels, waves that do not fill the device.

    Rows: a part is a range around the model's methods, which exists only while a step is traced; a kernel of the
    backward pass belongs to the operator whose gradient it computes. Projections: the input projections and the output
    projection of attention, and attention's work outside its other rows. Attention prologue: convolutions, q-k mean and
    norm, value shift, RoPE and its tables. Experts: sort, permute, grouped products, SwiGLU, unpermute, and gradients
    that its own kernels add to the fp32 buffer. Head and loss: the tied head's products forward and backward, and
    cross-entropy. Gradient buffers: zeroing, passes that add gradients to the fp32 buffer, scaling by the number of
    tokens. Exposed communication: only communication runs; a collective waits for the slowest rank, so this includes
    imbalance. Idle: no kernel runs; the host is late, or waits. The profiler slows the host down, so the traced step
    has more of it than the others.

    examples:
      zaya bench step experiment=cpu_demo                          the demo on this machine's CPU, after:
        zaya data prepare --input stdlib --output data/stdlib --train-bpe 2048 --valid-fraction 0.1
      zaya bench step experiment=zaya1_base cluster=gpu --random-tokens nproc=1 model.num_layers=8 \\
        stage.global_batch_size=4 stage.micro_batch_size=4
      torchrun --nnodes 2 ... -m zaya_plugin.cli bench step ...    several nodes; or: srun zaya bench step ...
    """
    settings = settings_of(options)
    return measurement.run(
        measurement.recipe_of(settings, options.output, options.overrides), "step_rank", asdict(settings)
    )


def _measured(name: str, options: argparse.Namespace) -> int:
    """Run the measurement of the command in its module of zaya_plugin/bench, which may import torch."""
    check_creatable(options.output, "--output")
    return importlib.import_module(f"zaya_plugin.bench.{name}").run(options)


@command(
    "bench hbm",
    option(
        "--max-bytes", type=message_size, metavar="SIZE", help="of the largest arrays (default: 4 GiB, on a CPU 64 MiB)"
    ),
    OUTPUT,
    COMMIT,
)
def hbm(options: argparse.Namespace) -> int:
    """Measures the bandwidth of a device's memory: BabelStream's copy, scale, add and triad over fp32 arrays of growing
    size.

    Every array that is read or written counts once. Every result is checked. Shares are of the copy rate in the recipe
    that names the device (machine.copy_tb_per_s) and of the vendor's data sheet. Without an accelerator the CPU's
    memory is measured, without shares. Exit code 1: a result is wrong.

    examples:
      zaya bench hbm                                      the first accelerator, arrays of 64 KiB to 4 GiB
      CUDA_VISIBLE_DEVICES=3 zaya bench hbm --output /shared/bench
      zaya bench hbm --max-bytes 16M                      quick, in the caches
    """
    return _measured("hbm", options)


@command("bench gemm", OUTPUT, COMMIT, recipe=True)
def gemm(options: argparse.Namespace) -> int:
    """Measures the matrix products of a recipe with the sizes and layouts of its layout and micro-batch: forward,
    dgrad, wgrad, and the products of Newton-Schulz (as whole products; training computes one triangle of the symmetric
    ones).

    Next to each product it measures the sizes rounded up to multiples of 64, 128 and 256, where they differ. Square
    products of growing size show at how many operations the device is saturated. Shares are of the large product, which
    `zaya verify` measures too. Every result is checked. Exit code 1: a result is wrong.

    examples:
      zaya bench gemm experiment=zaya1_base cluster=gpu stage.micro_batch_size=4
      zaya bench gemm experiment=zaya1_base cluster=gpu model.moe_ffn_hidden_size=4000     what a better size gives
      zaya bench gemm experiment=cpu_demo        on this machine's CPU, with the vocabulary of its data:
        zaya data prepare --input stdlib --output data/stdlib --train-bpe 2048 --valid-fraction 0.1
    """
    return _measured("gemm", options)


@command(
    "bench mlp",
    option("--hidden", type=COUNT, metavar="N", help="inputs and outputs of an MLP (8192, on a CPU 128)"),
    option("--ffn", type=COUNT, metavar="N", help="channels inside an MLP (32768, on a CPU 256)"),
    option("--tokens", type=COUNT, metavar="N", help="rows of the largest measurement (8192, on a CPU 128)"),
    option("--layers", type=whole_number(1, MOST_STEPS), metavar="N", help="MLPs of the chain (4, on a CPU 2)"),
    OUTPUT,
    COMMIT,
)
def mlp(options: argparse.Namespace) -> int:
    """Measures a chain of bf16 MLPs, and compares it with 732 TFLOP/s a device: the 750 PFLOP/s that AMD published for
    1,024 MI300X (ROCm 6.4, November 2025). The sizes of that workload are not public; the defaults are large enough to
    saturate any device of today. The output and every gradient are checked. Exit code 1: a result is wrong.

    examples:
      zaya bench mlp
      zaya bench mlp --hidden 4096 --ffn 14336 --tokens 16384 --layers 8
    """
    return _measured("mlp", options)


@command("bench tune", OUTPUT, COMMIT, recipe=True)
def tune(options: argparse.Namespace) -> int:
    """Chooses the library's kernel for the matrix products of a recipe that training calls through torch (projections,
    head, the router's first layer), and writes files with which training uses them: by torch's TunableOp on every
    accelerator, and on ROCm by hipBLASLt's offline tuning too, in Primus' three stages and with its file names. Prints
    rates before and after, and the recipe keys (cluster.environment) that use the files.

    The files are for this device and these versions of torch and ROCm: elsewhere both libraries ignore them, and on a
    CPU there is nothing to tune. On CUDA, TunableOp has one candidate, torch's own choice. The ROCm part has not run on
    ROCm. Exit code 1: a result is wrong, or torch does not accept its own file.

    examples:
      zaya bench tune experiment=zaya1_base cluster=mi300x_8 --output runs/tuned
      zaya bench tune experiment=zaya1_base cluster=gpu model.num_layers=8 stage.micro_batch_size=4
    """
    return _measured("tune", options)


@command(
    "bench collectives",
    option(
        "--min-bytes", dest="least", type=message_size, default=1024, metavar="SIZE", help="smallest size (1K = 1024)"
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
    option("--table", metavar="FILE", help=f"also write the columns of Primus, as {', '.join(TABLES)}"),
    OUTPUT,
    COMMIT,
    recipe=True,
)
def collectives(options: argparse.Namespace) -> int:
    """Measures all-reduce, reduce-scatter, all-gather, broadcast and all-to-all over groups of every size, and checks
    every element.

    The command starts the ranks, one for each device (two on a CPU), or joins those of torchrun or srun; on several
    nodes groups of whole nodes and of one rank a node are measured too. Without cluster=<name> the recipe is that of
    this machine's devices. The result ends with the size from which each collective is fast, and with the size of
    gradient buckets and the number of optimizer instances that follow; parallel.bucket_plan=<its collectives.json>
    applies them.

    A row of collectives.json begins with the fields of rccl-tests' JSON. size is the larger of a rank's two buffers, so
    of an all-gather or reduce-scatter the bytes of all ranks together. time is the mean of 20 calls and all ranks in
    microseconds. busBw is algBw times 2 (n - 1) / n for all-reduce, 1 for broadcast and (n - 1) / n for the others.
    Primus' columns, which --table writes alone too, differ: bytes of an all-gather or reduce-scatter are those of one
    rank's part, and eff_gbps divides these; broadcast has the factor (n - 1) / n; Primus' times begin and end with a
    wait of the host, these are between events of the device. A percentile is of the slowest rank of each call, as
    there. Small sizes measure how fast Python launches: a call takes longer than in rccl-tests, which is C++.

    examples:
      zaya bench collectives                                           all devices of this machine
      zaya bench collectives --op reduce_scatter --op all_gather --group 4 --max-bytes 1G cluster=h200_8 nproc=4
      zaya bench collectives cluster=cpu nproc=4 --max-bytes 64K       four processes over gloo
      zaya bench collectives cluster=mi300x_8 --table runs/rccl.csv    also a table with the columns of Primus
      srun zaya bench collectives cluster=mi300x_128x8 ...             several nodes; or torchrun --nnodes 2 ... -m
                                                                       zaya_plugin.cli bench collectives ...
      zaya train experiment=zaya1_base cluster=h200_8 data.path=data/corpus \\
        parallel.bucket_plan=runs/bench/collectives.json
    """
    from zaya_plugin.config.compose import compose

    least, most = options.least, options.most
    if most and most < least:
        raise mistake("--max-bytes", most, problem=f"is less than --min-bytes {least}", allowed=f"{least} or more")
    if options.table:
        check_ending(Path(options.table), "--table", TABLES)
    words = options.overrides
    if not any(word.startswith("cluster=") for word in words):
        words = [*of_this_machine(), *words]
    keys = ("least", "most", "factor", "op", "group", "table", "command", "commit")
    recipe = compose(with_data_path([*words, f"run_dir={options.output}"]))
    return measurement.run_collectives(recipe, {key: getattr(options, key) for key in keys})


def of_this_machine() -> list[str]:
    """Return the words of a recipe for this machine's devices."""
    from zaya_plugin.plan.known_machine import recipe_of

    done = subprocess.run([sys.executable, "-c", DEVICES], stdout=subprocess.PIPE, text=True, check=True)
    name, devices = json.loads(done.stdout.splitlines()[-1])
    return [f"cluster={recipe_of(name).cluster.name}", f"nproc={devices}"] if devices else ["cluster=cpu", "nproc=2"]


@command(
    "bench storage",
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
def storage(options: argparse.Namespace) -> int:
    """Measures the file system of a folder: a sequential write with fsync, reading it back, random reads of 4 KiB by 1
    to 32 threads, and random writes of 4 KiB with an fsync each. It names the network interface behind the path, with a
    warning where that is the training network.

    The file has no name and ends with the command, also if it is killed. This machine's page cache is dropped before
    reads; caches of servers, controllers and drives are not.

    examples:
      zaya bench storage data                            where the data is
      zaya bench storage runs --size 8G --seconds 5      where checkpoints go, with a larger file
      srun --ntasks-per-node=1 sh -c 'zaya bench storage /shared/runs --output bench-$SLURM_NODEID'
    """
    return _measured("storage", options)


@command(
    "bench data",
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
def data(options: argparse.Namespace) -> int:
    """Reads micro-batches with the loader of a recipe's training, on every rank and with its workers
    (data.num_workers), without a model: batches and tokens a second, the wait for the first batch, and the time for the
    data of a step.

    examples:
      zaya bench data experiment=cpu_demo                              the demo's data, after:
        zaya data prepare --input stdlib --output data/stdlib --train-bpe 2048 --valid-fraction 0.1
      zaya bench data experiment=zaya1_base cluster=mi300x_8 data.path=data/corpus data.num_workers=2 --batches 500
      torchrun --nnodes 2 ... -m zaya_plugin.cli bench data ...        several nodes; or: srun zaya bench data ...
    """
    steps = Options(steps=options.batches + 1)  # a step has one micro-batch or more
    recipe = measurement.recipe_of(steps, options.output, options.overrides)
    return measurement.run(
        recipe, "data_rank", {key: getattr(options, key) for key in ("batches", "command", "commit")}
    )
