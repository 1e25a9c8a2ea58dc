# SPDX-License-Identifier: Apache-2.0
"""Where parameters lie in Megatron's flat buffers, so that a layer's experts stay one block and no expert is cut.

Megatron's DDP copies all weights of one dtype into a flat buffer, cuts the buffer into buckets and every bucket into
as many equal shards as there are data-parallel ranks (ZeRO-1). Its own layout lets bucket and shard borders fall
anywhere. Here

* the matrices of an expert block (parameters tagged `expert_block = (name, index)`, e.g. the 16 gate+up matrices of a
  layer) are neighbours in ascending order, so the grouped GEMM reads them in place as one [E, out, in] tensor;
* inside a bucket the blocks come first and the shard size is a multiple of the largest expert matrix, so shard borders
  fall only between matrices; everything else fills the rest and may be cut, as AdamW does not mind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron.core.optimizer.param_layout import (
    PerBufferParamLayout,
    bucket_end_divisor,
    pad_param_start,
    pad_to_divisor,
)
from torch.nn import Parameter

# A bucket grows over more layers until the padding that whole matrices cost is at most this share of it.
MAX_PADDING = 0.10


def compute_expert_block_layout(
    params: list[Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config,
    param_indices: list[int] | None = None,
) -> PerBufferParamLayout:
    """Layout of one buffer; takes the place of DistributedOptimizer._compute_per_buffer_param_layout.

    Args:
        params: parameters in forward order; those with an attribute `expert_block` belong to a block.
        bucket_size: elements after which a bucket may close; None puts all into one bucket.
        data_parallel_world_size: shards of a bucket.
        ddp_config: Megatron's DistributedDataParallelConfig (bucket padding for NCCL).
        param_indices: passed through.

    Returns:
        A layout whose buckets follow the order of the backward pass, as DDP demands.
    """
    divisor = bucket_end_divisor(data_parallel_world_size, ddp_config.pad_buckets_for_high_nccl_busbw)
    layout = PerBufferParamLayout(
        param_indices=param_indices if param_indices is not None else [],
        num_optimizer_shards=data_parallel_world_size,
    )
    chunk: list[list[Parameter]] = []

    def close() -> None:
        if chunk:
            start = layout.bucket_indices[-1][1] if layout.bucket_indices else 0
            starts, numel = _place(chunk, data_parallel_world_size, divisor)
            bucket = len(layout.bucket_indices)
            # DDP walks parameters in backward order; the map only has to name each one's place.
            for param, offset in starts.items():
                layout.param_index_map[param] = (start + offset, start + offset + param.numel(), bucket)
            layout.bucket_indices.append((start, start + numel))
            # Up to the end of the last parameter, alignment gaps included: checkpoints are cut off there.
            layout.per_bucket_numel_unpadded.append(max(offset + p.numel() for p, offset in starts.items()))
            chunk.clear()

    for unit in _units(reversed(params)):
        alone = getattr(unit[0], "shared_embedding", False)  # reduced across pipeline stages by itself
        if alone:
            close()
        chunk.append(unit)
        if alone or (bucket_size is not None and _worth_closing(chunk, bucket_size, data_parallel_world_size, divisor)):
            close()
    close()
    return layout


def _units(params: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    """Splits parameters into what must stay together: an expert block, or a single parameter."""
    unit: list[Parameter] = []
    for param in params:
        block = getattr(param, "expert_block", None)
        if unit and (block is None or block[0] != unit[0].expert_block[0]):
            yield unit
            unit = []
        if block is None:
            yield [param]
        else:
            unit.append(param)
    if unit:
        yield unit


def _place(units: list[list[Parameter]], shards: int, divisor: int) -> tuple[dict[Parameter, int], int]:
    """Offsets of the parameters of one bucket, and the bucket's length."""
    blocks = [sorted(u, key=lambda p: p.expert_block[1]) for u in units if hasattr(u[0], "expert_block")]
    whole = max((p.numel() for block in blocks for p in block), default=1)
    starts, cursor = {}, 0
    for block in blocks:
        # Aligned to the largest matrix, a block of matrices that divide it never straddles a multiple of it.
        cursor = pad_to_divisor(cursor, whole) if shards > 1 else pad_param_start(cursor)
        for param in block:
            starts[param] = cursor
            cursor += param.numel()
    for unit in units:
        if not hasattr(unit[0], "expert_block"):
            cursor = pad_param_start(cursor)
            starts[unit[0]] = cursor
            cursor += unit[0].numel()
    unit_of_shard = divisor // shards
    if blocks and shards > 1:
        unit_of_shard = math.lcm(unit_of_shard, whole)
    return starts, shards * pad_to_divisor(math.ceil(cursor / shards), unit_of_shard)


def _worth_closing(units: list[list[Parameter]], bucket_size: int, shards: int, divisor: int) -> bool:
    numel = sum(p.numel() for unit in units for p in unit)
    if numel < bucket_size:
        return False
    if not any(hasattr(unit[0], "expert_block") for unit in units):
        return True
    return _place(units, shards, divisor)[1] <= (1 + MAX_PADDING) * numel
