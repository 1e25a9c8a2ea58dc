# SPDX-License-Identifier: Apache-2.0
"""A rank's flat part of a parameter as boxes of the whole tensor, as a checkpoint stores them.

torch's distributed checkpoints store boxes: an offset and a size in every axis. A shard of the distributed optimizer is
a flat range of a parameter, which may begin and end inside a row. Such a range is a few boxes: part of a row, whole
rows, part of a row. So each rank writes what it holds and nothing is gathered; a load at another number of ranks reads
the intersections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, sizes) of boxes that together are the elements start to end of a contiguous tensor, in their
    order.
    """
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while start < end:
        index, inside = divmod(start, row)
        whole = 0 if inside else (end - start) // row
        if whole:
            yield (index, *(0 for _ in shape[1:])), (whole, *shape[1:])
            start += whole * row
            continue
        stop = min(end, (index + 1) * row)
        for offset, sizes in boxes(shape[1:], inside, stop - index * row):
            yield (index, *offset), (1, *sizes)
        start = stop


def sharded_boxes(
    param: ShardedTensor | ShardedTensorFactory, key: str, values: Tensor, start: int, replica_id: tuple
) -> list[ShardedTensor]:
    """Return `values` as sharded tensors under `key`: views of it, in its order.

    Args:
        param: Megatron's description of the whole local parameter.
        values: flat; the parameter's elements from `start` on.
    """
    parts, end = [], start + values.numel()
    for whole, first in _contiguous_parts(replace(param, key=key)):
        low, high = max(start, first), min(end, first + math.prod(whole.local_shape))
        for offset, sizes in boxes(whole.local_shape, low - first, high - first) if low < high else ():
            data = values[low - start :][: math.prod(sizes)].view(sizes)
            low += data.numel()
            inside = (0,) * whole.prepend_axis_num + offset
            parts.append(
                replace(
                    whole,
                    data=data,
                    dtype=data.dtype,
                    local_shape=sizes,
                    global_offset=tuple(map(sum, zip(whole.global_offset, inside, strict=True))),
                    axis_fragmentations=None,  # no regular grid
                    replica_id=replica_id,
                )
            )
    return parts


def _contiguous_parts(param: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """Return the tensors that a checkpoint has for a parameter, each with its first element in the flat parameter.

    One tensor, or those that Megatron's factory makes, as gate and up of a SwiGLU's matrix.
    """
    if isinstance(param, ShardedTensor):
        return [(param, 0)]
    built = replace(param, data=torch.empty_like(param.data, device="meta")).build()
    parts = [(tensor, tensor.data.storage_offset()) for tensor in nested_values(built)]
    assert all(tensor.data.is_contiguous() for tensor, _ in parts), f"{param.key}: its parts are not contiguous"
    return sorted(parts, key=lambda part: part[1])
