# SPDX-License-Identifier: Apache-2.0
"""Scalar instructions and their condition bit against Python integers."""

import numpy as np
import pytest

from tests.gfx942.assembly_kernel import run_snippets
from tests.gfx942.test_vector_values import s, u

PAIRS = [
    (0, 0),
    (1, 0xFFFFFFFF),
    (0x7FFFFFFF, 1),
    (0x80000000, 0x80000000),
    (0x80000000, 1),
    (0xDEADBEEF, 0x00050003),
    (37, 0x00200004),
    (0x12345678, 0x0010000C),
]


def nonzero(value):
    return value, int(u(value) != 0)


def signed_overflow(value):
    return value, int(not -(2**31) <= value < 2**31)


def field(a, control):
    return (a >> (control & 31)) & ((1 << (control >> 16 & 127)) - 1)


def signed_field(a, control):
    width = min(control >> 16 & 127, 32 - (control & 31))
    value = s(a) >> (control & 31) & ((1 << width) - 1)
    return value - (1 << width) if width and value >> (width - 1) else value


# name -> (a, b) -> (result, SCC); SCC None: unchanged, which the snippet sets to 0
BINARY = {
    "s_add_u32": lambda a, b: (a + b, a + b >> 32),
    "s_sub_u32": lambda a, b: (a - b, int(b > a)),
    "s_add_i32": lambda a, b: signed_overflow(s(a) + s(b)),
    "s_sub_i32": lambda a, b: signed_overflow(s(a) - s(b)),
    "s_addc_u32": lambda a, b: (a + b, a + b >> 32),
    "s_mul_i32": lambda a, b: (a * b, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (s(a) * s(b) >> 32, None),
    "s_and_b32": lambda a, b: nonzero(a & b),
    "s_or_b32": lambda a, b: nonzero(a | b),
    "s_xor_b32": lambda a, b: nonzero(a ^ b),
    "s_andn2_b32": lambda a, b: nonzero(a & ~b),
    "s_lshl_b32": lambda a, b: nonzero(a << (b & 31)),
    "s_lshr_b32": lambda a, b: nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b: nonzero(s(a) >> (b & 31)),
    "s_min_i32": lambda a, b: (min(s(a), s(b)), int(s(a) < s(b))),
    "s_max_u32": lambda a, b: (max(a, b), int(a > b)),
    "s_bfe_u32": lambda a, b: nonzero(field(a, b)),
    "s_bfe_i32": lambda a, b: nonzero(signed_field(a, b)),
    "s_bfm_b32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), None),
    "s_lshl2_add_u32": lambda a, b: ((a << 2) + b, int((a << 2) + b >= 2**32)),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | b << 16, None),
    "s_cselect_b32": lambda a, b: (b, None),
}
UNARY = {
    "s_not_b32": lambda a: nonzero(~a),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_ff1_i32_b32": lambda a: ((a & -a).bit_length() - 1 if a else -1, None),
    "s_flbit_i32_b32": lambda a: (32 - a.bit_length() if a else -1, None),
    "s_bcnt1_i32_b32": lambda a: nonzero(a.bit_count()),
    "s_abs_i32": lambda a: nonzero(abs(s(a))),
    "s_sext_i32_i16": lambda a: (s(a << 16) >> 16, None),
}
COMPARE = {
    "s_cmp_eq_u32": lambda a, b: a == b,
    "s_cmp_lg_u32": lambda a, b: a != b,
    "s_cmp_gt_i32": lambda a, b: s(a) > s(b),
    "s_cmp_le_i32": lambda a, b: s(a) <= s(b),
    "s_cmp_lt_u32": lambda a, b: a < b,
    "s_cmp_ge_u32": lambda a, b: a >= b,
    "s_bitcmp1_b32": lambda a, b: bool(a >> (b & 31) & 1),
}
_SETUP = "s_mov_b32 s20, {a}\n  s_mov_b32 s21, {b}\n  s_cmp_lg_u32 0, 0\n  "
_SHOW = "\n  s_cselect_b32 s23, 1, 0\n  v_mov_b32 v8, s22\n  v_mov_b32 v9, s23"


@pytest.fixture(scope="module")
def results():
    snippets = {}
    for a, b in PAIRS:
        setup = _SETUP.format(a=a, b=b)
        for name in BINARY:
            snippets[name, a, b] = f"{setup}{name} s22, s20, s21{_SHOW}"
        for name in UNARY:
            snippets[name, a, b] = f"{setup}{name} s22, s20{_SHOW}"
        for name in COMPARE:
            snippets[name, a, b] = f"{setup}s_mov_b32 s22, 0\n  {name} s20, s21{_SHOW}"
    found = run_snippets(list(snippets.values()), np.zeros((64, 4), np.uint32))
    assert (found == found[:, :1]).all()  # the same in every lane
    return dict(zip(snippets, found[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("name", [*BINARY, *UNARY, *COMPARE])
def test_scalar(results, name):
    for a, b in PAIRS:
        if name in COMPARE:
            want, condition = 0, int(COMPARE[name](a, b))
        else:
            want, condition = BINARY[name](a, b) if name in BINARY else UNARY[name](a)
        assert results[name, a, b] == [u(want), condition or 0], (a, b)


def test_pairs_of_registers_and_exec():
    """64-bit logic, shifts, and EXEC: inactive lanes keep their value and do not store."""
    found = run_snippets(
        [
            "s_mov_b32 s20, 0x80000001\n  s_mov_b32 s21, 3\n  s_lshl_b64 s[22:23], s[20:21], 31\n  v_mov_b32 v8, s22\n "
            " v_mov_b32 v9, s23",
            "s_mov_b32 s20, 0\n  s_mov_b32 s21, 0x80000000\n  s_ashr_i64 s[22:23], s[20:21], 36\n  v_mov_b32 v8, s22\n "
            " v_mov_b32 v9, s23",
            "v_cmp_gt_u32 vcc, 10, v0\n  s_and_saveexec_b64 s[20:21], vcc\n  v_mov_b32 v8, 7\n  s_mov_b64 exec, "
            "s[20:21]\n  v_mov_b32 v9, exec_lo",
            "s_mov_b64 s[20:21], exec\n  s_mov_b64 exec, 0xf0\n  v_mov_b32 v8, 5\n  v_readfirstlane_b32 s22, v0\n  "
            "s_mov_b64 exec, s[20:21]\n"
            "  v_mov_b32 v9, s22",
            "v_readlane_b32 s20, v4, 17\n  v_mov_b32 v8, s20\n  v_writelane_b32 v9, s20, 3",
            "v_mbcnt_lo_u32_b32 v8, -1, 0\n  v_mbcnt_hi_u32_b32 v8, -1, v8",
        ],
        np.arange(256, dtype=np.uint32).reshape(64, 4),
    )
    shifted = 0x3_8000_0001 << 31
    assert found[0, 0].tolist() == [u(shifted), u(shifted >> 32)]
    assert found[1, 0].tolist() == [0xF8000000, 0xFFFFFFFF]
    lane = np.arange(64)
    assert np.array_equal(found[2, :, 0], np.where(lane < 10, 7, 0)) and (found[2, :, 1] == 0xFFFFFFFF).all()
    assert np.array_equal(found[3, :, 0], np.where((lane >= 4) & (lane < 8), 5, 0)) and (found[3, :, 1] == 4).all()
    assert (found[4, :, 0] == 17 * 4).all() and np.array_equal(found[4, :, 1], np.where(lane == 3, 68, 0))
    assert np.array_equal(found[5, :, 0], lane)
