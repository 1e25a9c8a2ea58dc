# SPDX-License-Identifier: Apache-2.0
"""Vector integer and bit instructions (CDNA3 ISA, VOP1, VOP2, VOP3)."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import UnknownInstruction
from tests.gfx942.emulator.operands import (
    integer_reader,
    mask_reader,
    result_of,
    scalar_reader,
    signed_bits_reader,
    vector_writer,
    wide_reader,
    wide_writer,
)
from tests.gfx942.emulator.registry import opcode
from tests.gfx942.emulator.scalar_unary import first_bit, reverse_bits

U16, U32, U64, I16, I32, I64 = np.uint16, np.uint32, np.uint64, np.int16, np.int32, np.int64


def _s(value):
    return value.view(I32)


def _n(value):
    return value & U32(31)


def _signed24(value):
    return (_s(value) << I32(8)) >> I32(8)


def _low24(value):
    return value & U32(0xFFFFFF)


def _bfe_u32(a, b, c):
    return (a >> _n(b)) & ((U32(1) << _n(c)) - U32(1))


def _bfe_i32(a, b, c):
    width = _n(c)
    field = (a >> _n(b)) & ((U32(1) << width) - U32(1))
    sign = np.where(width > 0, U32(1) << (width - U32(1) & U32(31)), U32(0))
    # where the field runs past bit 31 the shift has brought in zeros; hardware shifts arithmetically
    shifted = (_s(a) >> _s(_n(b))).view(U32)
    past = _n(b) + width >= U32(32)
    return np.where(past & (width > 0), shifted, (field ^ sign) - sign)


def _subtract_to_zero(a, b):
    return np.where(a > b, a - b, U32(0))


def _permute_bytes(a, b, selector):
    """v_perm_b32: bytes 0-3 of the pool are b, 4-7 are a; 8-11 a sign, 12 zero, 13 and above 0xff."""
    pool = (a.astype(U64) << U64(32)) | b.astype(U64)
    result = None
    for k in range(4):
        choice = (selector >> U32(8 * k)) & U32(0xFF)
        byte = ((pool >> ((choice & U32(7)) * U32(8)).astype(U64)) & U64(0xFF)).astype(U32)
        if (choice >= 8).any():
            sign_source = (choice & U32(3)) * U32(2) + U32(1)
            sign = ((pool >> (sign_source * U32(8) + U32(7)).astype(U64)) & U64(1)).astype(U32) * U32(0xFF)
            byte = np.where(choice >= 13, U32(0xFF), np.where(choice == 12, U32(0), np.where(choice >= 8, sign, byte)))
        part = byte << U32(8 * k)
        result = part if result is None else result | part
    return result


def _half_op(operate, signed=False):
    """16-bit operation on the low halves; the high half of the result is zero."""

    def run(*values):
        halves = [np.ascontiguousarray(v.astype(U16)) for v in values]
        halves = [h.view(I16) for h in halves] if signed else halves
        result = np.asarray(operate(*halves))
        return (result.astype(I16).view(U16) if signed else result.astype(U16)).astype(U32)

    return run


_PLAIN = {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": reverse_bits,
    "v_ffbh_u32": lambda a: first_bit(a, 32, True),
    "v_ffbl_b32": lambda a: first_bit(a, 32, False),
    "v_ffbh_i32": lambda a: np.where(
        (a == 0) | (a == U32(0xFFFFFFFF)), U32(0xFFFFFFFF), first_bit(np.where(_s(a) < 0, ~a, a), 32, True)
    ),
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_i32": lambda a, b: a + b,
    "v_sub_i32": lambda a, b: a - b,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << _n(a),
    "v_lshrrev_b32": lambda a, b: b >> _n(a),
    "v_ashrrev_i32": lambda a, b: (_s(b) >> _s(_n(a))).view(U32),
    "v_lshl_b32": lambda a, b: a << _n(b),
    "v_min_i32": lambda a, b: np.minimum(_s(a), _s(b)).view(U32),
    "v_max_i32": lambda a, b: np.maximum(_s(a), _s(b)).view(U32),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32),
    "v_mul_hi_i32": lambda a, b: ((_s(a).astype(I64) * _s(b).astype(I64)) >> I64(32)).astype(I32).view(U32),
    "v_mul_u32_u24": lambda a, b: _low24(a) * _low24(b),
    "v_mul_i32_i24": lambda a, b: (_signed24(a) * _signed24(b)).view(U32),
    "v_mul_hi_u32_u24": lambda a, b: ((_low24(a).astype(U64) * _low24(b).astype(U64)) >> U64(32)).astype(U32),
    "v_mad_u32_u24": lambda a, b, c: _low24(a) * _low24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: (_signed24(a) * _signed24(b)).view(U32) + c,
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << _n(b)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << _n(c),
    "v_lshl_or_b32": lambda a, b, c: (a << _n(b)) | c,
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfe_u32": _bfe_u32,
    "v_bfe_i32": _bfe_i32,
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfm_b32": lambda a, b: ((U32(1) << _n(a)) - U32(1)) << _n(b),
    "v_perm_b32": _permute_bytes,
    "v_alignbit_b32": lambda a, b, c: (((a.astype(U64) << U64(32)) | b.astype(U64)) >> _n(c).astype(U64)).astype(U32),
    "v_alignbyte_b32": lambda a, b, c: (
        ((a.astype(U64) << U64(32)) | b.astype(U64)) >> (U64(8) * (c & U32(3)).astype(U64))
    ).astype(U32),
    "v_bcnt_u32_b32": lambda a, b: np.bitwise_count(a).astype(U32) + b,
    "v_min3_u32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_max3_u32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_med3_u32": lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
    "v_min3_i32": lambda a, b, c: np.minimum(np.minimum(_s(a), _s(b)), _s(c)).view(U32),
    "v_max3_i32": lambda a, b, c: np.maximum(np.maximum(_s(a), _s(b)), _s(c)).view(U32),
    "v_med3_i32": lambda a, b, c: np.maximum(
        np.minimum(_s(a), _s(b)), np.minimum(np.maximum(_s(a), _s(b)), _s(c))
    ).view(U32),
    "v_sad_u32": lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c,
    "v_add_u16": _half_op(lambda a, b: a + b),
    "v_sub_u16": _half_op(lambda a, b: a - b),
    "v_subrev_u16": _half_op(lambda a, b: b - a),
    "v_mul_lo_u16": _half_op(lambda a, b: a * b),
    "v_mad_legacy_u16": _half_op(lambda a, b, c: a * b + c),
    "v_lshlrev_b16": _half_op(lambda a, b: b << (a & U16(15))),
    "v_lshrrev_b16": _half_op(lambda a, b: b >> (a & U16(15))),
    "v_ashrrev_i16": _half_op(lambda a, b: b >> (a & I16(15)), signed=True),
    "v_min_u16": _half_op(np.minimum),
    "v_max_u16": _half_op(np.maximum),
    "v_min_i16": _half_op(np.minimum, signed=True),
    "v_max_i16": _half_op(np.maximum, signed=True),
}


@opcode(*_PLAIN)
def _plain(instruction: Instruction):
    operate, write = _PLAIN[instruction.opcode], vector_writer(instruction)
    # saturates: Triton's scans find the lane before by it
    if instruction.opcode == "v_sub_u32" and "clamp" in instruction.modifiers:
        instruction.result_modified = True
        operate = _subtract_to_zero
    if instruction.opcode == "v_mov_b32":
        read = signed_bits_reader(instruction, 1)
        return lambda m: write(m, read(m))
    sources = [integer_reader(instruction, k) for k in range(1, len(instruction.operands))]
    return result_of(operate, sources, write)


@opcode("v_bitop3_b32", "v_bitop3_b16")
def _table_of_three(instruction: Instruction):
    """gfx950: bit 4 a + 2 b + c of the table for each bit of the operands. The 16-bit form leaves 0 in the high half."""
    write, table = vector_writer(instruction), instruction.integer("bitop3")
    sources = [integer_reader(instruction, k) for k in (1, 2, 3)]
    width = U32(0xFFFF if instruction.opcode.endswith("16") else 0xFFFFFFFF)
    cases = [case for case in range(8) if table >> case & 1]

    def operate(a, b, c):
        result = (a ^ a) & (b ^ b) & (c ^ c)
        for case in cases:
            result = result | (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        return result & width

    return result_of(operate, sources, write)


@opcode("v_cndmask_b32")
def _conditional_move(instruction: Instruction):
    write, otherwise, chosen = (
        vector_writer(instruction),
        signed_bits_reader(instruction, 1),
        signed_bits_reader(instruction, 2),
    )
    mask = mask_reader(instruction.operands[3])
    return lambda m: write(m, np.where(mask(m), chosen(m), otherwise(m)))


# 64-bit -----------------------------------------------------------------------------------------------------------
@opcode("v_lshl_add_u64")
def _shift_add(instruction: Instruction):
    write, first, shift, third = (
        wide_writer(instruction),
        wide_reader(instruction, 1),
        integer_reader(instruction, 2),
        wide_reader(instruction, 3),
    )
    return lambda m: write(m, (first(m) << (shift(m) & U32(7)).astype(U64)) + third(m))


_SHIFTS = {
    "v_lshlrev_b64": lambda a, n: a << n,
    "v_lshrrev_b64": lambda a, n: a >> n,
    "v_ashrrev_i64": lambda a, n: (a.view(I64) >> n.view(I64)).view(U64),
}


@opcode(*_SHIFTS)
def _shift(instruction: Instruction):
    operate, write, amount, value = (
        _SHIFTS[instruction.opcode],
        wide_writer(instruction),
        integer_reader(instruction, 1),
        wide_reader(instruction, 2),
    )
    return lambda m: write(m, operate(value(m), (amount(m) & U32(63)).astype(U64)))


@opcode("v_mov_b64")
def _move_wide(instruction: Instruction):
    write, read = wide_writer(instruction), wide_reader(instruction, 1)
    return lambda m: write(m, read(m))


@opcode("v_mad_u64_u32", "v_mad_i64_i32")
def _multiply_add_wide(instruction: Instruction):
    """Carry-out goes to operand 1."""
    write, carry_out = wide_writer(instruction), instruction.operands[1]
    first, second, third = integer_reader(instruction, 2), integer_reader(instruction, 3), wide_reader(instruction, 4)
    signed = instruction.opcode == "v_mad_i64_i32"

    def run(m):
        a, b, c = first(m), second(m), third(m)
        product = (_s(a).astype(I64) * _s(b).astype(I64)).view(U64) if signed else a.astype(U64) * b.astype(U64)
        total = product + c
        if carry_out.kind == "s" and not signed:
            m.write_mask(carry_out.index, m.spread(total < product))
        write(m, total)

    return run


@opcode("v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
def _with_carry(instruction: Instruction):
    write, carry_out = vector_writer(instruction), instruction.operands[1].index
    first, second = integer_reader(instruction, 2), integer_reader(instruction, 3)
    carry_in = mask_reader(instruction.operands[4]) if len(instruction.operands) > 4 else None
    name = instruction.opcode

    def run(m):
        a, b = first(m).astype(I64), second(m).astype(I64)
        a, b = (b, a) if "rev" in name else (a, b)
        carry = carry_in(m).astype(I64) if carry_in else I64(0)
        total = a + b + carry if name.startswith("v_add") else a - b - carry
        value = (total & 0xFFFFFFFF).astype(U32)
        m.write_mask(carry_out, m.spread((total >> 32) != 0))
        write(m, value)

    return run


# Across lanes -----------------------------------------------------------------------------------------------------
_BELOW_LOW = np.array([(1 << min(lane, 32)) - 1 for lane in range(64)], np.uint64).astype(U32)
_BELOW_HIGH = np.array([(1 << max(lane - 32, 0)) - 1 for lane in range(64)], np.uint64).astype(U32)


@opcode("v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")
def _masked_bit_count(instruction: Instruction):
    write, mask, base = vector_writer(instruction), integer_reader(instruction, 1), integer_reader(instruction, 2)
    below = _BELOW_LOW if "_lo_" in instruction.opcode else _BELOW_HIGH
    return lambda m: write(m, np.bitwise_count(mask(m) & below).astype(U32) + base(m))


@opcode("v_permlane32_swap_b32", "v_permlane16_swap_b32")
def _swap_rows(instruction: Instruction):
    """gfx950: the odd rows of the first register change places with the even rows of the second one."""
    first, second = (operand.position for operand in instruction.operands)
    rows = 32 if "32" in instruction.opcode.partition("_swap")[0] else 16
    odd = np.flatnonzero(np.arange(64) // rows % 2)

    def run(m):
        if not m.full:
            raise UnknownInstruction(f"{instruction.opcode} with lanes that EXEC leaves out")
        one, two = (m.vector[position][m.rows].copy() for position in (first, second))
        one[:, odd], two[:, odd - rows] = two[:, odd - rows], one[:, odd]
        m.write_vector(first, one)
        m.write_vector(second, two)

    return run


@opcode("v_readfirstlane_b32")
def _read_first_lane(instruction: Instruction):
    target, read = instruction.operands[0], integer_reader(instruction, 1)

    def run(m):
        value = m.spread(read(m))
        # lane 0 where EXEC is zero
        m.write_scalar(target.index, value[np.arange(m.selected), m.enabled.argmax(axis=1)])

    return run


@opcode("v_readlane_b32")
def _read_lane(instruction: Instruction):
    target, read, lane_of = (
        instruction.operands[0],
        integer_reader(instruction, 1),
        scalar_reader(instruction.operands[2]),
    )

    def run(m):
        value = m.spread(read(m))
        m.write_scalar(target.index, value[np.arange(m.selected), np.broadcast_to(lane_of(m) & U32(63), m.selected)])

    return run


@opcode("v_writelane_b32")
def _write_lane(instruction: Instruction):
    position = instruction.operands[0].position
    value_of, lane_of = scalar_reader(instruction.operands[1]), scalar_reader(instruction.operands[2])

    def run(m):
        rows = np.arange(m.waves)[m.rows]
        m.vector[position][rows, np.broadcast_to(lane_of(m) & U32(63), m.selected)] = value_of(m)

    return run
