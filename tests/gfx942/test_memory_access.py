# SPDX-License-Identifier: Apache-2.0
"""Widths, offsets and extensions of global, buffer and LDS instructions, on the bytes of the input buffer itself."""

import numpy as np
import pytest

from tests.gfx942.assembly_kernel import run_snippets
from tests.gfx942.emulator.faults import OutOfBounds

INPUTS = np.random.default_rng(0).integers(0, 2**32, (64, 4), dtype=np.uint32)
BYTES = INPUTS.reshape(-1).view(np.uint8)
LANE = np.arange(64)
LOADED = "\n  s_waitcnt vmcnt(0) lgkmcnt(0)"


def little(offset: int, size: int, signed: bool = False) -> np.ndarray:
    """The value of `size` bytes at 16 * lane + offset, wrapped to 32 bits."""
    return np.array(
        [
            int.from_bytes(BYTES[16 * n + offset : 16 * n + offset + size].tobytes(), "little", signed=signed)
            & 0xFFFFFFFF
            for n in LANE
        ]
    )


def test_global_loads():
    base = (
        "v_mov_b32 v10, s4\n  v_mov_b32 v11, s5\n  v_add_co_u32 v10, vcc, v10, v1\n  v_addc_co_u32 v11, vcc, 0, v11, "
        "vcc\n  "
    )
    cases = {
        "global_load_ubyte v8, v1, s[4:5] offset:5": little(5, 1),
        "global_load_sbyte v8, v1, s[4:5] offset:6": little(6, 1, signed=True),
        "global_load_ushort v8, v1, s[4:5] offset:10": little(10, 2),
        "global_load_sshort v8, v1, s[4:5] offset:10": little(10, 2, signed=True),
        "global_load_dword v8, v1, s[4:5] offset:12": little(12, 4),
        "v_mov_b32 v8, v5\n  global_load_short_d16 v8, v1, s[4:5] offset:2": little(2, 2) | little(4, 4) & 0xFFFF0000,
        "v_mov_b32 v8, v5\n  global_load_short_d16_hi v8, v1, s[4:5] offset:2": little(2, 2) << 16 | little(4, 2),
        base + "global_load_dword v8, v[10:11], off offset:8": little(8, 4),
        base + "flat_load_dword v8, v[10:11] offset:4": little(4, 4),
        "v_add_u32 v12, 16, v1\n  global_load_dword v8, v12, s[4:5] offset:-8": little(8, 4),
    }
    for got, want, name in zip(
        run_snippets([case + LOADED for case in cases], INPUTS), cases.values(), cases, strict=True
    ):
        assert np.array_equal(got[:, 0], want), name
    (wide,) = run_snippets(
        ["global_load_dwordx3 v[16:18], v1, s[4:5] offset:4" + LOADED + "\n  v_mov_b32 v8, v16\n  v_mov_b32 v9, v18"],
        INPUTS,
    )
    assert np.array_equal(wide, INPUTS[:, [1, 3]])


def test_scalar_loads():
    (found,) = run_snippets(
        [
            "s_load_dwordx8 s[24:31], s[4:5], 0x10"
            + LOADED
            + "\n  s_mov_b32 s20, 0x28\n  s_load_dword s21, s[4:5], s20"
            + LOADED
            + "\n  v_mov_b32 v8, s31\n  v_mov_b32 v9, s21"
        ],
        INPUTS,
    )
    assert (found == [INPUTS[2, 3], INPUTS[2, 2]]).all()


def test_buffer_accesses_end_at_the_number_of_records():
    """Lanes past num_records read 0 and do not store; the emulator does not fault there, for hardware defines it."""
    resource = "s_mov_b32 s24, s4\n  s_and_b32 s25, s5, 0xffff\n  s_movk_i32 s26, 0x200\n  s_mov_b32 s27, 0x27000\n  "
    load, shifted, stored = run_snippets(
        [
            resource + "buffer_load_dword v8, v1, s[24:27], 0 offen" + LOADED,
            resource + "s_movk_i32 s28, 0x10\n  buffer_load_dwordx2 v[8:9], v1, s[24:27], s28 offen offset:8" + LOADED,
            resource
            + "s_mov_b32 s24, s6\n  s_and_b32 s25, s7, 0xffff\n  buffer_store_dword v4, v2, s[24:27], 0 offen\n  s_waitcnt vmcnt(0)\n"
            "  global_load_dword v8, v2, s[6:7]" + LOADED,
        ],
        INPUTS,
    )
    assert np.array_equal(load[:, 0], np.where(16 * LANE + 4 <= 512, INPUTS[:, 0], 0))
    want = np.where((16 * LANE + 16 <= 512)[:, None], np.roll(INPUTS, -1, axis=0)[:, 2:], 0)
    assert np.array_equal(shifted, want)
    assert np.array_equal(stored[:, 0], INPUTS[:, 0])  # the output rows have exactly 512 bytes


LDS = {
    "ds_write_b32 v1, v4\n  ds_read_b32 v8, v1": (0, None),
    "ds_write_b128 v1, v[4:7]\n  ds_read_b64 v[8:9], v1 offset:8": (2, 3),
    "ds_write_b128 v1, v[4:7]\n  ds_read_b96 v[16:18], v1" + LOADED + "\n  v_mov_b32 v8, v17\n  v_mov_b32 v9, v18": (
        1,
        2,
    ),
    "ds_write2_b32 v2, v4, v5 offset1:1\n  ds_read2_b32 v[8:9], v2 offset0:1 offset1:0": (1, 0),
    "ds_write2_b64 v1, v[4:5], v[6:7] offset1:1\n  ds_read2_b64 v[16:19], v1 offset0:1 offset1:0"
    + LOADED
    + "\n  v_mov_b32 v8, v16\n  v_mov_b32 v9, v19": (2, 1),
    "v_lshlrev_b32 v12, 2, v0\n  ds_write2st64_b32 v12, v4, v5 offset0:2 offset1:5\n  ds_read2st64_b32 v[8:9], v12 offset0:5 offset1:2": (
        1,
        0,
    ),
    "v_lshlrev_b32 v12, 3, v0\n  ds_write2st64_b64 v12, v[4:5], v[6:7] offset1:1\n  ds_read_b64 v[8:9], v12 offset:512": (
        2,
        3,
    ),
}


@pytest.fixture(scope="module")
def lds_results():
    return dict(zip(LDS, run_snippets([snippet + LOADED for snippet in LDS], INPUTS), strict=True))


@pytest.mark.parametrize("snippet", LDS)
def test_lds(lds_results, snippet):
    low, high = LDS[snippet]
    assert np.array_equal(lds_results[snippet][:, 0], INPUTS[:, low])
    assert np.array_equal(lds_results[snippet][:, 1], INPUTS[:, high] if high is not None else np.zeros(64))


def test_small_lds_accesses():
    signed, high, d16, byte = run_snippets(
        [
            "ds_write_b16 v2, v4\n  ds_read_i16 v8, v2" + LOADED,
            "ds_write_b16_d16_hi v2, v4\n  ds_read_u16 v8, v2" + LOADED,
            "ds_write_b32 v2, v4\n  v_mov_b32 v8, v5\n  ds_read_u16_d16_hi v8, v2 offset:2" + LOADED,
            "ds_write_b8 v2, v4 offset:3\n  ds_read_u8 v8, v2 offset:3\n  ds_read_i8 v9, v2 offset:3" + LOADED,
        ],
        INPUTS,
    )
    a, b = INPUTS[:, 0], INPUTS[:, 1]
    assert np.array_equal(signed[:, 0], a.astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32))
    assert np.array_equal(high[:, 0], a >> 16)
    assert np.array_equal(d16[:, 0], (a & 0xFFFF0000) | (b & 0xFFFF))
    assert np.array_equal(byte[:, 0], a & 0xFF) and np.array_equal(
        byte[:, 1].view(np.int32), a.astype(np.uint8).view(np.int8)
    )


def test_atomics():
    """Sixty-four lanes add to one place in global memory and in LDS; returned values are a running sum."""
    returned, total, shared = run_snippets(
        [
            "v_mov_b32 v12, 0\n  global_store_dword v12, v12, s[6:7]\n  s_waitcnt vmcnt(0)\n  v_mov_b32 v13, 3\n"
            "  global_atomic_add v9, v12, v13, s[6:7] sc0\n  s_waitcnt vmcnt(0)\n  global_load_dword v8, v12, s[6:7]"
            + LOADED,
            "v_mov_b32 v12, 0\n  global_store_dword v12, v12, s[6:7]\n  s_waitcnt vmcnt(0)\n  v_mov_b32 v13, 0.5\n"
            "  global_atomic_add_f32 v12, v13, s[6:7]\n  s_waitcnt vmcnt(0)\n  global_load_dword v8, v12, s[6:7]"
            + LOADED,
            "v_mov_b32 v12, 0\n  ds_write_b32 v12, v12\n  ds_add_u32 v12, v0\n  ds_read_b32 v8, v12" + LOADED,
        ],
        INPUTS,
    )
    assert (returned[:, 0] == 192).all() and np.array_equal(returned[:, 1], 3 * LANE)
    assert (total[:, 0].view(np.float32) == 32).all()
    assert (shared[:, 0] == 64 * 63 // 2).all()


def test_one_byte_past_the_end():
    with pytest.raises(OutOfBounds):
        run_snippets(["global_load_dwordx2 v[8:9], v1, s[4:5] offset:12" + LOADED], INPUTS)
