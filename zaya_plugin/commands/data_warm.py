# SPDX-License-Identifier: Apache-2.0
"""`zaya data warm`: the options of reading data into the page cache."""

from zaya_plugin.commands.datasets import data_parser, recipe_of
from zaya_plugin.commands.parser import Parser, option
from zaya_plugin.corpus.warm import warm
from zaya_plugin.ground.option_numbers import MOST_RANKS, MOST_STEPS, size, whole_number

DESCRIPTION = """\
Read data into the page cache of this node: whole datasets, or the samples that a run draws in its next steps.

A run is given as for zaya train; datasets, sequence length, batch, seed, order, layout and nodes are its recipe's."""
EXAMPLES = """\
examples:
  zaya data warm data/web                                                   # all of its training data
  # the samples of the next 2,000 steps of a run, from its last checkpoint on (from its start, if it has none)
  zaya data warm experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web --steps 2000
  # of these the samples of node 5; on all: srun --ntasks-per-node=1 sh -c 'zaya data warm ... --node $SLURM_NODEID'
  zaya data warm experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web --from-step 2000 --steps 2000 --node 5"""


def parser() -> Parser:
    return data_parser(
        "warm",
        lambda options, _: warm(options, recipe_of(options)),
        DESCRIPTION,
        EXAMPLES,
        option(
            "--max-bytes", type=size, metavar="SIZE", help="read no more than this (default: 80 %% of the free memory)"
        ),
        option("--dry-run", action="store_true", help="print the size of the data, and stop"),
        option(
            "--steps",
            type=whole_number(1, MOST_STEPS),
            metavar="N",
            help="read the samples of N steps (default: all data)",
            group="with a recipe",
        ),
        option(
            "--from-step",
            type=whole_number(0, MOST_STEPS),
            metavar="N",
            help="steps already done (default: those of the last checkpoint in run_dir, else 0)",
            group="with a recipe",
        ),
        option(
            "--node",
            type=whole_number(0, MOST_RANKS),
            metavar="N",
            help="read for this node, from 0 (default: for all cluster.num_nodes)",
            group="with a recipe",
        ),
        datasets="datasets (directory or prefix) to read whole",
    )
