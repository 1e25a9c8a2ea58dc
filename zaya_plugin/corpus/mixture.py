# SPDX-License-Identifier: Apache-2.0
"""`zaya data mixture`: show tokens and epochs of each source over the stages of a run, and the ledger between them. No torch."""

import argparse

from zaya_plugin.corpus.invocation import command_parser, run_command, whole_number
from zaya_plugin.data.ledger import after, parse_ledger, report, stage_use, write_ledger

DESCRIPTION = """\
Show how many samples and tokens a stage draws from each source of its blend, how many epochs these are, and the data.consumed
of the next stage, so that with data.order=continuing no sample of a source is repeated or left out.
"""
EXAMPLES = """\
examples:
  # stage 1: 1000 steps of 64 sequences
  zaya data mixture '0.8 data/web' '0.2 data/code' --sequence-length 4096 --samples 64000
  # stage 2 with another blend, from where stage 1 stopped
  zaya data mixture '0.5 data/web' '0.5 data/math' --sequence-length 4096 --samples 16000 --consumed '209715200 data/web' \\
      --consumed '52428800 data/code'
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    out = command_parser("mixture", DESCRIPTION, EXAMPLES)
    out.add_argument(
        "sources", nargs="+", metavar="ENTRY", help="'WEIGHT DATASET' entries as in data.blend, or datasets"
    )
    out.add_argument("--sequence-length", required=True, type=whole_number(1), metavar="N", help="stage.seq_length")
    out.add_argument(
        "--samples",
        required=True,
        type=whole_number(1),
        metavar="N",
        help="of the stage: train_iters x global_batch_size",
    )
    out.add_argument(
        "--consumed", action="append", default=[], metavar="ENTRY", help="'TOKENS DATASET' of earlier stages; repeat"
    )
    out.add_argument("--seed", type=whole_number(0), default=1234, metavar="N", help="of the run (default: 1234)")
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    return run_command("mixture", lambda: mixture(args))


def mixture(args: argparse.Namespace) -> None:
    """Print the table and the ledger for the next stage."""
    ledger = parse_ledger(args.consumed)
    uses = stage_use(args.sources, args.samples, args.sequence_length, ledger, args.seed)
    print(report(uses))
    print("the next stage's data.consumed:")
    for entry in write_ledger(after(ledger, uses)):
        print(f"  {entry}")
