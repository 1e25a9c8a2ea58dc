# SPDX-License-Identifier: Apache-2.0
"""`zaya data pack`: a prepared dataset into bins of whole documents, one bin a training sample.

The result is an indexed dataset whose documents are the bins, each of exactly `sequence_length` tokens, documents ended by
the end-of-document token and the rest filled with it. Megatron's own sampling, which joins documents and cuts at multiples
of the sequence length, then draws exactly one bin a sample, in any host.
"""

import argparse
import os
import shutil
from collections import Counter
from datetime import datetime, timezone

import zaya_plugin
from zaya_plugin.corpus.arguments import whole_number
from zaya_plugin.corpus.bin_writer import progress_file
from zaya_plugin.corpus.command import begin, command_parser, complete, run_command
from zaya_plugin.corpus.pack_plan import LONG, Fitting
from zaya_plugin.corpus.pack_write import write_bins
from zaya_plugin.corpus.reasoning import EARLIER_DROPPED, EARLIER_DROPPED_TAIL_CUT, TAIL_CUT, BlockFinder
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data.check import locate
from zaya_plugin.data.indexed_reader import IndexedReader
from zaya_plugin.data.manifest import Manifest, PackingRecord
from zaya_plugin.data.tokenizer import open_tokenizer

COUNTS = (
    "documents",
    "bins",
    "filling tokens",
    "loss tokens",
    "split documents",
    "pieces of split documents",
    TAIL_CUT,
    EARLIER_DROPPED,
    EARLIER_DROPPED_TAIL_CUT,
    "trimmed tokens",
    "dropped documents",
    "dropped tokens",
)
DROPPED_FILE = "dropped.jsonl"

DESCRIPTION = """\
Pack whole documents of a prepared dataset into bins of --sequence-length tokens, best fit first, one bin a training sample.

Train on the result with data.packing=documents, which keeps the documents of a bin apart; ends of documents and filling
are left out of the loss. An interrupted run continues when the same command is given again.
"""
EXAMPLES = """\
examples:
  zaya data pack data/web --sequence-length 4096 --output data/web-4k

  # chains of thought for 32K: what is too long loses the end of its reasoning, never its answer; other long documents are left out
  zaya data pack data/reasoning --sequence-length 32768 --trim-reasoning '<think>' '</think>' --long drop --output data/reasoning-32k
"""


def parser() -> argparse.ArgumentParser:
    out = command_parser("pack", DESCRIPTION, EXAMPLES)
    out.add_argument("source", metavar="DATASET", help="directory written by `zaya data prepare`")
    out.add_argument("--sequence-length", required=True, type=whole_number(2), metavar="N", help="tokens of a bin")
    out.add_argument("--output", required=True, metavar="DIR", help="directory of the packed dataset")
    out.add_argument(
        "--long",
        choices=LONG,
        default="split",
        help="a document longer than a bin: split it into bins of its own and a rest, or drop it (default: split)",
    )
    out.add_argument(
        "--trim-reasoning",
        nargs=2,
        metavar=("BEGIN", "END"),
        help="markers of reasoning: a longer document with such blocks loses the end of the last one, then the earlier ones, "
        "and is dropped if that is not enough or it has no answer",
    )
    out.add_argument("--overwrite", action="store_true", help="replace what was packed with other arguments")
    out.add_argument("--quiet", action="store_true", help="no summary; problems are still reported")
    return out


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    kept = "What is finished is kept, and the same command continues from there"
    return run_command("pack", lambda: pack(args), kept)


def pack(args: argparse.Namespace) -> None:
    """Makes the packed dataset, or finds that it is there.

    Raises:
        ValueError: the source is no prepared dataset, or the output is something else.
    """
    source, prefixes = locate(args.source)
    if source is None:
        raise ValueError(
            f"{args.source} has no manifest.json that names its tokenizer; pack what `zaya data prepare` wrote"
        )
    if source.packing is not None:
        raise ValueError(
            f"{args.source} is packed already, into bins of {source.packing.sequence_length} tokens; pack what it was made from"
        )
    if source.tokenizer.eod_id is None:
        raise ValueError(
            f"{args.source}: its tokenizer has no end-of-document token, and bins need one between documents"
        )
    plan = {
        "source": os.path.abspath(args.source),
        "sha256 of the source": {name: source.splits[name].bin_sha256 for name in prefixes},
        "--sequence-length": args.sequence_length,
        "--long": args.long,
        "--trim-reasoning": args.trim_reasoning,
        "append eod": True,
    }
    workspace = Workspace(args.output)
    with workspace.locked():
        manifest = complete(workspace, plan, args.overwrite)
        if manifest is None:
            begin(workspace, plan, args.overwrite)
            manifest = _build(workspace, plan, source, prefixes, args)
            workspace.publish()
    if not args.quiet:
        print(summary(workspace.output, manifest))


def _build(workspace: Workspace, plan: dict, source: Manifest, prefixes: dict[str, str], args) -> Manifest:
    os.makedirs(workspace.final, exist_ok=True)
    home = os.path.join(os.path.dirname(next(iter(prefixes.values()))), "tokenizer")
    finder = BlockFinder(open_tokenizer(home), *args.trim_reasoning) if args.trim_reasoning else None
    fitting = Fitting(args.sequence_length, source.tokenizer.eod_id, args.long, finder)
    splits, counts = {}, {}
    with open(os.path.join(workspace.final, DROPPED_FILE), "w", encoding="ascii") as dropped:
        for name, prefix in prefixes.items():
            counted, target = Counter(), os.path.join(workspace.final, name)
            splits[name] = write_bins(
                IndexedReader(prefix), target, fitting, counted, dropped, source.tokenizer.vocab_size
            )
            counts[name] = {key: counted[key] for key in COUNTS}
    target = os.path.join(workspace.final, "tokenizer")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(home, target)
    for name in prefixes:
        os.unlink(progress_file(os.path.join(workspace.final, name)))
    manifest = Manifest(
        arguments=plan,
        tokenizer=source.tokenizer,
        dtype=source.dtype,
        splits=splits,
        documents=source.documents,
        input_files=source.input_files,
        input_bytes=source.input_bytes,
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        zaya_plugin_version=zaya_plugin.__version__,
        tokenizers_version=source.tokenizers_version,
        packing=PackingRecord(args.sequence_length, counts),
    )
    manifest.write(workspace.final)
    return manifest


def summary(output: str, manifest: Manifest) -> str:
    """What is in the bins, what was lost on the way, and how full they are."""
    length = manifest.packing.sequence_length
    lines = [f"{output}: bins of {length:,} tokens"]
    for name, counts in manifest.packing.counts.items():
        tokens = counts["bins"] * length
        fill, trained = 1 - counts["filling tokens"] / tokens, counts["loss tokens"] / tokens
        lines.append(
            f"  {name:5} {counts['documents']:9,} documents in {counts['bins']:,} bins: {100 * fill:.2f} % full, "
            f"{100 * trained:.2f} % of the positions in the loss"
        )
        if counts["split documents"]:
            lines.append(
                f"        {counts['split documents']:,} too long: split into {counts['pieces of split documents']:,} pieces"
            )
        if counts["trimmed tokens"]:
            kinds = ", ".join(f"{key} {counts[key]:,}" for key in (TAIL_CUT, EARLIER_DROPPED, EARLIER_DROPPED_TAIL_CUT))
            lines.append(f"        trimmed by {counts['trimmed tokens']:,} tokens: {kinds}")
        if counts["dropped documents"]:
            lines.append(
                f"        dropped {counts['dropped documents']:,} documents, {counts['dropped tokens']:,} tokens, see {DROPPED_FILE}"
            )
    return "\n".join(lines)
