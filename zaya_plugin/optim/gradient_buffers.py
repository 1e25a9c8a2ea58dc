# SPDX-License-Identifier: Apache-2.0
"""Two changes to the gradient buffers of Megatron's DDP, both made when the optimizer is built:

* `group_layers`: one coalesced reduce-scatter and all-gather for all buckets of a layer's experts;
* `skip_zeroing_experts`: a step's first micro-batch writes the experts' gradients, so that they are not zeroed before.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.nn import Parameter

from zaya_plugin.optim.parameter_role import ExpertBlock, role_of
from zaya_plugin.patches import hooks

# Set on a bucket group where the optimizer has several instances.
INSTANCE_ATTRIBUTES = ("inter_distributed_optimizer_instance_group", "communication_stream")
# Values of `cuda_graph_impl` that keep the micro-batches of a step apart: all of them in one graph, or no graph.
GRAPHS_OF_WHOLE_STEPS = ("none", "full_iteration")


def group_layers(model_chunks: Iterable) -> None:
    """Put the buckets of experts that the same layer waits for into one bucket group.

    model_chunks: as DDP wraps them, before the optimizer is built.

    Both blocks of a layer's experts are ready at the same moment of the backward pass, and the forward pass reads them
    in the same product. In groups of their own, as Megatron makes them, they are two collectives in sequence. With one
    hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron requires under tensor and context parallelism) the
    second collective's wait for the first blocks every kernel queued behind it: 35 ms of a step on two H200s, in graphs
    too.
    """
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel) or getattr(
            chunk.ddp_config, "reduce_scatter_with_fp32_accumulation", False
        ):
            continue  # that reduction of Megatron's takes one bucket a group
        old = chunk.expert_parallel_bucket_groups
        new = [_joined(list(groups)) for _, groups in groupby(old, key=_layer)]
        hooks.set_attribute("DistributedDataParallel().expert_parallel_bucket_groups", chunk, new)
        joined = {param: bucket_group for bucket_group in new for param in bucket_group.params}
        hooks.set_attribute(
            "DistributedDataParallel().param_to_bucket_group", chunk, chunk.param_to_bucket_group | joined
        )
        if any(group.next_param_gather_bucket_group is not None for group in old):
            for before, after in pairwise(new):  # as DDP links its own groups, in the order of the backward pass
                hooks.set_attribute("_ParamAndGradBucketGroup().next_param_gather_bucket_group", after, before)


def _joined(groups: list) -> _ParamAndGradBucketGroup:
    """Return one group of all buckets of `groups`."""
    first = groups[0]
    if len(groups) == 1:
        return first
    ranks = getattr(first, "intra_distributed_optimizer_instance_group", None) or first.data_parallel_group
    joined = _ParamAndGradBucketGroup(
        [bucket for group in groups for bucket in group.buckets], first.ddp_config, ranks, ranks.size()
    )
    for name in INSTANCE_ATTRIBUTES:
        if hasattr(first, name):
            setattr(joined, name, getattr(first, name))
    return joined


def _layer(bucket_group) -> int | tuple:
    """Return the lowest layer in the group, which waits for it first and fills it last; a unique key for a group
    without expert blocks.
    """
    blocks = (role_of(param).block for bucket in bucket_group.buckets for param in bucket.params_list)
    return min((block.layer for block in blocks if block is not None), default=(id(bucket_group),))


def skip_zeroing_experts(model_chunks: Iterable) -> None:
    """Replace `reset` of the gradient buffers of `model_chunks`, as DDP wraps them, by `ZeroOtherGradients` where the
    first micro-batch writes a block.

    Megatron zeroes all gradient buffers at the start of a step, and the first micro-batch reads the zeros: 8 bytes an
    element, by their number 15 ms of ZAYA1-base's step on an H200. The experts' matrices are nine tenths of it. The
    gradient of a block comes from one product (`zaya_plugin.model.experts.weight_gradients`), which can write instead
    of add.
    """
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel) and _separates_micro_batches(chunk.config):
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                if blocks := blocks_that_write(buffer.param_index_map):
                    hooks.set_attribute("_ParamAndGradBuffer().reset", buffer, ZeroOtherGradients(buffer, blocks))


def _separates_micro_batches(config) -> bool:
    """Return whether the first micro-batch of a step runs other code than later ones: not in graphs of single layers.

    megatron-core 0.16 has graphs of single layers only, by two switches.
    """
    if hasattr(config, "cuda_graph_impl"):
        return config.cuda_graph_impl in GRAPHS_OF_WHOLE_STEPS
    return not (getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False))


def blocks_that_write(places: dict[Parameter, tuple[int, int, int]]) -> list[tuple[ExpertBlock, int, int]]:
    """Return (block, start, end) of every block that lies in the buffer whole, in order and without gaps.

    places: a buffer's parameters with (start, end, bucket).
    """
    members: dict[ExpertBlock, dict[int, tuple[int, int]]] = {}
    for param, (start, end, _) in places.items():
        role = role_of(param)
        if role.block is not None:
            members.setdefault(role.block, {})[role.index] = (start, end)
    written = []
    for block, by_index in members.items():
        ordered = [by_index[index] for index in sorted(by_index)]
        whole = sorted(by_index) == list(range(block.size))
        if whole and all(a[1] == b[0] for a, b in pairwise(ordered)):
            written.append((block, ordered[0][0], ordered[-1][1]))
    return written


class ZeroOtherGradients:
    """Replacement of `reset` of one gradient buffer: zeroes all gradients but those of `blocks`, and marks these as
    unwritten.
    """

    def __init__(self, buffer, blocks: list[tuple[ExpertBlock, int, int]]):
        self.buffer, self.blocks = buffer, [block for block, _, _ in blocks]
        borders = [
            0,
            *(place for _, start, end in sorted(blocks, key=lambda block: block[1]) for place in (start, end)),
            buffer.grad_data.numel(),
        ]
        self.others = [(start, end) for start, end in zip(borders[::2], borders[1::2], strict=True) if start < end]

    def __call__(self) -> None:
        others = [self.buffer.grad_data[start:end] for start, end in self.others]
        if others:
            torch._foreach_zero_(others)
        for grad in getattr(self.buffer, "extra_main_grads", ()):
            grad.zero_()
        for block in self.blocks:
            block.gradient_is_unwritten = True
