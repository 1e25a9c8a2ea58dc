# SPDX-License-Identifier: Apache-2.0
"""One collective for all buckets of a layer's experts, so that Muon's shares may be cut finer than what goes over the links.

Both blocks of a layer's experts are ready at the same moment of the backward pass and read by the same product of the forward pass. In buckets of their own
they would be two collectives one behind the other, and with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands under tensor and context
parallelism) the second one's wait for the first holds up every kernel that is queued behind it: on two H200s 35 ms of a step, in graphs too. Megatron's bucket
groups are made for that; its own have one bucket each.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

# set on a group where the optimizer has several instances
OF_INSTANCES = ("inter_distributed_optimizer_instance_group", "communication_stream")


def group_layers(model_chunks: Iterable) -> None:
    """Put buckets of experts that the same layer waits for into one bucket group; model_chunks as DDP wraps them, before the optimizer is built."""
    for chunk in model_chunks:
        if not isinstance(chunk, DistributedDataParallel) or getattr(
            chunk.ddp_config, "reduce_scatter_with_fp32_accumulation", False
        ):
            continue  # that reduction of Megatron's takes one bucket a group
        old = chunk.expert_parallel_bucket_groups
        new = [_joined(list(groups)) for _, groups in groupby(old, key=_layer)]
        chunk.expert_parallel_bucket_groups = new
        for bucket_group in new:
            chunk.param_to_bucket_group.update(dict.fromkeys(bucket_group.params, bucket_group))
        if any(each.next_param_gather_bucket_group is not None for each in old):
            for before, after in pairwise(new):  # as DDP links its own, which lie in the order of the backward pass
                after.next_param_gather_bucket_group = before


def _joined(groups: list) -> _ParamAndGradBucketGroup:
    first = groups[0]
    if len(groups) == 1:
        return first
    ranks = getattr(first, "intra_distributed_optimizer_instance_group", None) or first.data_parallel_group
    joined = _ParamAndGradBucketGroup(
        [bucket for group in groups for bucket in group.buckets], first.ddp_config, ranks, ranks.size()
    )
    for name in OF_INSTANCES:
        if hasattr(first, name):
            setattr(joined, name, getattr(first, name))
    return joined


def _layer(bucket_group) -> int | tuple:
    """The layer that waits for it first and fills it last, by the blocks' names, layers.<number>.<matrices>; a key of its own where experts are in no block."""
    blocks = (getattr(param, "expert_block", None) for bucket in bucket_group.buckets for param in bucket.params_list)
    return min((int(block[0].split(".")[1]) for block in blocks if block is not None), default=(id(bucket_group),))
