# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices that a buffer's shard borders cut: brought together at one rank for Newton-Schulz, and taken back.

Megatron's own buffer layout, the only one that releases before 0.19 and hence Primus know, cuts about one matrix at each border.
State stays where it is: every rank moves the momentum of its piece, the rank with the largest piece collects the
others' pieces, orthogonalises, and sends the update back. With the layout of zaya_plugin/optim/sharding/layout.py nothing is cut
and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, get_global_rank, irecv, isend
from torch.nn import Parameter


@dataclass(frozen=True)
class CutMatrix:
    """A parameter that several ranks share.

    index: its place among all, the same on every rank. matrices: (b, m, n), as Muon sees it. pieces: (rank, start,
    end) of each flat part, in ascending order. owner: the rank that orthogonalises it.
    """

    index: int
    matrices: tuple[int, int, int]
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def owner(self) -> int:
        return max(self.pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))[0]

    @property
    def numel(self) -> int:
        return self.pieces[-1][2]


def find_cut_matrices(buffers, shards: int) -> dict[Parameter, CutMatrix]:
    """Muon's parameters with more than one owner in Megatron's `buffers`; the same on every rank."""
    found = {}
    for buffer in buffers:
        for param, (start, end, bucket_id) in buffer.param_index_map.items():
            if not hasattr(param, "muon_matrices"):
                continue
            bucket = buffer.buckets[bucket_id]
            shard = bucket.grad_data.numel() // shards
            low, high = start - bucket.offset, end - bucket.offset
            pieces = [
                (rank, max(low, rank * shard) - low, min(high, (rank + 1) * shard) - low)
                for rank in range(low // shard, (high - 1) // shard + 1)
            ]
            if len(pieces) > 1:
                found[param] = CutMatrix(len(found), param.muon_matrices, tuple(pieces))
    return found


class MatrixExchange:
    """Sends pieces of matrices to their owners and back, over the data-parallel group."""

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.rank = group.rank()

    def collect(self, cut: Sequence[CutMatrix], pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """The matrices that this rank owns, flat, by index. pieces: this rank's part of each in `cut`."""
        whole: dict[int, Tensor] = {}
        moves = []
        for matrix, piece in sorted(zip(cut, pieces, strict=True), key=lambda pair: pair[0].index):
            if matrix.owner != self.rank:
                moves.append(self._move(isend, piece, matrix.owner))
                continue
            whole[matrix.index] = piece.new_empty(matrix.numel)
            for rank, start, end in matrix.pieces:
                part = whole[matrix.index][start:end]
                if rank == self.rank:
                    part.copy_(piece)
                else:
                    moves.append(self._move(irecv, part, rank))
        self._run(moves)
        return whole

    def give_back(self, cut: Sequence[CutMatrix], whole: dict[int, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of each matrix in `cut`, in that order; `whole` as from `collect`, `like` gives dtypes and sizes."""
        parts: dict[int, Tensor] = {}
        moves = []
        for matrix, example in sorted(zip(cut, like, strict=True), key=lambda pair: pair[0].index):
            if matrix.owner != self.rank:
                parts[matrix.index] = torch.empty_like(example)
                moves.append(self._move(irecv, parts[matrix.index], matrix.owner))
                continue
            for rank, start, end in matrix.pieces:
                part = whole[matrix.index][start:end]
                if rank == self.rank:
                    parts[matrix.index] = part
                else:
                    moves.append(self._move(isend, part.contiguous(), rank))
        self._run(moves)
        return [parts[matrix.index] for matrix in cut]

    def _move(self, operation, tensor: Tensor, rank: int) -> P2POp:
        return P2POp(operation, tensor, get_global_rank(self.group, rank), self.group)

    @staticmethod
    def _run(moves: list[P2POp]) -> None:
        for request in batch_isend_irecv(moves) if moves else ():
            request.wait()
