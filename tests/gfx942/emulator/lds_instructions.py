# SPDX-License-Identifier: Apache-2.0
"""ds_ instructions: reads, writes, the two-address forms, add atomics, and lane permutes that only pass through the LDS
crossbar.
"""

import numpy as np

from tests.gfx942.emulator.cross_lane import swizzle_lanes
from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import UnknownInstruction
from tests.gfx942.emulator.operands import raw_reader, vector_writer
from tests.gfx942.emulator.registry import opcode, opcode_pattern

U32, I32, I64 = np.uint32, np.int32, np.int64


def _address(instruction: Instruction, position: int):
    read = raw_reader(instruction.operands[position])
    return lambda m: m.spread(read(m)).astype(I64)


@opcode_pattern(r"ds_read_(?:([biu])(8|16|32|64|96|128))(_d16)?(_hi)?")
def _read(instruction: Instruction, match):
    signed, size, d16, high = match[1] == "i", int(match[2]) // 8, bool(match[3]), bool(match[4])
    address, offset = _address(instruction, 1), instruction.integer("offset")
    register = instruction.operands[0].position

    def run(m):
        parts = m.lds.read(m, address(m) + offset, size, m.enabled)
        for part, value in enumerate(parts):
            if signed and size < 4:
                up = I32(32 - 8 * size)
                value = ((value.view(I32) << up) >> up).view(U32)
            if d16:
                before = m.vector[register][m.rows]
                value = value & U32(0xFFFF)
                value = (value << U32(16)) | (before & U32(0xFFFF)) if high else value | (before & U32(0xFFFF0000))
            m.write_vector(register + part, value)

    return run


_LANE = np.arange(64)


@opcode("ds_read_b64_tr_b16")
def _read_transposed(instruction: Instruction):
    """gfx950: 16 lanes read four halves each, a 16 x 4 matrix of which lane j gets half j % 4 of the lanes 4 i + j // 4
    (measured on a gfx950: FlyDSL, probe_tr16_lanemap_gfx950.py).
    """
    address, offset = _address(instruction, 1), instruction.integer("offset")
    register = instruction.operands[0].position
    sources = [_LANE // 16 * 16 + 4 * i + _LANE % 16 // 4 for i in range(4)]

    def run(m):
        if not m.full:
            raise UnknownInstruction("ds_read_b64_tr_b16 with lanes that EXEC leaves out")
        low, high = m.lds.read(m, address(m) + offset, 8, m.enabled)
        halves = np.stack([low & U32(0xFFFF), low >> U32(16), high & U32(0xFFFF), high >> U32(16)])
        taken = [halves[_LANE % 4, :, source].T for source in sources]
        for part in range(2):
            m.write_vector(register + part, taken[2 * part] | taken[2 * part + 1] << U32(16))

    return run


@opcode_pattern(r"ds_write_b(8|16|32|64|96|128)(_d16_hi)?")
def _write(instruction: Instruction, match):
    size, high = int(match[1]) // 8, bool(match[2])
    address, offset = _address(instruction, 0), instruction.integer("offset")
    register, count = instruction.operands[1].position, max(size // 4, 1)

    def run(m):
        values = m.bits[register : register + count, m.rows]
        m.lds.write(m, address(m) + offset, size, m.enabled, values >> U32(16) if high else values)

    return run


@opcode_pattern(r"ds_(read|write)2(st64)?_b(32|64)")
def _two(instruction: Instruction, match):
    """Offsets count elements, or 64 elements in the st64 form."""
    size = int(match[3]) // 8
    unit = size * (64 if match[2] else 1)
    offsets = [instruction.integer(f"offset{k}") * unit for k in (0, 1)]
    words = size // 4
    if match[1] == "read":
        address, register = _address(instruction, 1), instruction.operands[0].position

        def run(m):
            base = address(m)
            parts = [part for offset in offsets for part in m.lds.read(m, base + offset, size, m.enabled)]
            for part, value in enumerate(parts):
                m.write_vector(register + part, value)

        return run
    address, sources = _address(instruction, 0), [operand.position for operand in instruction.operands[1:3]]

    def run_write(m):
        base = address(m)
        for offset, register in zip(offsets, sources, strict=True):
            m.lds.write(m, base + offset, size, m.enabled, m.bits[register : register + words, m.rows])

    return run_write


@opcode_pattern(r"ds_(add|sub|max|min|or|and)(_rtn)?_(u32|f32|b32)")
def _atomic(instruction: Instruction, match):
    """Lane after lane. Atomics of several waves are ordered by hardware, hence no race; the bytes count as initialised
    by a write.
    """
    returns, name, kind = bool(match[2]), match[1], np.float32 if match[3] == "f32" else U32
    address, offset = _address(instruction, 1 if returns else 0), instruction.integer("offset")
    source = raw_reader(instruction.operands[2 if returns else 1])
    operate = {
        "add": np.add,
        "sub": np.subtract,
        "max": np.maximum,
        "min": np.minimum,
        "or": np.bitwise_or,
        "and": np.bitwise_and,
    }[name]
    target = instruction.operands[0].position if returns else None

    def run(m):
        before = m.lds.atomic(m, address(m) + offset, m.spread(source(m)), operate, kind)
        m.counters.atomics += int(m.enabled.sum())
        if target is not None:
            m.write_vector(target, before)

    return run


def _named_lane(instruction: Instruction):
    """The lane that each lane's address names, [waves, 64]."""
    index, offset = raw_reader(instruction.operands[1]), U32(instruction.integer("offset"))
    return lambda m: m.spread((index(m) + offset) >> U32(2) & U32(63)).astype(I64)


@opcode("ds_bpermute_b32")
def _backward_permute(instruction: Instruction):
    """Each lane names the lane it reads from; inactive source lanes give 0."""
    write, other_lane, value = vector_writer(instruction), _named_lane(instruction), raw_reader(instruction.operands[2])

    def run(m):
        lane = other_lane(m)
        held = value(m) if m.full else np.where(m.enabled, value(m), U32(0))
        write(m, np.take_along_axis(m.spread(held), lane, 1))

    return run


@opcode("ds_permute_b32")
def _forward_permute(instruction: Instruction):
    """Each lane names the lane it sends to; the highest sending lane wins, a lane that gets nothing reads 0."""
    write, other_lane, value = vector_writer(instruction), _named_lane(instruction), raw_reader(instruction.operands[2])

    def run(m):
        lane = other_lane(m)
        sent = m.spread(value(m))
        result = np.zeros(m.enabled.shape, U32)
        rows, lanes = np.nonzero(m.enabled)
        result[rows, lane[rows, lanes]] = sent[rows, lanes]
        write(m, result)

    return run


@opcode("ds_swizzle_b32")
def _swizzle(instruction: Instruction):
    write, value = vector_writer(instruction), raw_reader(instruction.operands[1])
    source = swizzle_lanes(instruction.modifiers.get("offset", "0"))

    def run(m):
        held = np.where(m.enabled, value(m), U32(0))
        write(m, m.spread(held)[:, source])

    return run
