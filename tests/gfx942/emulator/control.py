# SPDX-License-Identifier: Apache-2.0
"""Branches and the instructions that have no effect on values. Barriers and ends are handled by the scheduler."""

import re

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import UnknownInstruction
from tests.gfx942.emulator.registry import opcode

_CONDITIONS = {
    "s_cbranch_scc0": lambda m: ~m.scc[m.rows],
    "s_cbranch_scc1": lambda m: m.scc[m.rows],
    "s_cbranch_vccz": lambda m: m.read_scalar64(106) == 0,
    "s_cbranch_vccnz": lambda m: m.read_scalar64(106) != 0,
    "s_cbranch_execz": lambda m: m.read_scalar64(126) == 0,
    "s_cbranch_execnz": lambda m: m.read_scalar64(126) != 0,
}


@opcode("s_branch")
def _branch(instruction: Instruction):
    def run(m):
        m.taken = np.ones(m.selected, bool)

    return run


@opcode(*_CONDITIONS)
def _conditional(instruction: Instruction):
    condition = _CONDITIONS[instruction.opcode]

    def run(m):
        m.taken = np.broadcast_to(condition(m), m.selected)

    return run


@opcode(
    "s_nop",
    "s_setprio",
    "s_sleep",
    "s_inst_prefetch",
    "buffer_wbl2",
    "buffer_inv",
    "s_icache_inv",
    "s_dcache_inv",
    "s_dcache_wb",
    "s_barrier",
    "s_endpgm",
    "s_waitcnt",
)
def _nothing(instruction: Instruction):
    return lambda m: None


@opcode("s_setreg_imm32_b32", "s_setreg_b32")
def _set_register(instruction: Instruction):
    """Only what keeps the modelled mode: fp32 and fp64 denormals kept, round to nearest even."""
    raw = instruction.modifiers["raw"]
    match = re.match(r"hwreg\(HW_REG_MODE, (\d+), (\d+)\), (\w+)", raw)
    if match:
        shift, width, value = (
            int(match[1]),
            int(match[2]),
            int(match[3], 0) if match[3].isdigit() or match[3].startswith("0x") else None,
        )
        wanted = 0xF0 >> shift & ((1 << width) - 1)
        if value == wanted and shift + width <= 8:
            return lambda m: None
    raise UnknownInstruction(f"s_setreg {raw}: only denormals on and round to nearest even are modelled")
