# SPDX-License-Identifier: Apache-2.0
"""Scoreboard: registers that an outstanding load will still write, and registers that nothing has written.

An unset register is no mistake until it matters: compilers leave the high half of a 64-bit sum unset where only the low
half is used. Arithmetic hands the mark on to its results; memory instructions, MFMAs and comparisons fault.

Counters of gfx942 as LLVM's SIInsertWaitcnts models them: vmcnt counts vector loads, stores and atomics and falls in
order of issue; lgkmcnt counts LDS instructions, in order, and scalar loads, in any order, so that only lgkmcnt(0) helps
once one is outstanding. A value is there at once in the emulator, so nothing but this check notices a missing wait.
"""

import re
from functools import lru_cache

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import MissingWait, UninitialisedRegister

_NO_DESTINATION = re.compile(
    r"(global|flat|buffer)_store_.*|ds_write.*|s_cmpk?_.*|s_bitcmp.*|s_branch|s_cbranch.*|ds_(add|sub|max|min|or|and)_[ufb]32"
)
_TWO_DESTINATIONS = re.compile(r"v_\w+_co_u32|v_mad_[ui]64_[ui]32|v_div_scale_f\d+|v_permlane\d+_swap_b32")
_READS_DESTINATION = re.compile(
    r"v_fmac_.*|v_mac_.*|s_cmov.*|s_addk.*|s_mulk.*|s_bitset.*|v_dot2c.*|v_fma_mix(lo|hi)_f16|v_permlane\d+_swap_b32"
)
_PARTIAL = re.compile(r".*_d16(_hi)?|v_writelane_b32|v_fma_mix(lo|hi)_f16")


@lru_cache(maxsize=1 << 12)
def _traits(name: str):
    """What an opcode's name says: destinations, whether it reads its destination, partial, counter, writes LDS, hands
    marks on.
    """
    destinations = 0 if _NO_DESTINATION.fullmatch(name) else 2 if _TWO_DESTINATIONS.fullmatch(name) else 1
    return (
        destinations,
        bool(_READS_DESTINATION.fullmatch(name)),
        bool(_PARTIAL.fullmatch(name)),
        _counter(name),
        bool(_WRITES_LDS.match(name)),
        name.startswith(("v_", "s_")) and not name.startswith(_SINKS),
    )


def classify(instruction: Instruction) -> None:
    """Fill what the scoreboard needs."""
    name, operands = instruction.opcode, instruction.operands
    count, reads_destination, partial, instruction.counter, instruction.writes_lds, arithmetic = _traits(name)
    if ("_atomic_" in name and "sc0" not in instruction.modifiers) or (
        name.startswith("v_cmpx") and len(operands) == 2
    ):
        count = 0
    writes = [register for operand in operands[:count] for register in operand.registers()]
    reads = [register for operand in operands[count:] for register in operand.registers()]
    if reads_destination:
        reads += writes
    instruction.partial = partial or instruction.modifiers.get("dst_unused") == "UNUSED_PRESERVE"
    instruction.writes, instruction.reads = tuple(dict.fromkeys(writes)), tuple(dict.fromkeys(reads))
    instruction.touches = frozenset(writes) | frozenset(reads)
    instruction.hands_on = arithmetic and bool(writes) and not instruction.partial
    instruction.sources = (
        tuple(_sources(instruction, part, count) for part in range(len(instruction.writes)))
        if instruction.hands_on
        else ()
    )


_WRITES_LDS = re.compile(r"ds_(write|add|sub|max|min|or|and)")
_SINKS = ("v_mfma", "v_cmp", "v_writelane", "s_load", "s_buffer_load")


def _sources(instruction: Instruction, part: int, destinations: int) -> tuple[int, ...]:
    """Registers that register `part` of the result depends on: the chosen halves of a packed operation, else this and
    lower parts.
    """
    name, operands = instruction.opcode, instruction.operands[destinations:]
    if part >= instruction.operands[0].count:  # a carry mask
        return instruction.reads
    halves = None
    if name in ("v_pk_fma_f32", "v_pk_mul_f32", "v_pk_add_f32"):
        halves = instruction.flags("op_sel_hi" if part else "op_sel", len(operands), part)
    elif name == "v_pk_mov_b32":
        operands, halves = operands[part : part + 1], [instruction.flags("op_sel", 2, 0)[part]]
    found: list[int] = []
    for position, operand in enumerate(operands):
        registers = operand.registers()
        if len(registers) > 1 and not name.startswith(("s_cselect", "s_cmov")):
            registers = registers[halves[position] : halves[position] + 1] if halves else registers[: part + 1]
        found += registers
    if _traits(name)[1]:
        found.append(instruction.operands[0].registers()[part])
    return tuple(found)


def _counter(name: str) -> str | None:
    if name.startswith(("global_", "buffer_load", "buffer_store", "buffer_atomic", "scratch_")):
        return "vector"
    if name.startswith("flat_"):
        return "flat"
    if name.startswith("ds_"):
        return "lds"
    return "scalar" if name.startswith(("s_load", "s_buffer_load", "s_memtime", "s_memrealtime")) else None


def register_name(number: int) -> str:
    return f"{'vas'[number // 512]}{number % 512}"


class Scoreboard:
    def __init__(self, waves: int, unwritten: list[int]):
        self.issued = {"vector": np.zeros(waves, np.int64), "lgkm": np.zeros(waves, np.int64)}
        self.done = {"vector": np.zeros(waves, np.int64), "lgkm": np.zeros(waves, np.int64)}
        self.last_scalar, self.last_lds_write = np.zeros(waves, np.int64), np.zeros(waves, np.int64)
        # (position, counter) -> its number of issue
        self.pending: dict[tuple[int, str], tuple[Instruction, np.ndarray]] = {}
        self.pending_of: dict[int, set[tuple[int, str]]] = {}  # register -> instructions
        self.unwritten = {register: np.ones(waves, bool) for register in unwritten}
        self.watched = set(unwritten)
        # (VGPR, lane) -> waves in which it holds a scalar register that was never written: compilers spill registers
        # of a group together, the unset ones too
        self.unset_lanes: dict[tuple[int, int], np.ndarray] = {}

    def issue(self, instruction: Instruction, rows) -> None:
        """A memory instruction goes out."""
        kind = instruction.counter
        for counter in {"vector": ("vector",), "flat": ("vector", "lgkm"), "lds": ("lgkm",), "scalar": ("lgkm",)}[kind]:
            number = self.issued[counter]
            number[rows] += 1
            if kind == "scalar":
                self.last_scalar[rows] = number[rows]
            if instruction.writes_lds:
                self.last_lds_write[rows] = number[rows]
            if instruction.writes:
                key = (instruction.position, counter)
                if key not in self.pending:
                    self.pending[key] = (instruction, np.zeros(len(number), np.int64))
                    for register in instruction.writes:
                        self.pending_of.setdefault(register, set()).add(key)
                        self.watched.add(register)
                self.pending[key][1][rows] = number[rows]

    def wait(self, vector: int | None, lgkm: int | None, rows) -> None:
        """s_waitcnt with the counts that are given."""
        if vector is not None:
            self.done["vector"][rows] = np.maximum(self.done["vector"][rows], self.issued["vector"][rows] - vector)
        if lgkm is not None:
            done, issued = self.done["lgkm"][rows], self.issued["lgkm"][rows]
            in_order = self.last_scalar[rows] <= done
            self.done["lgkm"][rows] = np.where(in_order | (lgkm == 0), np.maximum(done, issued - lgkm), done)
        for key, (instruction, number) in list(self.pending.items()):
            if not (number > self.done[key[1]]).any():
                del self.pending[key]
                for register in instruction.writes:
                    self.pending_of[register].discard(key)
                    self._forget(register)

    def _forget(self, register: int) -> None:
        if not self.pending_of.get(register) and register not in self.unwritten:
            self.watched.discard(register)

    def check(self, instruction: Instruction, rows) -> None:
        """Called where the instruction touches a watched register."""
        for register in instruction.reads:
            self._ready(register, "read", rows)
        if not instruction.hands_on:
            for register in instruction.reads:
                missing = self.unwritten.get(register)
                if (
                    missing is not None
                    and not (instruction.opcode == "v_writelane_b32" and register >= 1024)
                    and missing[rows].any()
                    and not (instruction.partial and register in instruction.writes)
                ):
                    raise UninitialisedRegister(
                        f"{register_name(register)} was never written", int(np.flatnonzero(missing[rows])[0])
                    )
        marks = [self._unset(sources, rows) for sources in instruction.sources] or [None] * len(instruction.writes)
        if instruction.opcode in ("v_writelane_b32", "v_readlane_b32") and instruction.operands[2].kind == "c":
            marks = [self._moved_lane(instruction, rows, marks[0])]
        for register, mark in zip(instruction.writes, marks, strict=True):
            self._ready(register, "overwritten", rows, instruction)
            missing = self.unwritten.get(register)
            if missing is None and mark is not None:
                missing = self.unwritten[register] = np.zeros_like(self.last_scalar, bool)
                self.watched.add(register)
            if missing is not None:
                missing[rows] = False if mark is None else mark
                if not missing.any():
                    del self.unwritten[register]
                    self._forget(register)

    def _moved_lane(self, instruction: Instruction, rows, mark: np.ndarray | None) -> np.ndarray | None:
        """Keeps the mark of a scalar register that goes into a lane of a VGPR, and gives it back with the lane."""
        lane = int(instruction.operands[2].value) & 63
        if instruction.opcode == "v_readlane_b32":
            kept = self.unset_lanes.get((instruction.operands[1].registers()[0], lane))
            return mark if kept is None or not kept[rows].any() else kept[rows].copy()
        register = instruction.writes[0]
        unset = self._unset(instruction.operands[1].registers(), rows)
        if unset is not None or (register, lane) in self.unset_lanes:
            kept = self.unset_lanes.setdefault((register, lane), np.zeros_like(self.last_scalar, bool))
            kept[rows] = False if unset is None else unset
            self.watched.add(register)
        return mark

    def _unset(self, sources: tuple[int, ...], rows) -> np.ndarray | None:
        """Which of these waves have an unset register among the sources; None where none has."""
        found = None
        for register in sources:
            missing = self.unwritten.get(register)
            if missing is not None and missing[rows].any():
                found = missing[rows] if found is None else found | missing[rows]
        return found

    def _ready(self, register: int, verb: str, rows, by: Instruction | None = None) -> None:
        for key in self.pending_of.get(register, ()):
            load, number = self.pending[key]
            if by is not None and by.counter == load.counter and by.counter != "scalar":
                continue  # results of one kind arrive in order
            late = number[rows] > self.done[key[1]][rows]
            if late.any():
                raise MissingWait(
                    f"{register_name(register)} is {verb} while `{load.text}` may be outstanding",
                    int(np.flatnonzero(late)[0]),
                )

    def at_barrier(self, rows) -> None:
        late = self.last_lds_write[rows] > self.done["lgkm"][rows]
        if late.any():
            raise MissingWait(
                "an LDS write may be outstanding at the barrier: s_waitcnt lgkmcnt(0) is missing",
                int(np.flatnonzero(late)[0]),
            )
