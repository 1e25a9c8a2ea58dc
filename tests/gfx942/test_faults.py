# SPDX-License-Identifier: Apache-2.0
"""Test that a small kernel provokes every fault, and that its correct twin passes, under all three schedules."""

from pathlib import Path

import numpy as np
import pytest

from tests.gfx942.emulator import SCHEDULES, Device
from tests.gfx942.emulator.faults import (
    BarrierMismatch,
    GlobalRace,
    LdsRace,
    MisalignedAccess,
    MissingWait,
    NotTerminating,
    OutOfBounds,
    ScratchAccess,
    UninitialisedLds,
    UninitialisedRegister,
    UnknownInstruction,
)
from tests.gfx942.toolchain import code_object

KERNELS = Path(__file__).parent / "kernels" / "faults.hip"


@pytest.fixture(params=SCHEDULES)
def device(request) -> Device:
    return Device(schedule=request.param)


def run(device: Device, kernel: str, args, blocks: int = 1):
    return device.launch(code_object(KERNELS), kernel, grid=(blocks,), block=(256,), args=args)


def values(*shape) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_exchange_through_lds_is_right(device):
    x, y = device.put(values(3, 256)), device.alloc((3, 256), np.float32)
    counters = run(device, "reverse_right", [x, y], blocks=3)
    assert np.array_equal(y.read(), x.read()[:, ::-1])
    assert counters.barriers == 3


def test_lost_barrier(device):
    x, y = device.put(values(3, 256)), device.alloc((3, 256), np.float32)
    with pytest.raises((LdsRace, UninitialisedLds)) as caught:
        run(device, "reverse_lost_barrier", [x, y], blocks=3)
    fault = caught.value
    assert fault.kernel == "reverse_lost_barrier" and fault.block == 0 and fault.instruction.startswith("ds_read")
    assert fault.wave in range(4) and fault.lane in range(64) and fault.pc is not None
    assert "reverse_lost_barrier" in str(fault) and "block 0" in str(fault)


def test_lost_second_barrier(device):
    x, y = device.put(values(4, 256)), device.alloc(256, np.float32)
    run(device, "reuse_right", [x, y, np.int32(4)])
    assert np.array_equal(y.read(), np.roll(x.read(), -64, axis=1).sum(axis=0))
    with pytest.raises(LdsRace, match="ds_write|ds_read"):
        run(device, "reuse_lost_barrier", [x, y, np.int32(4)])
    run(device, "reuse_lost_barrier", [x, y, np.int32(1)])  # one round does not reuse the buffer


def test_two_waves_write_one_lds_address(device):
    with pytest.raises(LdsRace, match="writes what another wave wrote"):
        run(device, "two_waves_write_one_place", [device.alloc(256, np.float32)])


def test_two_waves_may_write_one_value(device):
    """Triton replicates small tensors over waves and writes them from each."""
    y = device.alloc(256, np.float32)
    run(device, "two_waves_write_one_value", [y])
    assert np.array_equal(y.read(), np.arange(256) % 64)


def test_unwritten_lds(device):
    with pytest.raises(UninitialisedLds) as caught:
        run(device, "reads_unwritten_lds", [device.alloc(256, np.float32)])
    assert (caught.value.wave, caught.value.lane) == (0, 77 - 64)


def test_lds_range(device):
    y = device.alloc(256, np.float32)
    run(device, "lds_out_of_range", [y, np.int32(0)])
    with pytest.raises(OutOfBounds, match="4 bytes at 1024, the block has 1024") as caught:
        run(device, "lds_out_of_range", [y, np.int32(1)])
    assert (caught.value.wave, caught.value.lane) == (3, 63)


@pytest.mark.parametrize(
    ("shifts", "lane", "operation"),
    [
        ((1, 0), 63, "global_load"),
        ((-1, 0), 0, "global_load"),
        ((0, 1), 63, "global_store"),
        ((0, -1), 0, "global_store"),
    ],
)
def test_out_of_bounds_by_one_element(device, shifts, lane, operation):
    x, y = device.put(values(512)), device.alloc(512, np.float32)
    run(device, "copy_shifted", [x, y, np.int32(0), np.int32(0)], blocks=2)
    assert np.array_equal(x.read(), y.read())
    with pytest.raises(OutOfBounds, match="of allocation") as caught:
        run(device, "copy_shifted", [x, y, *map(np.int32, shifts)], blocks=2)
    assert caught.value.lane == lane and caught.value.instruction.startswith(operation)


def test_null_pointer(device):
    with pytest.raises(OutOfBounds):
        run(device, "copy_shifted", [None, device.alloc(256, np.float32), np.int32(0), np.int32(0)])


def test_misaligned(device):
    x, y = device.put(np.zeros(1028, np.uint8)), device.alloc(256, np.float32)
    run(device, "misaligned", [x, y, np.int32(4)])
    with pytest.raises(MisalignedAccess, match="not a multiple of 4"):
        run(device, "misaligned", [x, y, np.int32(2)])


def test_barrier_that_some_waves_skip(device):
    with pytest.raises(BarrierMismatch, match="2 ended"):
        run(device, "barrier_of_some_waves", [device.alloc(256, np.float32)])


def test_waves_at_different_barriers(device):
    y = device.alloc(256, np.float32)
    run(device, "two_barriers", [y, np.int32(256)])
    with pytest.raises(BarrierMismatch):
        run(device, "two_barriers", [y, np.int32(128)])
    shifted = Device(device.schedule, allow_shifted_waves=True)
    y = shifted.alloc(256, np.float32)
    run(shifted, "two_barriers", [y, np.int32(128)])
    assert np.array_equal(y.read(), [1] * 128 + [2] * 128)
    with pytest.raises(BarrierMismatch, match="2 ended"):
        run(shifted, "barrier_of_some_waves", [y])


def test_blocks_that_write_one_address(device):
    y = device.alloc(256, np.float32)
    run(device, "blocks_write_one_place", [y, np.int32(1)], blocks=4)  # equal values are no race
    with pytest.raises(GlobalRace, match="stored another value"):
        run(device, "blocks_write_one_place", [y, np.int32(0)], blocks=4)


def test_block_that_reads_another_ones_result(device):
    with pytest.raises(GlobalRace, match="reads what block 0 stored"):
        run(device, "block_reads_another", [device.alloc((2, 256), np.float32)], blocks=2)


def test_blocks_may_exchange_where_allowed():
    device = Device(allow_cross_block=True)
    run(device, "block_reads_another", [device.alloc((2, 256), np.float32)], blocks=2)


def test_missing_wait_for_a_load(device):
    x, y = device.put(values(512)), device.alloc(512, np.float32)
    run(device, "waits_for_all", [x, y])
    assert np.array_equal(y.read(), x.read() + 1)
    run(device, "waits_for_one", [x, y])  # the first of two loads is there after vmcnt(1)
    with pytest.raises(MissingWait, match="global_load_dword") as caught:
        run(device, "waits_for_none", [x, y])
    assert caught.value.instruction.startswith("v_add_f32")


def test_missing_wait_before_a_barrier(device):
    with pytest.raises(MissingWait, match="LDS write may be outstanding"):
        run(device, "barrier_before_lds_write_is_done", [device.alloc(256, np.float32)])


def test_unset_register(device):
    """The sum with an unset register is unset as well; storing it is the fault."""
    with pytest.raises(UninitialisedRegister) as caught:
        run(device, "reads_unset_register", [device.alloc(256, np.float32)])
    assert caught.value.instruction.startswith("global_store_dword")


def test_scratch(device):
    with pytest.raises(ScratchAccess, match="bytes of scratch a lane"):
        run(device, "spills", [device.put(values(64, 256)), device.alloc(256, np.float32), np.int32(3)])


def test_unknown_instruction_is_named(device):
    with pytest.raises(UnknownInstruction, match="v_mqsad_u32_u8"):
        run(device, "unknown_instruction", [device.alloc(256, np.float32)])


def test_endless_loop():
    device = Device(instruction_limit=10_000)
    with pytest.raises(NotTerminating, match="endless"):
        run(device, "endless", [device.alloc(256, np.float32)])


def test_arguments_are_checked():
    device = Device()
    y = device.alloc(256, np.float32)
    with pytest.raises(ValueError, match="takes 2 arguments, 1 given"):
        run(device, "blocks_write_one_place", [y])
    with pytest.raises(ValueError, match="argument 1 has 4 bytes"):
        run(device, "blocks_write_one_place", [y, np.int64(1)])
    with pytest.raises(ValueError, match="no kernel 'absent'"):
        run(device, "absent", [])
    with pytest.raises(ValueError, match="1 to 256 threads"):
        device.launch(code_object(KERNELS), "blocks_write_one_place", (1,), (512,), [y, np.int32(1)])
    with pytest.raises(ValueError, match="allowed are lockstep, serial, reverse"):
        Device(schedule="random")
