# SPDX-License-Identifier: Apache-2.0
"""An ELF of gfx942 or gfx950: loadable image, kernel descriptors, argument metadata. Layouts: LLVM "User Guide for AMDGPU
Backend".
"""

import re
import struct
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from hip_ops.runtime import hazards
from tests.tool import require_tool

RELOCATION_RELATIVE64, RELOCATION_ABS64 = 13, 3


@dataclass(frozen=True)
class Argument:
    kind: str  # by_value, global_buffer, hidden_*
    offset: int
    size: int
    name: str = ""


@dataclass(frozen=True)
class KernelInfo:
    """Kernel descriptor and metadata of one kernel; sizes in bytes, registers in 32-bit registers a lane."""

    name: str
    arguments: tuple[Argument, ...]
    kernarg_size: int
    lds_size: int
    scratch_size: int
    entry: int  # virtual address of the first instruction
    vgprs: int  # architectural
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    max_threads: int
    user_sgpr_bits: int  # which user SGPRs are set up, in order
    user_sgprs: int
    preload_length: int
    preload_offset: int
    workgroup_id: tuple[bool, bool, bool]
    float_mode: int  # MODE bits: round 3:0, denormals 7:4

    @property
    def total_vgprs(self) -> int:
        """Unified register file: AGPRs start at the accumulator offset, a multiple of 4 (gfx90a and later)."""
        return (self.vgprs + 3) // 4 * 4 + self.agprs if self.agprs else self.vgprs


class CodeObject:
    def __init__(self, path: str | Path):
        self.path = str(path)
        data = Path(path).read_bytes()
        if data[:4] != b"\x7fELF":
            raise ValueError(
                f"{path} is not an ELF file; a code object is made with --cuda-device-only --no-gpu-bundle-output"
            )
        self.architecture = hazards.architecture_of(data) or "gfx942"
        self._load(data)
        notes = subprocess.run(
            [require_tool("llvm-readelf-19"), "--notes", "--dyn-syms", "-W", self.path],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        self.symbols = {
            fields[-1]: int(fields[1], 16)
            for line in notes.splitlines()
            if len(fields := line.split()) >= 8 and fields[0][:-1].isdigit()
        }
        self.kernels = {info.name: info for info in self._kernels(notes)}

    def _load(self, data: bytes) -> None:
        (offset,) = struct.unpack_from("<Q", data, 32)
        entry_size, count = struct.unpack_from("<HH", data, 54)
        headers = [struct.unpack_from("<IIQQQQQQ", data, offset + k * entry_size) for k in range(count)]
        self.image = np.zeros(max(h[3] + h[6] for h in headers if h[0] == 1), np.uint8)
        for kind, _, file_offset, address, _, file_size, _, _ in headers:
            if kind == 1:
                self.image[address : address + file_size] = np.frombuffer(
                    data[file_offset : file_offset + file_size], np.uint8
                )
        self.dynamic = next(((h[3], h[5]) for h in headers if h[0] == 2), None)

    def relocated(self, base: int) -> np.ndarray:
        """The image as it stands in memory at `base`: pointers in the global offset table filled in."""
        image = self.image.copy()
        if self.dynamic is None:
            return image
        address, size = self.dynamic
        tags = dict(struct.iter_unpack("<qQ", self.image[address : address + size].tobytes()))
        for where, info, addend in struct.iter_unpack(
            "<QQq", self.image[tags.get(7, 0) : tags.get(7, 0) + tags.get(8, 0)].tobytes()
        ):
            kind, symbol = info & 0xFFFFFFFF, info >> 32
            value = base + addend
            if kind == RELOCATION_ABS64:
                value += struct.unpack_from("<Q", self.image, tags[6] + 24 * symbol + 8)[0]
            elif kind != RELOCATION_RELATIVE64:
                raise ValueError(f"{self.path}: relocation type {kind} is not supported")
            image[where : where + 8] = np.frombuffer(struct.pack("<Q", value), np.uint8)
        return image

    def _kernels(self, notes: str):
        for block in re.split(r"\n  - ", notes.split("amdhsa.kernels:")[-1])[1:]:
            symbol = re.search(r"\.symbol:\s+'?([^'\s]+?)\.kd'?\s*$", block, re.M)
            if not symbol:
                continue
            name = symbol[1]
            number = {key: int(value) for key, value in re.findall(r"^    \.(\w+):\s+(\d+)$", "\n    " + block, re.M)}
            descriptor = self.symbols[name + ".kd"]
            raw = self.image[descriptor : descriptor + 64].tobytes()
            lds, scratch, kernarg = struct.unpack_from("<III", raw, 0)
            (entry,) = struct.unpack_from("<q", raw, 16)
            rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", raw, 44)
            agprs = number.get("agpr_count", 0)
            accumulator_offset = 4 * ((rsrc3 & 0x3F) + 1)
            total = number["vgpr_count"]
            yield KernelInfo(
                name=name,
                arguments=tuple(_arguments(block)),
                kernarg_size=kernarg,
                lds_size=lds,
                scratch_size=scratch,
                entry=descriptor + entry,
                vgprs=min(total, accumulator_offset) if agprs else total,
                agprs=agprs,
                sgprs=number["sgpr_count"],
                vgpr_spills=number["vgpr_spill_count"],
                sgpr_spills=number["sgpr_spill_count"],
                max_threads=number["max_flat_workgroup_size"],
                user_sgpr_bits=properties & 0x7F,
                user_sgprs=(rsrc2 >> 1) & 0x1F,
                preload_length=preload & 0x7F,
                preload_offset=preload >> 7,
                workgroup_id=tuple(bool(rsrc2 >> bit & 1) for bit in (7, 8, 9)),
                float_mode=(rsrc1 >> 12) & 0xFF,
            )


def _arguments(block: str):
    if ".args:" not in block:
        return
    section = re.split(r"\n    \.\w+:", block.split(".args:", 1)[1])[0]
    for entry in re.split(r"\n\s+- ", section):
        fields = dict(re.findall(r"\.(\w+):\s+(\S+)", entry))
        if "value_kind" in fields:
            yield Argument(fields["value_kind"], int(fields["offset"]), int(fields["size"]), fields.get("name", ""))


@lru_cache(maxsize=256)
def _open(path: str, mtime: int, size: int) -> CodeObject:
    return CodeObject(path)


def open_code_object(path: str | Path) -> CodeObject:
    """A parsed code object; parsed once for a path and its modification time."""
    status = Path(path).stat()
    return _open(str(path), status.st_mtime_ns, status.st_size)
