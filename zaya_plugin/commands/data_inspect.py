# SPDX-License-Identifier: Apache-2.0
"""`zaya data inspect`: the options of printing decoded samples."""

from zaya_plugin.commands.datasets import data_parser, recipe_of
from zaya_plugin.commands.parser import TOKENIZER, Parser, option
from zaya_plugin.corpus.inspect import inspect
from zaya_plugin.ground.option_numbers import MOST_AMOUNT, whole_number

DESCRIPTION = """\
Show decoded samples with their source, length and loss mask: the documents of a dataset, the bins of a packed one, or
the training samples of a run, which is given as for zaya train."""
EXAMPLES = """\
examples:
  zaya data inspect data/web                                  # the first documents
  zaya data inspect data/web --split valid --start 40 --count 1 --characters 0
  zaya data inspect data/web-4k                               # a packed dataset: its bins
  zaya data inspect experiment=zaya1_base data.path=data/web "data.blend=['0.7 data/web','0.3 data/code']" --start \\
      16384 --json"""


def parser() -> Parser:
    return data_parser(
        "inspect",
        lambda options, _: inspect(options, recipe_of(options)),
        DESCRIPTION,
        EXAMPLES,
        option("--split", choices=("train", "valid"), help="of a prepared directory (default: train)"),
        option(
            "--start",
            type=whole_number(0, MOST_AMOUNT),
            default=0,
            metavar="N",
            help="number of the first sample (default: 0)",
        ),
        option(
            "--count", type=whole_number(1, MOST_AMOUNT), default=3, metavar="N", help="number of samples (default: 3)"
        ),
        option(
            "--characters",
            type=whole_number(0, MOST_AMOUNT),
            default=800,
            metavar="N",
            help="of each text, 0 for all (default: 800)",
        ),
        TOKENIZER,
        option("--json", action="store_true", help="print a JSON object a line, with the whole text"),
        datasets="one dataset (directory or prefix)",
    )
