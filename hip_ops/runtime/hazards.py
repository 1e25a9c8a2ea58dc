# SPDX-License-Identifier: Apache-2.0
"""Finds missing wait states in gfx942 code: `python -m hip_ops scan OBJECT_OR_FOLDER`. Needs no torch and no GPU.

CDNA3 does not stall for some dependent instructions. The compiler must put a number of wait states between them, and
compilers have got that wrong: after a wide store its data registers were overwritten too early, and the store wrote
wrong values. Each instruction is one wait state and `s_nop n` is n + 1. For every instruction that needs a distance,
all paths behind it are followed, through branches both ways, until the distance is reached.

The distances are those that LLVM's GCNHazardRecognizer.cpp keeps on gfx940 and later; each rule names its function
there. Loads that follow each other directly are a soft clause; where an object may run with XNACK, they may be
executed again after a page fault, so none of them may write a register that another one reads. Not checked: calls and
returns through registers (s_swappc, s_setpc), s_rfe, v_fma_f64 behind an fp64 MFMA, and compressed offload bundles.
MFMA passes are those of SISchedule.td for gfx940.
"""

import copy
import functools
import importlib.util
import operator
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hip_ops.errors import mistake

ARCHITECTURE = "gfx942"
OLDEST_LLVM = 17  # the first release that knows gfx942
ROCM = ("/opt/rocm",)  # searched after PATH and ROCM_PATH
ROCM_WHEEL = "_rocm_sdk_core"  # the package of AMD's wheel rocm-sdk-core, searched last
_MACHINE_AMDGPU, _MACH_GFX942 = 224, 0x4C  # e_machine, and the low byte of e_flags
_MAY_REPLAY = 0x100  # of e_flags: XNACK is on, or not fixed at compile time (EF_AMDGPU_FEATURE_XNACK_V4)
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"

# Registers are bits of one integer: VGPR n, AGPR 512 + n, SGPR 1024 + n.
_AGPR, _SGPR = 512, 1024
VECTORS = (1 << _SGPR) - 1
_NAMED = {"vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec_lo": 126, "exec_hi": 127}
_PAIRS = {"vcc": 106, "exec": 126, "flat_scratch": 102}
VCC, EXEC, M0 = (3 << _SGPR + 106), (3 << _SGPR + 126), (1 << _SGPR + 124)


class ToolNotFound(RuntimeError):
    """There is no llvm-objdump that knows gfx942."""


@dataclass
class Instruction:
    """One instruction with what the rules ask about it. Registers are bit masks."""

    pc: int
    text: str
    name: str
    operands: tuple[str, ...] = ()
    masks: tuple[int, ...] = ()  # registers of each operand
    writes: int = 0
    reads: int = 0
    wait_states: int = 1
    valu: bool = False
    memory: bool = False  # global, flat, scratch, buffer or LDS
    vmem: bool = False  # memory without LDS
    clause: str = ""  # kind of soft clause that it can be in, "scalar" or "vector"; empty where XNACK is off
    passes: int = 0  # of a matrix instruction
    xdl: bool = False  # matrix instruction that is neither fp32 nor fp64
    dgemm: bool = False
    target: int | None = None
    watched: tuple[tuple["Rule", int, int], ...] = ()  # rules, the registers that they watch, the largest distance

    @property
    def stored(self) -> tuple[int, int]:
        """Data registers of a store of more than 8 bytes and the wait states before a VALU may write them; 0, 0 for
        other instructions.
        """
        # createsVALUHazard, with the distance for an SGPR soffset that llvm/llvm-project#197267 added
        match = _WIDE_STORE.fullmatch(self.name)
        if not match:
            return 0, 0
        if not self.name.startswith(("buffer_", "tbuffer_")):
            returns = "atomic" in self.name and " sc0" in self.text
            return self.masks[2 if returns else 1] & VECTORS, 2
        offset = self.operands[3].split()[0] if len(self.operands) > 3 else "0"
        return self.masks[0] & VECTORS, 1 if _register_mask(offset) else 2

    def __str__(self) -> str:
        return f"{self.pc:#x} `{self.text}`"


@dataclass(frozen=True)
class Violation:
    """Two instructions that follow each other too closely on some path."""

    function: str
    rule: str
    first: str
    second: str
    needed: int
    found: int

    def __str__(self) -> str:
        return (
            f"{self.function}: {self.second} comes {self.found} wait states after {self.first}; {self.needed} are "
            f"needed ({self.rule})"
        )


# Decoding ------------------------------------------------------------------------------------------------------------

_WIDE_STORE = re.compile(
    r"((global|flat|scratch)_store|t?buffer_store(_format)?)_(dwordx[34]|xyzw?)|(global|flat|buffer)_atomic_cmpswap_x2"
)
_REGISTER = re.compile(r"\b([vas])(\d+)\b|\b([vas])\[(\d+):(\d+)\]|\b(vcc_lo|vcc_hi|vcc|exec_lo|exec_hi|exec|m0)\b")
_NO_RESULT = re.compile(
    r"(global|flat|scratch|t?buffer)_store_.*|ds_write.*|ds_(add|sub|max|min|or|and|xor|inc|dec)_[ufb]\d+"
    r"|ds_(gws|nop|append|consume)\w*|global_load_lds_.*|v_nop|v_clrexcp|buffer_(wbl2|inv).*"
)
_TWO_RESULTS = re.compile(r"v_\w+_co_u32|v_mad_[ui]64_[ui]32|v_div_scale_f\d+|v_swap_b32")
_READS_RESULT = re.compile(r"v_(pk_)?fmac_.*|v_mac_.*|v_dot\dc_.*|v_writelane_b32|v_swap_b32|v_smfmac_.*")
_MATRIX = re.compile(r"v_s?mfmac?_(?:f32|i32|f64)_(\d+)x\d+x(\d+)_?(?:(\d+)b_)?(\w+)")
_LINE = re.compile(r"^\s+(\S+)\s*(.*?)\s*// ([0-9A-F]+): [0-9A-F]{4}([0-9A-F]{4})")
_LABEL = re.compile(r"([0-9a-f]+) <(.+)>:")
_SCALAR_LOADS = ("s_load_", "s_buffer_load_")
_MEMORY = ("global_", "flat_", "scratch_", "buffer_", "tbuffer_", "ds_")


@lru_cache(maxsize=1 << 16)
def _register_mask(operand: str) -> int:
    mask = 0
    for kind, number, kinds, first, last, named in _REGISTER.findall(operand):
        if named:
            mask |= 3 << _SGPR + _PAIRS[named] if named in _PAIRS else 1 << _SGPR + _NAMED[named]
            continue
        low = int(number or first)
        count = int(last) - low + 1 if kinds else 1
        mask |= ((1 << count) - 1) << low + {"v": 0, "a": _AGPR, "s": _SGPR}[kind or kinds]
    return mask


def _split(text: str) -> tuple[str, ...]:
    """Operands are separated by commas outside brackets."""
    return tuple(part.strip() for part in re.split(r",(?![^\[(]*[\])])", text)) if text else ()


def passes(name: str) -> int:
    """Passes of a matrix instruction on gfx942, 0 for others."""
    match = _MATRIX.match(name)
    if not match:
        return 0
    size, depth, blocks, kind = int(match[1]), int(match[2]), match[3], match[4]
    if name.startswith("v_mfma_f64"):
        return {4: 4, 16: 8}[size]
    if size == 4:
        return 2
    dense = not name.startswith("v_mfma") or not (blocks or kind == "f32" or (size == 32 and depth <= 4))
    return (size // 4 if dense or kind == "xf32" else size // 2) if size == 32 else 4 if dense else 8


def parse(text: str, pc: int = 0, low_half: int = 0) -> Instruction:
    """An instruction from its disassembly. `low_half`: the low 16 bits of its first word, for a branch's target."""
    found = copy.copy(_decoded(text))
    found.pc = pc
    if found.name.startswith(("s_branch", "s_cbranch")):
        found.target = pc + 4 + 4 * (low_half - 0x10000 if low_half & 0x8000 else low_half)
    return found


@lru_cache(maxsize=1 << 15)
def _decoded(text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    name = re.sub(r"_(e32|e64)(?=$|_)", "", name)
    plain = re.sub(r"_(sdwa|dpp)$", "", name)
    operands = _split(rest.strip())
    masks = tuple(map(_register_mask, operands))
    found = Instruction(0, text, plain, operands, masks)
    found.valu = name.startswith("v_")
    found.memory = name.startswith(_MEMORY) and not name.startswith(("buffer_wbl2", "buffer_inv"))
    found.vmem = found.memory and not name.startswith("ds_")
    found.clause = "vector" if found.vmem else "scalar" if name.startswith(_SCALAR_LOADS) else ""
    if plain == "s_nop":
        found.wait_states = int(operands[0], 0) + 1
    count = 2 if _TWO_RESULTS.fullmatch(plain) else 0 if _NO_RESULT.fullmatch(plain) else 1
    atomic = "_atomic_" in plain and " sc0" not in text
    if not (found.valu or found.memory or plain.startswith("s_")) or atomic or text.endswith(" lds"):
        count = 0
    if plain.startswith(("s_waitcnt", "s_setreg", "s_cmp", "s_bitcmp", "s_nop", "s_barrier", "s_sendmsg")):
        count = 0
    for mask in masks[:count]:
        found.writes |= mask
    for mask in masks[count:]:
        found.reads |= mask
    if _READS_RESULT.fullmatch(plain) or "UNUSED_PRESERVE" in text:
        found.reads |= masks[0]
    if plain.startswith("v_cmpx"):
        found.writes |= EXEC
    elif plain.startswith("v_div_fmas"):
        found.reads |= VCC
    if found.vmem:
        found.reads |= EXEC
    if found.valu and (amount := passes(plain)):
        found.passes, found.dgemm = amount, plain.startswith("v_mfma_f64")
        found.xdl = not found.dgemm and not re.search(r"_\d+x\d+x\d+_?(\d+b_)?f32$", plain)
    produced = ((rule, rule.produces(found)) for rule in RULES)
    found.watched = tuple((rule, *what) for rule, what in produced if what)
    return found


@lru_cache(maxsize=1)
def objdump() -> str:
    """Path of an llvm-objdump that knows gfx942, from ROCm or PATH. Raises ToolNotFound."""
    names = ["llvm-objdump", *(f"llvm-objdump-{major}" for major in range(OLDEST_LLVM + 15, OLDEST_LLVM - 1, -1))]
    rocm = [Path(place) / "llvm" / "bin" for place in (os.environ.get("ROCM_PATH"), *ROCM) if place]
    wheel = importlib.util.find_spec(ROCM_WHEEL)
    rocm += [Path(place) / "lib" / "llvm" / "bin" for place in (wheel and wheel.submodule_search_locations) or ()]
    for folder in (None, *map(str, rocm)):
        for name in names:
            program = shutil.which(name, path=folder)
            if program is None:
                continue
            told = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            version = re.search(r"LLVM version (\d+)", told)
            if version and int(version[1]) >= OLDEST_LLVM:
                return program
    raise ToolNotFound(
        f"no llvm-objdump of LLVM {OLDEST_LLVM} or newer on PATH or in {', '.join(map(str, rocm))}: install ROCm's "
        "LLVM (package rocm-llvm, or AMD's wheel rocm-sdk-core) or Debian's llvm-19, or set ROCM_PATH"
    )


def disassemble(path: Path) -> dict[str, list[Instruction]]:
    """Function -> its instructions, of a gfx942 code object."""
    done = subprocess.run([objdump(), "-d", f"--mcpu={ARCHITECTURE}", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{path}: llvm-objdump failed: {done.stderr.strip()}")
    functions: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    (flags,) = struct.unpack_from("<I", _head(path), 48)
    for line in done.stdout.splitlines():
        if match := _LINE.match(line):
            code.append(parse(f"{match[1]} {match[2]}".strip(), int(match[3], 16), int(match[4], 16)))
            if not flags & _MAY_REPLAY:
                code[-1].clause = ""
        elif match := _LABEL.fullmatch(line.strip()):
            code = functions.setdefault(match[2], [])
    if functions and not any(functions.values()):  # an object may hold no function
        raise ValueError(f"{path}: {objdump()} printed no instruction")
    return functions


# Rules ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A distance between two instructions.

    produces: registers of the first instruction that the rule watches and the largest distance, or None. needs: the
    distance that the second instruction needs; its arguments are the first, the second and the watched registers.
    """

    name: str
    produces: Callable[[Instruction], tuple[int, int] | None]
    needs: Callable[[Instruction, Instruction, int], int]


def _wide_store(first: Instruction):
    mask, distance = first.stored
    return (mask, distance) if mask else None


def _overwrites(first: Instruction, second: Instruction, mask: int) -> int:
    return first.stored[1] if second.valu and second.writes & mask else 0


def _after_matrix(first: Instruction, second: Instruction, mask: int) -> int:
    """Distance from a matrix instruction to one that reads or writes its result."""
    single = 0 if first.xdl else 1  # fp32 products (SMFMA in LLVM) need one wait state less
    if second.passes:
        needed = 0
        if (second.masks[1] | second.masks[2]) & mask:
            needed = (6 if first.passes == 4 else 11) if first.dgemm else first.passes + 3 - single
        addend = second.masks[0 if second.name.startswith("v_smfmac") else 3]
        if addend & mask:
            if addend == first.masks[0]:
                both = first.dgemm and second.dgemm and first.passes == second.passes == 4
                needed = max(needed, 4 if both else 2 if first.passes == 2 else 0)
            elif first.dgemm:
                needed = max(needed, 0 if second.xdl else 4 if first.passes == 4 else 9)
            elif first.xdl or not second.xdl:
                needed = max(needed, first.passes + 1 - single)
        return needed
    if not (second.valu or second.memory) or not (second.reads | second.writes) & mask:
        return 0
    if not first.dgemm:
        return first.passes + 3 - single
    if second.memory and second.reads & mask:
        return 9 if first.passes == 4 else 18
    return 6 if first.passes == 4 else 11


def _addend(first: Instruction):
    if not first.xdl or first.name.startswith("v_smfmac") or not first.masks[3] & VECTORS:
        return None
    return first.masks[3] & VECTORS, first.passes - 1


def _vector_result(first: Instruction):
    return (first.writes & VECTORS, 3) if first.writes & VECTORS and not first.passes else None


_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_f(16|32|64)|v_(exp|log)_legacy_f32")
_LANE_READS = ("v_readlane_b32", "v_readfirstlane_b32")


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
    return 2 if _TWO_RESULTS.fullmatch(instruction.name) else 1


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
        elif second.passes or second.name in (*_LANE_READS, "v_writelane_b32"):
            needed = 4  # checkMAIHazards90A; checkVALUHazards, hasVDecCoExecHazard
    return needed


def _reads_m0(second: Instruction) -> bool:
    return second.text.endswith(" lds") or second.name.startswith(
        ("s_movrel", "s_sendmsg", "s_ttracedata", "global_load_lds", "ds_write_addtid", "ds_read_addtid", "ds_gws")
    )


def _mode(instruction: Instruction) -> str:
    match = re.search(r"hwreg\((\w+)", instruction.text)
    return match[1] if match else ""


RULES = (
    Rule("data of a wide store is overwritten: checkVALUHazardsHelper", _wide_store, _overwrites),
    Rule(
        "result of a matrix instruction: checkMAIHazards90A, checkMAIVALUHazards",
        lambda first: (first.masks[0], 19) if first.passes else None,
        _after_matrix,
    ),
    Rule(
        "addend of a matrix instruction is overwritten: checkMAIVALUHazards",
        _addend,
        lambda first, second, mask: (
            first.passes - 1 if (second.valu or second.memory) and not second.passes and second.writes & mask else 0
        ),
    ),
    Rule(
        "result in a vector register: checkMAIHazards90A, checkDPPHazards, checkVALUHazards",
        _vector_result,
        _after_vector,
    ),
    Rule(
        "result of a VALU instruction in a scalar register: checkVMEMHazards, checkVALUHazards, checkRWLaneHazards, "
        "checkDivFMasHazards",
        _lane_result,
        _after_lane,
    ),
    Rule(
        "M0 is written by a scalar instruction: checkReadM0Hazards",
        lambda first: (M0, 1) if first.name.startswith("s_") and first.writes & M0 else None,
        lambda first, second, mask: int(_reads_m0(second)),
    ),
    Rule(
        "s_setreg before s_getreg or s_setreg of one register: checkGetRegHazards, checkSetRegHazards",
        lambda first: (1, 2) if first.name.startswith("s_setreg") else None,
        lambda first, second, mask: (
            2 if second.name.startswith(("s_setreg", "s_getreg")) and _mode(first) == _mode(second) else 0
        ),
    ),
)


_CLAUSE = 5  # MaxLookAhead of GCNHazardRecognizer.cpp
SOFT_CLAUSE = "a load of a soft clause writes a register that the clause reads: checkSoftClauseHazards"


def violations(functions: dict[str, list[Instruction]], extra: int = 0) -> Iterator[Violation]:
    """Yields the pairs of instructions that are too close. `extra` wait states more are asked of wide stores, which
    shows that the scan sees them.
    """
    names = [function for function, code in functions.items() for _ in code]
    code = [instruction for part in functions.values() for instruction in part]
    places = {instruction.pc: place for place, instruction in enumerate(code)}
    following = [_successors(code, place, places) for place in range(len(code))]
    targets = {instruction.target for instruction in code}
    for place, first in enumerate(code):
        for rule, mask, limit in first.watched:
            more = extra if rule is RULES[0] else 0
            found: dict[int, tuple[int, int]] = {}  # place of the second instruction -> wait states, needed
            for at, waited, watched in _behind(code, following, place, mask, limit + more):
                needed = rule.needs(first, code[at], watched)
                if needed and waited < needed + more:
                    found[at] = min(found.get(at, (waited, needed + more)), (waited, needed + more))
            for at, (waited, needed) in found.items():
                yield Violation(names[place], rule.name, str(first), str(code[at]), needed, waited)
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


def _successors(code: list[Instruction], place: int, places: dict[int, int]) -> tuple[int, ...]:
    instruction, following = code[place], []
    if instruction.name.startswith(("s_endpgm", "s_setpc", "s_swappc", "s_rfe")):
        return ()
    if instruction.target is not None and instruction.target in places:
        following.append(places[instruction.target])
    if instruction.name != "s_branch" and place + 1 < len(code):
        following.append(place + 1)
    return tuple(following)


def _behind(
    code: list[Instruction], following: list[tuple[int, ...]], place: int, mask: int, limit: int
) -> Iterator[tuple[int, int, int]]:
    """Yields what can execute within `limit` wait states behind an instruction: its place, the wait states between,
    the registers still watched. A later matrix instruction that writes a matrix result takes over its registers.
    """
    matrix = code[place].passes and mask == code[place].masks[0]
    seen: dict[int, tuple[int, int]] = {}
    open_paths = [(at, 0, mask) for at in following[place]]
    while open_paths:
        at, waited, watched = open_paths.pop()
        if waited >= limit or not watched:
            continue
        earlier = seen.get(at)
        if earlier and earlier[0] <= waited and watched & ~earlier[1] == 0:
            continue
        seen[at] = (waited, watched)
        second = code[at]
        yield at, waited, watched
        if matrix and second.passes:
            watched &= ~second.writes
        open_paths += [(after, waited + second.wait_states, watched) for after in following[at]]


# Files ---------------------------------------------------------------------------------------------------------------


def is_gfx942(content: bytes) -> bool:
    """Whether these bytes begin with an ELF of gfx942."""
    if content[:5] != b"\x7fELF\x02" or len(content) < 64:
        return False
    (machine,), (flags,) = struct.unpack_from("<H", content, 18), struct.unpack_from("<I", content, 48)
    return machine == _MACHINE_AMDGPU and flags & 0xFF == _MACH_GFX942


def code_objects(content: bytes) -> Iterator[bytes]:
    """The gfx942 ELFs of a file: itself, or those in the offload bundles of a library."""
    if is_gfx942(content):
        yield content
        return
    start = content.find(_BUNDLE)
    while start >= 0:
        (count,) = struct.unpack_from("<Q", content, start + len(_BUNDLE))
        at = start + len(_BUNDLE) + 8
        for _ in range(min(count, 64)):
            offset, size, length = struct.unpack_from("<QQQ", content, at)
            at += 24 + length
            part = content[start + offset : start + offset + size]
            if is_gfx942(part):
                yield part
        start = content.find(_BUNDLE, start + 1)


def scan(path: Path, extra: int = 0) -> list[Violation]:
    """Violations in a gfx942 code object, or in those of a library. Raises ValueError where the file holds none."""
    parts = list(code_objects(path.read_bytes()))
    if not parts:
        raise mistake(str(path), f"holds no {ARCHITECTURE} code", "a code object (.co, .hsaco), a library, a folder")
    if is_gfx942(_head(path)):
        return list(violations(disassemble(path), extra))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            file = Path(folder) / "part.co"
            file.write_bytes(part)
            found += violations(disassemble(file), extra)
    return found


def files_in(folder: Path) -> list[Path]:
    """Files below a folder that hold gfx942 code, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file() and _head(path).startswith(b"\x7fELF"))
    return sorted(path for path in files if any(code_objects(path.read_bytes())))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)


def triton_cache() -> Path:
    """Triton's cache folder, as Triton finds it."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def triton_objects(folder: Path | None = None) -> list[Path]:
    """The gfx942 objects (.hsaco) that Triton has compiled into a cache folder."""
    found = sorted((folder or triton_cache()).rglob("*.hsaco"))
    return [path for path in found if is_gfx942(_head(path))]


def scan_files(paths: Iterable[Path]) -> dict[Path, list[Violation]]:
    """File -> its violations; files without any are in the result too."""
    return {path: scan(path) for path in paths}
