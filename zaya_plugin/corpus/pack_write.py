# SPDX-License-Identifier: Apache-2.0
"""Writes planned bins."""

import json
import os
from collections import Counter

import numpy as np

from zaya_plugin.corpus.bin_writer import BinWriter
from zaya_plugin.corpus.pack_plan import WINDOW, Fitting, Piece, windows
from zaya_plugin.data.indexed_reader import IndexedReader
from zaya_plugin.data.manifest import SplitRecord

CHUNK_TOKENS = 4_000_000  # written and counted at a time


def fill_bin(reader: IndexedReader, pieces: list[Piece], fitting: Fitting) -> np.ndarray:
    """Token ids [sequence_length] of a bin: its pieces one after the other, then end-of-document tokens."""
    tokens, at = np.full(fitting.sequence_length, fitting.eod, reader.dtype), 0
    for piece in pieces:
        of = reader.document(piece.document) if piece.trimmed is None else piece.trimmed
        tokens[at : at + len(piece)] = of[piece.begin : piece.end]
        at += len(piece)
    return tokens


def write_bins(
    reader: IndexedReader,
    target: str,
    fitting: Fitting,
    counts: Counter,
    dropped,
    vocab_size: int,
    window: int = WINDOW,
) -> SplitRecord:
    """Writes and syncs `<target>.bin` and `.idx`.

    Args:
        counts: filled in, see zaya_plugin.corpus.pack.COUNTS.
        dropped: open text file that gets a line for each document left out.

    Raises:
        ValueError: nothing is left.
    """
    split, length = os.path.basename(target), fitting.sequence_length
    writer, chunk = BinWriter(target, reader.dtype, vocab_size), []

    def flush() -> None:
        if chunk:
            tokens = np.concatenate(chunk)
            counts["loss tokens"] += int((tokens.reshape(-1, length)[:, :-1] != fitting.eod).sum())
            writer.write(tokens)
            chunk.clear()

    def drop(record: dict) -> None:
        dropped.write(json.dumps({"split": split, **record}) + "\n")

    for bins in windows(reader, fitting, counts, drop, window):
        for pieces in bins:
            chunk.append(fill_bin(reader, pieces, fitting))
            if len(chunk) * length >= CHUNK_TOKENS:
                flush()
    flush()
    if counts["bins"] == 0:
        raise ValueError(
            f"no document of {reader.prefix} is left: {counts['dropped documents']} of {counts['documents']} were dropped; "
            "see --long, --trim-reasoning and --sequence-length"
        )
    return writer.finish(np.full(counts["bins"], length, np.int32), {fitting.eod: counts["filling tokens"]})
