# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which matrix of a flat buffer, and the exchange of matrices that several ranks share.

Megatron's DDP copies all weights of one dtype into a flat buffer (experts into one of their own) and cuts the buffer
into buckets. ZeRO-1 cuts every bucket into equal shards, one a data-parallel rank. In Megatron's own layout bucket and
shard borders may lie inside a parameter. `layout` plans buffers in which

* the matrices of an expert block (e.g. the 16 gate+up matrices of a layer) are neighbours in ascending order, so that
  the grouped GEMM reads them in place as one [E, out, in] tensor; shard borders lie only between them;
* a parameter that Muon updates lies whole in one shard; the rank of that shard is its owner and alone keeps its
  momentum and updates it; owners have about equal work over all buckets;
* every other parameter fills the gaps and may be cut, because AdamW works element by element.

`BufferLayout.of` describes a buffer as it is, whichever layout it has. megatron-core before 0.19, hence Primus, has its
own layout alone, which cuts about one matrix at each shard border. `MatrixExchange` collects the pieces of such a
matrix at its owner for Newton-Schulz.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, get_global_rank, irecv, isend
from torch.nn import Parameter

from zaya_plugin.optim.parameter_role import role_of


@dataclass(frozen=True)
class BufferLayout:
    """Places of parameters in one buffer.

    places: parameter -> (start, end, bucket), in elements of the buffer.
    buckets: (start, end) of every bucket, padding included, in the order of the backward pass.
    shards: number of equal shards of every bucket; shard i belongs to rank i.
    """

    places: Mapping[Parameter, tuple[int, int, int]]
    buckets: Sequence[tuple[int, int]]
    shards: int

    @classmethod
    def of(cls, buffer, shards: int) -> BufferLayout:
        """Describe `buffer`, one of DDP's."""
        buckets = [(bucket.offset, bucket.offset + bucket.grad_data.numel()) for bucket in buffer.buckets]
        return cls(buffer.param_index_map, buckets, shards)

    def pieces(self, param: Parameter) -> tuple[tuple[int, int, int], ...]:
        """Return (rank, start, end) of each rank's part of the flat parameter, in ascending order."""
        start, end, bucket = self.places[param]
        low, high = self.buckets[bucket]
        shard = (high - low) // self.shards
        return tuple(
            (rank, max(start, low + rank * shard) - start, min(end, low + (rank + 1) * shard) - start)
            for rank in range((start - low) // shard, (end - 1 - low) // shard + 1)
        )


def layout(params: Sequence[Parameter], bucket_size: int | None, shards: int, divisor: int) -> BufferLayout:
    """Plan the layout of one buffer. Every rank plans for itself and gets the same result.

    Args:
        params: parameters in forward order, with their roles.
        bucket_size: elements after which a bucket may close; None puts all parameters into one bucket.
        shards: shards of a bucket.
        divisor: a divisor of every bucket's length.
    """
    from zaya_plugin.optim.sharding.placement import placed_buckets  # imports what megatron-core has from 0.19 on

    places, buckets, start = {}, [], 0
    for bucket, (offsets, numel) in enumerate(placed_buckets(params, bucket_size, shards, divisor)):
        for param, offset in offsets.items():
            places[param] = (start + offset, start + offset + param.numel(), bucket)
        buckets.append((start, start + numel))
        start += numel
    return BufferLayout(places, buckets, shards)


def compute_expert_block_layout(
    params: list[Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config,
    param_indices: list[int] | None = None,
):
    """Return `layout` as Megatron's PerBufferParamLayout; takes the place of
    DistributedOptimizer._compute_per_buffer_param_layout.

    ddp_config: Megatron's DistributedDataParallelConfig (bucket padding for NCCL). param_indices: passed through.
    """
    from megatron.core.optimizer.param_layout import PerBufferParamLayout, bucket_end_divisor

    divisor = bucket_end_divisor(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)
    planned = layout(params, bucket_size, data_parallel_world_size, divisor)
    return PerBufferParamLayout(
        param_index_map=dict(planned.places),
        bucket_indices=list(planned.buckets),
        # Padding included. Without it, `fully_reshardable` checkpoints (distrib_optimizer.py,
        # get_parameter_state_dp_zero) join the buckets without padding but look parameters up by their place in the
        # buffer: from the second bucket on they hold shifted state.
        per_bucket_numel_unpadded=[end - start for start, end in planned.buckets],
        param_indices=param_indices if param_indices is not None else [],
        num_optimizer_shards=data_parallel_world_size,
    )


@dataclass(frozen=True)
class CutMatrix:
    """A Muon parameter that several ranks share: one matrix, or several if its role says so.

    index: its number among all cut parameters, the same on every rank.
    pieces: as `BufferLayout.pieces`.
    """

    index: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def owner(self) -> int:
        """The rank that orthogonalises it: the one with the largest piece, the lowest of several."""
        return max(self.pieces, key=lambda piece: (piece[2] - piece[1], -piece[0]))[0]

    @property
    def numel(self) -> int:
        return self.pieces[-1][2]


def cut_matrices(buffers, shards: int) -> dict[Parameter, CutMatrix]:
    """Return the Muon parameters of DDP's `buffers` that several ranks share; the same on every rank."""
    cut = {}
    for buffer_layout in (BufferLayout.of(buffer, shards) for buffer in buffers):
        for param in buffer_layout.places:
            if role_of(param).matrices is not None and len(pieces := buffer_layout.pieces(param)) > 1:
                cut[param] = CutMatrix(len(cut), pieces)
    return cut


class MatrixExchange:
    """Sends pieces of matrices to their owners and back, over the data-parallel group.

    cut: fp32 weight of which this rank has only a piece -> the CutMatrix of the whole parameter. State is not
        exchanged: momentum and weight of a piece stay on its rank.
    """

    def __init__(self, group: ProcessGroup, cut: Mapping[Tensor, CutMatrix]):
        self.group, self.cut = group, cut
        self.rank = group.rank()

    def collect(self, params: Sequence[Tensor], pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the parameters that this rank owns, flat and whole, by index. pieces: this rank's part of each of
        `params`.
        """
        shared = ((self.cut[param], piece) for param, piece in zip(params, pieces, strict=True))
        whole = {matrix.index: piece.new_empty(matrix.numel) for matrix, piece in shared if matrix.owner == self.rank}
        self._exchange(params, pieces, whole, to_owner=True)
        return whole

    def give_back(self, params: Sequence[Tensor], whole: dict[int, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of each of `params`. whole: as from `collect`; like: gives dtypes and sizes."""
        parts = [torch.empty_like(part) for part in like]
        self._exchange(params, parts, whole, to_owner=False)
        return parts

    def _exchange(self, params: Sequence[Tensor], parts: Sequence[Tensor], whole: dict[int, Tensor], to_owner: bool):
        """Copy this rank's `parts` into the owners' matrices, or the owners' matrices into `parts`."""
        non_owner_op, owner_op = (isend, irecv) if to_owner else (irecv, isend)
        pairs = [(self.cut[param], part) for param, part in zip(params, parts, strict=True)]
        operations = []
        for matrix, part in sorted(pairs, key=lambda pair: pair[0].index):  # all ranks send in this order
            if matrix.owner != self.rank:
                operations.append(P2POp(non_owner_op, part, get_global_rank(self.group, matrix.owner), self.group))
                continue
            for rank, start, end in matrix.pieces:
                segment = whole[matrix.index][start:end]
                if rank != self.rank:
                    operations.append(P2POp(owner_op, segment, get_global_rank(self.group, rank), self.group))
                elif to_owner:
                    segment.copy_(part)
                else:
                    part.copy_(segment)
        for request in batch_isend_irecv(operations) if operations else ():
            request.wait()
