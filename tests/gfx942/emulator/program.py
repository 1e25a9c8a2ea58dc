# SPDX-License-Identifier: Apache-2.0
"""A kernel ready to run: decoded, its registers placed, every instruction bound to its semantics."""

from functools import lru_cache

from hip_ops.runtime import hazards
from tests.gfx942.emulator import (  # noqa: F401  (these register opcodes)
    control,
    global_memory,
    lds_instructions,
    mfma,
    packed,
    scalar,
    scalar_memory,
    scalar_unary,
    vector_compare,
    vector_convert,
    vector_division,
    vector_float,
    vector_integer,
)
from tests.gfx942.emulator.code_object import CodeObject, KernelInfo
from tests.gfx942.emulator.decode import Instruction, bind_registers, disassemble
from tests.gfx942.emulator.faults import EmulatorFault, ScratchAccess, UnknownInstruction
from tests.gfx942.emulator.registry import build
from tests.gfx942.emulator.scheduler import mark_segments
from tests.gfx942.emulator.waits import classify


@lru_cache(maxsize=256)
def program_of(path: str, code: CodeObject, kernel: str) -> list[Instruction]:
    """Cached for a code object as it was when opened."""
    info = code.kernels[kernel]
    instructions = disassemble(path, kernel)
    # with preloaded arguments the entry is 256 bytes on: the first part loads them for firmware that does not know how
    start = info.entry + (256 if info.preload_length else 0)
    instructions = [instruction for instruction in instructions if instruction.pc >= start]
    for position, instruction in enumerate(instructions):
        instruction.position = position
    mark_segments(instructions)
    for instruction in instructions:
        classify(instruction)
        instruction.hazard = hazards.parse(instruction.text)
        instruction.wide_store = bool(instruction.hazard.stored[0])
        instruction.run = _bind(instruction, info)
        if instruction.run.__name__ == "raise_fault":
            instruction.touches = frozenset()  # say what is unknown before what its operands lack
    return instructions


_MEMORY = {"offset", "offset0", "offset1", "offen", "sc0", "sc1", "nt", "idxen", "lds"}
_LANE_MOVES = {
    "quad_perm",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_mirror",
    "row_half_mirror",
    "row_bcast",
    "row_newbcast",
    "wave_shl",
    "wave_shr",
    "wave_rol",
    "wave_ror",
    "row_mask",
    "bank_mask",
    "bound_ctrl",
}
_SELECTIONS = {"dst_sel", "dst_unused", "src0_sel", "src1_sel"}
_RESULT = {"clamp", "mul", "div"}
_HALVES = {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}


def _check_modifiers(instruction: Instruction) -> None:
    """A modifier that the semantics would ignore must not pass."""
    name = instruction.opcode
    if name.startswith(("global_", "flat_", "buffer_", "ds_", "s_load", "s_buffer")):
        known = _MEMORY
    else:
        known = (_LANE_MOVES if instruction.name.endswith("_dpp") else set()) | (
            _SELECTIONS if instruction.name.endswith("_sdwa") else set()
        )
        known = known | (_HALVES if name.startswith(("v_pk_", "v_pack_", "v_fma_mix", "v_dot2")) else set())
        known = known | ({"bitop3"} if name.startswith("v_bitop3") else set())
        known = known | (_RESULT if instruction.result_modified else set())
        known = known | ({"cbsz", "abid", "blgp"} if name.startswith("v_mfma") else set()) | {"raw"}
    unknown = set(instruction.modifiers) - known
    if unknown:
        raise UnknownInstruction(f"modifier {', '.join(sorted(unknown))} of {name}")
    if name.startswith(("v_pack_", "v_dot2")) and {"neg_lo", "neg_hi"} & set(instruction.modifiers):
        raise UnknownInstruction(f"neg of {name}")


def _bind(instruction: Instruction, info: KernelInfo):
    """Unknown instructions fault when they are reached, not before: dead code may hold anything."""
    try:
        if instruction.opcode.startswith("scratch_"):
            raise ScratchAccess("scratch memory: registers spill or an array is indexed dynamically")
        bind_registers(instruction, info.vgprs, info.agprs)
        run = build(instruction)
        _check_modifiers(instruction)
        return run
    except EmulatorFault as fault:
        kind, what = type(fault), fault.what
    except (ValueError, IndexError, KeyError, TypeError) as error:
        kind, what = UnknownInstruction, f"operands of {instruction.opcode}: {error!r}"

    def raise_fault(m):
        raise kind(what)

    return raise_fault
