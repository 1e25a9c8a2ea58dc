# SPDX-License-Identifier: Apache-2.0
"""The bytes around a tensor's values: with any values between them torch reads the tensor, bit for bit."""

import io

import pytest
import torch

from zaya_plugin.checkpoint.stored_tensor import around


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (1024, 257), (2, 1024, 1025)])
def test_torch_reads_values_between_the_bytes(dtype, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    before, after = around(dtype, shape)
    raw = values.reshape(-1).view(torch.uint8).numpy().tobytes()
    read = torch.load(io.BytesIO(before + raw + after), weights_only=True)
    assert (read.dtype, read.shape) == (dtype, values.shape)
    assert torch.equal(read, values)


def test_the_bytes_do_not_depend_on_the_process():
    first = around(torch.float32, (3, 5))
    around.cache_clear()
    opened = [open("/dev/null") for _ in range(20)]  # other descriptors, as in another process
    assert around(torch.float32, (3, 5)) == first
    for file in opened:
        file.close()


def test_the_bytes_of_a_large_tensor_need_no_memory():
    before, after = around(torch.float32, (1 << 15, 1 << 16))  # 8 GiB
    assert len(before) + len(after) < 4096
