# SPDX-License-Identifier: Apache-2.0
"""Scalar loads, and the scalar instructions that read the program counter or a clock."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.operands import scalar_reader
from tests.gfx942.emulator.registry import opcode, opcode_pattern

U32, U64 = np.uint32, np.uint64


@opcode_pattern(r"s_(buffer_)?load_dword(x(2|4|8|16))?")
def _load(instruction: Instruction, match):
    target, base, offset = instruction.operands[:3]
    count, from_buffer = int(match[3] or 1), bool(match[1])
    read_offset, immediate = scalar_reader(offset), instruction.integer("offset")

    def run(m):
        address = m.read_scalar64(base.index) & U64(0xFFFFFFFFFFFF)
        relative = read_offset(m).astype(U64) + U64(immediate)
        if from_buffer:
            limit = m.scalar[base.index + 2][m.rows].astype(U64)
            inside = np.broadcast_to(relative + U64(4 * count) <= limit, address.shape)
            address = np.where(inside, address + relative, m.read_scalar64(base.index) & U64(0xFFFFFFFFFFFF))
        else:
            inside = np.ones(address.shape, bool)
            address = (address + relative) & ~U64(3)
        words = m.memory.load_scalar(address, count)
        m.counters.scalar_load_bytes += 4 * count * m.selected
        for part in range(count):
            m.write_scalar(target.index + part, np.where(inside, words[:, part], U32(0)))

    return run


@opcode("s_getpc_b64")
def _program_counter(instruction: Instruction):
    target = instruction.operands[0]
    after = instruction.pc + instruction.size
    return lambda m: m.write_scalar64(target.index, np.full(m.selected, m.image_base + after, U64))


@opcode("s_memtime", "s_memrealtime")
def _clock(instruction: Instruction):
    target = instruction.operands[0]
    return lambda m: m.write_scalar64(target.index, np.full(m.selected, m.counters.instructions, U64))
