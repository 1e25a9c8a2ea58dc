# SPDX-License-Identifier: Apache-2.0
"""Test counters on kernels small enough to count by hand; they are the same under every schedule and order of
blocks.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.gfx942.emulator import Device
from tests.gfx942.toolchain import code_object

KERNELS = Path(__file__).parent / "kernels" / "counters.hip"


@pytest.fixture(params=["lockstep", "serial", "reverse", "one block at a time, backwards"])
def device(request) -> Device:
    if "block" in request.param:
        return Device(block_order="reverse", blocks_at_once=1)
    return Device(schedule=request.param)


def run(device, kernel, args, blocks=1, shared=0):
    return device.launch(code_object(KERNELS), kernel, blocks, 256, args, shared=shared)


def test_streaming_copy(device):
    x = device.put(np.random.default_rng(0).standard_normal((5, 256, 4)).astype(np.float32))
    y = device.alloc(x.shape, np.float32)
    counters = run(device, "copy16", [x, y], blocks=5)
    assert np.array_equal(x.read(), y.read())
    assert counters.global_load_bytes == counters.global_store_bytes == 5 * 256 * 16
    assert counters.global_load_transactions == counters.global_store_transactions == 5 * 4 * 16
    assert counters.global_transactions == 2 * 5 * 4 * 16
    assert counters.distinct_load_bytes == counters.distinct_store_bytes == 5 * 256 * 16
    assert (counters.blocks, counters.waves, counters.barriers, counters.mfma, counters.lds_bank_conflicts) == (
        5,
        20,
        0,
        0,
        0,
    )
    assert counters.scalar_load_bytes == 20 * 16  # two pointers a wave
    load = next(count for count in counters.per_pc.values() if count.text.startswith("global_load_dwordx4"))
    assert (load.executed, load.transactions, load.global_bytes) == (20, 20 * 16, 20 * 1024)
    assert counters.per_opcode["global_load_dwordx4"] == 20
    assert (
        sum(counters.per_opcode.values())
        == counters.instructions
        == sum(count.executed for count in counters.per_pc.values())
    )


def test_tail_counts_active_lanes_only(device):
    x, y = device.put(np.arange(300, dtype=np.int16)), device.alloc(300, np.int16)
    counters = run(device, "copy2", [x, y, np.int32(300)], blocks=2)
    assert np.array_equal(x.read(), y.read())
    assert counters.global_load_bytes == counters.global_store_bytes == 600
    assert counters.global_load_transactions == 4 * 2 + 2  # 128 bytes a wave; the last wave has 44 lanes, 88 bytes


@pytest.mark.parametrize(("stride", "transactions"), [(1, 4), (2, 8), (4, 16), (16, 64), (17, 64)])
def test_strided_gather(stride, transactions):
    device = Device()
    x, y = device.put(np.arange(256 * stride, dtype=np.float32)), device.alloc(256, np.float32)
    counters = run(device, "gather4", [x, y, np.int32(stride)])
    assert np.array_equal(y.read(), x.read()[::stride])
    assert counters.global_load_transactions == 4 * transactions
    assert counters.global_load_bytes == 1024


def test_distinct_bytes_and_xcds(device):
    """Sixteen blocks read four rows: blocks b and b + 8 share an XCD, and row b % 4."""
    x, y = device.put(np.zeros((4, 256), np.float32)), device.alloc((16, 256), np.float32)
    counters = run(device, "rows", [x, y, np.int32(4)], blocks=16)
    assert counters.global_load_bytes == 16 * 1024
    assert counters.distinct_load_bytes == 4 * 1024
    assert counters.xcd_bytes(8) == [1024] * 8
    assert counters.xcd_bytes(4) == [1024] * 4
    assert counters.xcd_bytes(1) == [4096]
    counters = run(device, "rows", [x, y, np.int32(3)], blocks=16)
    assert counters.xcd_bytes(8) == [2048] * 8  # b and b + 8 differ modulo 3
    with pytest.raises(ValueError, match="xcds=3"):
        counters.xcd_bytes(3)


@pytest.mark.parametrize(("stride", "extra"), [(1, 0), (2, 1), (4, 3), (32, 31), (33, 0)])
def test_lds_conflicts_of_dwords(device, stride, extra):
    """Two phases of 32 lanes; lanes a multiple of 32 dwords apart share a bank."""
    y = device.alloc(256, np.float32)
    counters = run(device, "lds4", [y, np.int32(stride)], shared=256 * 4 * stride)
    accesses = 4 * 2  # waves, a write and a read each
    assert counters.lds_bank_conflicts == accesses * 2 * extra
    assert counters.lds_cycles == accesses * 2 * (1 + extra)
    reads = [count for count in counters.per_pc.values() if count.text.startswith("ds_read")]
    assert [count.lds_bank_conflicts for count in reads] == [4 * 2 * extra]
    assert counters.barriers == 1


@pytest.mark.parametrize(("stride", "extra"), [(1, 0), (2, 1), (3, 0), (8, 7)])
def test_lds_conflicts_of_16_bytes(device, stride, extra):
    """Eight phases of eight lanes, four banks each."""
    counters = run(device, "lds16", [device.alloc((256, 4), np.float32), np.int32(stride)], shared=256 * 16 * stride)
    assert counters.lds_bank_conflicts == 4 * 2 * 8 * extra
    assert counters.lds_underaligned == 0


def test_products_and_barriers(device):
    x, y = device.put(np.zeros((256, 4), np.int16)), device.alloc((256, 4), np.float32)
    counters = run(device, "products", [x, y, np.int32(7)], blocks=3)
    assert counters.mfma == 3 * 4 * 7 * 2
    assert counters.mfma_by_opcode == {"v_mfma_f32_32x32x8_bf16": 84, "v_mfma_f32_16x16x16_bf16": 84}
    assert counters.barriers == 3 * 7
