# SPDX-License-Identifier: Apache-2.0
"""Megatron's ZeRO-1 optimizer over MuonAdamW: whole matrices at their owners, AdamW's state sharded flat.

The buffer layout (placement.py) keeps each matrix inside one shard of Megatron's ordinary distributed optimizer, whose
bucketed reduce-scatter, all-gather and their overlap apply unchanged. If another layout cuts a matrix,
`MatrixExchange` collects its pieces at one rank for Newton-Schulz.

Megatron's own Muon uses its layer-wise optimizer (`use_layer_wise_distributed_optimizer`), which this one does not use,
for three reasons. It distributes a layer's experts over the shards, so the grouped GEMM would need a copy of all
experts every step. It updates 2-D parameters one by one, so thousands of small products are launched. It assigns whole
parameters to ranks, so the embedding is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, get_global_rank, irecv, isend
from torch.nn import Parameter

from zaya_plugin.ground.errors import mistake
from zaya_plugin.optim.muon import MuonAdamW
from zaya_plugin.optim.parameter_role import role_of
from zaya_plugin.optim.sharding.boxes import sharded_boxes

# In Megatron's metadata of a sharded state: only what is no tensor is asked for.
WITHOUT_TENSORS = "zaya_without_tensors"


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


class MuonDistributedOptimizer(DistributedOptimizer):
    """DistributedOptimizer over a MuonAdamW. Checkpoints are Megatron's, without a second moment for Muon's matrices;
    every rank writes and reads its own parts.

    Attributes:
        exchange: exchanges the matrices that the layout cuts; None if it cuts none.
        targets: fp32 weight under Muon -> this rank's flat part of it in DDP's parameter buffer (`StepContext`). Empty
            for an fp32 model, whose weights are updated in the buffer.
    """

    def __init__(self, optimizer: MuonAdamW, *positional, **named):
        super().__init__(optimizer, *positional, **named)
        self.exchange, self.targets, self._copies, self._gradients = None, {}, {}, {}
        if self.is_stub_optimizer:  # no parameter of this kind is trained
            return
        cut = cut_matrices(self.buffers, self.data_parallel_group.size())
        cut_by_main_param = {main: cut[model] for model, main in self._pairs() if model in cut}
        self.exchange = MatrixExchange(self.data_parallel_group, cut_by_main_param) if cut else None
        self.targets: dict[Tensor, Tensor] = {}
        # For AdamW's parameters: this rank's part of the parameter buffer -> the fp32 weight that is copied to it.
        self._copies: dict[Tensor, Tensor] = {}
        # fp32 weight -> the model parameter's whole main_grad, and this rank's part of that.
        self._gradients: dict[Tensor, tuple[Tensor, Tensor]] = {}
        for model_param, main_param in self._pairs():
            main_param.zaya_role = role_of(model_param)
            # The flat part of DDP's parameter buffer that this rank writes and the other ranks gather.
            buffer, _, bucket = self.model_param_gbuf_map[model_param]
            place = self._get_model_param_range_map(model_param)["gbuf_world_in_bucket"]
            share = self.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end]
            if main_param.data_ptr() == share.data_ptr():  # an fp32 model: the weight itself
                continue
            if role_of(model_param).matrices is not None:
                self.targets[main_param] = share
            else:
                self._copies[share] = main_param

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return (model parameter, fp32 weight) for each parameter with a part on this rank. The fp32 weight holds that
        part only, and the inner optimizer updates it.
        """
        groups = (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        )
        return [
            pair
            for model_groups, main_groups in groups
            for model_group, main_group in zip(model_groups, main_groups, strict=True)
            for pair in zip(model_group, main_group, strict=True)
        ]

    def _copy_main_params_to_model_params(self) -> None:
        """Copy AdamW's fp32 weights to the parameter buffer. Muon's update kernel has written its `targets` already."""
        if self._copies:
            torch._foreach_copy_(list(self._copies), list(self._copies.values()))

    def _copy_model_grads_to_main_grads(self) -> None:
        """Set `grad` of the fp32 weights to this rank's part of each main_grad, which the reduce-scatter has summed.

        fp32 gradients are views into DDP's buffers; the views are made once.
        """
        if self.is_stub_optimizer or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            return super()._copy_model_grads_to_main_grads()
        for model_param, main_param in self._pairs():
            main_grad, view = self._gradients.get(main_param, (None, None))
            if main_grad is not model_param.main_grad:
                main_grad = model_param.main_grad
                param_range = self._get_model_param_range_map(model_param)["param"]
                view = main_grad.view(-1)[param_range.start : param_range.end]
                self._gradients[main_param] = main_grad, view
            main_param.grad = view.float()

    def start_param_sync_for_bucket_group_subset(self) -> None:
        """Gather the weights of this optimizer's own buckets. Megatron's method gathers all buckets, and is called for
        each optimizer.
        """
        own = {id(bucket) for buffer in self.buffers for bucket in buffer.buckets}
        for chunk in self.model_chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if any(id(bucket) in own for bucket in group.buckets):
                    chunk._start_bucket_group_param_sync(group, force_sync=False)

    def load_state_dict(self, state_dict: dict) -> None:
        # Megatron creates missing state as Adam's, with a second moment for every parameter.
        self.optimizer.initialise_state()
        # It looks for a saved group with the settings of each of this run's.
        groups = self.optimizer.groups_after(state_dict["optimizer"]["param_groups"])
        with torch.no_grad():
            super().load_state_dict({**state_dict, "optimizer": {**state_dict["optimizer"], "param_groups": groups}})

    def sharded_state_dict(self, model_sharded_state_dict: dict, is_loading: bool = False, **named) -> dict:
        """Return the state of this rank for a checkpoint, in Megatron's format `fully_reshardable`.

        Raises:
            ValueError: another format is asked for.
        """
        asked = named.get("sharding_type") or (named.get("metadata") or {}).get("distrib_optim_sharding_type")
        if asked != "fully_reshardable":
            raise mistake(
                "distrib_optim_sharding_type",
                asked,
                problem="stores the state by its place in the buffers. At another number of ranks it would load into "
                "other parameters without an error",
                allowed="fully_reshardable",
                fix="--dist-ckpt-optim-fully-reshardable",
            )
        if (named.get("metadata") or {}).get(WITHOUT_TENSORS):
            return {**self.state_dict(), "param_state": {}, "param_state_sharding_type": asked}
        return super().sharded_state_dict(model_sharded_state_dict, is_loading, **named)

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: dict, is_loading: bool = False, metadata: dict | None = None
    ) -> dict:
        """Return {number of a parameter: {state: boxes}} of this rank's parts: views, to be written or read in place.

        Megatron's own method gathers the whole state on every rank. Keys, shapes and values of the files are the same.
        """
        sharded, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_param = {tensor.data: tensor for tensor in nested_values(sharded)}
        return {number: self._boxes(param, by_param[param]) for number, (param, _) in enumerate(self._pairs())}

    def _boxes(self, model_param: Tensor, described: ShardedTensor | ShardedTensorFactory) -> dict[str, list]:
        start = self._get_model_param_range_map(model_param)["param"].start
        # Each part of the parameter is on one data-parallel rank of an optimizer instance.
        replica_id = (*described.replica_id[:2], self.distributed_optimizer_instance_id)
        return {
            state: sharded_boxes(described, f"optimizer.state.{state}.{described.key}", tensor, start, replica_id)
            for state, tensor in self._saved_tensors(model_param).items()
        }

    def _saved_tensors(self, model_param: Tensor) -> dict[str, Tensor]:
        """Return this rank's fp32 weights and state of a parameter, flat."""
        tensors = self._get_main_param_and_optimizer_states(model_param)
        return {state: tensor.detach().view(-1) for state, tensor in tensors.items()}

    def load_parameter_state_from_fully_reshardable(self, state_dict: dict) -> None:
        """Copy what `sharded_param_state_fully_reshardable` asked for, unless it was read in place."""
        for number, (param, _) in enumerate(self._pairs()):
            for state, tensor in self._saved_tensors(param).items():
                loaded = state_dict[number][state]
                for part, box in zip(tensor.split([box.numel() for box in loaded]), loaded, strict=True):
                    if part.data_ptr() != box.data_ptr():
                        part.copy_(box.view(-1))
