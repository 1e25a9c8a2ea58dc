# SPDX-License-Identifier: Apache-2.0
"""`zaya data mixture`: the samples that a stage draws from each source of its blend,
and its ledger for the next stage.
"""

import argparse

from zaya_plugin.commands.datasets import data_parser, recipe_of
from zaya_plugin.commands.parser import Parser
from zaya_plugin.data.ledger import report
from zaya_plugin.handover.data_places import consumed_after, source_uses

DESCRIPTION = """\
Show how many samples and tokens a stage draws from each source of its blend, how many epochs these are, and the
data.consumed of the next stage, so that with data.order=continuing no sample of a source is repeated or left out.

The stage is given as for zaya train: data.blend, stage.seq_length, stage.train_iters, stage.global_batch_size,
data.consumed."""
EXAMPLES = """\
examples:
  # stage 1: 1000 steps of 64 sequences
  zaya data mixture experiment=zaya1_base data.path=data/web "data.blend=['0.8 data/web','0.2 data/code']" \\
      stage.train_iters=1000 stage.global_batch_size=64 data.order=continuing
  # stage 2 with another blend, from where stage 1 stopped
  zaya data mixture experiment=zaya1_base data.path=data/web "data.blend=['0.5 data/web','0.5 data/math']" \\
      stage.train_iters=250 stage.global_batch_size=64 data.order=continuing \\
      "data.consumed=['209715200 data/web','52428800 data/code']"
"""


def parser() -> Parser:
    return data_parser("mixture", _mixture, DESCRIPTION, EXAMPLES, recipe=True)


def _mixture(options: argparse.Namespace, _: None) -> None:
    """Print the table and the ledger for the next stage."""
    recipe = recipe_of(options)
    print(report(source_uses(recipe)))
    print("\n  ".join(["the next stage's data.consumed:", *consumed_after(recipe)]))
