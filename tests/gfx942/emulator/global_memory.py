# SPDX-License-Identifier: Apache-2.0
"""global_, flat_ and buffer_ loads, stores and the integer and fp32 add atomics."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import UnknownInstruction
from tests.gfx942.emulator.operands import raw_reader, scalar_reader
from tests.gfx942.emulator.registry import opcode_pattern

U16, U32, U64, I32, I64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
SIZES = {
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "short_d16": 2,
    "short_d16_hi": 2,
    "ubyte": 1,
    "sbyte": 1,
    "byte": 1,
    "ubyte_d16": 1,
    "ubyte_d16_hi": 1,
    "byte_d16_hi": 1,
}
_KINDS = "|".join(sorted(SIZES, key=len, reverse=True))


def _signed_offset(instruction: Instruction) -> int:
    return instruction.integer("offset") & 0xFFFFFFFFFFFFFFFF


def global_address(instruction: Instruction, vector: int, base: int | None):
    """-> (addresses [waves, 64] uint64, active lanes) of global_ and flat_ instructions."""
    offset, register = U64(_signed_offset(instruction)), instruction.operands[vector]
    low = raw_reader(register)
    scalar = instruction.operands[base] if base is not None else None
    if scalar is None or scalar.kind == "off":
        high = raw_reader(register, 1)

        def address(m):
            return (low(m).astype(U64) | (high(m).astype(U64) << U64(32))) + offset, m.enabled
    else:

        def address(m):
            return m.read_scalar64(scalar.index)[:, None] + low(m).astype(U64) + offset, m.enabled

    return address


def buffer_address(instruction: Instruction, vector: int, resource: int, soffset: int, size: int):
    """Raw buffers (stride 0): lanes beyond num_records read 0 and store nothing."""
    if "idxen" in instruction.modifiers or "lds" in instruction.modifiers:
        raise UnknownInstruction("buffer access by index or to LDS")
    with_register = "offen" in instruction.modifiers
    register = raw_reader(instruction.operands[vector]) if with_register else None
    scalar_offset, offset = scalar_reader(instruction.operands[soffset]), U64(instruction.integer("offset"))
    index = instruction.operands[resource].index

    def address(m):
        word1 = m.scalar[index + 1][m.rows]
        if ((word1 >> U32(16)) & U32(0x3FFF)).any():
            raise UnknownInstruction("buffer resource with a stride")
        base = m.scalar[index][m.rows].astype(U64) | ((word1 & U32(0xFFFF)).astype(U64) << U64(32))
        inside = (register(m).astype(U64) if with_register else np.zeros((1, 1), U64)) + offset
        records = m.scalar[index + 2][m.rows].astype(U64)[:, None]
        active = m.enabled & (inside + U64(size) <= records)
        return base[:, None] + inside + scalar_offset(m).astype(U64)[:, None], active

    return address


def _lane_of(active: np.ndarray):
    """Entry k of the compacted lanes -> (row, lane), for faults."""

    def where(k):
        row, lane = (int(index[k]) for index in np.nonzero(active))
        return row, lane

    return where


def _compact(m, addresses, active):
    """Addresses and block ids of the active lanes, in order."""
    addresses = m.spread(addresses)
    if active.all():
        return addresses.ravel(), None
    return addresses[active], active


def _blocks(m, active) -> np.ndarray:
    blocks = m.spread(m.block[m.rows][:, None])
    return blocks.ravel() if active is None else blocks[active]


def _load(instruction: Instruction, kind: str, address):
    size, target = SIZES[kind], instruction.operands[0]
    register, count = target.position, max(SIZES[kind] // 4, 1)
    zero_outside = instruction.name.startswith("buffer")

    def run(m):
        addresses, lanes = address(m)
        compact, some = _compact(m, addresses, lanes)
        where = _lane_of(lanes)
        offsets = m.memory.offsets(compact, size, where)
        if not m.allow_cross_block:
            m.memory.check_load(offsets, size, _blocks(m, some), where)
        m.counters.load(m, offsets, size, addresses, lanes, some)
        words = m.memory.gather(offsets, size)
        for part in range(count):
            if some is None:
                value = words[part].reshape(m.enabled.shape)
            else:
                value = np.zeros(m.enabled.shape, U32)
                value[lanes] = words[part]
            value = _extend(kind, value, m.vector[register + part][m.rows])
            m.write_vector(register + part, value, m.enabled if zero_outside else (None if some is None else lanes))

    return run


def _extend(kind: str, value, before):
    if kind in ("sshort", "sbyte"):
        up = I32(16 if kind == "sshort" else 24)
        return ((value.view(I32) << up) >> up).view(U32)
    if kind.endswith("d16_hi"):
        return (value << U32(16)) | (before & U32(0xFFFF))
    if kind.endswith("d16"):
        return value | (before & U32(0xFFFF0000))
    return value


def _store(instruction: Instruction, kind: str, address, data: int):
    size, source = SIZES[kind], instruction.operands[data]
    register, count, high = source.position, max(SIZES[kind] // 4, 1), kind.endswith("d16_hi")

    def run(m):
        addresses, lanes = address(m)
        compact, some = _compact(m, addresses, lanes)
        where = _lane_of(lanes)
        offsets = m.memory.offsets(compact, size, where)
        values = m.bits[register : register + count, m.rows]
        values = values.reshape(count, -1) if some is None else values[:, lanes]
        values = values >> U32(16) if high else values
        m.counters.store(m, offsets, size, addresses, lanes)
        if m.allow_cross_block:
            m.memory.scatter(offsets, size, values)
        else:
            m.memory.store(offsets, size, values, _blocks(m, some), where)

    return run


@opcode_pattern(rf"(global|flat)_(load|store)_({_KINDS})")
def _global(instruction: Instruction, match):
    space, direction, kind = match.groups()
    if "lds" in instruction.modifiers:
        raise UnknownInstruction("global load to LDS")
    base = 2 if space == "global" else None
    if direction == "load":
        return _load(instruction, kind, global_address(instruction, 1, base))
    return _store(instruction, kind, global_address(instruction, 0, base), data=1)


@opcode_pattern(rf"buffer_(load|store)_({_KINDS})")
def _buffer(instruction: Instruction, match):
    direction, kind = match.groups()
    address = buffer_address(instruction, 1, 2, 3, SIZES[kind])
    return _load(instruction, kind, address) if direction == "load" else _store(instruction, kind, address, data=0)


_ATOMICS = {
    "add": (U32, lambda old, new: old + new),
    "sub": (U32, lambda old, new: old - new),
    "umax": (U32, np.maximum),
    "umin": (U32, np.minimum),
    "or": (U32, lambda old, new: old | new),
    "and": (U32, lambda old, new: old & new),
    "swap": (U32, lambda old, new: new),
    "inc": (U32, lambda old, new: np.where(old >= new, U32(0), old + U32(1))),
    "add_f32": (np.float32, lambda old, new: old + new),
}


@opcode_pattern(r"(global|flat|buffer)_atomic_(add|sub|umax|umin|or|and|swap|inc|add_f32)")
def _atomic(instruction: Instruction, match):
    """Lane after lane in order of wave and lane: one possible order of many. sc0 returns the value before."""
    space, name = match.groups()
    kind, operate = _ATOMICS[name]
    returns = "sc0" in instruction.modifiers
    if space == "buffer":
        address, data = buffer_address(instruction, 1, 2, 3, 4), 0
    else:
        first = 1 if returns else 0
        address, data = global_address(instruction, first, first + 2 if space == "global" else None), first + 1
    source = raw_reader(instruction.operands[data])
    target = instruction.operands[0].position if returns else None

    def run(m):
        addresses, lanes = address(m)
        compact, _ = _compact(m, addresses, lanes)
        index = m.memory.offsets(compact, 4, _lane_of(lanes)) >> 2
        values = m.spread(source(m))[lanes]
        words, before = m.memory.words, np.empty(len(index), U32)
        for k, (position, value) in enumerate(zip(index, values, strict=True)):
            before[k] = words[position]
            old, new = np.array([words[position]], U32).view(kind), np.array([value], U32).view(kind)
            words[position] = np.asarray(operate(old, new), kind).view(U32)[0]
        m.counters.atomics += len(index)
        if target is not None:
            result = np.zeros(m.enabled.shape, U32)
            result[lanes] = before
            m.write_vector(target, result, lanes)

    return run
