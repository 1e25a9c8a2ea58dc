# SPDX-License-Identifier: Apache-2.0
"""`zaya bench step`: a recipe's speed by part of the step, measured. No torch import."""

from __future__ import annotations

import argparse
from dataclasses import fields

from zaya_plugin.bench.options import ANCHORS, VOCABULARY, Options
from zaya_plugin.commands.parser import Parser, option
from zaya_plugin.config.train_help import DEMO_DATA
from zaya_plugin.ground.option_numbers import INT32, MOST_STEPS, whole_number

STEP = """\
Measures a few steps of a recipe in the loop of `zaya train`.

After a warm-up, steps are timed without a profiler; one further step is traced. The report divides the traced step's
time among attention prologue, attention, projections, router, experts, norms, head and loss, embedding, gradient
buffers, optimizer, exposed communication and idle, and compares each with the matrix-product and copy rates of the same
device. No checkpoint is saved; W&B runs offline."""
STEP_EXAMPLES = f"""\
examples:
  zaya bench step experiment=cpu_demo                          the demo on this machine's CPU, after:
    {DEMO_DATA}
  zaya bench step experiment=zaya1_base cluster=gpu --random-tokens nproc=1 model.num_layers=8 \\
    stage.global_batch_size=4 stage.micro_batch_size=4
  zaya bench step experiment=zaya1_base cluster=h200_8 --random-tokens --anchor transformers \\
    stage.micro_batch_size=4 stage.global_batch_size=128
  torchrun --nnodes 2 ... -m zaya_plugin.cli bench step ...    several nodes; or: srun zaya bench step ..."""


def step() -> Parser:
    return Parser(
        "bench step",
        _step,
        STEP,
        STEP_EXAMPLES,
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
        option(
            "--anchor",
            choices=ANCHORS,
            help="then measure transformers' ZayaForCausalLM with FSDP2, torch.compile and fused AdamW on as many "
            "devices with as many tokens, in processes of its own, and print the ratio",
        ),
        option("--commit", metavar="TEXT", help="commit for the record, where there is no git checkout"),
        recipe=True,
        bare={"--random-tokens": VOCABULARY},
    )


def settings_of(options: argparse.Namespace) -> Options:
    return Options(**{field.name: getattr(options, field.name) for field in fields(Options)})


def _step(options: argparse.Namespace) -> int:
    from zaya_plugin.bench.measurement import recipe_of, run

    settings = settings_of(options)
    return run(recipe_of(settings, options.output, options.overrides), settings)
