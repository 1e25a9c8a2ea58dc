# SPDX-License-Identifier: Apache-2.0
"""The format against Megatron's own writer and reader, and every way in which the two files can be broken."""

import struct

import numpy as np
import pytest

from zaya_plugin.data.indexed_dataset import HEADER, largest_token, read_index, stored_tokens, token_dtype, write_index

LENGTHS = np.array([5, 1, 7, 3], np.int32)


@pytest.fixture
def prefix(tmp_path) -> str:
    np.arange(16, dtype=np.uint16).tofile(tmp_path / "d.bin")
    write_index(str(tmp_path / "d.idx"), np.dtype("uint16"), LENGTHS)
    return str(tmp_path / "d")


@pytest.mark.parametrize("vocab_size", [300, 65499, 65500, 262_272])
def test_same_bytes_as_megatron_and_read_by_it(tmp_path, vocab_size):
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

    rng = np.random.default_rng(vocab_size)
    documents = [rng.integers(0, vocab_size, size) for size in rng.integers(1, 50, 200)]
    dtype = token_dtype(vocab_size)
    assert dtype == DType.optimal_dtype(vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    np.concatenate(documents).astype(dtype).tofile(tmp_path / "ours.bin")
    write_index(str(tmp_path / "ours.idx"), dtype, np.array([len(document) for document in documents], np.int32))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    dataset = IndexedDataset(str(tmp_path / "ours"))
    assert len(dataset) == 200 and all(
        np.array_equal(dataset[number], document) for number, document in enumerate(documents)
    )
    indexed = read_index(str(tmp_path / "theirs"))
    tokens = sum(map(len, documents))
    assert (indexed.sequences, indexed.documents, indexed.tokens, indexed.dtype) == (200, 200, tokens, dtype)
    assert largest_token(indexed) == (max(document.max() for document in documents), True)
    assert stored_tokens(str(tmp_path / "theirs")) == tokens


def test_chunks_do_not_show(tmp_path, monkeypatch):
    lengths = np.random.default_rng(0).integers(0, 9, 1000).astype(np.int32)
    write_index(str(tmp_path / "whole.idx"), np.dtype("int32"), lengths)
    monkeypatch.setattr("zaya_plugin.data.indexed_dataset.CHUNK_ELEMENTS", 7)
    write_index(str(tmp_path / "chunks.idx"), np.dtype("int32"), lengths)
    assert (tmp_path / "whole.idx").read_bytes() == (tmp_path / "chunks.idx").read_bytes()
    np.arange(lengths.sum(), dtype=np.int32).tofile(tmp_path / "chunks.bin")
    indexed = read_index(str(tmp_path / "chunks"))
    assert indexed.tokens == lengths.sum() and largest_token(indexed) == (lengths.sum() - 1, True)


def test_documents_of_several_sequences_are_read(tmp_path, prefix):
    data = bytearray(open(prefix + ".idx", "rb").read())
    header = list(HEADER.unpack_from(data))
    header[4] = 3  # two documents of two sequences each
    body = data[HEADER.size : HEADER.size + 12 * 4] + struct.pack("<3q", 0, 2, 4)
    open(prefix + ".idx", "wb").write(HEADER.pack(*header) + body)
    assert (read_index(prefix).sequences, read_index(prefix).documents) == (4, 2)


def test_partial_scan_looks_at_both_ends(prefix):
    indexed = read_index(prefix)
    assert largest_token(indexed, limit_bytes=8) == (15, False)
    tokens = np.fromfile(prefix + ".bin", np.uint16)
    tokens[8] = 999
    tokens.tofile(prefix + ".bin")
    assert largest_token(indexed, limit_bytes=8) == (15, False) and largest_token(indexed) == (999, True)


def test_index_cut_at_any_byte_is_detected(prefix):
    whole = open(prefix + ".idx", "rb").read()
    assert len(whole) == 34 + 12 * 4 + 8 * 5
    for size in range(len(whole)):
        open(prefix + ".idx", "wb").write(whole[:size])
        with pytest.raises(ValueError, match="cut short"):
            read_index(prefix)


def test_tokens_cut_at_any_byte_are_detected(prefix):
    whole = open(prefix + ".bin", "rb").read()
    for size in range(len(whole)):
        open(prefix + ".bin", "wb").write(whole[:size])
        with pytest.raises(ValueError, match=r"d\.bin: cut short: .* describes 32 \(16 tokens of uint16\)"):
            read_index(prefix)
    open(prefix + ".bin", "wb").write(whole + b"\0\0")
    with pytest.raises(ValueError, match="does not belong to its index"):
        read_index(prefix)


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"),
    [
        (0, "<9s", b"NOTINDEX\0", "is not an index"),
        (9, "<Q", 2, "index version 2"),
        (17, "<B", 99, "dtype code 99"),
        (17, "<B", 7, "dtype code 7"),
        (17, "<B", 4, "contradict"),
        (18, "<Q", 5, "cut short"),
        (18, "<Q", 3, "damaged"),
        (26, "<Q", 2**60, "cut short"),
        (34, "<i", 6, "contradict"),
        (34, "<i", -5, "contradict"),
        (34 + 16 + 8, "<q", 11, "contradict"),
        (34 + 48, "<q", 1, "do not run from 0 to 4"),
        (34 + 48 + 8, "<q", 3, "do not run from 0 to 4"),
        (34 + 48 + 32, "<q", 9, "do not run from 0 to 4"),
    ],
)
def test_damage_inside_the_index_is_detected(prefix, offset, form, value, message):
    data = bytearray(open(prefix + ".idx", "rb").read())
    struct.pack_into(form, data, offset, value)
    open(prefix + ".idx", "wb").write(data)
    with pytest.raises(ValueError, match=message):
        read_index(prefix)


def test_multimodal_index_is_named(prefix):
    open(prefix + ".idx", "ab").write(bytes(4))
    with pytest.raises(ValueError, match="multimodal"):
        read_index(prefix)
