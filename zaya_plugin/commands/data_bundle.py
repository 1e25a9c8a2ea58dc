# SPDX-License-Identifier: Apache-2.0
"""`zaya data bundle`: the options of joining datasets, and of the planned run that reads them."""

from zaya_plugin.commands.datasets import data_parser
from zaya_plugin.commands.parser import Parser
from zaya_plugin.corpus.bundle import PlannedRun, bundle
from zaya_plugin.ground.option_numbers import INT32, MOST_AMOUNT, MOST_TOKENS, YEAR, real_number, whole_number

DESCRIPTION = """\
Join datasets that were prepared with the same tokenizer into one, documents in the given order, and print how many
random reads a planned run asks of the storage, before and after packing. An interrupted run leaves nothing in the way of
the same command."""
EXAMPLES = """\
examples:
  zaya data bundle data/shard-* --output data/web
  # only the numbers, for ZAYA1's own run
  zaya data bundle data/shard-* --dry-run --sequence-length 4096 --global-batch-size 4096 --step-seconds 2.5 \\
      --iops-budget 70000"""


def parser() -> Parser:
    out, planned = data_parser("bundle", bundle, DESCRIPTION, EXAMPLES), PlannedRun()
    out.add_argument(
        "sources", nargs="+", metavar="DATASET", help="directories written by `zaya data prepare` or `zaya data pack`"
    )
    target = out.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", metavar="DIR", help="directory of the bundle")
    target.add_argument("--dry-run", action="store_true", help="write nothing, print the reads of the planned run")
    out.add_argument("--overwrite", action="store_true", help="make the bundle again in place of what --output holds")
    out.add_argument("--quiet", action="store_true", help="no summary; problems are still reported")
    run = out.add_argument_group("planned run (the defaults are ZAYA1's stage 1)")
    for option, kind, metavar, meaning in (
        ("--sequence-length", whole_number(1, MOST_TOKENS), "N", "tokens of a sequence, stage.seq_length of the run"),
        ("--global-batch-size", whole_number(1, INT32), "N", "sequences of a step, stage.global_batch_size of the run"),
        ("--step-seconds", real_number(1e-6, YEAR), "S", "seconds of a step"),
        ("--iops-budget", real_number(1e-6, MOST_AMOUNT), "N", "reads a second that the storage can serve"),
        ("--page-bytes", whole_number(512, 2**30), "N", "bytes of a page, which one read fetches"),
    ):
        default = getattr(planned, option[2:].replace("-", "_"))
        run.add_argument(option, type=kind, default=default, metavar=metavar, help=f"{meaning} (default: {default:g})")
    return out
