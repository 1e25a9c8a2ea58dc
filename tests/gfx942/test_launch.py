# SPDX-License-Identifier: Apache-2.0
"""Test the state at a launch, divergent control flow, and buffers."""

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import OutOfBounds
from tests.gfx942.toolchain import code_object

KERNELS = Path(__file__).parent / "kernels" / "launch.hip"


@pytest.fixture(params=["lockstep", "serial", "reverse"])
def device(request) -> Device:
    return Device(schedule=request.param)


def test_indices_in_three_dimensions(device):
    grid, block = (3, 2, 2), (5, 7, 3)
    y = device.alloc((12, 105, 8), np.int32)
    device.launch(code_object(KERNELS), "where", grid, block, [y])
    z, w, v = np.meshgrid(range(3), range(7), range(5), indexing="ij")
    bz, by, bx = np.meshgrid(range(2), range(2), range(3), indexing="ij")
    found = y.read()
    for column, index in enumerate((v, w, z)):
        assert np.array_equal(found[:, :, column], np.broadcast_to(index.ravel(), (12, 105)))
    for column, index in enumerate((bx, by, bz)):
        assert np.array_equal(found[:, :, 3 + column], np.broadcast_to(index.ravel()[:, None], (12, 105)))
    assert (found[:, :, 6] == 50703).all() and (found[:, :, 7] == 30202).all()


def test_constants_of_the_object(device):
    y = device.alloc(256, np.int32)
    device.launch(code_object(KERNELS), "constants", 1, 256, [y])
    assert np.array_equal(y.read(), np.resize([43, 41, 44, 41, 45], 256))


def test_structures_and_small_types_by_value():
    device = Device()
    y = device.alloc(8, np.int32)
    shape = struct.pack("<qifhxxxxxx", 2**31 - 1, -7, 2.5, -3)
    device.launch(code_object(KERNELS), "structure", 1, 1, [y, shape, np.float64(9.75), np.int16(-11), np.bool_(True)])
    assert y.read().tolist() == [2**31 - 1, -7, 2, -3, 9, -11, 1, -1]
    # Python numbers take the argument's size
    device.launch(code_object(KERNELS), "structure", 1, 1, [y, shape, 9.75, -11, True])
    assert y.read().tolist() == [2**31 - 1, -7, 2, -3, 9, -11, 1, -1]


def test_loops_of_different_length_in_every_lane(device):
    start = np.arange(1, 513, dtype=np.uint32)
    x, y = device.put(start), device.alloc(512, np.int32)
    device.launch(code_object(KERNELS), "collatz", 2, 256, [x, y])

    def steps(n):
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n % 2 else n // 2)

    assert y.read().tolist() == [steps(int(n)) for n in start]


def test_waves_that_part_and_meet(device):
    y = device.put(np.concatenate([np.arange(256), np.zeros(256)]).astype(np.int32))
    device.launch(code_object(KERNELS), "rounds_per_wave", 1, 256, [y])
    want = sum(sum(64 * wave + k for k in range(3 * wave)) for wave in range(4))
    assert (y.read()[256:] == want).all()


def test_buffers():
    device = Device()
    x = device.put(np.arange(6, dtype=np.int16).reshape(2, 3))
    assert x.read().tolist() == [[0, 1, 2], [3, 4, 5]] and x.nbytes == 12 and x.address % 256 == 0
    x.write(np.zeros((2, 3), np.int16))
    assert not x.read().any()
    with pytest.raises(ValueError, match="write of int32"):
        x.write(np.zeros((2, 3), np.int32))
    assert np.isnan(device.alloc(3, np.float32).read()).all()  # unwritten memory is not mistaken for a result
    later = device.alloc(1 << 22, np.uint8)  # the arena grows; earlier buffers keep address and contents
    assert not x.read().any() and later.address > x.address
    empty = device.alloc(0, np.float32)
    assert empty.read().size == 0


def test_empty_buffers_may_not_be_read():
    device = Device()
    with pytest.raises(OutOfBounds):
        device.launch(
            code_object(KERNELS), "collatz", 1, 256, [device.alloc(0, np.uint32), device.alloc(256, np.int32)]
        )


def test_order_of_blocks():
    with pytest.raises(ValueError, match="block_order='sideways'"):
        Device(block_order="sideways").launch(code_object(KERNELS), "constants", 1, 256, [None])
    device = Device(block_order=[1, 0])
    x, y = device.put(np.ones(512, np.uint32)), device.alloc(512, np.int32)
    device.launch(code_object(KERNELS), "collatz", 2, 256, [x, y])
    assert not y.read().any()
    with pytest.raises(ValueError, match="not a permutation of 3 blocks"):
        device.launch(code_object(KERNELS), "collatz", 3, 256, [x, y])
