# SPDX-License-Identifier: Apache-2.0
"""A flat range of a parameter as boxes of its tensor."""

import itertools
import math

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from zaya_plugin.optim.sharding.boxes import boxes, sharded_boxes


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (4, 1, 3), (1, 1), (2, 0)])
def test_boxes_are_the_range_in_its_order(shape):
    values = torch.arange(math.prod(shape)).view(shape)
    for start, end in itertools.combinations(range(values.numel() + 1), 2):
        found = list(boxes(shape, start, end))
        parts = [
            values[tuple(slice(a, a + n) for a, n in zip(offset, sizes, strict=True))].reshape(-1)
            for offset, sizes in found
        ]
        assert torch.equal(torch.cat(parts), torch.arange(start, end))
        assert len(found) <= max(2 * len(shape) - 1, 1)
    assert list(boxes(shape, 0, values.numel())) == ([((0,) * len(shape), shape)] if values.numel() else [])


def test_a_part_of_a_tensor_parallel_rank_lies_at_its_place_in_the_whole():
    """Rank 1 of two that halve the columns: elements 2 to 9 of its [4, 3]."""
    local = ShardedTensor.from_rank_offsets("weight", torch.zeros(4, 3), (1, 1, 2), replica_id=(0, 1, 5))
    values = torch.arange(2.0, 9.0, dtype=torch.bfloat16)
    found = sharded_boxes(local, "optimizer.state.exp_avg.weight", values, 2, (0, 1, 0))
    assert [(each.global_offset, each.local_shape) for each in found] == [((0, 5), (1, 1)), ((1, 3), (2, 3))]
    assert all(each.key == "optimizer.state.exp_avg.weight" and each.global_shape == (4, 6) for each in found)
    assert all(each.replica_id == (0, 1, 0) and each.dtype == torch.bfloat16 for each in found)
    assert torch.equal(torch.cat([each.data.flatten() for each in found]), values)
    found[0].data.fill_(-1.0)
    assert values[0] == -1.0, "views, so that a load reads in place"


def test_the_parts_of_a_factory():
    """Gate and up of one [4, 3] matrix are two tensors in a checkpoint; the range has the end of one and the start of
    the other.
    """

    def build(key, data, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{name}", part, replica_id=replica_id)
            for name, part in zip(("gate", "up"), data.chunk(2), strict=True)
        ]

    factory = ShardedTensorFactory("fc1", torch.zeros(4, 3), build, merge_fn=None, replica_id=(0, 0, 0))
    found = sharded_boxes(factory, "exp_avg.fc1", torch.arange(4.0, 8.0), 4, (0, 0, 0))
    assert [(each.key, each.global_offset, each.data.flatten().tolist()) for each in found] == [
        ("exp_avg.fc1.gate", (1, 1), [4.0, 5.0]),
        ("exp_avg.fc1.up", (0, 0), [6.0, 7.0]),
    ]
