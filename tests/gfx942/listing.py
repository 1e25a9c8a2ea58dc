# SPDX-License-Identifier: Apache-2.0
"""The text of a code object's instructions, by Debian's llvm-objdump of LLVM 19, for gfx950 too, which it does not know.

gfx950 has gfx942's encodings and some instructions more. Each of those has a twin on gfx942: an instruction of the same
format and length whose operands lie in the same bits. A copy of the object with the twins in their place is
disassembled as gfx942's, and in the lines of the twins names and operands are put back. `reassembled` tells whether LLVM
itself, of the pinned Triton, gives a line the bytes that it was read from.
"""

import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hip_ops.runtime import hazards
from tests.tool import require_tool

_LINE = re.compile(r"^(\s+)(\S.*?)(\s*// )([0-9A-F]{12}): ((?:[0-9A-F]{8} ?)+)")
_FUNCTION, _DYNAMIC_SYMBOLS, _PROGBITS, _EXECUTABLE = 2, 11, 1, 4


@dataclass(frozen=True)
class New:
    """An instruction that came with gfx950. bits: of the first word under `mask`; twin: those of the twin. text: makes
    the line from the twin's, with the two words of the instruction.
    """

    name: str
    mask: int
    bits: int
    twin: int
    text: Callable[[str, int, int], str]
    # bits of the two words that the twin must not have
    dropped: tuple[int, int] = (0, 0)


def _renamed(name: str) -> Callable[[str, int, int], str]:
    return lambda text, first, second: f"{name} {text.partition(' ')[2]}"


def _wider(name: str) -> Callable[[str, int, int], str]:
    """Both factors of a matrix product have four registers instead of two."""

    def edit(text: str, first: int, second: int) -> str:
        parts = text.partition(" ")[2].split(", ")
        for place in (1, 2):
            low = int(re.search(r"\[(\d+):", parts[place])[1])
            parts[place] = f"{parts[place][0]}[{low}:{low + 3}]"
        return f"{name} {', '.join(parts)}"

    return edit


def _bitop3(name: str) -> Callable[[str, int, int], str]:
    """The table of the three inputs' eight cases lies where other instructions have modifiers."""

    def edit(text: str, first: int, second: int) -> str:
        table = second >> 29 | (first >> 8 & 7) << 3 | (second >> 27 & 3) << 6
        operands = text.partition(" ")[2]
        return f"{name} {operands}" + (f" bitop3:{table:#x}" if table else "")

    return edit


def _to_lds(text: str, first: int, second: int) -> str:
    name, _, rest = text.partition(" ")
    return f"{name} {rest.partition(', ')[2]} lds"


_VOP3, _VOP1, _DS, _MUBUF, _FLAT = 0xFFFF0000, 0xFE01FE00, 0xFDFE0000, 0xFDFD0000, 0xFDFC0000
_TABLE = (0x700, 0xF8000000)  # bits of v_bitop3's table
NEW = (
    New("v_bitop3_b32", _VOP3, 0xD2340000, 0xD2020000, _bitop3("v_bitop3_b32"), _TABLE),  # v_or3_b32
    New("v_bitop3_b16", _VOP3, 0xD2330000, 0xD2040000, _bitop3("v_bitop3_b16"), _TABLE),  # v_mad_u16
    New("v_cvt_pk_bf16_f32", _VOP3, 0xD2680000, 0xD2960000, _renamed("v_cvt_pk_bf16_f32")),  # v_cvt_pkrtz_f16_f32
    New("v_cvt_pk_f16_f32", _VOP3, 0xD2670000, 0xD2960000, _renamed("v_cvt_pk_f16_f32")),
    New("v_permlane32_swap_b32", _VOP1, 0x7E00B400, 0x7E00A200, _renamed("v_permlane32_swap_b32_e32")),  # v_swap_b32
    New("v_permlane16_swap_b32", _VOP1, 0x7E00B200, 0x7E00A200, _renamed("v_permlane16_swap_b32_e32")),
    New("v_mfma_f32_16x16x32_bf16", _VOP3, 0xD3B50000, 0xD3E10000, _wider("v_mfma_f32_16x16x32_bf16")),
    New("v_mfma_f32_32x32x16_bf16", _VOP3, 0xD3B70000, 0xD3E00000, _wider("v_mfma_f32_32x32x16_bf16")),
    New("v_mfma_f32_16x16x32_f16", _VOP3, 0xD3D40000, 0xD3CD0000, _wider("v_mfma_f32_16x16x32_f16")),
    New("v_mfma_f32_32x32x16_f16", _VOP3, 0xD3D50000, 0xD3CC0000, _wider("v_mfma_f32_32x32x16_f16")),
    New("ds_read_b64_tr_b16", _DS, 0xD9C60000 & _DS, 0xD8EC0000 & _DS, _renamed("ds_read_b64_tr_b16")),  # ds_read_b64
    New("buffer_load_dwordx4 lds", _MUBUF, 0xE05D0000 & _MUBUF, 0xE05C0000 & _MUBUF, _to_lds),
    New("global_load_lds_dwordx4", _FLAT, 0xDDF40000 & _FLAT, 0xDCA80000 & _FLAT, _renamed("global_load_lds_dwordx4")),
)


def instruction_words(first: int) -> int:
    """The number of words of a gfx9 instruction, by its first one."""
    literal, other = first & 0xFF == 255, first >> 8 & 0xFF == 255
    if not first >> 31:  # VOP1, VOP2, VOPC; those two have a literal of their own
        literal = first & 0x1FF in (249, 250, 255) or first >> 25 in (23, 24, 36, 37)
        return 2 if literal else 1
    if first >> 30 == 2:
        kind = first >> 23
        if kind == 0x17F:  # SOPP
            return 1
        if kind == 0x17D:  # SOP1
            return 2 if literal else 1
        if first >> 28 == 0xB and kind < 0x17D:  # SOPK: s_setreg_imm32_b32
            return 2 if first >> 23 & 31 == 20 else 1
        return 2 if literal or other else 1
    return 1 if first >> 26 == 0b110101 else 2


def _sections(content: bytes) -> list[tuple[int, ...]]:
    (offset,), (size, count, _) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HHH", content, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", content, offset + place * size) for place in range(count)]


def new_instructions(content: bytes) -> Iterator[tuple[int, int, New]]:
    """Address, place in the file and kind of each instruction of gfx950 only, of all functions of an object."""
    sections = _sections(content)
    code = [part for part in sections if part[1] == _PROGBITS and part[2] & _EXECUTABLE]
    symbols = next(part for part in sections if part[1] == _DYNAMIC_SYMBOLS)
    for place in range(symbols[4], symbols[4] + symbols[5], 24):
        _, info, _, _, start, size = struct.unpack_from("<IBBHQQ", content, place)
        if info & 15 != _FUNCTION:
            continue
        part = next(part for part in code if part[3] <= start < part[3] + part[5])
        at = start - part[3] + part[4]
        end = at + size if size else part[4] + part[5]  # assembly written by hand gives no size
        while at < end:
            (first,) = struct.unpack_from("<I", content, at)
            kind = next((kind for kind in NEW if first & kind.mask == kind.bits), None)
            if kind:
                yield at - part[4] + part[3], at, kind
            at += 4 * instruction_words(first)


def _objdump(path: str | Path) -> str:
    command = [require_tool("llvm-objdump-19"), "-d", "--mcpu=gfx942", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _of_gfx950(content: bytes) -> str:
    changed, found = bytearray(content), {}
    changed[48] = hazards.ARCHITECTURES["gfx942"]  # the low byte of e_flags
    for address, at, kind in new_instructions(content):
        first, second = struct.unpack_from("<II", content, at)
        found[address] = (kind, first, second)
        twin = first & ~(kind.mask | kind.dropped[0]) | kind.twin
        struct.pack_into("<I", changed, at, twin)
        if kind.dropped[1]:
            struct.pack_into("<I", changed, at + 4, second & ~kind.dropped[1])
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "twins.co").write_bytes(changed)
        text = _objdump(file)
    lines = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match[2].startswith((".long", "<unknown>")):
            raise ValueError(f"llvm-objdump-19 and tests/gfx942/listing.py do not know {match[5]} at {match[4]}")
        if match and int(match[4], 16) in found:
            kind, first, second = found.pop(int(match[4], 16))
            words = f"{first:08X} {second:08X}" if len(match[5].split()) == 2 else f"{first:08X}"
            line = f"{match[1]}{kind.text(match[2], first, second)}{match[3]}{match[4]}: {words}"
        lines.append(line)
    assert not found, f"not at an instruction's start: {[hex(address) for address in found]}"
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=256)
def _listing(path: str, changed: int, size: int) -> str:
    content = Path(path).read_bytes()
    return _of_gfx950(content) if hazards.architecture_of(content) == "gfx950" else _objdump(path)


def listing(path: str | Path) -> str:
    """The text as llvm-objdump -d prints it; one run of the tool for a file."""
    status = Path(path).stat()
    return _listing(str(path), status.st_mtime_ns, status.st_size)


def reassembled(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the instructions of a listing that only gfx950 has, with their words and those that LLVM gives them."""
    from triton._C.libtriton import amd, llvm

    llvm.init_targets()
    lines = {match[2]: match[5].split() for line in text.splitlines() if (match := _LINE.match(line))}
    names = {kind.name.split()[0] for kind in NEW}
    new = {line: words for line, words in lines.items() if re.sub(r"_e32$", "", line.split()[0]) in names}
    if not new:
        return
    content = amd.assemble_amdgcn("\n".join([".text", *new, ""]), "gfx950", "")
    part = next(part for part in _sections(content) if part[1] == _PROGBITS and part[2] & _EXECUTABLE and part[5])
    at = part[4]
    for line, words in new.items():
        given = struct.unpack_from(f"<{len(words)}I", content, at)
        yield line, " ".join(words), " ".join(f"{word:08X}" for word in given)
        at += 4 * len(words)
