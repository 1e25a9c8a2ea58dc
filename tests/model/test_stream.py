# SPDX-License-Identifier: Apache-2.0
"""Stream and router state as one tensor: equal to the bit in bf16 and fp32, with their gradients."""

import pytest
import torch

from zaya_plugin.model.stream import join_stream_and_state, split_stream_and_state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_arrive_as_they_left_and_their_gradients_come_back(dtype):
    stream = torch.randn(5, 2, 8, requires_grad=True)
    state = torch.randn(5, 2, 3).to(dtype).requires_grad_()
    joined = join_stream_and_state(stream, state)
    assert joined.shape == (5, 2, 11) and joined.dtype == torch.float32 and joined._base is None
    stream_there, state_there = split_stream_and_state(joined, 8, dtype)
    assert torch.equal(stream_there, stream) and torch.equal(state_there, state) and state_there.dtype == dtype
    weights = torch.randn(5, 2, 8), torch.randn(5, 2, 3).to(dtype)
    torch.autograd.backward((stream_there, state_there), weights)
    assert torch.equal(stream.grad, weights[0]) and torch.equal(state.grad, weights[1])


def test_without_a_state_the_stream_goes_alone():
    stream = torch.randn(5, 2, 8)
    assert join_stream_and_state(stream, None) is stream
    there, state = split_stream_and_state(stream, 8, torch.bfloat16)
    assert torch.equal(there, stream) and state is None
