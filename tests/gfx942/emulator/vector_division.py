# SPDX-License-Identifier: Apache-2.0
"""The helpers of fp32 division: v_div_scale, v_div_fmas and v_div_fixup as the CDNA3 ISA documents them."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.operands import float_reader, float_writer
from tests.gfx942.emulator.registry import opcode
from tests.gfx942.emulator.vector_float import fused

U32, I32, F32, F64 = np.uint32, np.int32, np.float32, np.float64
_TINY = F32(2.0**-126)


def _exponent_of(value):
    return ((value.view(U32) >> U32(23)) & U32(0xFF)).astype(I32) - 127


@opcode("v_div_scale_f32")
def _div_scale(instruction: Instruction):
    """Scales numerator or denominator by 2**64 where the quotient's steps could leave the normal range; sets the mask
    then.
    """
    write, mask = float_writer(instruction), instruction.operands[1].index
    source, denominator, numerator = (float_reader(instruction, k) for k in (2, 3, 4))

    def run(m):
        s0, s1, s2 = (np.array(m.spread(read(m))) for read in (source, denominator, numerator))
        up, down = np.ldexp(s0.astype(F64), 64).astype(F32), np.ldexp(s0.astype(F64), -64).astype(F32)
        is_denominator, is_numerator = s0.view(U32) == s1.view(U32), s0.view(U32) == s2.view(U32)
        with_inverse_denormal = np.abs(1.0 / s1.astype(F64)) < 2.0**-126
        with_quotient_denormal = np.abs(s2.astype(F64) / s1.astype(F64)) < 2.0**-126
        tiny_denominator = (np.abs(s1) < _TINY) & (s1 != 0)
        wide_gap = _exponent_of(s2) - _exponent_of(s1) >= 96
        low_numerator = _exponent_of(s2) + 127 <= 23
        cases = [
            (s1 == 0) | (s2 == 0),
            wide_gap,
            tiny_denominator,
            with_inverse_denormal & with_quotient_denormal,
            with_inverse_denormal,
            with_quotient_denormal,
            low_numerator,
        ]
        values = [
            np.full_like(s0, np.nan),
            np.where(is_denominator, up, s0),
            up,
            np.where(is_denominator, up, s0),
            down,
            np.where(is_numerator, up, s0),
            up,
        ]
        scaled = [False, True, False, True, False, True, False]
        write(m, np.select(cases, values, s0).astype(F32))
        m.write_mask(mask, np.select(cases, [np.full(s0.shape, flag) for flag in scaled], np.zeros(s0.shape, bool)))

    return run


@opcode("v_div_fmas_f32")
def _div_fmas(instruction: Instruction):
    write, a, b, c = float_writer(instruction), *(float_reader(instruction, k) for k in (1, 2, 3))

    def run(m):
        result = fused(a(m), b(m), c(m))
        big = _exponent_of(c(m)) > 0
        scaled = np.where(big, np.ldexp(result.astype(F64), 64), np.ldexp(result.astype(F64), -64)).astype(F32)
        write(m, np.where(m.read_mask(106), scaled, result))

    return run


@opcode("v_div_fixup_f32")
def _div_fixup(instruction: Instruction):
    """Special cases of the quotient; an ordinary quotient takes the sign of numerator xor denominator."""
    write, quotient, denominator, numerator = (
        float_writer(instruction),
        *(float_reader(instruction, k) for k in (1, 2, 3)),
    )

    def run(m):
        q, d, n = np.broadcast_arrays(quotient(m), denominator(m), numerator(m))
        sign = np.signbit(d) ^ np.signbit(n)
        exact = n.astype(F64) / d.astype(F64)
        special = np.isnan(n) | np.isnan(d) | np.isinf(n) | np.isinf(d) | (n == 0) | (d == 0)
        underflow = _exponent_of(np.ascontiguousarray(n)) - _exponent_of(np.ascontiguousarray(d)) < -150
        overflow = np.isinf(exact.astype(F32))
        result = np.where(
            special | underflow | overflow, exact.astype(F32), np.copysign(q, np.where(sign, F32(-1), F32(1)))
        )
        write(m, result.astype(F32))

    return run
