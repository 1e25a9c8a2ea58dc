# SPDX-License-Identifier: Apache-2.0
"""Runs the waves of some blocks to their end under one of three schedules.

lockstep: all waves that stand at the lowest program counter step together.
serial:   of every block one wave runs until it waits at a barrier or ends, the lowest first.
reverse:  as serial, the highest first.

Waves at the same place are stepped by one numpy operation; a group keeps going until a branch, a barrier, an end, or
until it reaches a place where other waves wait to be joined.
"""

import re

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import BarrierMismatch, EmulatorFault, NotTerminating, UnknownInstruction
from tests.gfx942.emulator.machine import Machine
from tests.gfx942.emulator.waits import Scoreboard
from tests.gfx942.emulator.wide_stores import WideStores

SCHEDULES = ("lockstep", "serial", "reverse")
RUNNING, AT_BARRIER, ENDED = 0, 1, 2
_SEGMENT_END = re.compile(r"s_branch|s_cbranch.*|s_barrier|s_endpgm|s_setpc_b64|s_swappc_b64")


def parse_wait(raw: str) -> tuple[int | None, int | None]:
    """(vmcnt, lgkmcnt) of s_waitcnt's operands; None where the counter is not named."""
    counts = {name: int(value) for name, value in re.findall(r"(\w+)\((\d+)\)", raw)}
    if not counts:
        raise UnknownInstruction(f"s_waitcnt {raw}")
    return counts.get("vmcnt"), counts.get("lgkmcnt")


def mark_segments(instructions: list[Instruction]) -> None:
    """Where a group must come back to the scheduler."""
    for instruction in instructions:
        instruction.ends_segment = bool(_SEGMENT_END.fullmatch(instruction.opcode))
        if instruction.opcode == "s_waitcnt":
            instruction.wait = parse_wait(instruction.modifiers["raw"])


class Scheduler:
    def __init__(
        self,
        machine: Machine,
        instructions: list[Instruction],
        scoreboard: Scoreboard,
        schedule: str,
        limit: int,
        shifted_waves: bool = False,
    ):
        self.m, self.code, self.scoreboard, self.schedule, self.limit, self.shifted_waves = (
            machine,
            instructions,
            scoreboard,
            schedule,
            limit,
            shifted_waves,
        )
        self.position_of = {instruction.pc: instruction.position for instruction in instructions}
        self.wide_stores = WideStores(machine.waves)
        self.at = np.zeros(machine.waves, np.int64)
        self.state = np.full(machine.waves, RUNNING)
        self.executed = np.zeros(len(instructions), np.int64)

    def run(self) -> None:
        with np.errstate(all="ignore"):
            while True:
                waves = self._choose()
                if waves is None:
                    return
                self._segment(waves)

    def _choose(self) -> np.ndarray | None:
        """The waves that step next; barriers are released when nothing else can run."""
        while True:
            running = np.flatnonzero(self.state == RUNNING)
            if running.size:
                break
            if not (self.state == AT_BARRIER).any():
                return None
            self._release()
        if self.schedule != "lockstep":  # one wave of every block
            order = running if self.schedule == "serial" else running[::-1]
            _, first = np.unique(self.m.block_row[order], return_index=True)
            running = np.sort(order[first])
        lowest = self.at[running].min()
        return running[self.at[running] == lowest]

    def _release(self) -> None:
        rows = np.arange(self.m.waves).reshape(-1, self.m.waves_per_block)
        for block in rows:
            states, places = self.state[block], self.at[block]
            if (states == ENDED).all():
                continue
            waiting = states == AT_BARRIER
            if not waiting.all() or ((places != places[0]).any() and not self.shifted_waves):
                fault = BarrierMismatch(
                    "waves "
                    + ", ".join(
                        f"{wave} {'ended' if state == ENDED else f'at {self.code[place - 1].pc:#x}'}"
                        for wave, (state, place) in enumerate(zip(states, places, strict=True))
                    )
                )
                fault.kernel, fault.block = self.m.kernel.name, int(self.m.block[block[0]])
                raise fault
            self.m.counters.barriers += 1
        at_barrier = self.state == AT_BARRIER
        self.m.lds.end_epoch(np.unique(self.m.block_row[at_barrier]))
        self.state[at_barrier] = RUNNING

    def _segment(self, waves: np.ndarray) -> None:
        m, code, board, stores = self.m, self.code, self.scoreboard, self.wide_stores
        m.select(waves)
        position, count = int(self.at[waves[0]]), len(waves)
        # stop where concurrent waves wait to be joined
        others = self.at[(self.state == RUNNING) & (self.at > position)] if self.schedule == "lockstep" else self.at[:0]
        stop = int(others.min()) if others.size else len(code)
        watched, rows = board.watched, m.rows
        try:
            while True:
                instruction = code[position]
                m.instruction = instruction
                self.executed[position] += count
                m.counters.instructions += count
                if not watched.isdisjoint(instruction.touches):
                    board.check(instruction, rows)
                if stores.recent:
                    stores.step(instruction, rows)
                instruction.run(m)
                if instruction.counter is not None:
                    board.issue(instruction, rows)
                    if instruction.wide_store:
                        stores.issue(instruction, rows)
                position += 1
                if instruction.ends_segment:
                    self._end_of_segment(instruction, waves, position)
                    break
                if instruction.opcode == "s_waitcnt":
                    board.wait(*instruction.wait, rows)
                if position >= stop:
                    self.at[waves] = position
                    break
        except EmulatorFault as fault:
            self._locate(fault, instruction, waves)
            raise
        if m.counters.instructions > self.limit:
            raise NotTerminating(f"more than {self.limit} wave instructions in kernel {m.kernel.name}")

    def _end_of_segment(self, instruction: Instruction, waves: np.ndarray, position: int) -> None:
        self.at[waves] = position
        if instruction.opcode == "s_endpgm":
            self.state[waves] = ENDED
        elif instruction.opcode == "s_barrier":
            self.scoreboard.at_barrier(self.m.rows)
            self.state[waves] = AT_BARRIER
        elif instruction.target is not None:
            self.at[waves] = np.where(self.m.taken, self.position_of[instruction.target], position)
        else:
            raise UnknownInstruction("calls and computed jumps")

    def _locate(self, fault: EmulatorFault, instruction: Instruction, waves: np.ndarray) -> None:
        m = self.m
        fault.kernel, fault.pc, fault.instruction = m.kernel.name, instruction.pc, instruction.text
        if fault.row is not None:
            wave = int(waves[fault.row])
            fault.block, fault.wave = int(m.block[wave]), int(m.wave[wave])
