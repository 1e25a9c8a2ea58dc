# SPDX-License-Identifier: Apache-2.0
"""Finds stores whose data is overwritten too early: `python -m hip_ops scan OBJECT_OR_FOLDER`. Needs neither torch nor
a GPU.

CDNA3 and CDNA4 do not stall for some dependent instructions. The compiler must put a number of wait states between them, and
compilers have got one of these rules wrong: after a wide store its data registers were overwritten too early, and the
store wrote wrong values. So this rule is checked in what ships and in what Triton has compiled; tests/gfx942 checks the
other rules of LLVM's GCNHazardRecognizer.cpp in what ships.

Each instruction is one wait state and `s_nop n` is n + 1. All paths behind a wide store are followed, through branches
both ways, until the distance is reached. Not checked: calls and returns through registers (s_swappc, s_setpc), s_rfe,
and compressed offload bundles.
"""

import copy
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hip_ops.errors import mistake
from hip_ops.runtime import rocm
from hip_ops.runtime.compilers import program_version, programs

ARCHITECTURES = {"gfx942": 0x4C, "gfx950": 0x4F}  # with the low byte of e_flags
OLDEST_LLVM = {"gfx942": 17, "gfx950": 20}  # the first releases that know them
INDUCTOR_PREFIX = "triton_"  # of the kernels of torch.compile: triton_poi_fused_add_0, triton_red_, triton_per_, ...
_MACHINE_AMDGPU = 224  # e_machine
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"

# Registers are bits of one integer: VGPR n, AGPR 512 + n, SGPR 1024 + n.
_AGPR, _SGPR = 512, 1024
VECTORS = (1 << _SGPR) - 1
_NAMED = {"vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec_lo": 126, "exec_hi": 127}
_PAIRS = {"vcc": 106, "exec": 126, "flat_scratch": 102}


class ToolNotFound(RuntimeError):
    """There is no llvm-objdump that knows the architecture."""


@dataclass(frozen=True)
class Rule:
    """A distance between two instructions.

    needs: the distance that the second instruction needs; its arguments are the first, the second and the watched
    registers. hides: with the same arguments, the registers that are not watched behind the second instruction.
    """

    name: str
    needs: Callable[["Instruction", "Instruction", int], int]
    hides: Callable[["Instruction", "Instruction", int], int] = lambda first, second, mask: 0


@dataclass
class Instruction:
    """One instruction, with the facts that the rule needs. Registers are bit masks."""

    pc: int
    text: str
    name: str
    operands: tuple[str, ...] = ()
    masks: tuple[int, ...] = ()  # registers of each operand
    writes: int = 0  # of a VALU instruction
    wait_states: int = 1
    valu: bool = False
    target: int | None = None
    watched: tuple[tuple[Rule, int, int], ...] = ()  # rules, the registers that they watch, the largest distance

    @property
    def stored(self) -> tuple[int, int]:
        """Return the data registers of a store of more than 8 bytes and the wait states before a VALU may write them;
        0, 0 for other instructions.
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
    waited: int

    def __str__(self) -> str:
        return (
            f"{self.function}: {self.second} comes {self.waited} wait states after {self.first}; {self.needed} are "
            f"needed ({self.rule})"
        )


# Decoding ------------------------------------------------------------------------------------------------------------

_WIDE_STORE = re.compile(
    r"((global|flat|scratch)_store|t?buffer_store(_format)?)_(dwordx[34]|xyzw?)|(global|flat|buffer)_atomic_cmpswap_x2"
)
_REGISTER = re.compile(r"\b([vas])(\d+)\b|\b([vas])\[(\d+):(\d+)\]|\b(vcc_lo|vcc_hi|vcc|exec_lo|exec_hi|exec|m0)\b")
TWO_RESULTS = re.compile(r"v_\w+_co_u32|v_mad_[ui]64_[ui]32|v_div_scale_f\d+|v_(permlane\d+_)?swap_b32")
_LINE = re.compile(r"^\s+(\S+)\s*(.*?)\s*// ([0-9A-F]+): [0-9A-F]{4}([0-9A-F]{4})")
_LABEL = re.compile(r"([0-9a-f]+) <(.+)>:")


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
    """Return the operands, which commas outside brackets separate."""
    return tuple(part.strip() for part in re.split(r",(?![^\[(]*[\])])", text)) if text else ()


def parse(text: str, pc: int = 0, low_half: int = 0, decode: Callable[[str], Instruction] | None = None) -> Instruction:
    """Return an instruction from its disassembly. low_half: the low half of its first word, for a branch's target."""
    instruction = copy.copy((decode or decoded)(text))
    instruction.pc = pc
    if instruction.name.startswith(("s_branch", "s_cbranch")):
        instruction.target = pc + 4 + 4 * (low_half - 0x10000 if low_half & 0x8000 else low_half)
    return instruction


@lru_cache(maxsize=1 << 15)
def decoded(text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    plain = re.sub(r"_(sdwa|dpp)$", "", re.sub(r"_(e32|e64)(?=$|_)", "", name))
    operands = _split(rest.strip())
    masks = tuple(map(_register_mask, operands))
    instruction = Instruction(0, text, plain, operands, masks, valu=name.startswith("v_"))
    if plain == "s_nop":
        instruction.wait_states = int(operands[0], 0) + 1
    if instruction.valu:
        for mask in masks[: 2 if TWO_RESULTS.fullmatch(plain) else 1]:
            instruction.writes |= mask
    mask, distance = instruction.stored
    instruction.watched = ((WIDE_STORE, mask, distance),) if mask else ()
    return instruction


def _overwrites(first: Instruction, second: Instruction, mask: int) -> int:
    return first.stored[1] if second.valu and second.writes & mask else 0


WIDE_STORE = Rule("data of a wide store is overwritten: checkVALUHazardsHelper", _overwrites)


@lru_cache(maxsize=2)
def objdump(architecture: str = "gfx942") -> str:
    """Return the path of an llvm-objdump that knows the architecture, from ROCm or PATH. Raises ToolNotFound."""
    oldest = OLDEST_LLVM[architecture]
    names = ["llvm-objdump", *(f"llvm-objdump-{major}" for major in range(oldest + 15, oldest - 1, -1))]
    folders = rocm.folders(*rocm.LLVM_FOLDERS)
    for program in programs(names, (None, *folders)):
        version = re.search(r"LLVM version (\d+)", program_version(program))
        if version and int(version[1]) >= oldest:
            return program
    raise ToolNotFound(
        f"no llvm-objdump of LLVM {oldest} or newer on PATH or in {', '.join(map(str, folders))}: install ROCm's LLVM "
        f"(package rocm-llvm, or AMD's wheel rocm-sdk-core){' or Debian llvm-19' if oldest < 20 else ''}, or set "
        "ROCM_PATH"
    )


def listing(path: Path) -> str:
    """Return the text that llvm-objdump prints for a code object."""
    architecture = architecture_of(head(path)) or "gfx942"
    command = [objdump(architecture), "-d", f"--mcpu={architecture}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{path}: llvm-objdump failed: {done.stderr.strip()}")
    return done.stdout


def disassemble(
    path: Path, decode: Callable[[str], Instruction] | None = None, lines: Callable[[Path], str] = listing
) -> dict[str, list[Instruction]]:
    """Return the instructions of a code object by function. decode: replaces `decoded`, for other rules."""
    functions: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    for line in lines(path).splitlines():
        if match := _LINE.match(line):
            code.append(parse(f"{match[1]} {match[2]}".strip(), int(match[3], 16), int(match[4], 16), decode))
        elif match := _LABEL.fullmatch(line.strip()):
            code = functions.setdefault(match[2], [])
    if functions and not any(functions.values()):  # an object may hold no function
        raise ValueError(f"{path}: llvm-objdump printed no instruction")
    return functions


# Paths ---------------------------------------------------------------------------------------------------------------


def violations(functions: dict[str, list[Instruction]], extra: int = 0) -> Iterator[Violation]:
    """Yield the pairs of instructions that are too close. extra: wait states that wide stores need beyond the rule, to
    show that the scan sees them.
    """
    names = [function for function, code in functions.items() for _ in code]
    code = [instruction for part in functions.values() for instruction in part]
    places = {instruction.pc: place for place, instruction in enumerate(code)}
    following = [_successors(code, place, places) for place in range(len(code))]
    for place, first in enumerate(code):
        for rule, mask, limit in first.watched:
            more = extra if rule is WIDE_STORE else 0
            pairs: dict[int, tuple[int, int]] = {}  # place of the second instruction -> wait states, needed
            for at, waited, watched in _behind(code, following, place, rule, mask, limit + more):
                needed = rule.needs(first, code[at], watched)
                if needed and waited < needed + more:
                    pairs[at] = min(pairs.get(at, (waited, needed + more)), (waited, needed + more))
            for at, (waited, needed) in pairs.items():
                yield Violation(names[place], rule.name, str(first), str(code[at]), needed, waited)


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
    code: list[Instruction], following: list[tuple[int, ...]], place: int, rule: Rule, mask: int, limit: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the instructions that can execute within `limit` wait states behind an instruction: place, wait states
    between, registers still watched.
    """
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
        watched &= ~rule.hides(code[place], second, mask)
        open_paths += [(after, waited + second.wait_states, watched) for after in following[at]]


# Files ---------------------------------------------------------------------------------------------------------------


def architecture_of(content: bytes) -> str | None:
    """Return the architecture, of those that this module knows, of the ELF with which these bytes begin."""
    if content[:5] != b"\x7fELF\x02" or len(content) < 64:
        return None
    (machine,), (flags,) = struct.unpack_from("<H", content, 18), struct.unpack_from("<I", content, 48)
    numbers = {number: name for name, number in ARCHITECTURES.items()}
    return numbers.get(flags & 0xFF) if machine == _MACHINE_AMDGPU else None


def code_objects(content: bytes) -> Iterator[bytes]:
    """Yield the ELFs of a file: itself, or those in the offload bundles of a library."""
    if architecture_of(content):
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
            if architecture_of(part):
                yield part
        start = content.find(_BUNDLE, start + 1)


def scan(path: Path, check: Callable[[Path], Iterable[Violation]] | None = None) -> list[Violation]:
    """Return the violations in a code object, or in those of a library. Raises ValueError where the file holds none.

    check: of one code object; None: that of this module.
    """
    check = check or (lambda path: violations(disassemble(path)))
    parts = list(code_objects(path.read_bytes()))
    if not parts:
        names = " or ".join(ARCHITECTURES)
        raise mistake(str(path), f"holds no {names} code", "a code object (.co, .hsaco), a library, a folder")
    if architecture_of(head(path)):
        return list(check(path))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.co"
        return [violation for part in parts if file.write_bytes(part) for violation in check(file)]


def files_in(folder: Path) -> list[Path]:
    """Return the files below a folder that hold gfx942's or gfx950's code, sorted."""
    files = (path for path in folder.rglob("*") if path.is_file() and head(path).startswith(b"\x7fELF"))
    return sorted(path for path in files if any(code_objects(path.read_bytes())))


def head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)


def triton_cache() -> Path:
    """Return Triton's cache folder, as Triton chooses it."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or default_triton_cache())


def default_triton_cache() -> Path:
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def inductor_cache() -> Path | None:
    """Return the folder of torch.compile's kernels, which has a folder triton/ with one folder a device; None without
    torch.
    """
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(folder)
    try:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    except (ImportError, OSError):  # no torch, or one whose libraries are missing
        return None
    return Path(default_cache_dir())


def triton_folders() -> list[Path]:
    """Return the folders that Triton has compiled into: that of TRITON_CACHE_DIR, Triton's default, and
    torch.compile's, one a device. From its first kernel on torch.compile makes its folder that of all kernels of the
    process.
    """
    inductor = inductor_cache()
    folders = [triton_cache(), default_triton_cache(), *(inductor.glob("triton/*") if inductor else ())]
    return sorted({folder.resolve() for folder in folders if folder.is_dir()})


def triton_objects() -> list[Path]:
    """Return the objects (.hsaco) for gfx942 and gfx950 in `triton_folders`."""
    objects = sorted({path for folder in triton_folders() for path in folder.rglob("*.hsaco")})
    return [path for path in objects if architecture_of(head(path))]


def is_inductors(triton_object: Path) -> bool:
    """Return whether a file of Triton's cache, which has its kernel's name, holds a kernel of torch.compile."""
    return triton_object.stem.startswith(INDUCTOR_PREFIX)


def operator_of(triton_object: Path) -> str | None:
    """Return the folder of hip_ops/ops whose sources define the kernel of a file of Triton's cache, or of a shipped
    object, whose name has a hash behind the kernel's; or None.
    """
    kernel = triton_object.stem.partition("-")[0]
    definition = re.compile(rf"^def {re.escape(kernel)}\(", re.MULTILINE)
    sources = sorted((Path(__file__).parents[1] / "ops").glob("*/*.py"))
    return next((source.parent.name for source in sources if definition.search(source.read_text())), None)
