# SPDX-License-Identifier: Apache-2.0
"""Megatron's indexed dataset on disk, read and written with numpy alone.

A dataset is `<prefix>.bin`, token ids one after the other, and `<prefix>.idx`, all little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     dtype code of the tokens in .bin
    uint64    S, number of sequences
    uint64    D, number of document boundaries = documents + 1
    int32[S]  tokens of each sequence
    int64[S]  byte offset of each sequence in .bin
    int64[D]  first sequence of each document, then S

Source: megatron/core/datasets/indexed_dataset.py (`_IndexWriter`, `_IndexReader`); tests/data compares both directions with
it byte for byte. Its own builder is not used because it needs torch and several seconds of imports in every worker, keeps
the index in Python lists, and never calls fsync.
"""

import os
import struct
from dataclasses import dataclass

import numpy as np

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
CHUNK = 1 << 22  # elements looked at or written at once: 32 MiB of int64


@dataclass(frozen=True)
class IndexedFile:
    """What an index says about a dataset whose two files agree with each other."""

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron chooses for a vocabulary (`DType.optimal_dtype`): uint16 below 65500 entries, else int32."""
    return np.dtype("uint16") if vocab_size < 65500 else np.dtype("int32")


def write_index(path: str, dtype: np.dtype, lengths: np.ndarray) -> None:
    """Writes and syncs the .idx of a dataset in which every document is one sequence.

    Args:
        lengths: int32 [documents], tokens of each document.
    """
    assert lengths.dtype == np.int32
    count = len(lengths)
    with open(path, "wb") as out:
        out.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[np.dtype(dtype)], count, count + 1))
        out.write(lengths.tobytes())
        offset = 0
        for begin in range(0, count, CHUNK):
            ends = np.cumsum(lengths[begin : begin + CHUNK], dtype=np.int64) * dtype.itemsize + offset
            out.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
            offset = int(ends[-1])
        for begin in range(0, count + 1, CHUNK):
            out.write(np.arange(begin, min(begin + CHUNK, count + 1), dtype="<i8").tobytes())
        out.flush()
        os.fsync(out.fileno())


def read_index(prefix: str) -> IndexedFile:
    """Reads `<prefix>.idx` and proves that it is whole and describes `<prefix>.bin`.

    Raises:
        ValueError: a file is missing, cut short, not an indexed dataset, or the two do not belong together.
    """
    index_path, bin_path = prefix + ".idx", prefix + ".bin"
    dtype, sequences, boundaries = _read_header(index_path, bin_path)
    index_bytes, bin_bytes = os.path.getsize(index_path), os.path.getsize(bin_path)
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if index_bytes == expected + sequences and sequences:
        raise ValueError(f"{index_path} belongs to a multimodal dataset (one mode a sequence); text datasets have none")
    if index_bytes != expected:
        raise ValueError(
            f"{index_path} is {'cut short' if index_bytes < expected else 'damaged'}: {index_bytes} bytes, and {sequences} sequences "
            f"with {boundaries} document boundaries take {expected}"
        )
    if boundaries < 1:
        raise ValueError(f"{index_path} is damaged: it has no document boundaries")
    tokens = _check_sequences(index_path, bin_path, dtype, sequences, bin_bytes)
    _check_boundaries(index_path, sequences, boundaries)
    return IndexedFile(prefix, dtype, sequences, boundaries - 1, tokens)


def stored_tokens(prefix: str) -> int:
    """Tokens in `<prefix>.bin` from its size alone; raises as `read_index` does for files that are missing or no dataset."""
    dtype, _, _ = _read_header(prefix + ".idx", prefix + ".bin")
    return os.path.getsize(prefix + ".bin") // dtype.itemsize


def _read_header(index_path: str, bin_path: str) -> tuple[np.dtype, int, int]:
    """Token dtype, sequences and document boundaries."""
    for path in (index_path, bin_path):
        if not os.path.isfile(path):
            raise ValueError(f"{path} does not exist. Make the dataset with `zaya data prepare`, or correct the path")
    with open(index_path, "rb") as stream:
        header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise ValueError(f"{index_path} is cut short: {len(header)} bytes, and the header alone has {HEADER.size}")
    magic, version, code, sequences, boundaries = HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(
            f"{index_path} is not an index of a Megatron indexed dataset: it begins with {magic!r}, not {MAGIC!r}"
        )
    if version != VERSION:
        raise ValueError(f"{index_path} has index version {version}; only {VERSION} can be read")
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None or dtype.kind == "f":
        raise ValueError(f"{index_path} is damaged: dtype code {code} is not one of an integer token type")
    return dtype, sequences, boundaries


def _check_sequences(index_path: str, bin_path: str, dtype: np.dtype, sequences: int, bin_bytes: int) -> int:
    """Sequences must tile .bin from its first byte to its last; returns the number of tokens."""
    end = 0
    if sequences:
        lengths = np.memmap(index_path, "<i4", "r", HEADER.size, (sequences,))
        offsets = np.memmap(index_path, "<i8", "r", HEADER.size + 4 * sequences, (sequences,))
        for begin in range(0, sequences, CHUNK):
            part = lengths[begin : begin + CHUNK].astype(np.int64)
            ends = np.cumsum(part) * dtype.itemsize + end
            starts = ends - part * dtype.itemsize
            if part.min() < 0 or not np.array_equal(starts, offsets[begin : begin + CHUNK]):
                raise ValueError(
                    f"{index_path} is damaged: lengths and byte offsets of its sequences contradict each other"
                )
            end = int(ends[-1])
    if end != bin_bytes:
        raise ValueError(
            f"{bin_path} {'is cut short' if bin_bytes < end else 'does not belong to its index'}: {bin_bytes} bytes, and {index_path} "
            f"describes {end} ({end // dtype.itemsize} tokens of {dtype.name})"
        )
    return end // dtype.itemsize


def _check_boundaries(index_path: str, sequences: int, boundaries: int) -> None:
    marks = np.memmap(index_path, "<i8", "r", HEADER.size + 12 * sequences, (boundaries,))
    good = marks[0] == 0 and marks[-1] == sequences
    for begin in range(0, boundaries, CHUNK):
        good = good and bool((np.diff(marks[begin : begin + CHUNK + 1]) >= 0).all())
    if not good:
        raise ValueError(f"{index_path} is damaged: its document boundaries do not run from 0 to {sequences}")


def largest_token(indexed: IndexedFile, limit_bytes: int | None = None) -> tuple[int, bool]:
    """The largest token id in .bin and whether all of .bin was read.

    Args:
        limit_bytes: read about this many bytes, half from the beginning and half from the end; None reads everything.
    """
    tokens = np.memmap(indexed.prefix + ".bin", indexed.dtype, "r") if indexed.tokens else np.empty(0, indexed.dtype)
    whole = limit_bytes is None or tokens.nbytes <= limit_bytes
    half = 0 if whole else limit_bytes // 2 // indexed.dtype.itemsize
    largest = -1
    for piece in [tokens] if whole else [tokens[:half], tokens[-half:]]:
        for begin in range(0, len(piece), CHUNK):
            largest = max(largest, int(piece[begin : begin + CHUNK].max()))
    return largest, whole
