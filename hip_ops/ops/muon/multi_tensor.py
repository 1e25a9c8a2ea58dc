# SPDX-License-Identifier: Apache-2.0
"""Work tables, by which one kernel launch processes many tensors of different sizes.

A table is one int64 tensor on the device. First a row of ROW_WORDS words for every tensor,

    word 0..2   addresses of up to three parallel tensors (gradient, momentum, output; or update, master, parameter)
    word 3      number of elements
    word 4      low half: the tensor's first chunk; high half: its head, or -1
    word 5      low half: bits of an fp32 scale; high half: the tensor's place in the caller's list

then, as int32, the row of every chunk. A chunk is `chunk_elements` consecutive elements of one tensor, which a block
takes at a time: from its chunk's number a block finds its work with two dependent loads, for any number of tensors. The
head is the number of elements to process one by one until all addresses of a row are aligned for vector access; -1:
there is no such number, and the whole tensor is processed element by element.

A table depends only on addresses, sizes and scales, so tables are cached under these and the stream that uploaded them:
a tensor that moved gets a new table, and a table stays valid if an address is freed and allocated again. While a CUDA
graph is captured every call makes its own table, whose upload becomes part of the graph; table and host copy are kept
for the life of the process, because replays read them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hip_ops.runtime.launch import multiprocessors

ROW_WORDS = 6
VECTOR_BYTES = 16
# Long enough that finding a chunk (two dependent loads) takes a few per cent of a block's time, short enough that the
# last round of a grid over a billion elements is well balanced. It is a multiple of every kernel's tile.
CHUNK_ELEMENTS = 16384
# With more chunks, blocks take several. A grid of exactly the resident blocks would waste most of a round where a
# kernel's registers admit one block less than assumed; several rounds reduce that loss.
BLOCKS_PER_PROCESSOR = 1024
MAX_TABLES = 64
STAGING_WORDS = 2**20  # 8 MiB; the tables of a step over 1.04 billion parameters take 0.6


@dataclass(frozen=True)
class WorkTable:
    """`data` holds `tensors` rows, then the row of each of `chunks` chunks of `chunk_elements` elements."""

    data: torch.Tensor
    tensors: int
    chunks: int
    chunk_elements: int

    @property
    def chunk_rows(self) -> torch.Tensor:
        """Return int32 [chunks] (and one more where their number is odd), a view into `data`."""
        return self.data[self.tensors * ROW_WORDS :].view(torch.int32)


def vector_elements(itemsizes: Sequence[int]) -> int:
    """Return the elements that a lane takes at once: 16 bytes of the widest type, so that a wave's accesses are
    contiguous in all types.
    """
    return VECTOR_BYTES // max(itemsizes)


def head_of(addresses: Sequence[int], itemsizes: Sequence[int]) -> int:
    """Return the number of elements before the first one at which every address is aligned to a vector, or -1."""
    width = vector_elements(itemsizes)
    for head in range(width):
        if all((a + head * s) % (width * s) == 0 for a, s in zip(addresses, itemsizes, strict=True)):
            return head
    return -1


def pack(
    addresses: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    numels: Sequence[int],
    scales: Sequence[float],
    places: Sequence[int],
    chunk_elements: int,
) -> tuple[torch.Tensor, int]:
    """Return the table as an int64 tensor on the CPU, and its number of chunks. `addresses[t]` has one address per
    entry of `itemsizes`.
    """
    rows, counts, chunks = [], [], 0
    for row, numel, scale, place in zip(addresses, numels, scales, places, strict=True):
        head = min(head_of(row, itemsizes), numel)
        count = max(1, -(-(numel - max(head, 0)) // chunk_elements)) if numel else 0
        rows.append(struct.pack("<4qiifi", *row, *[0] * (3 - len(row)), numel, chunks, head, scale, place))
        counts.append(count)
        chunks += count
    if chunks >= 2**31:
        raise ValueError(
            f"hip_ops: {sum(numels)} elements are {chunks} chunks, more than one launch can number; split the lists"
        )
    words = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int64)
    row_of_chunk = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(counts))
    if chunks % 2:
        row_of_chunk = torch.cat([row_of_chunk, row_of_chunk.new_zeros(1)])
    return torch.cat([words, row_of_chunk.view(torch.int64)]), chunks


class Staging:
    """Pinned host memory for the tables of graphs.

    It is allocated ahead, because a capture may not allocate pinned memory and torch copies from no other. It is never
    freed, because replays copy from it.
    """

    def __init__(self):
        self.left: torch.Tensor | None = None

    def prepare(self) -> None:
        """Make sure that at least half of STAGING_WORDS is free. Must be called outside of captures."""
        if self.left is None or self.left.numel() < STAGING_WORDS // 2:
            self.left = torch.empty(STAGING_WORDS, dtype=torch.int64, pin_memory=True)

    def take(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy of `host` in pinned memory."""
        if self.left is None or self.left.numel() < host.numel():
            raise RuntimeError(
                "hip_ops: a graph is captured and there is no pinned memory left for a work table of "
                f"{8 * host.numel()} bytes. Call the "
                f"operator once before the capture; one capture may use {4 * STAGING_WORDS} bytes of tables for certain"
            )
        piece, self.left = self.left[: host.numel()], self.left[host.numel() :]
        return piece.copy_(host)


_staging = Staging()
_kept_for_graphs: list[tuple[WorkTable, torch.Tensor]] = []


@functools.lru_cache(maxsize=MAX_TABLES)
def _uploaded(
    device, stream, addresses, itemsizes, numels, scales, places, chunk_elements
) -> tuple[WorkTable, torch.Tensor]:
    """Return the table on `device`, uploaded on `stream`, and its host copy, which the upload may still read."""
    host, chunks = pack(addresses, itemsizes, numels, scales, places, chunk_elements)
    if device.type != "cpu":
        _staging.prepare()
        host = host.pin_memory()
    return WorkTable(host.to(device, non_blocking=True), len(numels), chunks, chunk_elements), host


def _captured(device, addresses, itemsizes, numels, scales, places, chunk_elements) -> WorkTable:
    """Return a new table for the graph being captured; its upload becomes part of the graph."""
    host, chunks = pack(addresses, itemsizes, numels, scales, places, chunk_elements)
    table = WorkTable(torch.empty_like(host, device=device), len(numels), chunks, chunk_elements)
    pinned = _staging.take(host)
    table.data.copy_(pinned, non_blocking=True)
    _kept_for_graphs.append((table, pinned))
    return table


def work_table(
    columns: Sequence[Sequence[torch.Tensor]], scales: Sequence[float], places: Sequence[int], chunk_elements: int
) -> WorkTable:
    """Return the table for parallel lists of tensors (`columns[c][t]`), each list of one dtype, all on one device."""
    device = columns[0][0].device
    content = (
        tuple(zip(*([t.data_ptr() for t in column] for column in columns), strict=True)),
        tuple(column[0].element_size() for column in columns),
        tuple(t.numel() for t in columns[0]),
        tuple(scales),
        tuple(places),
        chunk_elements,
    )
    if device.type == "cpu":
        return _uploaded(device, 0, *content)[0]
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return _captured(device, *content)
        return _uploaded(device, torch.cuda.current_stream().cuda_stream, *content)[0]


def work_tables(
    columns: Sequence[Sequence[torch.Tensor]], scales: Sequence[float] = ()
) -> Iterator[tuple[tuple[torch.dtype, ...], WorkTable]]:
    """Yield one table per combination of dtypes in parallel lists. Usually there is one combination, hence one
    launch.
    """
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for place, row in enumerate(zip(*columns, strict=True)):
        groups.setdefault(tuple(t.dtype for t in row), []).append(place)
    for dtypes, places in groups.items():
        chosen = [[column[place] for place in places] for column in columns]
        yield dtypes, work_table(chosen, [scales[place] if scales else 1.0 for place in places], places, CHUNK_ELEMENTS)


def blocks_for(table: WorkTable) -> int:
    """Return the number of blocks of 256 threads to launch; few on a CPU, which runs them one by one."""
    device = table.data.device
    if device.type == "cpu":
        return min(table.chunks, 4)
    return min(table.chunks, multiprocessors(device) * BLOCKS_PER_PROCESSOR)
