# SPDX-License-Identifier: Apache-2.0
"""`zaya data bundle`: the options of joining datasets, and of the planned run that reads them."""

import argparse

from zaya_plugin.commands.datasets import data_parser
from zaya_plugin.commands.parser import QUIET, Option, Parser, option
from zaya_plugin.corpus.bundle import PlannedRun, bundle
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import INT32, MOST_AMOUNT, MOST_TOKENS, YEAR, real_number, whole_number

DESCRIPTION = """\
Join datasets that were prepared with the same tokenizer into one, documents in the given order, and print how many
random reads a planned run asks of the storage, before and after packing. An interrupted run leaves nothing in the way
of the same command.

Reads of a run that finds nothing in a cache (arXiv 2605.05365, appendix B): reads/s = sigma G s b / (P t) with sigma =
1 + m P / (s b), the pages read over the pages needed, since each stretch touches about one page more than its bytes fill.
G, s, P and t are --global-batch-size, --sequence-length, --page-bytes and --step-seconds; b, the bytes of a token, and m,
the stretches of a sequence in the file (1 + s / mean tokens of a document, 1 in packed bins), are the dataset's. Tokens
of 4 bytes and sigma 1 give the report's 6,554 reads/s. "of budget" is reads/s over --iops-budget; "least step" is the
step time at which the reads need the whole budget."""
EXAMPLES = """\
examples:
  zaya data bundle data/shard-* --output data/web
  # only the numbers, for ZAYA1's own run
  zaya data bundle data/shard-* --dry-run --sequence-length 4096 --global-batch-size 4096 --step-seconds 2.5 \\
      --iops-budget 70000"""


def parser() -> Parser:
    planned = PlannedRun()

    def of_run(name: str, kind, metavar: str, meaning: str) -> Option:
        default = getattr(planned, name[2:].replace("-", "_"))
        group, meaning = "planned run (the defaults are ZAYA1's stage 1)", f"{meaning} (default: {default:g})"
        return option(name, type=kind, default=default, metavar=metavar, help=meaning, group=group)

    return data_parser(
        "bundle",
        _bundle,
        DESCRIPTION,
        EXAMPLES,
        option(
            "sources",
            nargs="+",
            metavar="DATASET",
            help="directories written by `zaya data prepare` or `zaya data pack`",
        ),
        option("--output", metavar="DIR", help="directory of the bundle"),
        option("--dry-run", action="store_true", help="write nothing, print the reads of the planned run"),
        option("--overwrite", action="store_true", help="make the bundle again in place of what --output holds"),
        QUIET,
        of_run("--sequence-length", whole_number(1, MOST_TOKENS), "N", "tokens of a sequence, stage.seq_length"),
        of_run("--global-batch-size", whole_number(1, INT32), "N", "sequences of a step, stage.global_batch_size"),
        of_run("--step-seconds", real_number(1e-6, YEAR), "S", "seconds of a step"),
        of_run("--iops-budget", real_number(1e-6, MOST_AMOUNT), "N", "reads a second that the storage can serve"),
        of_run("--page-bytes", whole_number(512, 2**30), "N", "bytes of a page, which one read fetches"),
    )


def _bundle(options: argparse.Namespace, workspace: Workspace | None) -> None:
    if options.dry_run == (workspace is not None):
        raise mistake("--output", problem="one of --output and --dry-run is required", fix="--output DIR, or --dry-run")
    bundle(options, workspace)
