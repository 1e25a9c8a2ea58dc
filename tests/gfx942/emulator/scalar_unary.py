# SPDX-License-Identifier: Apache-2.0
"""Scalar instructions of one source, and the bit counting that vector instructions share."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import UnknownInstruction
from tests.gfx942.emulator.operands import scalar_reader, scalar_wide_reader
from tests.gfx942.emulator.registry import opcode

U32, U64, I32 = np.uint32, np.uint64, np.int32


def _signed(value):
    return value.view(I32)


def first_bit(value: np.ndarray, width: int, from_high: bool) -> np.ndarray:
    """Index of the first set bit from the low or high end; all ones where there is none. Exact for 64 bits too."""
    value = value.astype(U64)
    found = np.full(value.shape, 0xFFFFFFFF, U32)
    for bit in range(width) if from_high else reversed(range(width)):
        found = np.where((value >> U64(bit)) & U64(1) != 0, U32(width - 1 - bit if from_high else bit), found)
    return found


_UNARY = {
    "s_not_b32": (lambda a: ~a, True),
    "s_abs_i32": (lambda a: np.abs(_signed(a)).view(U32), True),
    "s_brev_b32": (lambda a: reverse_bits(a), False),
    "s_ff1_i32_b32": (lambda a: first_bit(a, 32, False), False),
    "s_flbit_i32_b32": (lambda a: first_bit(a, 32, True), False),
    "s_bcnt1_i32_b32": (lambda a: np.bitwise_count(a).astype(U32), True),
    "s_sext_i32_i8": (lambda a: a.astype(np.uint8).view(np.int8).astype(I32).view(U32), False),
    "s_sext_i32_i16": (lambda a: a.astype(np.uint16).view(np.int16).astype(I32).view(U32), False),
}
_UNARY_FROM_WIDE = {
    "s_ff1_i32_b64": (lambda a: first_bit(a, 64, False), False),
    "s_flbit_i32_b64": (lambda a: first_bit(a, 64, True), False),
    "s_bcnt1_i32_b64": (lambda a: np.bitwise_count(a).astype(U32), True),
}


def reverse_bits(value: np.ndarray) -> np.ndarray:
    value = ((value >> U32(1)) & U32(0x55555555)) | ((value & U32(0x55555555)) << U32(1))
    value = ((value >> U32(2)) & U32(0x33333333)) | ((value & U32(0x33333333)) << U32(2))
    value = ((value >> U32(4)) & U32(0x0F0F0F0F)) | ((value & U32(0x0F0F0F0F)) << U32(4))
    return value.byteswap()


@opcode(*_UNARY, *_UNARY_FROM_WIDE)
def _unary(instruction: Instruction):
    target, source = instruction.operands
    wide = instruction.opcode in _UNARY_FROM_WIDE
    operate, sets_condition = (_UNARY_FROM_WIDE if wide else _UNARY)[instruction.opcode]
    read = scalar_wide_reader(source) if wide else scalar_reader(source)

    def run(m):
        value = operate(read(m))
        if sets_condition:
            m.scc[m.rows] = value != 0
        m.write_scalar(target.index, value)

    return run


@opcode("s_not_b64", "s_wqm_b64")
def _not_wide(instruction: Instruction):
    if instruction.opcode == "s_wqm_b64":
        raise UnknownInstruction("whole-quad mode")
    target, source = instruction.operands
    read = scalar_wide_reader(source)

    def run(m):
        value = ~read(m)
        m.scc[m.rows] = value != 0
        m.write_scalar64(target.index, value)

    return run
