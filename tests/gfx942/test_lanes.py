# SPDX-License-Identifier: Apache-2.0
"""Data moved between lanes: DPP, ds_bpermute, ds_permute, ds_swizzle."""

import numpy as np
import pytest

from tests.gfx942.assembly_kernel import run_snippets

LANES = range(64)
OLD = 1000  # what a lane keeps when DPP does not write it


def row(lane):
    return lane // 16 * 16


# control -> lane -> source lane, or None where the lane is left alone
DPP = {
    "quad_perm:[2,0,3,1]": lambda n: n // 4 * 4 + [2, 0, 3, 1][n % 4],
    "row_shr:3": lambda n: n - 3 if n % 16 >= 3 else None,
    "row_shl:5": lambda n: n + 5 if n % 16 + 5 < 16 else None,
    "row_ror:4": lambda n: row(n) + (n % 16 - 4) % 16,
    "row_mirror": lambda n: row(n) + 15 - n % 16,
    "row_half_mirror": lambda n: n // 8 * 8 + 7 - n % 8,
    "row_bcast:15": lambda n: row(n) - 1 if n >= 16 else None,
    "row_bcast:31": lambda n: 31 if n >= 32 else None,
    "row_newbcast:6": lambda n: row(n) + 6,
    "wave_shr:1": lambda n: n - 1 if n else None,
    "wave_rol:1": lambda n: (n + 1) % 64,
    "row_mirror row_mask:0x5": lambda n: row(n) + 15 - n % 16 if n // 16 in (0, 2) else None,
    "row_mirror bank_mask:0x9": lambda n: row(n) + 15 - n % 16 if n % 16 // 4 in (0, 3) else None,
}
INPUTS = np.random.default_rng(0).integers(0, 2**32, (64, 4), dtype=np.uint32)


@pytest.fixture(scope="module")
def dpp_results():
    def masks(control):
        return control if "mask" in control else f"{control} row_mask:0xf bank_mask:0xf"

    def complete(control):
        return masks(control) + (
            " bank_mask:0xf" if "row_mask" in control and "bank_mask" not in masks(control) else ""
        )

    snippets = [
        f"v_mov_b32 v8, {OLD}\n  s_nop 1\n  v_mov_b32_dpp v8, v4 {complete(control)}".replace(str(OLD), hex(OLD))
        for control in DPP
    ]
    return dict(zip(DPP, run_snippets(snippets, INPUTS), strict=True))


@pytest.mark.parametrize("control", DPP)
def test_dpp(dpp_results, control):
    want = [OLD if (source := DPP[control](lane)) is None else int(INPUTS[source, 0]) for lane in LANES]
    assert dpp_results[control][:, 0].tolist() == want


def test_dpp_zero_fill_and_arithmetic_and_inactive_sources():
    zero, total, inactive = run_snippets(
        [
            f"v_mov_b32 v8, {hex(OLD)}\n  s_nop 1\n  v_mov_b32_dpp v8, v4 row_shr:1 row_mask:0xf bank_mask:0xf "
            "bound_ctrl:0",
            "v_add_u32_dpp v8, v4, v5 row_ror:8 row_mask:0xf bank_mask:0xf",
            f"v_mov_b32 v8, {hex(OLD)}\n  s_mov_b64 s[20:21], exec\n  s_mov_b32 exec_lo, 0xfffffffe\n  s_nop 4\n"
            "  v_mov_b32_dpp v8, v4 row_shr:1 row_mask:0xf bank_mask:0xf\n  s_mov_b64 exec, s[20:21]",
        ],
        INPUTS,
    )[:, :, 0]
    a, b = INPUTS[:, 0], INPUTS[:, 1]
    assert zero.tolist() == [int(a[n - 1]) if n % 16 else 0 for n in LANES]
    assert total.tolist() == [(int(a[row(n) + (n % 16 - 8) % 16]) + int(b[n])) % 2**32 for n in LANES]
    assert inactive.tolist() == [OLD if n % 16 == 0 or n == 1 else int(a[n - 1]) for n in LANES]


def test_permutes():
    rng = np.random.default_rng(1)
    inputs = INPUTS.copy()
    inputs[:, 1] = 4 * rng.integers(0, 64, 64)  # where to read from
    inputs[:, 2] = 4 * rng.permutation(64)  # where to send to
    wait = "\n  s_waitcnt lgkmcnt(0)"
    backward, forward, offset, swap, broadcast, reverse, masked, quads = run_snippets(
        [
            "ds_bpermute_b32 v8, v5, v4" + wait,
            "ds_permute_b32 v8, v6, v4" + wait,
            "ds_bpermute_b32 v8, v5, v4 offset:8" + wait,
            "ds_swizzle_b32 v8, v4 offset:swizzle(SWAP,16)" + wait,
            "ds_swizzle_b32 v8, v4 offset:swizzle(BROADCAST,8,3)" + wait,
            "ds_swizzle_b32 v8, v4 offset:swizzle(REVERSE,32)" + wait,
            'ds_swizzle_b32 v8, v4 offset:swizzle(BITMASK_PERM,"01pip")' + wait,
            "ds_swizzle_b32 v8, v4 offset:swizzle(QUAD_PERM,1,0,3,2)" + wait,
        ],
        inputs,
    )[:, :, 0]
    value, read_from, send_to = inputs[:, 0], inputs[:, 1] // 4, inputs[:, 2] // 4
    lane = np.arange(64)
    assert np.array_equal(backward, value[read_from])
    assert np.array_equal(offset, value[(read_from + 2) % 64])
    assert np.array_equal(forward[send_to], value)
    assert np.array_equal(swap, value[lane ^ 16])
    assert np.array_equal(broadcast, value[lane // 8 * 8 + 3])
    assert np.array_equal(reverse, value[lane // 32 * 32 + 31 - lane % 32])
    assert np.array_equal(masked, value[lane // 32 * 32 + (8 | (lane & 4) | (~lane & 2) | (lane & 1))])
    assert np.array_equal(quads, value[lane ^ 1])


def test_bpermute_of_an_inactive_lane_gives_zero():
    inputs = INPUTS.copy()
    inputs[:, 1] = 4 * 40
    (result,) = run_snippets(
        [
            "s_mov_b64 s[20:21], exec\n  s_mov_b32 exec_hi, 0\n  ds_bpermute_b32 v8, v5, v4\n  s_waitcnt lgkmcnt(0)\n"
            "  s_mov_b64 exec, s[20:21]"
        ],
        inputs,
    )
    assert (result[:, 0] == 0).all()
