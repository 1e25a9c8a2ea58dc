# SPDX-License-Identifier: Apache-2.0
"""`zaya data pack`: put the whole documents of a prepared dataset into bins, one bin a training sample.

The result is an indexed dataset whose documents are the bins, each of exactly `sequence_length` tokens: documents ended
by the end-of-document token, then more of these as filling. Megatron's own sampling joins documents and cuts at
multiples of the sequence length; from this dataset it draws exactly one bin a sample, in any host.
"""

import argparse
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TextIO

import numpy as np

from zaya_plugin.corpus.bin_writer import BinWriter
from zaya_plugin.corpus.reasoning import (
    EARLIER_DROPPED,
    EARLIER_DROPPED_TAIL_CUT,
    KEPT,
    NO_REASONING,
    TAIL_CUT,
    UNALIGNED,
    BlockFinder,
    trim,
)
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data.indexed_dataset import IndexedReader
from zaya_plugin.data.prepared import (
    END,
    Manifest,
    PackingRecord,
    SplitRecord,
    holds_chats,
    locate,
    marks_of,
    packed_loss_mask,
    tokenizer_of,
)
from zaya_plugin.data.tokenizer import open_tokenizer
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import MOST_TOKENS
from zaya_plugin.ground.progress import bar

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

# Documents that are fitted with each other. Bounds memory and keeps the reads for one bin within one stretch of the
# file; bins are within a few thousandths of full with far fewer.
WINDOW = 1_000_000
# Bins are filled in memory, 8 bytes a token while they are counted: 0.3 GB for one of the longest.
LONGEST_BIN = MOST_TOKENS
CHUNK_TOKENS = 4_000_000  # written and counted at a time


def pack(args: argparse.Namespace, workspace: Workspace) -> None:
    """Make the packed dataset, or find that it is complete, and print a summary.

    Raises:
        ValueError: the source is not a prepared dataset, or the output is something else.
    """
    for marker in args.trim_reasoning or ():
        if not marker.strip() or args.trim_reasoning.count(marker) > 1:
            raise mistake(
                "--trim-reasoning",
                " ".join(map(repr, args.trim_reasoning)),
                problem="the markers are empty or equal",
                allowed="two different texts",
                fix="--trim-reasoning '<think>' '</think>'",
            )
    source, prefixes = locate(args.source)
    if source is None:
        raise mistake(
            args.source,
            problem="has no manifest.json that names its tokenizer",
            allowed="a directory written by `zaya data prepare`",
            fix="prepare its text with `zaya data prepare`, and pack that",
        )
    if source.packing is not None:
        raise mistake(
            args.source,
            problem=f"is packed already, into bins of {source.packing.sequence_length} tokens",
            fix="pack the dataset that it was made from",
        )
    if source.tokenizer.eod_id is None:
        raise mistake(
            args.source,
            problem="its tokenizer has no end-of-document token, and bins need one between documents",
            fix="prepare it with a tokenizer that has an eos_token",
        )
    chats = holds_chats(args.source)
    if chats and args.long == "split":
        raise mistake(
            "--long",
            "split",
            problem="the pieces of a chat would hold answers without their questions",
            allowed="drop",
            fix="--long drop",
        )
    args.long = args.long or ("drop" if chats else "split")
    plan = {
        "source": os.path.abspath(args.source),
        "sha256 of the source": {name: source.splits[name].bin_sha256 for name in prefixes},
        "--sequence-length": args.sequence_length,
        "--long": args.long,
        "--trim-reasoning": args.trim_reasoning,
        "append eod": True,
    }
    manifest, _ = workspace.dataset(plan, lambda: _build(workspace, plan, source, prefixes, args))
    if not args.quiet:
        print(summary(workspace.output, manifest))


def _build(workspace: Workspace, plan: dict, source: Manifest, prefixes: dict[str, str], args) -> None:
    workspace.begin(plan)
    home, record = tokenizer_of(args.source)
    finder = BlockFinder(open_tokenizer(home), *args.trim_reasoning) if args.trim_reasoning else None
    fitting = Fitting(args.sequence_length, record.eod_id, args.long, finder)
    splits, counts = {}, {}
    with (
        open(os.path.join(workspace.final, DROPPED_FILE), "w", encoding="ascii") as dropped,
        bar("pack", sum(source.splits[name].documents for name in prefixes), " documents") as shown,
    ):
        for name, prefix in prefixes.items():
            counted, target = Counter(), os.path.join(workspace.final, name)
            reader = IndexedReader(prefix, marks_of(prefix))
            splits[name] = write_bins(reader, target, fitting, counted, dropped, record.vocab_size, shown.update)
            counts[name] = {key: counted[key] for key in COUNTS}
    shutil.copytree(home, os.path.join(workspace.final, "tokenizer"))
    replace(source, arguments=plan, splits=splits, packing=PackingRecord(args.sequence_length, counts)).write(
        workspace.final
    )


@dataclass(frozen=True)
class Piece:
    """Tokens of one bin that come from one document: a range of it, or of `trimmed`, its changed tokens; of a chat with
    `marks`, theirs.
    """

    document: int
    begin: int
    end: int
    trimmed: np.ndarray | None = None
    marks: np.ndarray | None = None

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass
class Fitting:
    """How documents are fitted. long: "split" or "drop", for a document that is too long and has no reasoning
    to trim.
    """

    sequence_length: int
    eod: int
    long: str
    finder: BlockFinder | None


def fit_document(
    reader: IndexedReader, number: int, fitting: Fitting, counts: Counter
) -> tuple[list[Piece], str | None]:
    """Return the pieces of one document; none if it is dropped, and then why. Chats end with `eod` and are never
    split.
    """
    limit, ids = fitting.sequence_length, reader.document(number)
    ended = len(ids) > 0 and ids[-1] == fitting.eod
    length = len(ids) + (not ended)
    if length <= limit:
        whole = None if ended else np.append(ids, ids.dtype.type(fitting.eod))
        return [Piece(number, 0, length, whole)], None
    ids = ids if ended else np.append(ids, ids.dtype.type(fitting.eod))
    if fitting.finder is not None:
        blocks = fitting.finder.find(ids)
        kept, outcome = (None, UNALIGNED) if blocks is None else trim(np.arange(len(ids)), blocks, limit)
        if kept is not None:
            assert outcome != KEPT and len(kept) <= limit
            counts[outcome] += 1
            counts["trimmed tokens"] += length - len(kept)
            marks = reader.document_marks(number)
            return [Piece(number, 0, len(kept), ids[kept], None if marks is None else marks[kept])], None
        if outcome != NO_REASONING:
            return [], outcome
    if fitting.long == "drop":
        return [], "too long"
    counts["split documents"] += 1
    pieces = [
        Piece(number, begin, min(begin + limit, length), None if ended else ids) for begin in range(0, length, limit)
    ]
    counts["pieces of split documents"] += len(pieces)
    return pieces, None


def windows(
    reader: IndexedReader, fitting: Fitting, counts: Counter, dropped: Callable[[dict], None]
) -> Iterator[list[list[Piece]]]:
    """Yield the bins of every window of documents, each a list of pieces in order of their documents.

    Args:
        counts: increased, see COUNTS.
        dropped: called with number, tokens and reason of each document that is left out.
    """
    for first in range(0, len(reader), WINDOW):
        pieces: list[Piece] = []
        for number in range(first, min(first + WINDOW, len(reader))):
            counts["documents"] += 1
            document, reason = fit_document(reader, number, fitting, counts)
            pieces += document
            if reason is not None:
                tokens = int(reader.lengths[number])
                counts["dropped documents"] += 1
                counts["dropped tokens"] += tokens
                dropped({"document": number, "tokens": tokens, "reason": reason})
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        bin_of, bins = best_fit_decreasing(lengths, fitting.sequence_length)
        contents: list[list[Piece]] = [[] for _ in range(bins)]
        for piece, number in zip(pieces, bin_of.tolist(), strict=True):
            contents[number].append(piece)
        counts["bins"] += bins
        counts["filling tokens"] += bins * fitting.sequence_length - int(lengths.sum())
        yield contents


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items into bins, best fit decreasing.

    Items go in order of falling length, each into the bin with the least room that still holds it. Ties go to the item
    that comes first and the bin that was opened last, so the result is deterministic. Sources: "Fewer Truncations
    Improve Language Modeling" (arXiv 2404.10830, section 3); for bins of 131,072 tokens the ZAYA1-8B technical report
    (arXiv 2605.05365).

    Args:
        lengths: int [items], each from 1 to `capacity`.

    Returns:
        int64 [items], the bin of each item, and the number of bins. Time grows with items, not with their square.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    bin_of = np.empty(len(lengths), np.int64)
    rooms: defaultdict[int, list[int]] = defaultdict(list)  # bins by the room left in them
    occupied, bins = 0, 0  # bit r of `occupied`: some bin has room r
    for item in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[item])
        fitting = occupied >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = rooms[room].pop()
            if not rooms[room]:
                occupied ^= 1 << room
        else:
            room, number, bins = capacity, bins, bins + 1
        bin_of[item] = number
        left = room - length
        if left:
            if not rooms[left]:
                occupied |= 1 << left
            rooms[left].append(number)
    return bin_of, bins


def fill_marks(reader: IndexedReader, pieces: list[Piece], fitting: Fitting) -> np.ndarray:
    """Return the marks uint8 [sequence_length] of a bin of chats."""
    marks = [reader.document_marks(piece.document) if piece.marks is None else piece.marks for piece in pieces]
    return np.concatenate([*marks, np.full(fitting.sequence_length - sum(map(len, marks)), END, np.uint8)])


def fill_bin(reader: IndexedReader, pieces: list[Piece], fitting: Fitting) -> np.ndarray:
    """Return the token ids [sequence_length] of a bin: its pieces in order, then end-of-document tokens."""
    tokens = [
        (reader.document(piece.document) if piece.trimmed is None else piece.trimmed)[piece.begin : piece.end]
        for piece in pieces
    ]
    filling = fitting.sequence_length - sum(map(len, tokens))
    return np.concatenate([*tokens, np.full(filling, fitting.eod, reader.dtype)])


def write_bins(
    reader: IndexedReader,
    target: str,
    fitting: Fitting,
    counts: Counter,
    dropped: TextIO,
    vocab_size: int,
    progress: Callable[[int], object],
) -> SplitRecord:
    """Write and sync `<target>.bin` and `.idx`.

    Args:
        counts: filled in, see COUNTS.
        dropped: gets a line for each document left out.
        progress: is called with the number of documents just written.

    Raises:
        ValueError: every document was dropped.
    """
    split, length = os.path.basename(target), fitting.sequence_length
    chats = reader.marks is not None
    writer, step = BinWriter(target, reader.dtype, vocab_size, chats), max(1, CHUNK_TOKENS // length)

    def drop(record: dict) -> None:
        dropped.write(json.dumps({"split": split, **record}) + "\n")

    for bins in windows(reader, fitting, counts, drop):
        for at in range(0, len(bins), step):
            some, marks = bins[at : at + step], None
            tokens = np.stack([fill_bin(reader, pieces, fitting) for pieces in some])
            if chats:
                marks = np.stack([fill_marks(reader, pieces, fitting) for pieces in some])
            counts["loss tokens"] += int(packed_loss_mask(tokens, fitting.eod, marks).sum())
            writer.write(tokens.reshape(-1), None if marks is None else marks.reshape(-1))
            progress(len({piece.document for pieces in some for piece in pieces if piece.begin == 0}))
    if counts["bins"] == 0:
        raise mistake(
            reader.prefix,
            problem=f"no document is left: {counts['dropped documents']} of {counts['documents']} were dropped",
            fix="change --long, --trim-reasoning or --sequence-length",
        )
    return writer.finish(np.full(counts["bins"], length, np.int32), {fitting.eod: counts["filling tokens"]})


def summary(output: str, manifest: Manifest) -> str:
    """Return how full the bins are, and which documents were split, trimmed and dropped, for a terminal."""
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
                f"        {counts['split documents']:,} too long: split into {counts['pieces of split documents']:,} "
                "pieces"
            )
        if counts["trimmed tokens"]:
            kinds = ", ".join(f"{key} {counts[key]:,}" for key in (TAIL_CUT, EARLIER_DROPPED, EARLIER_DROPPED_TAIL_CUT))
            lines.append(f"        trimmed by {counts['trimmed tokens']:,} tokens: {kinds}")
        if counts["dropped documents"]:
            lines.append(
                f"        dropped {counts['dropped documents']:,} documents, {counts['dropped tokens']:,} tokens, see "
                f"{DROPPED_FILE}"
            )
    return "\n".join(lines)
