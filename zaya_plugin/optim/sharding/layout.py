# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie in Megatron's flat buffers, so that a layer's experts stay one block and no matrix is cut.

Megatron's DDP copies all weights of one dtype into a flat buffer (experts into one of their own), cuts the buffer into buckets and every bucket into
as many equal shards as there are data-parallel ranks (ZeRO-1). Its own layout lets bucket and shard borders fall
anywhere. Here

* the matrices of an expert block (parameters tagged `expert_block = (name, index)`, e.g. the 16 gate+up matrices of a
  layer) are neighbours in ascending order, so the grouped GEMM reads them in place as one [E, out, in] tensor, and the
  shard size is a multiple of the largest expert matrix, so shard borders fall only between them;
* a parameter that Muon updates (tagged `muon_matrices = (b, m, n)`) lies whole in one shard, its owner's; blocks are
  ordered so that every owner gets the same work over all buckets (owner_balance.py);
* everything else fills the rest and may be cut, as AdamW does not mind.
"""

from __future__ import annotations

from megatron.core.optimizer.param_layout import PerBufferParamLayout, bucket_end_divisor
from torch.nn import Parameter

from zaya_plugin.optim.newton_schulz_cost import FLOPS_PER_ELEMENT, newton_schulz_flops
from zaya_plugin.optim.sharding import partition
from zaya_plugin.optim.sharding.owner_balance import balanced
from zaya_plugin.optim.sharding.placement import Shards, offsets, units_of

# Times the bucket's size that is asked for: blocks of larger buckets can be ordered in more ways, and fill them better.
SIZES = (1, 2, 4)


def compute_expert_block_layout(
    params: list[Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config,
    param_indices: list[int] | None = None,
) -> PerBufferParamLayout:
    """Layout of one buffer; takes the place of DistributedOptimizer._compute_per_buffer_param_layout.

    Args:
        params: parameters in forward order; those with an attribute `expert_block` belong to a block, those with
            `muon_matrices` are kept whole.
        bucket_size: elements after which a bucket may close; None puts all into one bucket.
        data_parallel_world_size: shards of a bucket.
        ddp_config: Megatron's DistributedDataParallelConfig (bucket padding for NCCL).
        param_indices: passed through.

    Returns:
        A layout whose buckets follow the order of the backward pass, as DDP demands.
    """
    shards = Shards(
        data_parallel_world_size,
        bucket_end_divisor(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw),
    )
    layout = PerBufferParamLayout(
        param_indices=param_indices if param_indices is not None else [], num_optimizer_shards=shards.count
    )
    units = units_of(reversed(params))
    tried = [
        balanced(partition.buckets(units, bucket_size and times * bucket_size, shards), shards)
        for times in (SIZES if bucket_size is not None and shards.count > 1 else (1,))
    ]
    # An element of a bucket costs about as much on the links as its owner's passes over it.
    chosen, _ = min(
        tried, key=lambda each: each[1] + FLOPS_PER_ELEMENT * partition.cost([numel for _, numel in each[0]])
    )
    start = 0
    for bucket, (in_bucket, numel) in enumerate(chosen):
        # DDP walks parameters in backward order; the map only has to name each one's place.
        for param, offset in offsets(in_bucket).items():
            layout.param_index_map[param] = (start + offset, start + offset + param.numel(), bucket)
        layout.bucket_indices.append((start, start + numel))
        # Padding included. Where it is left out, `fully_reshardable` checkpoints (distrib_optimizer.py,
        # get_parameter_state_dp_zero) join the buckets without it but look parameters up by their place in the
        # buffer: from the second bucket on they hold shifted state.
        layout.per_bucket_numel_unpadded.append(numel)
        start += numel
    return layout


def newton_schulz_work(layout: PerBufferParamLayout, shards: int) -> list[float]:
    """Newton-Schulz FLOPs of each shard's owner under `layout`."""
    work = [0.0] * shards
    for param, (start, _, bucket) in layout.param_index_map.items():
        low, high = layout.bucket_indices[bucket]
        count, m, n = getattr(param, "muon_matrices", (0, 1, 1))
        work[(start - low) * shards // (high - low)] += count * newton_schulz_flops(m, n)
    return work
