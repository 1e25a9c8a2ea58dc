# SPDX-License-Identifier: Apache-2.0
"""The copy of a checkpoint on a GPU: the host does not wait for it, and an update waits for what is not copied yet."""

import time

import pytest
import torch

from zaya_plugin.checkpoint.host_buffer import SMALL, HostBuffer, Staging, view

COUNT = 1500  # more than a stream takes; with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams together take no more


def first_values(buffer: HostBuffer, starts: list[int], tensors: list[torch.Tensor]) -> list[float]:
    """Return what the copy of each tensor begins with."""
    return [float(view(buffer.bytes, start, tensor)[0]) for start, tensor in zip(starts, tensors, strict=True)]


@pytest.mark.alone
def test_more_copies_than_a_stream_takes():
    tensors = [torch.full((SMALL // 4,), float(n), device="cuda") for n in range(COUNT)]
    tensors += [torch.full((8,), float(COUNT), device="cuda")]
    tensors = tensors[-1:] + tensors[:-1]  # small ones first, as in a rank's file
    starts = [0] + [64 + n * SMALL for n in range(COUNT)]
    buffer = HostBuffer()
    buffer.allocate(64 + COUNT * SMALL, pin=True)
    assert buffer.pinned
    staging = Staging(buffer, list(zip(starts, tensors, strict=True)))
    for step in range(3):
        expected = [float(tensor[0]) for tensor in tensors]
        torch.cuda._sleep(int(0.5 * 1.9e9))  # the optimizer's kernels, half a second
        begun = time.perf_counter()
        staging.start()
        assert step == 0 or time.perf_counter() - begun < 0.1  # the first one loads kernels
        assert not staging.is_complete
        if step == 1:
            while not staging.is_complete:
                time.sleep(0.001)
        staging.before_change(tensors)
        torch._foreach_add_(tensors, COUNT)
        staging.wait()
        assert staging.is_complete
        assert first_values(buffer, starts, tensors) == expected
        assert [float(tensor[0]) for tensor in tensors] == [each + COUNT for each in expected]
    buffer.release()
