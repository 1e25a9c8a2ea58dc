# SPDX-License-Identifier: Apache-2.0
"""Test the work table of multi-tensor kernels, and the batches for Newton-Schulz."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hip_ops.ops.muon import MatrixBatches, multi_tensor
from hip_ops.ops.muon.multi_tensor import ROW_WORDS, Staging, head_of, pack, vector_elements, work_table, work_tables


def rows_of(data: torch.Tensor, tensors: int) -> list[dict]:
    names = ("a", "b", "c", "numel", "first", "head", "scale", "place")
    return [
        dict(zip(names, row, strict=True))
        for row in struct.iter_unpack("<4qiifi", data[: tensors * ROW_WORDS].numpy().tobytes())
    ]


tensor = st.tuples(st.integers(0, 3000), st.tuples(*[st.integers(0, 40)] * 3))  # elements; where each column begins


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(tensor, min_size=1, max_size=8),
    sizes=st.sampled_from([(2, 4, 2), (4, 4, 2), (2, 2, 2), (4, 4), (2, 2)]),
    chunk=st.sampled_from([16, 256, 1024]),
)
def test_chunks_cover_every_element_once(tensors, sizes, chunk):
    addresses = [
        [4096 * (1 + i) + begin * size for begin, size in zip(begins, sizes, strict=False)]
        for i, (_, begins) in enumerate(tensors)
    ]
    numels = [numel for numel, _ in tensors]
    scales = [0.5 * i for i in range(len(tensors))]
    data, chunks = pack(addresses, sizes, numels, scales, range(len(tensors)), chunk)
    rows = rows_of(data, len(tensors))
    chunk_rows = data[len(tensors) * ROW_WORDS :].view(torch.int32)[:chunks].tolist()
    width = vector_elements(sizes)
    seen = [torch.zeros(n, dtype=torch.int32) for n in numels]
    for index, place in enumerate(chunk_rows):
        row = rows[place]
        skipped = max(row["head"], 0)
        begin = skipped + (index - row["first"]) * chunk
        assert index >= row["first"]
        seen[place][begin : min(begin + chunk, row["numel"])] += 1
        if index == row["first"]:
            seen[place][:skipped] += 1
    assert all((counts == 1).all() for counts in seen)
    for row, address, numel, scale, place in zip(rows, addresses, numels, scales, range(len(tensors)), strict=True):
        assert [row["a"], row["b"], row["c"]][: len(sizes)] == address and row["numel"] == numel
        assert row["scale"] == scale and row["place"] == place
        if row["head"] >= 0 and row["head"] < numel:
            assert all((a + row["head"] * s) % (width * s) == 0 for a, s in zip(address, sizes, strict=True))
    assert data.numel() == len(tensors) * ROW_WORDS + -(-chunks // 2)


def test_head_is_the_least_that_aligns_all():
    assert head_of([4096, 4096, 4096], [2, 4, 2]) == 0
    assert head_of([4096 + 2 * 3, 4096 + 4 * 3, 4096 + 2 * 3], [2, 4, 2]) == 1  # a vector of four is at 4
    assert head_of([4096 + 2 * 3, 4096 + 4 * 3, 4096 + 2 * 2], [2, 4, 2]) == -1
    assert head_of([4096 + 2 * 3, 4096 + 2 * 3], [2, 2]) == 5  # bf16 alone: vectors of eight
    assert vector_elements([2, 4, 2]) == 4 and vector_elements([2, 2, 2]) == 8


def test_table_is_cached_by_addresses_and_scales():
    a, b = [torch.zeros(5, 7), torch.zeros(3)], [torch.zeros(5, 7), torch.zeros(3)]
    table = work_table([a, b], [1.0, 2.0], [0, 1], 1024)
    assert work_table([a, b], [1.0, 2.0], [0, 1], 1024) is table
    assert work_table([a, b], [1.0, 3.0], [0, 1], 1024) is not table
    moved = [a[0].clone(), a[1]]
    other = work_table([moved, b], [1.0, 2.0], [0, 1], 1024)
    assert other is not table and rows_of(other.data, 2)[0]["a"] == moved[0].data_ptr()
    assert (table.tensors, table.chunks, table.chunk_rows[:2].tolist()) == (2, 2, [0, 1])


def test_old_tables_are_dropped():
    before = multi_tensor._uploaded.cache_info().maxsize
    tensors = [torch.zeros(4) for _ in range(before + 5)]
    for t in tensors:
        work_table([[t]], [1.0], [0], 1024)
    assert multi_tensor._uploaded.cache_info().currsize == before


def test_graphs_take_from_memory_that_lies_ready():
    """Tests without a GPU that pieces follow each other and never overlap, and that a lack of memory is reported."""
    staging, host = Staging(), torch.arange(3)
    with pytest.raises(RuntimeError, match="Call the operator once before the capture"):
        staging.take(host)
    staging.left = torch.zeros(7, dtype=torch.int64)
    first, second = staging.take(host), staging.take(host + 10)
    assert (
        first.tolist() == [0, 1, 2] and second.tolist() == [10, 11, 12] and second.data_ptr() == first.data_ptr() + 24
    )
    with pytest.raises(RuntimeError, match="table of 24 bytes"):
        staging.take(host)


def test_one_table_a_combination_of_dtypes():
    bf16, fp32 = torch.bfloat16, torch.float32
    first = [torch.zeros(4, dtype=d) for d in (bf16, fp32, bf16, bf16)]
    second = [torch.zeros(4, dtype=d) for d in (fp32, fp32, fp32, bf16)]
    found = {
        dtypes: [row["place"] for row in rows_of(table.data, table.tensors)]
        for dtypes, table in work_tables([first, second], [1.0] * 4)
    }
    assert found == {(bf16, fp32): [0, 2], (fp32, fp32): [1], (bf16, bf16): [3]}


def test_too_many_chunks_are_refused():
    with pytest.raises(ValueError, match="split the lists"):
        pack([[0]], [2], [2**41], [1.0], [0], 16)


def test_batches_hold_equal_shapes_together():
    shapes = [(4, 6), (3, 5), (4, 6), (6, 4), (3, 5)]
    batches = MatrixBatches(shapes, "cpu")
    assert [tuple(t.shape) for t in batches.tensors] == [(2, 4, 6), (2, 3, 5), (1, 6, 4)]
    assert batches.places == [[0, 2], [1, 4], [3]]
    for i, slot in enumerate(batches.slots):
        assert tuple(slot.shape) == shapes[i] and slot.is_contiguous() and slot.dtype == torch.bfloat16
        slot.fill_(i + 1)
    assert [t[:, 0, 0].tolist() for t in batches.tensors] == [[1, 3], [2, 5], [4]]
    assert [m[0, 0].item() for m in batches.split([t * 2 for t in batches.tensors])] == [2, 4, 6, 8, 10]
    batches.square_sums.copy_(torch.arange(5.0))
    assert [s.tolist() for s in batches.sums()] == [[0, 2], [1, 4], [3]]
    together = MatrixBatches(sorted(shapes), "cpu")
    assert [s.data_ptr() - together.square_sums.data_ptr() for s in together.sums()] == [0, 8, 16]  # no copies
    empty = MatrixBatches([], "cpu")
    assert empty.slots == empty.tensors == empty.sums() == empty.split([]) == []
    with pytest.raises(ValueError, match="a batch has shape"):
        batches.split([t.mT for t in batches.tensors])
    with pytest.raises(ValueError, match=r"shapes\[1\]"):
        MatrixBatches([(2, 3), (2, 3, 4)], "cpu")
