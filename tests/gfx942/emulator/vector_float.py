# SPDX-License-Identifier: Apache-2.0
"""Vector floating point: fp32, fp64, fp16.

Arithmetic rounds once, to nearest even, denormals kept (the mode HIP and Triton set). The transcendental functions are
rounded correctly in the emulator and flush denormal inputs and results; hardware is within 1 ulp of that, so a test
must allow for it.
"""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.operands import (
    bits_reader,
    double_reader,
    float_reader,
    float_writer,
    integer_reader,
    result_of,
    vector_writer,
    wide_writer,
)
from tests.gfx942.emulator.registry import opcode

U16, U32, U64, I32 = np.uint16, np.uint32, np.uint64, np.int32
F16, F32, F64 = np.float16, np.float32, np.float64
_TINY = F32(2.0**-126)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 a * b + c rounded once. The product is exact in fp64; where the fp64 sum falls on a tie of fp32 (or below
    its normal range), the sum is rounded to odd first, which makes the second rounding exact (Boldo and Melquiond
    2008).
    """
    product, addend = a.astype(F64) * b.astype(F64), c.astype(F64)
    total = product + addend
    bits = total.view(U64)
    doubtful = ((bits & U64(0x1FFFFFFF)) == U64(0x10000000)) | ((np.abs(total) < 2.0**-126) & (total != 0))
    if doubtful.any():
        back = total - product
        error = (product - (total - back)) + (addend - back)  # TwoSum
        inexact = doubtful & (error != 0) & np.isfinite(error) & ((bits & U64(1)) == 0)
        toward = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        total = np.where(inexact, toward, total)
    return total.astype(F32)


def _flush(value):
    return np.where(np.abs(value) < _TINY, np.copysign(F32(0), value), value)


def _special(function):
    """A transcendental function: evaluated in fp64, denormals flushed on both sides."""
    return lambda a: _flush(function(_flush(a).astype(F64)).astype(F32))


def _median(a, b, c):
    low, high = np.fmin(np.fmin(a, b), c), np.fmax(np.fmax(a, b), c)
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), low, np.clip(middle, low, high))


def _fract(a):
    return np.fmin(a - np.floor(a), np.nextafter(F32(1), F32(0)))


def _max(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def _min(a, b):
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


_FLOAT = {
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_mul_legacy_f32": lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b),
    "v_max_f32": _max,
    "v_min_f32": _min,
    "v_max3_f32": lambda a, b, c: _max(_max(a, b), c),
    "v_min3_f32": lambda a, b, c: _min(_min(a, b), c),
    "v_med3_f32": _median,
    "v_fma_f32": fused,
    "v_fmamk_f32": fused,
    "v_fmaak_f32": fused,
    "v_floor_f32": np.floor,
    "v_ceil_f32": np.ceil,
    "v_trunc_f32": np.trunc,
    "v_rndne_f32": np.rint,
    "v_fract_f32": _fract,
    "v_rcp_f32": _special(lambda a: 1.0 / a),
    "v_rcp_iflag_f32": _special(lambda a: 1.0 / a),
    "v_rsq_f32": _special(lambda a: 1.0 / np.sqrt(a)),
    "v_sqrt_f32": _special(np.sqrt),
    "v_exp_f32": _special(np.exp2),
    "v_log_f32": _special(np.log2),
    "v_sin_f32": _special(lambda a: np.sin(2 * np.pi * a)),
    "v_cos_f32": _special(lambda a: np.cos(2 * np.pi * a)),
    "v_frexp_mant_f32": lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a),
}


@opcode(*_FLOAT)
def _float(instruction: Instruction):
    operate, write = _FLOAT[instruction.opcode], float_writer(instruction)
    sources = [float_reader(instruction, k) for k in range(1, len(instruction.operands))]
    return result_of(operate, sources, write)


@opcode("v_fmac_f32", "v_mac_f32")
def _accumulate(instruction: Instruction):
    write, a, b, c = (
        float_writer(instruction),
        float_reader(instruction, 1),
        float_reader(instruction, 2),
        _own_float(instruction),
    )
    return lambda m: write(m, fused(a(m), b(m), c(m)))


def _own_float(instruction: Instruction):
    register = instruction.operands[0].position
    return lambda m: m.vector_float[register][m.rows]


@opcode("v_ldexp_f32")
def _scale(instruction: Instruction):
    write, value, exponent = float_writer(instruction), float_reader(instruction, 1), integer_reader(instruction, 2)
    return lambda m: write(m, np.ldexp(value(m).astype(F64), np.clip(exponent(m).view(I32), -400, 400)).astype(F32))


@opcode("v_frexp_exp_i32_f32")
def _exponent(instruction: Instruction):
    write, value = vector_writer(instruction), float_reader(instruction, 1)
    return lambda m: write(m, np.where(np.isfinite(value(m)), np.frexp(value(m))[1], 0).astype(I32).view(U32))


# fp16, low half
_HALF = {
    "v_add_f16": lambda a, b: a + b,
    "v_sub_f16": lambda a, b: a - b,
    "v_subrev_f16": lambda a, b: b - a,
    "v_mul_f16": lambda a, b: a * b,
    "v_max_f16": np.fmax,
    "v_min_f16": np.fmin,
    "v_fma_f16": lambda a, b, c: (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16),
}


def _half_reader(instruction: Instruction, position: int):
    read, operand = bits_reader(instruction, position), instruction.operands[position]

    def typed(m):
        if operand.kind == "f":
            return np.full((1, 1), operand.value, F16)
        value = np.ascontiguousarray(read(m).astype(U16)).view(F16)
        value = np.abs(value) if operand.absolute else value
        return np.negative(value) if operand.negate else value

    return typed


@opcode(*_HALF)
def _half(instruction: Instruction):
    operate, write = _HALF[instruction.opcode], vector_writer(instruction)
    sources = [_half_reader(instruction, k) for k in range(1, len(instruction.operands))]
    return lambda m: write(m, operate(*(read(m) for read in sources)).view(U16).astype(U32))


# fp64 -----------------------------------------------------------------------------------------------------------------
_DOUBLE = {
    "v_add_f64": lambda a, b: a + b,
    "v_mul_f64": lambda a, b: a * b,
    "v_max_f64": np.fmax,
    "v_min_f64": np.fmin,
    "v_floor_f64": np.floor,
    "v_ceil_f64": np.ceil,
    "v_trunc_f64": np.trunc,
    "v_rndne_f64": np.rint,
    "v_rcp_f64": lambda a: 1.0 / a,
    "v_rsq_f64": lambda a: 1.0 / np.sqrt(a),
    "v_sqrt_f64": np.sqrt,
}


def fused_double(a, b, c):
    """fp64 a * b + c in extended precision (80-bit on x86): rounds twice in rare cases."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(F64)


@opcode(*_DOUBLE, "v_fma_f64", "v_fmac_f64")
def _double(instruction: Instruction):
    write = wide_writer(instruction)
    sources = [double_reader(instruction, k) for k in range(1, len(instruction.operands))]
    if instruction.opcode == "v_fmac_f64":
        sources.append(double_reader(instruction, 0))
    operate = fused_double if "fma" in instruction.opcode else _DOUBLE[instruction.opcode]
    return lambda m: write(m, np.asarray(operate(*(read(m) for read in sources)), F64).view(U64))


@opcode("v_ldexp_f64")
def _scale_double(instruction: Instruction):
    write, value, exponent = wide_writer(instruction), double_reader(instruction, 1), integer_reader(instruction, 2)
    return lambda m: write(m, np.ldexp(value(m), exponent(m).view(I32)).view(U64))
