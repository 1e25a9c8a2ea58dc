# SPDX-License-Identifier: Apache-2.0
"""Scalar arithmetic of two sources. One value a wave: arrays of shape [waves] (or [1] for constants)."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction, constant_bits
from tests.gfx942.emulator.operands import scalar_reader, scalar_wide_reader
from tests.gfx942.emulator.registry import opcode, opcode_pattern

U32, U64, I32, I64 = np.uint32, np.uint64, np.int32, np.int64


def _signed(value):
    return value.view(I32)


def _low(value):
    return value & U32(31)


def _field(value, control):
    """(offset, width) of s_bfe and s_bfm controls."""
    return value & U32(31), (control >> U32(16)) & U32(127)


def _bfe_u32(a, b):
    offset, width = _field(b, b)
    width = np.minimum(width, U32(32)).astype(U64)
    return ((a.astype(U64) >> offset.astype(U64)) & ((U64(1) << width) - U64(1))).astype(U32)


def _bfe_i32(a, b):
    offset, width = _field(b, b)
    width = np.minimum(width, U32(32) - offset).astype(I64)
    raw = (a.astype(I64) >> offset.astype(I64)) & ((I64(1) << width) - 1)
    sign = np.where(width > 0, I64(1) << np.maximum(width - 1, 0), 0)
    return ((raw ^ sign) - sign).astype(I32).view(U32)


def _add_overflow(a, b, result):
    return ((~(a ^ b) & (a ^ result)) >> U32(31)) != 0


def _sub_overflow(a, b, result):
    return (((a ^ b) & (a ^ result)) >> U32(31)) != 0


def _nonzero(a, b, result):
    return result != 0


# name -> (result, SCC or None)
_BINARY = {
    "s_add_u32": (lambda a, b: a + b, lambda a, b, r: r < a),
    "s_sub_u32": (lambda a, b: a - b, lambda a, b, r: b > a),
    "s_add_i32": (lambda a, b: a + b, _add_overflow),
    "s_sub_i32": (lambda a, b: a - b, _sub_overflow),
    "s_mul_i32": (lambda a, b: a * b, None),
    "s_mul_hi_u32": (lambda a, b: ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32), None),
    "s_mul_hi_i32": (
        lambda a, b: ((_signed(a).astype(I64) * _signed(b).astype(I64)) >> I64(32)).astype(I32).view(U32),
        None,
    ),
    "s_and_b32": (lambda a, b: a & b, _nonzero),
    "s_or_b32": (lambda a, b: a | b, _nonzero),
    "s_xor_b32": (lambda a, b: a ^ b, _nonzero),
    "s_andn2_b32": (lambda a, b: a & ~b, _nonzero),
    "s_orn2_b32": (lambda a, b: a | ~b, _nonzero),
    "s_nand_b32": (lambda a, b: ~(a & b), _nonzero),
    "s_nor_b32": (lambda a, b: ~(a | b), _nonzero),
    "s_xnor_b32": (lambda a, b: ~(a ^ b), _nonzero),
    "s_lshl_b32": (lambda a, b: a << _low(b), _nonzero),
    "s_lshr_b32": (lambda a, b: a >> _low(b), _nonzero),
    "s_ashr_i32": (lambda a, b: (_signed(a) >> _signed(_low(b))).view(U32), _nonzero),
    "s_bfm_b32": (lambda a, b: ((U32(1) << _low(a)) - U32(1)) << _low(b), None),
    "s_bfe_u32": (_bfe_u32, _nonzero),
    "s_bfe_i32": (_bfe_i32, _nonzero),
    "s_min_i32": (lambda a, b: np.minimum(_signed(a), _signed(b)).view(U32), lambda a, b, r: _signed(a) < _signed(b)),
    "s_max_i32": (lambda a, b: np.maximum(_signed(a), _signed(b)).view(U32), lambda a, b, r: _signed(a) > _signed(b)),
    "s_min_u32": (np.minimum, lambda a, b, r: a < b),
    "s_max_u32": (np.maximum, lambda a, b, r: a > b),
    "s_absdiff_i32": (lambda a, b: np.abs(_signed(a - b)).view(U32), _nonzero),
    "s_pack_ll_b32_b16": (lambda a, b: (a & U32(0xFFFF)) | (b << U32(16)), None),
    "s_pack_lh_b32_b16": (lambda a, b: (a & U32(0xFFFF)) | (b & U32(0xFFFF0000)), None),
    "s_pack_hh_b32_b16": (lambda a, b: (a >> U32(16)) | (b & U32(0xFFFF0000)), None),
    **{
        f"s_lshl{n}_add_u32": (
            lambda a, b, n=n: (a << U32(n)) + b,
            lambda a, b, r, n=n: ((a.astype(U64) << U64(n)) + b.astype(U64)) >> U64(32) != 0,
        )
        for n in (1, 2, 3, 4)
    },
}


@opcode(*_BINARY)
def _binary(instruction: Instruction):
    result, condition = _BINARY[instruction.opcode]
    target, first, second = instruction.operands
    a_of, b_of, index = scalar_reader(first), scalar_reader(second), target.index

    def run(m):
        a, b = a_of(m), b_of(m)
        value = result(a, b)
        if condition is not None:
            m.scc[m.rows] = condition(a, b, value)
        m.write_scalar(index, value)

    return run


@opcode("s_addc_u32", "s_subb_u32")
def _with_carry(instruction: Instruction):
    target, first, second = instruction.operands
    a_of, b_of, index, add = (
        scalar_reader(first),
        scalar_reader(second),
        target.index,
        instruction.opcode == "s_addc_u32",
    )

    def run(m):
        a, b, carry = a_of(m).astype(I64), b_of(m).astype(I64), m.scc[m.rows]
        total = a + b + carry if add else a - b - carry
        m.scc[m.rows] = (total >> 32) != 0
        m.write_scalar(index, (total & 0xFFFFFFFF).astype(U32))

    return run


_WIDE = {
    "s_and_b64": lambda a, b: a & b,
    "s_or_b64": lambda a, b: a | b,
    "s_xor_b64": lambda a, b: a ^ b,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_orn2_b64": lambda a, b: a | ~b,
    "s_nand_b64": lambda a, b: ~(a & b),
    "s_nor_b64": lambda a, b: ~(a | b),
    "s_xnor_b64": lambda a, b: ~(a ^ b),
}
_WIDE_SHIFTS = {
    "s_lshl_b64": lambda a, n: a << n,
    "s_lshr_b64": lambda a, n: a >> n,
    "s_ashr_i64": lambda a, n: (a.view(I64) >> n.view(I64)).view(U64),
}


@opcode(*_WIDE, *_WIDE_SHIFTS)
def _wide(instruction: Instruction):
    target, first, second = instruction.operands
    a_of, index = scalar_wide_reader(first), target.index
    if instruction.opcode in _WIDE:
        operate, b_of = _WIDE[instruction.opcode], scalar_wide_reader(second)
    else:
        operate, shift_of = _WIDE_SHIFTS[instruction.opcode], scalar_reader(second)

        def b_of(m):
            return (shift_of(m) & U32(63)).astype(U64)

    def run(m):
        value = operate(a_of(m), b_of(m))
        m.scc[m.rows] = value != 0
        m.write_scalar64(index, value)

    return run


@opcode("s_bfm_b64")
def _bfm64(instruction: Instruction):
    target, first, second = instruction.operands
    a_of, b_of = scalar_reader(first), scalar_reader(second)

    def run(m):
        width, offset = (a_of(m) & U32(63)).astype(U64), (b_of(m) & U32(63)).astype(U64)
        m.write_scalar64(target.index, ((U64(1) << width) - U64(1)) << offset)

    return run


@opcode("s_bfe_u64", "s_bfe_i64")
def _bfe64(instruction: Instruction):
    target, first, second = instruction.operands
    a_of, b_of, is_signed = scalar_wide_reader(first), scalar_reader(second), instruction.opcode == "s_bfe_i64"

    def run(m):
        control = b_of(m)
        offset = (control & U32(63)).astype(U64)
        width = np.minimum((control >> U32(16) & U32(127)).astype(U64), U64(64) - offset)
        up = U64(64) - width
        value = (a_of(m) >> offset) << (up & U64(63))
        value = (value.view(I64) >> (up & U64(63)).view(I64)).view(U64) if is_signed else value >> (up & U64(63))
        value = np.where(width == 0, U64(0), value)
        m.scc[m.rows] = value != 0
        m.write_scalar64(target.index, value)

    return run


@opcode("s_cselect_b32", "s_cselect_b64")
def _select(instruction: Instruction):
    target, first, second = instruction.operands
    if instruction.opcode.endswith("64"):
        a_of, b_of = scalar_wide_reader(first), scalar_wide_reader(second)
        return lambda m: m.write_scalar64(target.index, np.where(m.scc[m.rows], a_of(m), b_of(m)))
    a_of, b_of = scalar_reader(first), scalar_reader(second)
    return lambda m: m.write_scalar(target.index, np.where(m.scc[m.rows], a_of(m), b_of(m)))


@opcode("s_mov_b32", "s_cmov_b32")
def _move(instruction: Instruction):
    target, source = instruction.operands
    read, own = scalar_reader(source), scalar_reader(target)
    if instruction.opcode == "s_cmov_b32":
        return lambda m: m.write_scalar(target.index, np.where(m.scc[m.rows], read(m), own(m)))
    return lambda m: m.write_scalar(target.index, read(m))


@opcode("s_mov_b64", "s_cmov_b64")
def _move_wide(instruction: Instruction):
    target, source = instruction.operands
    read, own = scalar_wide_reader(source), scalar_wide_reader(target)
    if instruction.opcode == "s_cmov_b64":
        return lambda m: m.write_scalar64(target.index, np.where(m.scc[m.rows], read(m), own(m)))
    return lambda m: m.write_scalar64(target.index, read(m))


def _sign_extended(operand) -> np.ndarray:
    value = constant_bits(operand, 16)
    return np.full(1, (value - 0x10000 if value & 0x8000 else value) & 0xFFFFFFFF, U32)


@opcode("s_movk_i32", "s_cmovk_i32", "s_addk_i32", "s_mulk_i32")
def _with_constant(instruction: Instruction):
    target, source = instruction.operands
    constant, own, name = _sign_extended(source), scalar_reader(target), instruction.opcode

    def run(m):
        if name == "s_movk_i32":
            m.write_scalar(target.index, constant)
        elif name == "s_cmovk_i32":
            m.write_scalar(target.index, np.where(m.scc[m.rows], constant, own(m)))
        elif name == "s_mulk_i32":
            m.write_scalar(target.index, own(m) * constant)
        else:
            before = own(m).copy()
            total = before + constant
            m.scc[m.rows] = _add_overflow(before, constant, total)
            m.write_scalar(target.index, total)

    return run


_COMPARE = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


@opcode_pattern(r"s_cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)")
def _compare(instruction: Instruction, match):
    first, second = instruction.operands
    compare, signed, wide = _COMPARE[match[2]], match[3] == "i", match[4] == "64"
    if wide:
        a_of, b_of = scalar_wide_reader(first), scalar_wide_reader(second)
    else:
        a_of, b_of = scalar_reader(first), scalar_reader(second)
        if match[1]:
            constant = _sign_extended(second) if signed else np.full(1, constant_bits(second, 16), U32)

            def b_of(m):
                return constant

    def run(m):
        a, b = a_of(m), b_of(m)
        m.scc[m.rows] = compare(_signed(a), _signed(b)) if signed and not wide else compare(a, b)

    return run


@opcode("s_bitcmp0_b32", "s_bitcmp1_b32")
def _bit_compare(instruction: Instruction):
    first, second = instruction.operands
    a_of, b_of, expected = scalar_reader(first), scalar_reader(second), U32(instruction.opcode == "s_bitcmp1_b32")

    def run(m):
        m.scc[m.rows] = ((a_of(m) >> _low(b_of(m))) & U32(1)) == expected

    return run


@opcode("s_bitset0_b32", "s_bitset1_b32")
def _bit_set(instruction: Instruction):
    target, source = instruction.operands
    own, bit_of = scalar_reader(target), scalar_reader(source)
    if instruction.opcode == "s_bitset1_b32":
        return lambda m: m.write_scalar(target.index, own(m) | (U32(1) << _low(bit_of(m))))
    return lambda m: m.write_scalar(target.index, own(m) & ~(U32(1) << _low(bit_of(m))))


_SAVE_EXEC = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e,
    "andn1": lambda s, e: ~s & e,
    "orn1": lambda s, e: ~s | e,
}


@opcode_pattern(r"s_(and|or|xor|andn2|orn2|andn1|orn1)_saveexec_b64")
def _save_exec(instruction: Instruction, match):
    target, source = instruction.operands
    read, operate = scalar_wide_reader(source), _SAVE_EXEC[match[1]]

    def run(m):
        mask, before = read(m), m.read_scalar64(126)
        value = operate(mask, before)
        m.write_scalar64(target.index, before)
        m.scc[m.rows] = value != 0
        m.write_scalar64(126, value)

    return run
