# SPDX-License-Identifier: Apache-2.0
"""Conversions between integers, fp16, fp32 and fp64. To integers: toward zero, saturating, NaN to 0."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.operands import (
    bits_reader,
    double_reader,
    float_reader,
    float_writer,
    integer_reader,
    vector_writer,
    wide_writer,
)
from tests.gfx942.emulator.registry import opcode

U16, U32, U64, I32, I64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
F16, F32, F64 = np.float16, np.float32, np.float64


def _saturate(value, low, high):
    return np.clip(np.nan_to_num(np.trunc(value.astype(F64)), nan=0.0, posinf=high, neginf=low), low, high)


def to_i32(value):
    return _saturate(value, -(2.0**31), 2.0**31 - 1).astype(I64).astype(I32).view(U32)


def to_u32(value):
    return _saturate(value, 0.0, 2.0**32 - 1).astype(U64).astype(U32)


_FROM_FLOAT = {
    "v_cvt_i32_f32": to_i32,
    "v_cvt_u32_f32": to_u32,
    "v_cvt_rpi_i32_f32": lambda a: to_i32(np.floor(a + F32(0.5))),
    "v_cvt_flr_i32_f32": lambda a: to_i32(np.floor(a)),
    "v_cvt_f16_f32": lambda a: a.astype(F16).view(U16).astype(U32),
}
_TO_FLOAT = {
    "v_cvt_f32_i32": lambda a: a.view(I32).astype(F32),
    "v_cvt_f32_u32": lambda a: a.astype(F32),
    "v_cvt_f32_f16": lambda a: np.ascontiguousarray(a.astype(U16)).view(F16).astype(F32),
    **{f"v_cvt_f32_ubyte{k}": (lambda a, k=k: ((a >> U32(8 * k)) & U32(0xFF)).astype(F32)) for k in range(4)},
}


@opcode(*_FROM_FLOAT)
def _from_float(instruction: Instruction):
    convert, write, read = _FROM_FLOAT[instruction.opcode], vector_writer(instruction), float_reader(instruction, 1)
    return lambda m: write(m, convert(read(m)))


@opcode(*_TO_FLOAT)
def _to_float(instruction: Instruction):
    convert, write, read = _TO_FLOAT[instruction.opcode], float_writer(instruction), bits_reader(instruction, 1)
    if instruction.operands[1].negate or instruction.operands[1].absolute:
        source, sign = read, instruction.operands[1]

        def read(m):
            value = source(m) & U32(0x7FFF) if sign.absolute else source(m)
            return value ^ U32(0x8000) if sign.negate else value

    return lambda m: write(m, convert(read(m)))


def _toward_zero_f16(value):
    half = value.astype(F16)
    over = np.abs(half.astype(F32)) > np.abs(value)
    bits = half.view(U16)
    return np.where(over & np.isfinite(value), bits - U16(1), bits).astype(U32)


@opcode("v_cvt_pkrtz_f16_f32")
def _pack_halves(instruction: Instruction):
    write, low, high = vector_writer(instruction), float_reader(instruction, 1), float_reader(instruction, 2)
    return lambda m: write(m, _toward_zero_f16(low(m)) | (_toward_zero_f16(high(m)) << U32(16)))


@opcode("v_cvt_pk_bf16_f32")
def _pack_brain_halves(instruction: Instruction):
    """gfx950: to nearest, ties to even; a NaN keeps its upper bits and becomes a quiet one."""
    write, low, high = vector_writer(instruction), float_reader(instruction, 1), float_reader(instruction, 2)

    def rounded(value):
        bits = np.ascontiguousarray(value).view(U32)
        nearest = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)
        return np.where(np.isnan(value), bits >> U32(16) | U32(0x40), nearest)

    return lambda m: write(m, rounded(low(m)) | (rounded(high(m)) << U32(16)))


@opcode("v_cvt_pk_f16_f32")
def _pack_rounded_halves(instruction: Instruction):
    """gfx950: to nearest, where v_cvt_pkrtz_f16_f32 rounds toward zero."""
    write, low, high = vector_writer(instruction), float_reader(instruction, 1), float_reader(instruction, 2)

    def rounded(value):
        return np.ascontiguousarray(value.astype(F16)).view(U16).astype(U32)

    return lambda m: write(m, rounded(low(m)) | (rounded(high(m)) << U32(16)))


@opcode("v_cvt_f64_f32", "v_cvt_f64_i32", "v_cvt_f64_u32")
def _to_double(instruction: Instruction):
    write, kind = wide_writer(instruction), instruction.opcode[-3:]
    read = float_reader(instruction, 1) if kind == "f32" else integer_reader(instruction, 1)
    return lambda m: write(m, (read(m).view(I32) if kind == "i32" else read(m)).astype(F64).view(U64))


@opcode("v_cvt_f32_f64", "v_cvt_i32_f64", "v_cvt_u32_f64")
def _from_double(instruction: Instruction):
    write, read = vector_writer(instruction), double_reader(instruction, 1)
    convert = {"v_cvt_f32_f64": lambda a: a.astype(F32).view(U32), "v_cvt_i32_f64": to_i32, "v_cvt_u32_f64": to_u32}[
        instruction.opcode
    ]
    return lambda m: write(m, convert(read(m)))
