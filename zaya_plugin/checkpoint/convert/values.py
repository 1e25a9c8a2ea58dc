# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie in files, read a block of rows at a time,
so that a model of any size passes through little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zaya_plugin.checkpoint.direct_file import PIECE
from zaya_plugin.checkpoint.stored_boxes import read_into


class Values(Protocol):
    """A tensor that is read by rows of its first dimension. A scalar has one row."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows start .. stop - 1; [stop - start, ...]."""
        ...


@dataclass(frozen=True)
class Region:
    """Contiguous values in a file, from the byte `offset` on."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Tensor:
        row = prod(self.shape[1:]) * self.dtype.itemsize
        tensor = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        if tensor.numel():
            read_into(self.path, self.offset + start * row, as_bytes(tensor))
        return tensor

    def part(self, index: int) -> Region:
        """Return entry `index` of the first dimension."""
        size = prod(self.shape[1:]) * self.dtype.itemsize
        return Region(self.path, self.offset + index * size, self.dtype, self.shape[1:])


@dataclass(frozen=True)
class Boxes:
    """A tensor in rectangular parts, as ranks stored it. parts: (place of the first element, values)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], Region], ...]

    def rows(self, start: int, stop: int) -> Tensor:
        if not self.shape:
            return self.parts[0][1].rows(start, stop)
        tensor = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for place, region in self.parts:
            first, last = max(start, place[0]), min(stop, place[0] + region.shape[0])
            if first < last:
                columns = tuple(slice(at, at + size) for at, size in zip(place[1:], region.shape[1:], strict=True))
                values = region.rows(first - place[0], last - place[0])
                tensor[(slice(first - start, last - start), *columns)] = values
        return tensor


@dataclass(frozen=True)
class Changed:
    """`of` with an elementwise function applied in fp32. dtype: of the function's result."""

    of: Values
    function: Callable[[Tensor], Tensor]
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def rows(self, start: int, stop: int) -> Tensor:
        return self.function(self.of.rows(start, stop).float())


@dataclass(frozen=True)
class Zeros:
    """A tensor of zeros."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.zeros((stop - start, *self.shape[1:]), dtype=self.dtype)


@dataclass(frozen=True)
class OfLength:
    """The first `length` rows of a tensor; rows that it lacks are zeros."""

    of: Values
    length: int

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.length, *self.of.shape[1:]

    def rows(self, start: int, stop: int) -> Tensor:
        end = min(max(self.of.shape[0], start), stop)
        grown = torch.zeros((stop - end, *self.of.shape[1:]), dtype=self.dtype)
        return torch.cat([self.of.rows(start, end), grown]) if end > start else grown


@dataclass(frozen=True)
class TensorContent:
    """A tensor to write. blocks: its bytes, in pieces."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[memoryview]]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def whole(values: Values) -> Tensor:
    """Return the tensor."""
    return values.rows(0, values.shape[0] if values.shape else 1).view(values.shape)


def blocks(values: Values, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the values in `dtype`, in blocks of rows of about PIECE bytes; empty tensors yield nothing."""
    count = values.shape[0] if values.shape else 1
    widest = max(values.dtype.itemsize, dtype.itemsize)
    step = max(1, PIECE // max(1, prod(values.shape[1:]) * widest))
    for start in range(0, count, step):
        yield values.rows(start, min(start + step, count)).to(dtype)


def as_bytes(block: Tensor) -> memoryview:
    """Return a tensor's bytes."""
    return memoryview(block.contiguous().view(-1).view(torch.uint8).numpy())


def byte_blocks(parts: Sequence[Values], dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the bytes of tensors one behind another, in `dtype`."""
    for values in parts:
        for block in blocks(values, dtype):
            yield as_bytes(block)
