# SPDX-License-Identifier: Apache-2.0
"""`zaya data bundle`: many small shards into one large dataset, whose reads are sequential and whose files are few.

Documents keep their order, shard after shard. What a planned run then asks of the storage is printed, see read_model.py.
"""

import argparse
import os
import shutil
from collections import Counter
from datetime import datetime, timezone

import numpy as np

import zaya_plugin
from zaya_plugin.corpus.arguments import whole_number
from zaya_plugin.corpus.bin_writer import BinWriter, progress_file
from zaya_plugin.corpus.command import begin, command_parser, complete, run_command
from zaya_plugin.corpus.read_model import PlannedRun, report
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data.check import locate
from zaya_plugin.data.indexed_reader import IndexedReader
from zaya_plugin.data.manifest import Manifest, load_manifest

COPIED_TOKENS = 4_000_000  # at a time

DESCRIPTION = """\
Join datasets that were prepared with the same tokenizer into one, documents in the given order, and print how many random
reads a planned run asks of the storage, before and after packing. An interrupted run continues when the same command is
given again.
"""
EXAMPLES = """\
examples:
  zaya data bundle data/shard-* --output data/web
  # only the numbers, for ZAYA1's own run
  zaya data bundle data/shard-* --dry-run --sequence-length 4096 --global-batch-size 4096 --step-seconds 2.5 --iops-budget 70000
"""


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def parser() -> argparse.ArgumentParser:
    out, planned = command_parser("bundle", DESCRIPTION, EXAMPLES), PlannedRun()
    out.add_argument(
        "sources", nargs="+", metavar="DATASET", help="directories written by `zaya data prepare` or `zaya data pack`"
    )
    target = out.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", metavar="DIR", help="directory of the bundle")
    target.add_argument("--dry-run", action="store_true", help="write nothing, print the reads of the planned run")
    out.add_argument("--overwrite", action="store_true", help="replace what was bundled from other shards")
    out.add_argument("--quiet", action="store_true", help="no summary; problems are still reported")
    run = out.add_argument_group("planned run (the defaults are ZAYA1's stage 1)")
    run.add_argument("--sequence-length", type=whole_number(1), default=planned.sequence_length, metavar="N")
    run.add_argument("--global-batch-size", type=whole_number(1), default=planned.global_batch_size, metavar="N")
    run.add_argument("--step-seconds", type=_positive, default=planned.step_seconds, metavar="S")
    run.add_argument(
        "--iops-budget", type=_positive, default=planned.iops_budget, metavar="N", help="reads/s of the storage"
    )
    run.add_argument("--page-bytes", type=whole_number(512), default=planned.page_bytes, metavar="N")
    return out


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    return run_command(
        "bundle", lambda: bundle(args), "What is finished is kept, and the same command continues from there"
    )


def bundle(args: argparse.Namespace) -> None:
    """Makes the bundle, or finds that it is there, and prints the reads of the planned run."""
    shards = [_shard(path) for path in args.sources]
    _refuse_mixture(args.sources, shards)
    if args.output:
        plan = {
            "shards": [[split.bin_sha256 for split in shard.splits.values()] for shard in shards],
            "append eod": shards[0].arguments["append eod"],
        }
        workspace = Workspace(args.output)
        with workspace.locked():
            manifest = complete(workspace, plan, args.overwrite)
            if manifest is None:
                begin(workspace, plan, args.overwrite)
                manifest = _build(workspace, plan, args.sources, shards)
                workspace.publish()
        if not args.quiet:
            print(f"{workspace.output}: {len(shards)} shards")
            for name, split in manifest.splits.items():
                print(
                    f"  {name:5} {split.documents:9,} documents {split.tokens:13,} tokens, {split.bin_bytes / 1e6:,.1f} MB in one file"
                )
    if not args.quiet:
        print(planned_reads(args, shards))


def _shard(path: str) -> Manifest:
    manifest, prefixes = locate(path)
    if manifest is None or set(prefixes) != set(manifest.splits):
        raise ValueError(f"{path} is not a directory of `zaya data prepare` or `zaya data pack`; give those, whole")
    return manifest


def _refuse_mixture(paths: list[str], shards: list[Manifest]) -> None:
    first = shards[0]
    facts = {
        "tokenizer": lambda shard: shard.tokenizer.sha256,
        "token type": lambda shard: shard.dtype,
        "splits": lambda shard: list(shard.splits),
        "end of documents": lambda shard: shard.arguments["append eod"],
        "length of bins": lambda shard: shard.packing and shard.packing.sequence_length,
    }
    for path, shard in zip(paths, shards, strict=True):
        for name, fact in facts.items():
            if fact(shard) != fact(first):
                raise ValueError(
                    f"{path} and {paths[0]} differ in {name} ({fact(shard)!r} and {fact(first)!r}) and cannot be one dataset"
                )
    seen: dict[str, str] = {}
    for path in map(os.path.realpath, paths):
        if path in seen:
            raise ValueError(f"{path} is named twice; every document would count double")
        seen[path] = path


def _build(workspace: Workspace, plan: dict, paths: list[str], shards: list[Manifest]) -> Manifest:
    os.makedirs(workspace.final, exist_ok=True)
    first, splits = shards[0], {}
    dtype = np.dtype(first.dtype)
    for name in first.splits:
        writer, lengths = BinWriter(os.path.join(workspace.final, name), dtype, first.tokenizer.vocab_size), []
        for path in paths:
            reader = IndexedReader(os.path.join(path, name))
            for begin_at in range(0, reader.indexed.tokens, COPIED_TOKENS):
                writer.write(np.ascontiguousarray(reader.stream[begin_at : begin_at + COPIED_TOKENS]))
            lengths.append(reader.lengths.astype(np.int32))
        filling = sum(shard.packing.counts[name]["filling tokens"] for shard in shards if shard.packing)
        splits[name] = writer.finish(np.concatenate(lengths), {first.tokenizer.eod_id: filling} if filling else None)
    target = os.path.join(workspace.final, "tokenizer")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(os.path.join(paths[0], "tokenizer"), target)
    for name in splits:
        os.unlink(progress_file(os.path.join(workspace.final, name)))
    packing = None
    if first.packing is not None:
        counts = {name: sum((Counter(shard.packing.counts[name]) for shard in shards), Counter()) for name in splits}
        keys = first.packing.counts[next(iter(splits))]
        packing = type(first.packing)(
            first.packing.sequence_length, {name: {key: count[key] for key in keys} for name, count in counts.items()}
        )
    manifest = Manifest(
        arguments=plan,
        tokenizer=first.tokenizer,
        dtype=first.dtype,
        splits=splits,
        documents={key: sum(shard.documents.get(key, 0) for shard in shards) for key in first.documents},
        input_files=sum(shard.input_files for shard in shards),
        input_bytes=sum(shard.input_bytes for shard in shards),
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        zaya_plugin_version=zaya_plugin.__version__,
        tokenizers_version=first.tokenizers_version,
        packing=packing,
    )
    manifest.write(workspace.final)
    return load_manifest(workspace.final)


def planned_reads(args: argparse.Namespace, shards: list[Manifest]) -> str:
    """The table of read_model.py for the training split as it is, and as `zaya data pack` would make it."""
    run = PlannedRun(args.sequence_length, args.global_batch_size, args.step_seconds, args.iops_budget, args.page_bytes)
    name = next(iter(shards[0].splits))
    tokens = sum(shard.splits[name].tokens for shard in shards)
    documents = sum(shard.splits[name].documents for shard in shards)
    size = np.dtype(shards[0].dtype).itemsize
    if shards[0].packing is not None:
        return report(run, [("packed bins", tokens, documents, size, True)])
    return report(
        run,
        [
            ("documents in random order", tokens, documents, size, False),
            ("packed into bins", tokens, documents, size, True),
        ],
    )
