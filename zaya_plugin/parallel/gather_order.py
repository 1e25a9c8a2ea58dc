# SPDX-License-Identifier: Apache-2.0
"""Which buckets of experts are fetched ahead: all of the next layer's.

With `overlap_param_gather` Megatron waits for a bucket in the hook of the first module that has a parameter in it, and then asks for the next one. Experts read both
their blocks before the first product, so where a layer's blocks lie in two buckets, the second would be asked for and waited for at once, in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

from megatron.core.distributed import DistributedDataParallel


def gather_layers_ahead(model_chunks: Iterable) -> None:
    """Let the wait for a layer's first bucket of experts ask for all buckets that the next layer waits for; model_chunks as DDP wraps them."""
    for chunk in model_chunks:
        if not (isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather):
            continue
        # In the order in which the forward pass waits for them.
        layers = [list(groups) for _, groups in groupby(reversed(chunk.expert_parallel_bucket_groups), key=_first_layer)]
        for now, then in pairwise(layers):
            for bucket_group in now:
                bucket_group.next_param_gather_bucket_group = None
            now[0].next_param_gather_bucket_group = Together(then)


class Together:
    """Several bucket groups as the one that Megatron asks for next."""

    def __init__(self, bucket_groups: list):
        self.bucket_groups = bucket_groups

    @property
    def param_gather_dispatched(self) -> bool:
        return all(each.param_gather_dispatched for each in self.bucket_groups)

    def start_param_sync(self) -> None:
        for each in self.bucket_groups:
            if not each.param_gather_dispatched:
                each.start_param_sync()


def _first_layer(bucket_group) -> int:
    """The layer that waits for it, by the blocks' names, layers.<number>.<matrices>; 0 where experts are in no block."""
    blocks = (getattr(param, "expert_block", None) for bucket in bucket_group.buckets for param in bucket.params_list)
    return min((int(block[0].split(".")[1]) for block in blocks if block is not None), default=0)
