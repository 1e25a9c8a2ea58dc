# SPDX-License-Identifier: Apache-2.0
"""Readers and writers for operands, bound once an instruction. SDWA selections and DPP lane movement live in this file,
so that the semantics of an opcode are written once for all encodings.
"""

import numpy as np

from tests.gfx942.emulator.cross_lane import dpp_lanes
from tests.gfx942.emulator.decode import Instruction, Operand, constant_bits
from tests.gfx942.emulator.faults import UnknownInstruction

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SDWA = {
    "DWORD": (0, 32),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
}


def raw_reader(operand: Operand, part: int = 0):
    """-> function(machine) giving uint32 that broadcasts to [waves, 64]; part n is the n-th register of a range."""
    if operand.kind in "va":
        register = operand.position + part
        return lambda m: m.vector[register][m.rows]
    if operand.kind == "s":
        index = operand.index + part
        return lambda m: m.scalar[index][m.rows][:, None]
    if operand.kind in "cf":
        if operand.kind == "f":
            bits = constant_bits(operand) if part == 0 else 0
        else:
            bits = (operand.value >> (32 * part)) & 0xFFFFFFFF
        value = np.full((1, 1), bits, np.uint32)
        return lambda m: value
    if operand.kind == "scc":
        return lambda m: m.scc[m.rows].astype(np.uint32)[:, None]
    raise UnknownInstruction(f"vector operand `{operand.text}`")


def bits_reader(instruction: Instruction, position: int, part: int = 0):
    """Source operand as the instruction's encoding presents it: after SDWA selection or DPP movement, before neg and
    abs.
    """
    operand = instruction.operands[position]
    read = raw_reader(operand, part)
    selection = (
        instruction.modifiers.get(f"src{position - _first_source(instruction)}_sel", "DWORD")
        if instruction.name.endswith("_sdwa")
        else "DWORD"
    )
    if selection != "DWORD":
        shift, width = (np.uint32(n) for n in _SDWA[selection])
        mask = np.uint32((1 << int(width)) - 1)
        if operand.sign_extend:
            up = np.int32(32 - int(width))
            return lambda m: ((((read(m) >> shift) & mask).view(np.int32) << up) >> up).view(np.uint32)
        return lambda m: (read(m) >> shift) & mask
    if instruction.name.endswith("_dpp") and position == _first_source(instruction):
        source, valid = dpp_lanes(instruction)

        def moved(m):
            value = m.spread(read(m))[:, source]
            return np.where(valid & m.enabled[:, source], value, np.uint32(0))

        return moved
    return read


def _first_source(instruction: Instruction) -> int:
    """VOPC writes a mask, carries write two results; everything else has one destination."""
    return 2 if "_co_" in instruction.opcode or instruction.opcode.startswith("v_div_scale") else 1


def integer_reader(instruction: Instruction, position: int, part: int = 0):
    operand = instruction.operands[position]
    if operand.negate or operand.absolute:
        raise UnknownInstruction(f"neg or abs on an integer operand: {operand.text}")
    return bits_reader(instruction, position, part)


def signed_reader(instruction: Instruction, position: int):
    read = integer_reader(instruction, position)
    return lambda m: read(m).view(np.int32)


def wide_reader(instruction: Instruction, position: int):
    """64-bit integer source."""
    operand = instruction.operands[position]
    if operand.kind in "cf":
        value = np.full((1, 1), constant_bits(operand, 64), np.uint64)
        return lambda m: value
    low, high = bits_reader(instruction, position, 0), bits_reader(instruction, position, 1)
    return lambda m: low(m).astype(np.uint64) | (high(m).astype(np.uint64) << np.uint64(32))


def _with_sign(read, operand: Operand):
    if operand.absolute and operand.negate:
        return lambda m: (read(m) & _MAGNITUDE) | _SIGN
    if operand.absolute:
        return lambda m: read(m) & _MAGNITUDE
    if operand.negate:
        return lambda m: read(m) ^ _SIGN
    return read


def signed_bits_reader(instruction: Instruction, position: int):
    """uint32 with float neg and abs applied: for v_cndmask and the like."""
    return _with_sign(bits_reader(instruction, position), instruction.operands[position])


def float_reader(instruction: Instruction, position: int):
    """float32 source with neg and abs."""
    operand = instruction.operands[position]
    if (
        operand.kind in "va"
        and not (operand.negate or operand.absolute)
        and not instruction.name.endswith(("_sdwa", "_dpp"))
    ):
        register = operand.position
        return lambda m: m.vector_float[register][m.rows]
    read = signed_bits_reader(instruction, position)
    return lambda m: read(m).view(np.float32)


def double_reader(instruction: Instruction, position: int):
    """float64 source with neg and abs."""
    operand = instruction.operands[position]
    if operand.kind in "cf":  # a 32-bit literal of a 64-bit float operation is its high half
        bits = (
            constant_bits(operand, 64)
            if operand.kind == "f" or abs(operand.value) <= 64
            else (operand.value & 0xFFFFFFFF) << 32
        )
        value = np.full((1, 1), bits, np.uint64).view(np.float64)
        value = np.abs(value) if operand.absolute else value
        value = -value if operand.negate else value
        return lambda m: value
    read = wide_reader(instruction, position)
    negate, absolute = operand.negate, operand.absolute

    def typed(m):
        value = read(m).view(np.float64)
        value = np.abs(value) if absolute else value
        return np.negative(value) if negate else value

    return typed


def scalar_reader(operand: Operand):
    """uint32 [waves] or [1]."""
    if operand.kind == "s":
        index = operand.index
        return lambda m: m.scalar[index][m.rows]
    if operand.kind in "cf":
        value = np.full(1, constant_bits(operand), np.uint32)
        return lambda m: value
    if operand.kind == "scc":
        return lambda m: m.scc[m.rows].astype(np.uint32)
    if operand.kind in ("vccz", "execz"):
        index = 106 if operand.kind == "vccz" else 126
        return lambda m: (m.read_scalar64(index) == 0).astype(np.uint32)
    raise UnknownInstruction(f"scalar operand `{operand.text}`")


def scalar_wide_reader(operand: Operand):
    """uint64 [waves] or [1]."""
    if operand.kind == "s":
        index = operand.index
        return lambda m: m.read_scalar64(index)
    value = np.full(1, constant_bits(operand, 64), np.uint64)
    return lambda m: value


def mask_reader(operand: Operand):
    """bool [waves, 64] of an SGPR pair."""
    if operand.kind == "s":
        index = operand.index
        return lambda m: m.read_mask(index)
    lanes = np.array([[constant_bits(operand, 64) >> lane & 1 for lane in range(64)]], bool)
    return lambda m: lanes


def vector_writer(instruction: Instruction, part: int = 0, position: int = 0):
    """-> write(machine, uint32 value): to the lanes of EXEC; SDWA destination selection and DPP write masks applied."""
    operand = instruction.operands[position]
    if operand.kind not in "va":
        raise UnknownInstruction(f"vector destination `{operand.text}`")
    register = operand.position + part
    if instruction.name.endswith("_sdwa") and instruction.modifiers.get("dst_sel", "DWORD") != "DWORD":
        shift, width = _SDWA[instruction.modifiers["dst_sel"]]
        mask, unused = np.uint32((1 << width) - 1), instruction.modifiers.get("dst_unused")
        keep = np.uint32(~(int(mask) << shift) & 0xFFFFFFFF)
        if unused not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
            raise UnknownInstruction(f"SDWA dst_unused {unused}")

        def write_part(m, value):
            value = (value & mask) << np.uint32(shift)
            m.write_vector(
                register, value | (m.vector[register][m.rows] & keep) if unused == "UNUSED_PRESERVE" else value
            )

        return write_part
    if instruction.name.endswith("_dpp"):
        source, valid = dpp_lanes(instruction)
        row_mask, bank_mask = instruction.integer("row_mask", 15), instruction.integer("bank_mask", 15)
        lane = np.arange(64)
        chosen = ((row_mask >> (lane // 16)) & (bank_mask >> (lane % 16 // 4)) & 1).astype(bool)
        zero_fill = "bound_ctrl" in instruction.modifiers

        def write_moved(m, value):
            written = m.enabled & chosen
            m.write_vector(register, value, written if zero_fill else written & valid & m.enabled[:, source])

        return write_moved
    return lambda m, value: m.write_vector(register, value)


def wide_writer(instruction: Instruction, position: int = 0):
    low, high = vector_writer(instruction, 0, position), vector_writer(instruction, 1, position)

    def write(m, value):
        low(m, value.astype(np.uint32))
        high(m, (value >> np.uint64(32)).astype(np.uint32))

    return write


def float_writer(instruction: Instruction):
    """float32 result with clamp and output modifier."""
    write = vector_writer(instruction)
    instruction.result_modified = True
    scale = {"mul:2": 2.0, "mul:4": 4.0, "div:2": 0.5}
    factor = next(
        (
            np.float32(scale[f"{key}:{value}"])
            for key, value in instruction.modifiers.items()
            if f"{key}:{value}" in scale
        ),
        None,
    )
    clamp = "clamp" in instruction.modifiers
    if factor is None and not clamp:
        return lambda m, value: write(m, value.view(np.uint32))

    def modified(m, value):
        value = value * factor if factor is not None else value
        if clamp:  # DX10_CLAMP: a NaN becomes 0
            value = np.where(np.isnan(value), np.float32(0), np.clip(value, np.float32(0), np.float32(1)))
        write(m, value.view(np.uint32))

    return modified


def result_of(operate, sources: list, write):
    """-> run(machine) of destination = operate(*sources), one to three; written out, as a kernel's time in the emulator
    goes into it.
    """
    if len(sources) == 1:
        (first,) = sources
        return lambda m: write(m, operate(first(m)))
    if len(sources) == 2:
        first, second = sources
        return lambda m: write(m, operate(first(m), second(m)))
    first, second, third = sources
    return lambda m: write(m, operate(first(m), second(m), third(m)))
