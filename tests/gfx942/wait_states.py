# SPDX-License-Identifier: Apache-2.0
"""All rules of wait states on gfx942 and gfx950, for the code that ships; hip_ops/runtime/hazards.py has the one that compilers got
wrong, and follows the paths for both.

The distances are those that LLVM's GCNHazardRecognizer.cpp keeps on gfx940 and later; each rule names its function
there. Loads that follow each other directly are a soft clause; where an object may run with XNACK, they may be executed
again after a page fault, so none of them may write a register that another one reads. Not checked: v_fma_f64 behind an
fp64 MFMA, and results of gfx950's conversions to fp4. MFMA passes are those of SISchedule.td for gfx940 and gfx950. The
distances of gfx950 were read in triton-lang/llvm-project at 2449c0e3, an LLVM 23.
"""

import functools
import operator
import re
import struct
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hip_ops.runtime import hazards
from hip_ops.runtime.hazards import VECTORS, Rule, Violation
from tests.gfx942.listing import listing

_MAY_REPLAY = 0x100  # of e_flags: XNACK is on, or not fixed at compile time (EF_AMDGPU_FEATURE_XNACK_V4)
_SGPR = VECTORS.bit_length()  # the bit of SGPR 0
VCC, EXEC, M0 = (3 << _SGPR + 106), (3 << _SGPR + 126), (1 << _SGPR + 124)


@dataclass
class Instruction(hazards.Instruction):
    """One instruction with what all rules ask about it; `writes` is that of every kind of instruction."""

    reads: int = 0
    memory: bool = False  # global, flat, scratch, buffer or LDS
    vmem: bool = False  # memory without LDS
    clause: str = ""  # kind of soft clause that it can be in, "scalar" or "vector"; empty where XNACK is off
    passes: int = 0  # of a matrix instruction
    xdl: bool = False  # matrix instruction that is neither fp32 nor fp64
    dgemm: bool = False
    gfx950: bool = False


_NO_RESULT = re.compile(
    r"(global|flat|scratch|t?buffer)_store_.*|ds_write.*|ds_(add|sub|max|min|or|and|xor|inc|dec)_[ufb]\d+"
    r"|ds_(gws|nop|append|consume)\w*|global_load_lds_.*|v_nop|v_clrexcp|buffer_(wbl2|inv).*"
)
_READS_RESULT = re.compile(r"v_(pk_)?fmac_.*|v_mac_.*|v_dot\dc_.*|v_writelane_b32|v_smfmac_.*")
_SWAPS = re.compile(r"v_(permlane(16|32)_)?swap_b32")
_MATRIX = re.compile(r"v_s?mfmac?_(?:f32|i32|f64)_(\d+)x\d+x(\d+)_?(?:(\d+)b_)?(\w+)")
_SCALAR_LOADS = ("s_load_", "s_buffer_load_")
_MEMORY = ("global_", "flat_", "scratch_", "buffer_", "tbuffer_", "ds_")


def passes(name: str, gfx950: bool = False) -> int:
    """Passes of a matrix instruction, 0 for others."""
    match = _MATRIX.match(name)
    if not match:
        return 0
    size, depth, blocks, kind = int(match[1]), int(match[2]), match[3], match[4]
    if name.startswith("v_mfma_f64"):
        return {4: 4, 16: 16 if gfx950 else 8}[size]
    if size == 4:
        return 2
    dense = not name.startswith("v_mfma") or not (blocks or kind == "f32" or (size == 32 and depth <= 4))
    return (size // 4 if dense or kind == "xf32" else size // 2) if size == 32 else 4 if dense else 8


@lru_cache(maxsize=1 << 15)
def decoded(text: str, gfx950: bool = False) -> Instruction:
    plain = hazards.decoded(text)
    fields = {name: getattr(plain, name) for name in ("pc", "text", "name", "operands", "masks", "wait_states", "valu")}
    found, name, masks = Instruction(**fields, gfx950=gfx950), plain.name, plain.masks
    found.memory = name.startswith(_MEMORY) and not name.startswith(("buffer_wbl2", "buffer_inv"))
    found.vmem = found.memory and not name.startswith("ds_")
    found.clause = "vector" if found.vmem else "scalar" if name.startswith(_SCALAR_LOADS) else ""
    count = 2 if hazards.TWO_RESULTS.fullmatch(name) else 0 if _NO_RESULT.fullmatch(name) else 1
    atomic = "_atomic_" in name and " sc0" not in text
    if not (found.valu or found.memory or name.startswith("s_")) or atomic or text.endswith(" lds"):
        count = 0
    if name.startswith(("s_waitcnt", "s_setreg", "s_cmp", "s_bitcmp", "s_nop", "s_barrier", "s_sendmsg")):
        count = 0
    for mask in masks[:count]:
        found.writes |= mask
    for mask in masks[count:]:
        found.reads |= mask
    if _READS_RESULT.fullmatch(name) or "UNUSED_PRESERVE" in text:
        found.reads |= masks[0]
    elif _SWAPS.fullmatch(name):
        found.reads |= found.writes
    if name.startswith("v_cmpx"):
        found.writes |= EXEC
    elif name.startswith("v_div_fmas"):
        found.reads |= VCC
    if found.vmem:
        found.reads |= EXEC
    if found.valu and (amount := passes(name, gfx950)):
        found.passes, found.dgemm = amount, name.startswith("v_mfma_f64")
        found.xdl = not found.dgemm and not re.search(r"_\d+x\d+x\d+_?(\d+b_)?f32$", name)
    produced = ((rule, produces(found)) for rule, produces in RULES)
    found.watched = plain.watched + tuple((rule, *watch) for rule, watch in produced if watch)
    return found


def disassemble(path: Path) -> dict[str, list[Instruction]]:
    """Function -> its instructions, of a code object."""
    gfx950 = hazards.architecture_of(hazards.head(path)) == "gfx950"
    functions = hazards.disassemble(path, functools.partial(decoded, gfx950=gfx950), listing)
    (flags,) = struct.unpack_from("<I", hazards.head(path), 48)
    if not flags & _MAY_REPLAY:
        for code in functions.values():
            for instruction in code:
                instruction.clause = ""
    return functions


# Rules ---------------------------------------------------------------------------------------------------------------


def _after_matrix(first: Instruction, second: Instruction, mask: int) -> int:
    """Distance from a matrix instruction to one that reads or writes its result."""
    single = 0 if first.xdl else 1  # fp32 products (SMFMA in LLVM) need one wait state less
    late = int(first.xdl and first.gfx950)  # and on gfx950 others one more, mostly not with two passes
    later = late if first.passes != 2 else 0
    large = 19 if first.gfx950 else 11  # of fp64 products with more than 4 passes
    if second.passes:
        needed = 0
        if (second.masks[1] | second.masks[2]) & mask:
            needed = (6 if first.passes == 4 else large) if first.dgemm else first.passes + 3 - single + later
        addend = second.masks[0 if second.name.startswith("v_smfmac") else 3]
        if addend & mask:
            if addend == first.masks[0]:
                both = first.dgemm and second.dgemm and first.passes == second.passes == 4
                needed = max(needed, 4 if both else 2 if first.passes == 2 else 0)
            elif first.dgemm:
                needed = max(needed, 0 if second.xdl else 4 if first.passes == 4 else large - 2)
            elif first.xdl or not second.xdl:
                needed = max(needed, first.passes + 1 - single + (late if second.xdl else later))
        return needed
    if not (second.valu or second.memory) or not (second.reads | second.writes) & mask:
        return 0
    if not first.dgemm:
        return first.passes + 3 - single + later
    if second.memory and second.reads & mask:
        return 9 if first.passes == 4 else 18
    if first.passes == 4:
        return 6
    return large if second.reads & mask else 11


def _taken_over(first: Instruction, second: Instruction, mask: int) -> int:
    """Registers of a matrix result that a later matrix instruction writes: as in LLVM the nearest write counts."""
    return second.writes if second.passes and mask == first.masks[0] else 0


def _addend(first: Instruction):
    if not first.xdl or first.name.startswith("v_smfmac") or not first.masks[3] & VECTORS:
        return None
    return first.masks[3] & VECTORS, first.passes - 1


def _vector_result(first: Instruction):
    return (first.writes & VECTORS, 3) if first.writes & VECTORS and not first.passes else None


_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(16|32|64)|v_(exp|log)_legacy_f32")
_LANE_READS = ("v_readlane_b32", "v_readfirstlane_b32")
_PERMLANES = ("v_permlane16_swap_b32", "v_permlane32_swap_b32")


def _after_vector(first: Instruction, second: Instruction, mask: int) -> int:
    if not second.valu:
        return 3 if first.name.startswith("v_dot") and second.memory and (second.reads | second.writes) & mask else 0
    read = bool(second.reads & mask)
    if first.name.startswith("v_dot") and (read or second.writes & mask):
        # checkMAIVALUHazards: the sum of equal dot products is passed on
        if first.name != second.name or (second.masks[1] | second.masks[2]) & mask:
            return 3
    if not read:
        return 0
    if second.passes and first.valu and not first.name.startswith("v_dot"):
        return 2  # checkMAIHazards90A
    if second.name in _PERMLANES and first.valu:
        return 2  # checkPermlaneHazards
    if "_dpp" in second.text.partition(" ")[0] and second.masks[_first_source(second)] & mask:
        return 2  # checkDPPHazards: any instruction that writes the moved register
    if _TRANSCENDENTAL.fullmatch(first.name) and not _TRANSCENDENTAL.fullmatch(second.name):
        return 1  # checkVALUHazards, hasTransForwardingHazard
    if re.search(r"dst_sel:(?!DWORD)", first.text) or re.search(r"op_sel:\[[01],[01],(?:[01],)?1\]", first.text):
        return 1 if "v_pk_" not in first.name and "v_fma_mix" not in first.name else 0  # hasDstSelForwardingHazard
    if first.name.startswith("v_cvt_sr_") and re.search(r"op_sel:\[[01],[01],1,0\]", first.text):
        return 1  # one byte of the result: a case of the same rule in LLVMs newer than 19
    return 1 if first.valu and second.name in _LANE_READS else 0  # checkVALUHazards, hasVDecCoExecHazard


def _first_source(instruction: Instruction) -> int:
    return 2 if hazards.TWO_RESULTS.fullmatch(instruction.name) else 1


def _lane_result(first: Instruction):
    return (first.writes & ~VECTORS, 5) if first.valu and first.writes & ~VECTORS else None


def _after_lane(first: Instruction, second: Instruction, mask: int) -> int:
    """Behind a VALU instruction that writes an SGPR, VCC or EXEC."""
    if second.vmem:
        return 5 if second.reads & mask else 0  # checkVMEMHazards
    if not second.valu:
        return 0
    needed = 2 if second.reads & mask else 0  # checkVALUHazards, hasVDecCoExecHazard
    if second.name in ("v_readlane_b32", "v_writelane_b32") and second.masks[2] & mask:
        needed = 4  # checkRWLaneHazards
    if second.name.startswith("v_div_fmas") and VCC & mask:
        needed = 4  # checkDivFMasHazards
    if EXEC & mask:
        if "_dpp" in second.text.partition(" ")[0]:
            needed = 5  # checkDPPHazards
        elif second.passes or second.name in (*_LANE_READS, "v_writelane_b32", *_PERMLANES):
            needed = 4  # checkMAIHazards90A, checkPermlaneHazards; checkVALUHazards, hasVDecCoExecHazard
    return needed


def _reads_m0(second: Instruction) -> bool:
    return second.text.endswith(" lds") or second.name.startswith(
        ("s_movrel", "s_sendmsg", "s_ttracedata", "global_load_lds", "ds_write_addtid", "ds_read_addtid", "ds_gws")
    )


def _mode(instruction: Instruction) -> str:
    match = re.search(r"hwreg\((\w+)", instruction.text)
    return match[1] if match else ""


# Each rule, and the registers of the first instruction that it watches with the largest distance, or None.
RULES: tuple[tuple[Rule, Callable[[Instruction], tuple[int, int] | None]], ...] = (
    (
        Rule("result of a matrix instruction: checkMAIHazards90A, checkMAIVALUHazards", _after_matrix, _taken_over),
        lambda first: (first.masks[0], 20) if first.passes else None,
    ),
    (
        Rule(
            "addend of a matrix instruction is overwritten: checkMAIVALUHazards",
            lambda first, second, mask: (
                first.passes - 1 if (second.valu or second.memory) and not second.passes and second.writes & mask else 0
            ),
            _taken_over,
        ),
        _addend,
    ),
    (
        Rule("result in a vector register: checkMAIHazards90A, checkDPPHazards, checkVALUHazards", _after_vector),
        _vector_result,
    ),
    (
        Rule(
            "result of a VALU instruction in a scalar register: checkVMEMHazards, checkVALUHazards, "
            "checkRWLaneHazards, checkDivFMasHazards",
            _after_lane,
        ),
        _lane_result,
    ),
    (
        Rule(
            "M0 is written by a scalar instruction: checkReadM0Hazards",
            lambda first, second, mask: int(_reads_m0(second)),
        ),
        lambda first: (M0, 1) if first.name.startswith("s_") and first.writes & M0 else None,
    ),
    (
        Rule(
            "s_setreg before s_getreg or s_setreg of one register: checkGetRegHazards, checkSetRegHazards",
            lambda first, second, mask: (
                2 if second.name.startswith(("s_setreg", "s_getreg")) and _mode(first) == _mode(second) else 0
            ),
        ),
        lambda first: (1, 2) if first.name.startswith("s_setreg") else None,
    ),
)
_CLAUSE = 5  # MaxLookAhead of GCNHazardRecognizer.cpp
SOFT_CLAUSE = "a load of a soft clause writes a register that the clause reads: checkSoftClauseHazards"


def violations(functions: dict[str, list[Instruction]], extra: int = 0) -> Iterator[Violation]:
    """Yields the pairs of instructions that are too close, in the code's order for each function. `extra` wait states
    more are asked of wide stores.
    """
    yield from hazards.violations(functions, extra)
    names = [function for function, code in functions.items() for _ in code]
    code = [instruction for part in functions.values() for instruction in part]
    targets = {instruction.target for instruction in code}
    for place, first in enumerate(code):
        if first.clause and (before := _clause_before(code, place, targets)) is not None:
            yield Violation(names[place], SOFT_CLAUSE, str(before), str(first), 1, 0)


def _clause_before(code: list[Instruction], place: int, targets: Container[int]) -> Instruction | None:
    """Returns the instruction directly before this one, where both are of a soft clause in which one writes a register
    that one reads. As in LLVM, the five instructions before are looked at, as far as they are of one block.
    """
    part, before = [code[place]], None
    for earlier in reversed(code[max(0, place - 2 * _CLAUSE) : place]):
        if part[-1].pc in targets or len(part) > _CLAUSE:
            break
        if earlier.name == "s_nop" and not earlier.wait_states:  # taken away by a test
            continue
        if earlier.clause != code[place].clause:
            break
        before = before or earlier
        part.append(earlier)
    written = functools.reduce(operator.or_, (each.writes for each in part))
    read = functools.reduce(operator.or_, (each.reads for each in part))
    return before if written & read and any(each.writes for each in part[1:]) else None


def scan(path: Path) -> list[Violation]:
    """Violations of all rules in a code object, or in those of a library."""
    return hazards.scan(path, lambda part: violations(disassemble(part)))
