# SPDX-License-Identifier: Apache-2.0
"""`zaya data pack`: the options of putting whole documents into bins."""

from zaya_plugin.commands.datasets import data_parser
from zaya_plugin.commands.parser import QUIET, Parser, option
from zaya_plugin.corpus.pack import LONGEST_BIN, pack
from zaya_plugin.ground.option_numbers import whole_number

DESCRIPTION = """\
Pack whole documents of a prepared dataset into bins of --sequence-length tokens, best fit first, one bin a training
sample.

Train on the result with data.packing=documents, which keeps the documents of a bin apart; ends of documents and filling
are left out of the loss. An interrupted run leaves nothing in the way of the same command."""
EXAMPLES = """\
examples:
  zaya data pack data/web --sequence-length 4096 --output data/web-4k

  # chains of thought for 32K: one that is too long loses the end of its reasoning, never its answer; other long
  # documents are dropped
  zaya data pack data/reasoning --sequence-length 32768 --trim-reasoning '<think>' '</think>' --long drop \\
      --output data/reasoning-32k"""


def parser() -> Parser:
    return data_parser(
        "pack",
        pack,
        DESCRIPTION,
        EXAMPLES,
        option("source", metavar="DATASET", help="directory written by `zaya data prepare`"),
        option(
            "--sequence-length",
            required=True,
            type=whole_number(2, LONGEST_BIN),
            metavar="N",
            help=f"tokens of a bin, at most {LONGEST_BIN:,}",
        ),
        option("--output", required=True, metavar="DIR", help="directory of the packed dataset"),
        option(
            "--long",
            choices=("split", "drop"),
            help="a document longer than a bin: split it into bins of its own and a rest, or drop it (default: split; "
            "chats are dropped)",
        ),
        option(
            "--trim-reasoning",
            nargs=2,
            metavar=("BEGIN", "END"),
            help="markers of reasoning: a longer document with such blocks loses the end of the last one, then the "
            "earlier ones, and is dropped if that is not enough or it has no answer",
        ),
        option("--overwrite", action="store_true", help="make the dataset again in place of what --output holds"),
        QUIET,
    )
