# SPDX-License-Identifier: Apache-2.0
"""VOP3P: two fp32 or two 16-bit operations in one instruction, with op_sel choosing halves."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.operands import raw_reader, vector_writer
from tests.gfx942.emulator.registry import opcode
from tests.gfx942.emulator.vector_float import fused

U16, U32, I16, F16, F32, F64 = np.uint16, np.uint32, np.int16, np.float16, np.float32, np.float64
_SIGN = U32(0x80000000)
_PAIRS = {"v_pk_mul_f32": lambda a, b: a * b, "v_pk_add_f32": lambda a, b: a + b, "v_pk_fma_f32": fused}


@opcode(*_PAIRS)
def _pair(instruction: Instruction):
    """Register pairs: op_sel picks the register for the low result, op_sel_hi for the high one."""
    operate, count = _PAIRS[instruction.opcode], len(instruction.operands) - 1
    halves = []
    for part, select, default, negate in ((0, "op_sel", 0, "neg_lo"), (1, "op_sel_hi", 1, "neg_hi")):
        chosen, signs = instruction.flags(select, count, default), instruction.flags(negate, count, 0)
        readers = []
        for operand, half, negative in zip(instruction.operands[1:], chosen, signs, strict=True):
            # a constant stands in the low half only where a 32-bit literal or inline value is given: both halves read
            # it
            read = raw_reader(operand, half if operand.kind in "vas" and operand.count > 1 else 0)
            readers.append(
                (lambda m, read=read: (read(m) ^ _SIGN).view(F32))
                if negative
                else (lambda m, read=read: read(m).view(F32))
            )
        halves.append((readers, vector_writer(instruction, part)))
    (low, write_low), (high, write_high) = halves

    def run(m):
        first, second = operate(*(read(m) for read in low)), operate(*(read(m) for read in high))
        write_low(m, first.view(U32))
        write_high(m, second.view(U32))

    return run


@opcode("v_pk_mov_b32")
def _move_pair(instruction: Instruction):
    select = instruction.flags("op_sel", 2, 0)
    first, second = (
        raw_reader(operand, half if operand.kind in "vas" and operand.count > 1 else 0)
        for operand, half in zip(instruction.operands[1:3], select, strict=True)
    )
    write_low, write_high = vector_writer(instruction, 0), vector_writer(instruction, 1)

    def run(m):
        low, high = first(m).copy(), second(m).copy()
        write_low(m, low)
        write_high(m, high)

    return run


_SHORT = {
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_lshlrev_b16": lambda a, b: b << (a & U16(15)),
    "v_pk_lshrrev_b16": lambda a, b: b >> (a & U16(15)),
    "v_pk_min_u16": np.minimum,
    "v_pk_max_u16": np.maximum,
    "v_pk_mad_u16": lambda a, b, c: a * b + c,
}
_SHORT_SIGNED = {
    "v_pk_add_i16": lambda a, b: a + b,
    "v_pk_sub_i16": lambda a, b: a - b,
    "v_pk_min_i16": np.minimum,
    "v_pk_max_i16": np.maximum,
    "v_pk_ashrrev_i16": lambda a, b: b >> (a & I16(15)),
}
_SHORT_FLOAT = {
    "v_pk_add_f16": lambda a, b: a + b,
    "v_pk_mul_f16": lambda a, b: a * b,
    "v_pk_max_f16": np.fmax,
    "v_pk_min_f16": np.fmin,
    "v_pk_fma_f16": lambda a, b, c: (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F16),
}
_SHORT_TYPES = {**dict.fromkeys(_SHORT, U16), **dict.fromkeys(_SHORT_SIGNED, I16), **dict.fromkeys(_SHORT_FLOAT, F16)}


@opcode(*_SHORT_TYPES)
def _short_pair(instruction: Instruction):
    name, count, kind = instruction.opcode, len(instruction.operands) - 1, _SHORT_TYPES[instruction.opcode]
    operate = {**_SHORT, **_SHORT_SIGNED, **_SHORT_FLOAT}[name]
    plans = []
    for select, default, negate in (("op_sel", 0, "neg_lo"), ("op_sel_hi", 1, "neg_hi")):
        plans.append(
            list(
                zip(
                    [_half_source(operand, kind) for operand in instruction.operands[1:]],
                    instruction.flags(select, count, default),
                    instruction.flags(negate, count, 0),
                    strict=True,
                )
            )
        )
    write = vector_writer(instruction)

    def run(m):
        results = []
        for plan in plans:
            values = [np.negative(read(m, half)) if negative else read(m, half) for read, half, negative in plan]
            results.append(np.ascontiguousarray(operate(*values)).view(U16).astype(U32))
        write(m, results[0] | (results[1] << U32(16)))

    return run


def _half_source(operand, kind):
    if operand.kind == "f":
        value = np.full((1, 1), operand.value, F16).view(kind)
        zero = np.zeros((1, 1), kind)
        return lambda m, half: zero if half else value
    read = raw_reader(operand)
    return lambda m, half: np.ascontiguousarray((read(m) >> U32(16 * half)).astype(U16)).view(kind)


@opcode("v_dot2_f32_f16", "v_dot2_f32_bf16")
def _dot2(instruction: Instruction):
    """Sum of two products of halves and an fp32 addend, in fp64, rounded once."""
    brain = instruction.opcode.endswith("bf16")
    a, b, c = (raw_reader(operand) for operand in instruction.operands[1:4])
    write = vector_writer(instruction)

    def parts(value):
        if brain:
            return (value << U32(16)).view(F32).astype(F64), (value & U32(0xFFFF0000)).view(F32).astype(F64)
        return tuple(np.ascontiguousarray((value >> U32(s)).astype(U16)).view(F16).astype(F64) for s in (0, 16))

    def run(m):
        (a0, a1), (b0, b1) = parts(a(m)), parts(b(m))
        write(m, (a0 * b0 + a1 * b1 + c(m).view(F32).astype(F64)).astype(F32).view(U32))

    return run


@opcode("v_pack_b32_f16")
def _pack(instruction: Instruction):
    """Two halves as they are; op_sel picks high halves."""
    select, write = instruction.flags("op_sel", 2, 0), vector_writer(instruction)
    halves = [
        _mixed_source(operand, True, half) for operand, half in zip(instruction.operands[1:3], select, strict=True)
    ]
    bits = [lambda m, read=read: read(m).astype(F16).view(U16).astype(U32) for read in halves]
    return lambda m: write(m, bits[0](m) | (bits[1](m) << U32(16)))


def _mixed_source(operand, is_half: bool, high: int):
    """fp32 value of an fp32 operand, or of one half of a register; neg and abs applied."""
    if is_half and operand.kind == "f":
        value = np.full((1, 1), operand.value, F32)

        def read(m):
            return value
    else:
        raw = raw_reader(operand)
        if is_half:

            def read(m):
                return np.ascontiguousarray((raw(m) >> U32(16 * high)).astype(U16)).view(F16).astype(F32)
        else:

            def read(m):
                return raw(m).view(F32)

    def signed(m):
        value = np.abs(read(m)) if operand.absolute else read(m)
        return np.negative(value) if operand.negate else value

    return signed


@opcode("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16")
def _mixed(instruction: Instruction):
    """fp32 fma whose sources may be halves: op_sel_hi says which are, op_sel which half."""
    is_half, high = instruction.flags("op_sel_hi", 3, 0), instruction.flags("op_sel", 3, 0)
    a, b, c = (
        _mixed_source(operand, bool(half), place)
        for operand, half, place in zip(instruction.operands[1:4], is_half, high, strict=True)
    )
    write, register = vector_writer(instruction), instruction.operands[0].position
    if instruction.opcode == "v_fma_mix_f32":
        return lambda m: write(m, fused(a(m), b(m), c(m)).view(U32))
    shift = U32(16 if "hi" in instruction.opcode else 0)
    keep = U32(0xFFFF0000 >> int(shift))

    def run(m):
        exact = a(m).astype(F64) * b(m).astype(F64) + c(m).astype(F64)
        half = exact.astype(F16).view(U16).astype(U32)
        write(m, (m.vector[register][m.rows] & keep) | (half << shift))

    return run
