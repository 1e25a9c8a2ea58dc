# SPDX-License-Identifier: Apache-2.0
"""Values of vector instructions against plain Python integers and exact rationals, on edge values and random ones."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from tests.gfx942.assembly_kernel import HEAD, TAIL, run_snippets
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import UnknownInstruction
from tests.gfx942.toolchain import assemble

EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1.5,
    -2.5,
    3.4028235e38,
    -3.4028235e38,
    1.17549435e-38,
    1e-40,
    -1.4e-45,
    math.inf,
    -math.inf,
    math.nan,
    0.33333334,
    16777217.0,
    2147483648.0,
    -2147483904.0,
    4294967296.0,
    1e-20,
    1e20,
    0.5,
    -0.49999997,
    65504.0,
    65536.0,
    6e-8,
]


def _inputs(seed: int) -> np.ndarray:
    """[64, 4]: edge values of fp32 in the first lanes, then random bits, then moderate floats."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (64, 4), dtype=np.uint32)
    edges = np.array(EDGES, np.float32).view(np.uint32)
    for column in range(3):
        words[: len(edges), column] = rng.permutation(edges)
    words[48:, :] = (
        (rng.standard_normal((16, 4)) * 10.0 ** rng.integers(-3, 4, (16, 4))).astype(np.float32).view(np.uint32)
    )
    return words


def u(x: int) -> int:
    return x & 0xFFFFFFFF


def s(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - 2**32 if x >> 31 else x


def f(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x))[0]


def s24(x: int) -> int:
    x &= 0xFFFFFF
    return x - 2**24 if x >> 23 else x


def nearest_f32(value: Fraction) -> float:
    """An exact rational to fp32, ties to even, with denormals and overflow."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude)) if magnitude >= Fraction(1, 2**1000) else -1000, -126)
    while exponent > -126 and Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    quantum = Fraction(2) ** (exponent - 23)
    rounded = round(value / quantum) * quantum  # round() of a Fraction takes ties to even
    return math.copysign(math.inf, value) if abs(rounded) >= Fraction(2) ** 128 else float(rounded)


def exact(operation):
    """Apply to exact rationals and round once; None where an operand is not finite or the result is a zero whose sign
    matters.
    """

    def run(*words):
        values = [f(word) for word in words]
        if not all(math.isfinite(value) for value in values):
            return None
        result = operation(*(Fraction(value) for value in values))
        return None if result == 0 else nearest_f32(result)

    return run


def perm(a, b, selector):
    pool = struct.pack("<II", b, a)
    out = []
    for choice in struct.pack("<I", selector):
        if choice < 8:
            out.append(pool[choice])
        elif choice < 12:
            out.append(0xFF * (pool[2 * (choice - 8) + 1] >> 7))
        else:
            out.append(0 if choice == 12 else 0xFF)
    return int.from_bytes(bytes(out), "little")


def trunc_to(low, high):
    def run(a):
        value = f(a)
        if math.isnan(value):
            return 0
        return u(low if value <= low else high if value >= high else math.trunc(value))

    return run


def bfe_signed(a, b, c):
    offset, width = b & 31, c & 31
    field = s(a) >> offset & ((1 << width) - 1)
    return u(field - (1 << width) if width and field >> (width - 1) else field)


# instruction -> function of the four source words giving v8 as an integer
INTEGER = {
    "v_add_u32 v8, v4, v5": lambda a, b, c, d: a + b,
    "v_sub_u32 v8, v4, v5": lambda a, b, c, d: a - b,
    "v_sub_u32_e64 v8, v4, v5 clamp": lambda a, b, c, d: max(a - b, 0),
    "v_subrev_u32 v8, v4, v5": lambda a, b, c, d: b - a,
    "v_mul_lo_u32 v8, v4, v5": lambda a, b, c, d: a * b,
    "v_mul_hi_u32 v8, v4, v5": lambda a, b, c, d: a * b >> 32,
    "v_mul_hi_i32 v8, v4, v5": lambda a, b, c, d: s(a) * s(b) >> 32,
    "v_mul_u32_u24 v8, v4, v5": lambda a, b, c, d: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24 v8, v4, v5": lambda a, b, c, d: s24(a) * s24(b),
    "v_mad_u32_u24 v8, v4, v5, v6": lambda a, b, c, d: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24 v8, v4, v5, v6": lambda a, b, c, d: s24(a) * s24(b) + c,
    "v_and_b32 v8, v4, v5": lambda a, b, c, d: a & b,
    "v_xnor_b32 v8, v4, v5": lambda a, b, c, d: ~(a ^ b),
    "v_lshlrev_b32 v8, v4, v5": lambda a, b, c, d: b << (a & 31),
    "v_lshrrev_b32 v8, v4, v5": lambda a, b, c, d: b >> (a & 31),
    "v_ashrrev_i32 v8, v4, v5": lambda a, b, c, d: s(b) >> (a & 31),
    "v_min_i32 v8, v4, v5": lambda a, b, c, d: min(s(a), s(b)),
    "v_max_u32 v8, v4, v5": lambda a, b, c, d: max(a, b),
    "v_add3_u32 v8, v4, v5, v6": lambda a, b, c, d: a + b + c,
    "v_lshl_add_u32 v8, v4, v5, v6": lambda a, b, c, d: (a << (b & 31)) + c,
    "v_add_lshl_u32 v8, v4, v5, v6": lambda a, b, c, d: (a + b) << (c & 31),
    "v_lshl_or_b32 v8, v4, v5, v6": lambda a, b, c, d: (a << (b & 31)) | c,
    "v_and_or_b32 v8, v4, v5, v6": lambda a, b, c, d: (a & b) | c,
    "v_or3_b32 v8, v4, v5, v6": lambda a, b, c, d: a | b | c,
    "v_xad_u32 v8, v4, v5, v6": lambda a, b, c, d: (a ^ b) + c,
    "v_bfe_u32 v8, v4, v5, v6": lambda a, b, c, d: a >> (b & 31) & ((1 << (c & 31)) - 1),
    "v_bfe_i32 v8, v4, v5, v6": lambda a, b, c, d: bfe_signed(a, b, c),
    "v_bfi_b32 v8, v4, v5, v6": lambda a, b, c, d: (a & b) | (~a & c),
    "v_bfm_b32 v8, v4, v5": lambda a, b, c, d: ((1 << (a & 31)) - 1) << (b & 31),
    "v_perm_b32 v8, v4, v5, v6": lambda a, b, c, d: perm(a, b, c),
    "s_mov_b32 s20, 0x07060302\n  v_perm_b32 v8, v4, v5, s20": lambda a, b, c, d: (a & 0xFFFF0000) | (b >> 16),
    "v_alignbit_b32 v8, v4, v5, v6": lambda a, b, c, d: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 v8, v4, v5, v6": lambda a, b, c, d: (a << 32 | b) >> 8 * (c & 3),
    "v_med3_i32 v8, v4, v5, v6": lambda a, b, c, d: sorted((s(a), s(b), s(c)))[1],
    "v_min3_u32 v8, v4, v5, v6": lambda a, b, c, d: min(a, b, c),
    "v_bfrev_b32 v8, v4": lambda a, b, c, d: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32 v8, v4": lambda a, b, c, d: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32 v8, v4": lambda a, b, c, d: (a & -a).bit_length() - 1 if a else -1,
    "v_bcnt_u32_b32 v8, v4, v5": lambda a, b, c, d: a.bit_count() + b,
    "v_not_b32 v8, v4": lambda a, b, c, d: ~a,
    "v_cvt_i32_f32 v8, v4": lambda a, b, c, d: trunc_to(-(2**31), 2**31 - 1)(a),
    "v_cvt_u32_f32 v8, v4": lambda a, b, c, d: trunc_to(0, 2**32 - 1)(a),
    "v_pk_add_u16 v8, v4, v5": lambda a, b, c, d: (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16,
    "v_pk_mul_lo_u16 v8, v4, v5 op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b, c, d: (
        ((a >> 16) * (b & 0xFFFF) & 0xFFFF) | ((a & 0xFFFF) * (b >> 16) & 0xFFFF) << 16
    ),
    "v_pack_b32_f16 v8, v4, v5 op_sel:[1,0,0]": lambda a, b, c, d: (a >> 16) | (b & 0xFFFF) << 16,
    "v_mov_b32_sdwa v8, v4 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1": lambda a, b, c, d: a >> 16,
    "v_add_u32_sdwa v8, v4, v5 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:WORD_0": lambda a, b, c, d: (
        ((a >> 8 & 0xFF) + (b & 0xFFFF) & 0xFFFF) << 16
    ),
    "v_mov_b32 v8, v6\n  v_or_b32_sdwa v8, v4, sext(v5) dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_3 src1_sel:BYTE_0": lambda a, b, c, d: (
        (c & 0xFF00FFFF) | ((a >> 24) | (b & 0xFF)) << 16
    ),
    "v_accvgpr_write_b32 a3, v4\n  v_accvgpr_read_b32 v8, a3": lambda a, b, c, d: a,
    "v_cmp_gt_i32 vcc, v4, v5\n  v_cndmask_b32 v8, v6, v7, vcc": lambda a, b, c, d: d if s(a) > s(b) else c,
    "v_cmp_nlt_f32 s[20:21], v4, |v5|\n  v_cndmask_b32 v8, v6, v7, s[20:21]": lambda a, b, c, d: (
        c if f(a) < abs(f(b)) else d
    ),
    "v_cmp_o_f32 vcc, v4, v5\n  v_cndmask_b32 v8, -v6, v7, vcc": lambda a, b, c, d: (
        c ^ 0x80000000 if math.isnan(f(a)) or math.isnan(f(b)) else d
    ),
    "s_movk_i32 s20, 0x204\n  v_cmp_class_f32 vcc, v4, s20\n  v_cndmask_b32 v8, 0, 1, vcc": lambda a, b, c, d: int(
        math.isinf(f(a))
    ),
    "v_cmp_u_f32 vcc, v4, v4\n  v_addc_co_u32 v8, vcc, v5, v6, vcc": lambda a, b, c, d: b + c + math.isnan(f(a)),
    "v_sub_co_u32 v8, vcc, v4, v5\n  v_cndmask_b32 v8, 0, 1, vcc": lambda a, b, c, d: int(a < b),
}
WIDE = {
    "v_lshl_add_u64 v[8:9], v[4:5], 3, v[6:7]": lambda a, b, c, d: (a << 3) + c,
    "v_lshlrev_b64 v[8:9], v6, v[4:5]": lambda a, b, c, d: a << (c & 63),
    "v_lshrrev_b64 v[8:9], v6, v[4:5]": lambda a, b, c, d: a >> (c & 63),
    "v_ashrrev_i64 v[8:9], v6, v[4:5]": lambda a, b, c, d: (a - 2**64 if a >> 63 else a) >> (c & 63),
    "v_mov_b64 v[8:9], v[6:7]": lambda a, b, c, d: c,
    "v_mad_u64_u32 v[8:9], s[20:21], v4, v5, v[6:7]": lambda a, b, c, d: (a & 0xFFFFFFFF) * (a >> 32) + c,
    "v_mad_i64_i32 v[8:9], s[20:21], v4, v5, v[6:7]": lambda a, b, c, d: s(a) * s(a >> 32) + c,
}
FLOAT = {
    "v_add_f32 v8, v4, v5": exact(lambda a, b, c, d: a + b),
    "v_sub_f32 v8, v4, -v5": exact(lambda a, b, c, d: a + b),
    "v_mul_f32 v8, |v4|, v5": exact(lambda a, b, c, d: abs(a) * b),
    "v_fma_f32 v8, v4, v5, v6": exact(lambda a, b, c, d: a * b + c),
    "v_mov_b32 v8, v6\n  v_fmac_f32 v8, v4, v5": exact(lambda a, b, c, d: a * b + c),
    "v_fmamk_f32 v8, v4, 0x3fc00000, v5": exact(lambda a, b, c, d: a * Fraction(3, 2) + b),
    "v_mul_f32 v8, v4, v5 mul:2": exact(
        lambda a, b, c, d: Fraction(nearest_f32(a * b)) * 2 if abs(a * b) < 2**120 else Fraction(0)
    ),
    "v_pk_fma_f32 v[8:9], v[4:5], v[6:7], v[4:5] op_sel:[0,1,1] op_sel_hi:[1,0,0]": exact(lambda a, b, c, d: a * d + b),
    "v_pk_add_f32 v[8:9], v[4:5], v[6:7]": exact(lambda a, b, c, d: a + c),
    "v_pk_mul_f32 v[8:9], v[4:5], v[6:7] neg_lo:[1,0]": exact(lambda a, b, c, d: -a * c),
    "v_cvt_f32_i32 v8, v4": lambda a, b, c, d: nearest_f32(Fraction(s(a))),
    "v_cvt_f32_u32 v8, v4": lambda a, b, c, d: nearest_f32(Fraction(a)),
    "v_cvt_f32_ubyte2 v8, v4": lambda a, b, c, d: float(a >> 16 & 0xFF),
    "v_floor_f32 v8, v4": lambda a, b, c, d: (float(math.floor(f(a))) or None) if math.isfinite(f(a)) else None,
    "v_rndne_f32 v8, v4": lambda a, b, c, d: (float(round(f(a))) or None) if math.isfinite(f(a)) else None,
    "v_ldexp_f32 v8, v4, 3": exact(lambda a, b, c, d: a * 8),
    "v_max_f32 v8, v4, v5": lambda a, b, c, d: (
        (f(b) if math.isnan(f(a)) else f(a) if math.isnan(f(b)) else max(f(a), f(b))) or None
    ),
    "v_med3_f32 v8, v4, v5, v6": lambda a, b, c, d: (
        None if any(math.isnan(f(x)) for x in (a, b, c)) else sorted((f(a), f(b), f(c)))[1] or None
    ),
    "v_max_f32 v8, v4, v4 clamp": lambda a, b, c, d: None if math.isnan(f(a)) else min(max(f(a), 0.0), 1.0) or None,
    # the compiler's division sequence
    "v_div_scale_f32 v10, s[20:21], v5, v5, v4\n  v_div_scale_f32 v11, vcc, v4, v5, v4\n  v_rcp_f32 v12, v10\n"
    "  v_fma_f32 v13, -v10, v12, 1.0\n  v_fma_f32 v12, v13, v12, v12\n  v_mul_f32 v13, v11, v12\n  v_fma_f32 v14, "
    "-v10, v13, v11\n"
    "  v_fma_f32 v13, v14, v12, v13\n  v_fma_f32 v10, -v10, v13, v11\n  v_div_fmas_f32 v10, v10, v12, v13\n"
    "  v_div_fixup_f32 v8, v10, v5, v4": exact(lambda a, b, c, d: a / b if b else Fraction(0)),
}


@pytest.fixture(scope="module", params=[1, 2])
def results(request):
    """All tables in one kernel."""
    inputs = _inputs(request.param)
    names = [*INTEGER, *WIDE, *FLOAT]
    return inputs, dict(zip(names, run_snippets(names, inputs), strict=True))


@pytest.mark.parametrize("name", INTEGER)
def test_integer(results, name):
    inputs, found = results
    want = [u(int(INTEGER[name](*(int(word) for word in row)))) for row in inputs]
    assert found[name][:, 0].tolist() == want


@pytest.mark.parametrize("name", WIDE)
def test_64_bit(results, name):
    inputs, found = results
    for row, (low, high) in zip(inputs, found[name], strict=True):
        a, c = (int(row[k]) | int(row[k + 1]) << 32 for k in (0, 2))
        want = WIDE[name](a, a, c if "mad" in name or "add" in name or "mov" in name else int(row[2]), c)
        assert int(low) | int(high) << 32 == want & 0xFFFFFFFFFFFFFFFF


@pytest.mark.parametrize("name", FLOAT)
def test_float(results, name):
    inputs, found = results
    checked = 0
    for row, (low, _) in zip(inputs, found[name], strict=True):
        want = FLOAT[name](*(int(word) for word in row))
        if want is not None:
            checked += 1
            assert f(int(low)) == want, [f(int(word)) for word in row]
    assert checked >= 20


def test_transcendentals_and_special_values():
    """Within 1 ulp of numpy in fp64 and with the special values of the ISA; denormal inputs count as zero."""
    inputs = _inputs(3)
    functions = {
        "v_rcp_f32": lambda x: 1 / x,
        "v_rsq_f32": lambda x: 1 / np.sqrt(x),
        "v_sqrt_f32": np.sqrt,
        "v_exp_f32": np.exp2,
        "v_log_f32": np.log2,
    }
    found = run_snippets([f"{name} v8, v4" for name in functions], inputs)[:, :, 0].view(np.float32)
    x = inputs[:, 0].copy().view(np.float32)
    flushed = np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(0, x), x).astype(np.float64)
    with np.errstate(all="ignore"):
        for got, function in zip(found, functions.values(), strict=True):
            want = function(flushed).astype(np.float32)
            want = np.where(np.abs(want) < np.float32(2.0**-126), np.copysign(np.float32(0), want), want)
            assert np.array_equal(np.isnan(got), np.isnan(want))
            assert np.all((got == want) | np.isnan(want) | (np.abs(got - want) <= np.spacing(np.abs(want))))
    zero = x == 0
    assert zero.any() and np.isinf(found[0][zero]).all()  # 1/0


def test_infinities_and_nans_propagate():
    words = np.zeros((64, 4), np.uint32)
    pairs = [(math.inf, -math.inf), (math.inf, 0.0), (math.nan, 1.0), (0.0, 0.0), (1.0, 0.0), (-1.0, math.inf)]
    for lane, pair in enumerate(pairs):
        words[lane, :2] = np.array(pair, np.float32).view(np.uint32)
    division = next(name for name in FLOAT if name.startswith("v_div_scale"))
    add, multiply, divide = run_snippets(["v_add_f32 v8, v4, v5", "v_mul_f32 v8, v4, v5", division], words)[
        :, : len(pairs), 0
    ].view(np.float32)
    assert np.isnan(add[[0, 2]]).all() and add[5] == math.inf
    assert np.isnan(multiply[[1, 2]]).all() and multiply[0] == -math.inf
    assert np.isnan(divide[[0, 2, 3]]).all() and divide[4] == math.inf and divide[5] == 0 and np.signbit(divide[5])


def test_halves_and_doubles():
    inputs = _inputs(4)
    inputs[:, 0] = np.random.default_rng(5).standard_normal(64).astype(np.float32).view(np.uint32)
    inputs[:, 1] = np.random.default_rng(6).standard_normal(64).astype(np.float32).view(np.uint32)
    half, both, back, double = run_snippets(
        [
            "v_cvt_f16_f32 v8, v4",
            "v_cvt_pkrtz_f16_f32 v8, v4, v5",
            "v_cvt_f16_f32 v8, v4\n  v_cvt_f32_f16 v8, v8",
            "v_cvt_f64_f32 v[10:11], v4\n  v_cvt_f64_f32 v[12:13], v5\n  v_fma_f64 v[8:9], v[10:11], v[12:13], "
            "-v[10:11]",
        ],
        inputs,
    )
    a, b = (inputs[:, k].copy().view(np.float32) for k in (0, 1))
    assert np.array_equal(half[:, 0], a.astype(np.float16).view(np.uint16))
    toward_zero = np.ascontiguousarray(both[:, 0] & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    assert np.all(np.abs(toward_zero) <= np.abs(a)) and np.all(
        np.abs(toward_zero - a) < np.abs(a) * 2.0**-10 + 2.0**-24
    )
    assert np.array_equal(back[:, 0].view(np.float32), a.astype(np.float16).astype(np.float32))
    want = [float(Fraction(float(x)) * Fraction(float(y)) - Fraction(float(x))) for x, y in zip(a, b, strict=True)]
    assert np.array_equal(np.ascontiguousarray(double).view(np.float64)[:, 0], want)


@pytest.mark.parametrize(
    "snippet",
    [
        "v_add_u32_e64 v8, v4, v5 clamp",
        "v_mad_u16 v8, v4, v5, v6 op_sel:[1,0,0,0]",
        "v_mfma_f32_32x32x8_bf16 v[16:31], v[4:5], v[6:7], 0 cbsz:1",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1",
    ],
)
def test_what_is_not_modelled_faults_and_is_not_ignored(snippet):
    with pytest.raises(UnknownInstruction):
        run_snippets([snippet], _inputs(0))


def test_flushed_denormals_are_not_modelled():
    path = assemble((HEAD + TAIL).replace("denorm_mode_32 3", "denorm_mode_32 0"), "flush")
    with pytest.raises(UnknownInstruction, match="float mode"):
        Device().launch(path, "snippets", 1, 64, [None, None])
