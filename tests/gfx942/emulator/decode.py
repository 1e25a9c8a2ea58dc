# SPDX-License-Identifier: Apache-2.0
"""Instructions from the text of llvm-objdump: decoding proper is left to LLVM, whose tables are what the assembler
used.
"""

import os
import re
import struct
from dataclasses import dataclass, field, replace
from functools import lru_cache

from hip_ops.runtime import hazards
from tests.gfx942.emulator.faults import OutOfBounds, UnknownInstruction
from tests.gfx942.listing import listing

# SGPR file positions of named scalar registers (CDNA3 ISA, "Scalar ALU operands").
NAMED_SCALARS = {
    "flat_scratch_lo": 102,
    "flat_scratch_hi": 103,
    "flat_scratch": 102,
    "vcc_lo": 106,
    "vcc_hi": 107,
    "vcc": 106,
    "m0": 124,
    "exec_lo": 126,
    "exec_hi": 127,
    "exec": 126,
}
PAIRS = ("vcc", "exec", "flat_scratch")
INLINE_FLOATS = {"0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494", "0.15915494309189532"}
APERTURES = {
    "src_shared_base": 0x10000,
    "src_private_base": 0x20000,
    "src_shared_limit": 0xFFFF,
    "src_private_limit": 0,
}


@dataclass
class Operand:
    """kind: 'v' VGPR, 'a' AGPR, 's' SGPR, 'c' constant, 'f' inline float, 'off', 'scc', 'vccz'/'execz', 'x' anything
    else (text).
    """

    kind: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False
    text: str = ""
    position: int = -1  # of a VGPR or AGPR in the unified register file, see bind_registers

    def registers(self) -> tuple[int, ...]:
        """Numbers in one space for the scoreboard: VGPR n, AGPR 512+n, SGPR 1024+n."""
        base = {"v": 0, "a": 512, "s": 1024}.get(self.kind)
        return () if base is None else tuple(range(base + self.index, base + self.index + self.count))


@dataclass
class Instruction:
    pc: int
    size: int
    name: str  # as printed
    opcode: str  # without encoding suffix
    operands: list[Operand]
    modifiers: dict[str, str]
    text: str
    target: int | None = None  # of a branch
    position: int = 0  # index in the kernel
    run: object = None
    ends_segment: bool = False
    result_modified: bool = False  # clamp and output multiplier are applied
    wait: tuple[int | None, int | None] = (None, None)  # vmcnt, lgkmcnt of s_waitcnt
    # for the scoreboard, see waits.py
    counter: str | None = None
    writes_lds: bool = False
    partial: bool = False
    hands_on: bool = False
    sources: tuple[tuple[int, ...], ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    touches: frozenset = field(default_factory=frozenset)
    hazard: hazards.Instruction | None = None  # what the rules of wait states ask, see wide_stores.py
    wide_store: bool = False

    def integer(self, key: str, default: int = 0) -> int:
        return int(self.modifiers[key], 0) if key in self.modifiers else default

    def flags(self, key: str, count: int, default: int) -> list[int]:
        """A per-operand bit list such as op_sel:[0,1]."""
        if key not in self.modifiers:
            return [default] * count
        bits = [int(bit) for bit in self.modifiers[key].strip("[]").split(",")]
        if any(bits[count:]):
            raise UnknownInstruction(f"{key} of the destination")
        return (bits + [default] * count)[:count]


@lru_cache(maxsize=1 << 16)
def parse_operand(text: str) -> Operand:
    negate = absolute = sign_extend = False
    if text.startswith("-") and not re.match(r"-[\d.]", text):
        negate, text = True, text[1:]
    if match := re.fullmatch(r"neg\((.*)\)", text):
        negate, text = True, match[1]
    if match := re.fullmatch(r"\|(.*)\|", text) or re.fullmatch(r"abs\((.*)\)", text):
        absolute, text = True, match[1]
    if match := re.fullmatch(r"sext\((.*)\)", text):
        sign_extend, text = True, match[1]
    common = {"negate": negate, "absolute": absolute, "sign_extend": sign_extend, "text": text}
    if match := re.fullmatch(r"([vas])(\d+)", text):
        return Operand(match[1], int(match[2]), **common)
    if match := re.fullmatch(r"([vas])\[(\d+):(\d+)\]", text):
        return Operand(match[1], int(match[2]), int(match[3]) - int(match[2]) + 1, **common)
    if text in NAMED_SCALARS:
        return Operand("s", NAMED_SCALARS[text], 2 if text in PAIRS else 1, **common)
    if text in INLINE_FLOATS:
        return Operand("f", value=float(text), **common)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return Operand("c", value=int(text, 0), **common)
    if text in APERTURES:
        return Operand("c", value=APERTURES[text] << 32, **common)
    if text in ("off", "scc", "vccz", "execz"):
        return Operand(text, **common)
    return Operand("x", **common)


def bind_registers(instruction: Instruction, vgprs: int, agprs: int) -> None:
    """Give vector operands their place in the register file: VGPRs first, then AGPRs."""
    for operand in instruction.operands:
        if operand.kind in ("v", "a"):
            limit = vgprs if operand.kind == "v" else agprs
            if operand.index + operand.count > limit:
                raise OutOfBounds(f"{operand.text}: the kernel descriptor allocates {limit} registers of this kind")
            operand.position = operand.index + (vgprs if operand.kind == "a" else 0)


def constant_bits(operand: Operand, width: int = 32) -> int:
    """The bits a constant stands for in an operation of this width. Inline floats follow the width; literals are 32
    bits.
    """
    if operand.kind == "f":
        code, word = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}[width]
        return struct.unpack(
            word,
            struct.pack(
                code,
                1 / (2 * 3.141592653589793)
                if abs(operand.value) == 0.15915494309189532 or operand.value == 0.15915494
                else operand.value,
            ),
        )[0]
    return operand.value & ((1 << width) - 1)


def _split(text: str) -> list[str]:
    """Operands are separated by commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


_LINE = re.compile(r"^\t(\S+)\s*(.*?)\s*// ([0-9A-F]{12}): ((?:[0-9A-F]{8} ?)+)")
_OPAQUE = (
    "s_waitcnt",
    "s_nop",
    "s_setprio",
    "s_sleep",
    "s_inst_prefetch",
    "s_setreg",
    "s_getreg",
    "s_endpgm",
    "s_icache",
    "s_dcache",
    "s_sethalt",
    "s_trap",
    "buffer_wbl2",
    "buffer_inv",
    "s_ttrace",
    "sched_barrier",
)


def parse_line(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if not match:
        return None
    name, rest, pc, words = match[1], match[2], int(match[3], 16), match[4].split()
    text = f"{name} {rest}".strip()
    opcode = re.sub(r"_(e32|e64|sdwa|dpp|e64_dpp)$", "", name)
    instruction = Instruction(pc, 4 * len(words), name, opcode, [], {}, text)
    if name.startswith(_OPAQUE):
        instruction.modifiers["raw"] = rest
        return instruction
    parts = _split(rest)
    if parts:
        tokens = re.findall(r"\w+:\[[^\]]*\]|\S+", parts[-1])
        parts[-1] = tokens[0]
        for token in tokens[1:]:
            key, _, value = token.partition(":")
            instruction.modifiers[key] = value or "1"
    instruction.operands = [replace(parse_operand(part)) for part in parts]  # copies: each gets a place of its own
    if opcode.startswith(("s_branch", "s_cbranch")):
        offset = instruction.operands[0].value & 0xFFFF
        instruction.target = pc + 4 + 4 * (offset - 0x10000 if offset & 0x8000 else offset)
    return instruction


@lru_cache(maxsize=32)
def _functions(path: str, mtime: int, size: int) -> dict[str, list[str]]:
    """Symbol -> its lines as llvm-objdump prints them."""
    functions: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in listing(path).splitlines():
        if match := re.fullmatch(r"[0-9a-f]+ <(\S+)>:", line):
            lines = functions.setdefault(match[1], [])
        elif line.startswith("\t"):
            lines.append(line)
    return functions


def function_lines(path: str, symbol: str) -> list[str]:
    """Disassembly of one function of a code object."""
    status = os.stat(path)
    lines = _functions(path, status.st_mtime_ns, status.st_size).get(symbol)
    if not lines:
        raise UnknownInstruction(f"{path} holds no code for {symbol}")
    return lines


def disassemble(path: str, symbol: str) -> list[Instruction]:
    """Instructions of one function, in order of address."""
    found = [instruction for line in function_lines(path, symbol) if (instruction := parse_line(line))]
    for position, instruction in enumerate(found):
        instruction.position = position
    return found
