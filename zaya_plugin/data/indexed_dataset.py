# SPDX-License-Identifier: Apache-2.0
"""Read and write Megatron's indexed dataset with numpy alone.

A dataset is `<prefix>.bin`, the token ids of all documents in order, and `<prefix>.idx`, all little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     dtype code of the tokens in .bin
    uint64    S, number of sequences
    uint64    D, number of document boundaries = documents + 1
    int32[S]  tokens of each sequence
    int64[S]  byte offset of each sequence in .bin
    int64[D]  first sequence of each document, then S

Source: megatron/core/datasets/indexed_dataset.py (`_IndexWriter`, `_IndexReader`); tests/data compares both directions
with it byte for byte. Megatron's builder and reader are not called: they import torch, which a login node does not have
and which takes seconds in every worker; the builder keeps the index in Python lists; the reader
does not notice a file that is cut short.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from zaya_plugin.ground.errors import mistake

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("int16"),
    4: np.dtype("int32"),
    5: np.dtype("int64"),
    6: np.dtype("float64"),
    7: np.dtype("float32"),
    8: np.dtype("uint16"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
CHUNK_ELEMENTS = 1 << 22  # elements read or written at once: 32 MiB of int64


@dataclass(frozen=True)
class IndexedFile:
    """Size and dtype of a dataset whose two files agree."""

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype that Megatron chooses for a vocabulary (`DType.optimal_dtype`): uint16 below 65500 entries, else
    int32.
    """
    return np.dtype("uint16") if vocab_size < 65500 else np.dtype("int32")


def write_index(path: str, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Write the .idx of a dataset in which every document is one sequence.

    Args:
        lengths: int32 [documents], tokens of each document.
    """
    assert lengths.dtype == np.int32
    count = len(lengths)
    with open(path, "wb") as out:
        out.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[np.dtype(dtype)], count, count + 1))
        out.write(lengths.tobytes())
        offset = 0
        for begin in range(0, count, CHUNK_ELEMENTS):
            ends = np.cumsum(lengths[begin : begin + CHUNK_ELEMENTS], dtype=np.int64) * dtype.itemsize + offset
            out.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
            offset = int(ends[-1])
        for begin in range(0, count + 1, CHUNK_ELEMENTS):
            out.write(np.arange(begin, min(begin + CHUNK_ELEMENTS, count + 1), dtype="<i8").tobytes())


def read_index(prefix: str) -> IndexedFile:
    """Read `<prefix>.idx` and check that it is whole and describes `<prefix>.bin`.

    Raises:
        ValueError: a file is missing, cut short, not an indexed dataset, or the two do not belong together.
    """
    index_path, bin_path = prefix + ".idx", prefix + ".bin"
    dtype, sequences, boundaries = _read_header(index_path, bin_path)
    index_bytes, bin_bytes = os.path.getsize(index_path), os.path.getsize(bin_path)
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if index_bytes == expected + sequences and sequences:
        raise _damaged(index_path, "a multimodal dataset (one mode a sequence); text datasets have no modes")
    if index_bytes != expected:
        how = "cut short" if index_bytes < expected else "damaged"
        need = f"{sequences} sequences with {boundaries} document boundaries need {expected}"
        raise _damaged(index_path, f"{how}: it has {index_bytes} bytes; {need}")
    if boundaries < 1:
        raise _damaged(index_path, "damaged: it has no document boundaries")
    tokens = _check_sequences(index_path, bin_path, dtype, sequences, bin_bytes)
    marks = np.memmap(index_path, "<i8", "r", HEADER.size + 12 * sequences, (boundaries,))
    rises = (
        bool((np.diff(marks[at : at + CHUNK_ELEMENTS + 1]) >= 0).all()) for at in range(0, boundaries, CHUNK_ELEMENTS)
    )
    if marks[0] != 0 or marks[-1] != sequences or not all(rises):
        raise _damaged(index_path, f"damaged: its document boundaries do not run from 0 to {sequences}")
    return IndexedFile(prefix, dtype, sequences, boundaries - 1, tokens)


def stored_tokens(prefix: str) -> int:
    """Return the number of tokens in `<prefix>.bin`, from its size; raise as `read_index` does for a missing file or
    header.
    """
    dtype, _, _ = _read_header(prefix + ".idx", prefix + ".bin")
    return os.path.getsize(prefix + ".bin") // dtype.itemsize


def _damaged(path: str, problem: str) -> ValueError:
    return mistake(path, problem=problem, fix="copy the dataset again, or make it again with `zaya data prepare`")


def _read_header(index_path: str, bin_path: str) -> tuple[np.dtype, int, int]:
    """Return token dtype, number of sequences and number of document boundaries."""
    for path in (index_path, bin_path):
        if not os.path.isfile(path):
            raise _damaged(path, "does not exist")
    with open(index_path, "rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise _damaged(index_path, f"cut short: it has {len(header)} bytes; the header alone has {HEADER.size}")
    magic, version, code, sequences, boundaries = HEADER.unpack(header)
    if magic != MAGIC:
        raise _damaged(index_path, f"is not an index of a Megatron dataset: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise mistake(index_path, problem=f"index version {version} is not supported", allowed=f"version {VERSION}")
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None or dtype.kind == "f":
        raise _damaged(index_path, f"damaged: dtype code {code} is not an integer token type")
    return dtype, sequences, boundaries


def _check_sequences(index_path: str, bin_path: str, dtype: np.dtype, sequences: int, bin_bytes: int) -> int:
    """Check that the sequences cover .bin from its first byte to its last; return the number of tokens."""
    end = 0
    if sequences:
        lengths = np.memmap(index_path, "<i4", "r", HEADER.size, (sequences,))
        offsets = np.memmap(index_path, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
        for begin in range(0, sequences, CHUNK_ELEMENTS):
            part = lengths[begin : begin + CHUNK_ELEMENTS].astype(np.int64)
            ends = np.cumsum(part) * dtype.itemsize + end
            if part.min() < 0 or not np.array_equal(
                ends - part * dtype.itemsize, offsets[begin : begin + CHUNK_ELEMENTS]
            ):
                raise _damaged(index_path, "damaged: lengths and byte offsets of its sequences contradict each other")
            end = int(ends[-1])
    if end != bin_bytes:
        how = "cut short" if bin_bytes < end else "does not belong to its index"
        tokens = f"{end // dtype.itemsize} tokens of {dtype.name}"
        raise _damaged(bin_path, f"{how}: it has {bin_bytes} bytes; {index_path} describes {end} ({tokens})")
    return end // dtype.itemsize


def largest_token(
    indexed: IndexedFile, limit_bytes: int | None = None, progress: Callable[[int], object] = lambda count: None
) -> tuple[int, bool]:
    """Return the largest token id in .bin, and whether all of .bin was read.

    Args:
        limit_bytes: read about this many bytes, half from the beginning and half from the end; None reads everything.
        progress: is called with the number of bytes just read.
    """
    tokens = np.memmap(indexed.prefix + ".bin", indexed.dtype, "r") if indexed.tokens else np.empty(0, indexed.dtype)
    whole = limit_bytes is None or tokens.nbytes <= limit_bytes
    half = 0 if whole else limit_bytes // 2 // indexed.dtype.itemsize
    pieces = [tokens] if whole else [tokens[:half], tokens[-half:]]
    chunks = (
        piece[begin : begin + CHUNK_ELEMENTS] for piece in pieces for begin in range(0, len(piece), CHUNK_ELEMENTS)
    )
    largest = -1
    for chunk in chunks:
        largest = max(largest, int(chunk.max()))
        progress(chunk.nbytes)
    return largest, whole


class IndexedReader:
    """Documents of a `.bin`/`.idx` pair by number, through memory maps.

    lengths: int64 [documents], tokens of each document.
    starts: int64 [documents + 1], first token of each document in .bin; the last entry is the number of all tokens.
    marks: uint8 [tokens] of chats (zaya_plugin.data.prepared.marks_of), None for other data.

    Raises:
        ValueError: see `read_index`.
    """

    def __init__(self, prefix: str, marks: np.ndarray | None = None):
        self.indexed: IndexedFile = read_index(prefix)
        self.marks = marks
        self.prefix, self.dtype = prefix, self.indexed.dtype
        sequences, documents = self.indexed.sequences, self.indexed.documents
        self.starts = np.zeros(documents + 1, np.int64)
        if sequences:
            path = prefix + ".idx"
            lengths = np.memmap(path, "<i4", "r", HEADER.size, (sequences,))
            marks = np.memmap(path, "<i8", "r", HEADER.size + 12 * sequences, (documents + 1,))
            ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            self.starts = ends[marks]
        self.lengths = np.diff(self.starts)
        self.stream = np.memmap(prefix + ".bin", self.dtype, "r") if self.indexed.tokens else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> np.ndarray:
        """Return the token ids [tokens] of a document, in the dtype of the file; a view of it."""
        return self.stream[self.starts[number] : self.starts[number + 1]]

    def document_marks(self, number: int) -> np.ndarray | None:
        """Return the marks uint8 [tokens] of a chat; None for other data."""
        return None if self.marks is None else self.marks[self.starts[number] : self.starts[number + 1]]


def spread(count: int, limit: int | None) -> list[int]:
    """Return at most `limit` numbers below `count`, evenly spread: each is the middle of an equal part."""
    most = count if limit is None else min(count, limit)
    return [((2 * part + 1) * count - 1) // (2 * most) for part in range(most)]
