# SPDX-License-Identifier: Apache-2.0
"""`zaya data bundle`: join many small shards into one dataset, with few files and sequential reads.

Documents keep their order, shard after shard. The command also prints how many random reads a planned run asks of its
storage. ZAYA1-8B technical report (arXiv 2605.05365), appendix B: IOPS = sigma G s b / (P t), with G sequences of s
tokens of b bytes each t seconds and pages of P bytes; the amplification sigma is about 1 + m P / (s b), because each of
the m stretches that a sequence is read from touches one page more than its bytes fill. sigma is 1 to 2 for well-packed
data, 2 to 8 for fragments.
"""

import argparse
import os
import shutil
from dataclasses import dataclass, fields, replace

import numpy as np

from zaya_plugin.corpus.bin_writer import BinWriter
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data.indexed_dataset import IndexedReader
from zaya_plugin.data.prepared import Manifest, PackingRecord, locate, marks_of
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.progress import bar

COPIED_TOKENS = 4_000_000  # at a time


@dataclass(frozen=True)
class PlannedRun:
    """A run that reads its data without a cache; the defaults are ZAYA1's stage 1 (appendix B).

    sequence_length s in tokens, global_batch_size G in sequences, step_seconds t, iops_budget in reads/s of the
    storage, page_bytes P.
    """

    sequence_length: int = 4096
    global_batch_size: int = 4096
    step_seconds: float = 2.5
    iops_budget: float = 70_000.0
    page_bytes: int = 4096


def stretches(sequence_length: int, tokens: int, documents: int, packed: bool = False) -> float:
    """Return m, the stretches of a file that a sequence comes from. Documents are drawn in random order: each begins a
    new one.
    """
    return 1.0 if packed else 1.0 + sequence_length * documents / tokens


def amplification(run: PlannedRun, token_bytes: int, m: float) -> float:
    """Return sigma."""
    return 1 + m * run.page_bytes / (run.sequence_length * token_bytes)


def reads_per_second(run: PlannedRun, token_bytes: int, sigma: float) -> float:
    """Return the IOPS of the whole job when no page is in a cache."""
    pages = run.global_batch_size * run.sequence_length * token_bytes / run.page_bytes
    return sigma * pages / run.step_seconds


def least_step_seconds(run: PlannedRun, token_bytes: int, sigma: float) -> float:
    """Return the step time at which the reads need the whole budget."""
    return reads_per_second(run, token_bytes, sigma) * run.step_seconds / run.iops_budget


def bundle(args: argparse.Namespace, workspace: Workspace | None) -> None:
    """Make the bundle, or find that it is complete, and print the reads of the planned run."""
    shards = [_shard(path) for path in args.sources]
    _refuse_mixture(args.sources, shards)
    if workspace is not None:
        plan = {
            "shards": [[split.bin_sha256 for split in shard.splits.values()] for shard in shards],
            "append eod": shards[0].arguments["append eod"],
        }
        manifest, _ = workspace.dataset(plan, lambda: _build(workspace, plan, args.sources, shards))
        if not args.quiet:
            print(f"{workspace.output}: {len(shards)} shards")
            for name, split in manifest.splits.items():
                counted = f"{split.documents:9,} documents {split.tokens:13,} tokens"
                print(f"  {name:5} {counted}, {split.bin_bytes / 1e6:,.1f} MB in one file")
    if not args.quiet:
        run = {field.name: getattr(args, field.name) for field in fields(PlannedRun)}
        print(planned_reads(PlannedRun(**run), shards))


def _shard(path: str) -> Manifest:
    manifest, prefixes = locate(path)
    if manifest is None or set(prefixes) != set(manifest.splits):
        raise mistake(
            path,
            problem="must be a whole dataset with a manifest.json",
            allowed="directories of `zaya data prepare` or `zaya data pack`",
            fix="give the directory, not a prefix in it" if manifest else "prepare its text with `zaya data prepare`",
        )
    return manifest


def _refuse_mixture(paths: list[str], shards: list[Manifest]) -> None:
    """Raise ValueError unless the shards can be one dataset."""

    def facts(shard: Manifest) -> dict:
        return {
            "tokenizer": shard.tokenizer.sha256,
            "token type": shard.dtype,
            "splits": list(shard.splits),
            "end of documents": shard.arguments["append eod"],
            "special_tokens": shard.special_tokens,
            "marks of answers": next(iter(shard.splits.values())).marks_sha256 is not None,
            "length of bins": shard.packing and shard.packing.sequence_length,
        }

    first, seen = facts(shards[0]), set()
    for path, shard in zip(paths, shards, strict=True):
        for name, fact in facts(shard).items():
            if fact != first[name]:
                raise mistake(
                    path,
                    problem=f"differs from {paths[0]} in {name} ({fact!r} and {first[name]!r}); the two cannot be one "
                    "dataset",
                    allowed="datasets of one tokenizer and one form",
                    fix="prepare both with the same options, or give each to data.blend",
                )
        if os.path.realpath(path) in seen:
            raise mistake(path, problem="is named twice; every document would count double", fix="name it once")
        seen.add(os.path.realpath(path))


def _build(workspace: Workspace, plan: dict, paths: list[str], shards: list[Manifest]) -> None:
    workspace.begin(plan)
    first, splits, counts = shards[0], {}, {}
    shown = bar("copy", sum(split.tokens for shard in shards for split in shard.splits.values()), " tokens")
    for name in first.splits:
        marked, lengths = first.splits[name].marks_sha256 is not None, []
        target = os.path.join(workspace.final, name)
        writer = BinWriter(target, first.dtype, first.tokenizer.vocab_size, marked)
        for path in paths:
            prefix = os.path.join(path, name)
            reader = IndexedReader(prefix, marks_of(prefix))
            for at in range(0, reader.indexed.tokens, COPIED_TOKENS):
                some = slice(at, at + COPIED_TOKENS)
                marks = np.ascontiguousarray(reader.marks[some]) if marked else None
                writer.write(tokens := np.ascontiguousarray(reader.stream[some]), marks)
                shown.update(len(tokens))
            lengths.append(reader.lengths.astype(np.int32))
        packed = [shard.packing.counts[name] for shard in shards if shard.packing]
        counts[name] = {key: sum(count[key] for count in packed) for key in packed[0]} if packed else {}
        filling = {first.tokenizer.eod_id: counts[name]["filling tokens"]} if packed else None
        splits[name] = writer.finish(np.concatenate(lengths), filling)
    shown.close()
    shutil.copytree(os.path.join(paths[0], "tokenizer"), os.path.join(workspace.final, "tokenizer"))
    replace(
        first,
        arguments=plan,
        splits=splits,
        documents={key: sum(shard.documents.get(key, 0) for shard in shards) for key in first.documents},
        input_files=sum(shard.input_files for shard in shards),
        input_bytes=sum(shard.input_bytes for shard in shards),
        packing=first.packing and PackingRecord(first.packing.sequence_length, counts),
    ).write(workspace.final)


def planned_reads(run: PlannedRun, shards: list[Manifest]) -> str:
    """Return a table for a terminal: the reads of the training split as it is, and as `zaya data pack` would
    make it.
    """
    name, token_bytes = next(iter(shards[0].splits)), np.dtype(shards[0].dtype).itemsize
    tokens = sum(shard.splits[name].tokens for shard in shards)
    documents = sum(shard.splits[name].documents for shard in shards)
    # The name of each row, and whether its documents are packed into bins.
    rows = (("documents in random order", False), ("packed into bins", True))
    rows = rows if shards[0].packing is None else (("packed bins", True),)
    lines = [
        f"reads of a run with {run.global_batch_size:,} sequences of {run.sequence_length:,} tokens each "
        f"{run.step_seconds:g} s, pages of {run.page_bytes:,} bytes, a budget of {run.iops_budget:,.0f} reads/s:",
        f"  {'':28} {'m':>8} {'sigma':>7} {'reads/s':>12} {'of budget':>10} {'least step':>11}",
    ]
    for name, packed in rows:
        m = stretches(run.sequence_length, tokens, documents, packed)
        sigma = amplification(run, token_bytes, m)
        iops = reads_per_second(run, token_bytes, sigma)
        least = least_step_seconds(run, token_bytes, sigma)
        lines.append(f"  {name:28} {m:8.2f} {sigma:7.3f} {iops:12,.0f} {iops / run.iops_budget:10.1%} {least:9.3f} s")
    return "\n".join(lines)
