# SPDX-License-Identifier: Apache-2.0
"""Registers, LDS, scratch, occupancy and required instructions of every kernel, HIP and Triton, held to the checked-in
table budgets.toml. It has a part for each target: gfx942's kernels as tests compile them, HIP's of gfx950 as they ship.

    python -m tests.gfx942.budgets            compare and print what differs
    python -m tests.gfx942.budgets --write    rewrite the table from the code objects and print the difference

A row's numbers are limits: registers, LDS and spills at most, waves_per_simd at least, every instruction of `requires`
present. --write takes the numbers as they are now, keeps `requires` of rows that exist, adds rows of new kernels and
drops those of kernels that are gone; read its difference before you commit it. To change what a row requires edit the
table, or delete the row and --write it again. Scratch and VGPR spills are never allowed, whatever the table says.
"""

import argparse
import difflib
import functools
import re
import sys
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import tomllib

from hip_ops.runtime.build import kernel_sources
from tests.gfx942.emulator.code_object import KernelInfo, open_code_object
from tests.gfx942.emulator.decode import function_lines
from tests.gfx942.toolchain import ARCH, WITHOUT_KERNELS, shipped_object

TABLE = Path(__file__).with_name("budgets.toml")
REGISTERS_A_LANE = 512  # of a SIMD, VGPRs and AGPRs together; given out in steps of 8
LDS_A_CU, LDS_STEP = {"gfx942": 65536, "gfx950": 163840}, {"gfx942": 512, "gfx950": 1280}
SIMDS, MAX_WAVES = 4, 8
TRITON = "triton"  # section of the kernels of triton_cases.py
# what makes a kernel the kernel that it is meant to be: matrix instructions, 16-byte global accesses, 16-byte LDS
# accesses during MFMAs
SHAPES = ("32x32x8", "16x16x16", "32x32x16", "16x16x32")
MATRIX = tuple(f"v_mfma_f32_{shape}_{kind}" for kind in ("bf16", "f16") for shape in SHAPES)
WIDE = ("global_load_dwordx4", "global_store_dwordx4", "buffer_load_dwordx4", "buffer_store_dwordx4")
WIDE_LDS = ("ds_read_b128", "ds_write_b128")
LIMITS = ("vgprs", "agprs", "sgprs", "lds", "sgpr_spills")
NEVER = ("scratch", "vgpr_spills")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers of 32 bits a lane, LDS in bytes a block, scratch in bytes a lane."""

    vgprs: int
    agprs: int
    sgprs: int
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int
    waves_per_simd: int


def waves_per_simd(info: KernelInfo, lds: int, threads: int, target: str = "gfx942") -> int:
    """Waves that fit on a SIMD together, by LLVM's rules for gfx90a and later."""
    by_vgprs = REGISTERS_A_LANE // max(8, -(-info.total_vgprs // 8) * 8)
    by_sgprs = 8 if info.sgprs <= 100 else 7  # SGPR file of gfx9: 800 a SIMD, 16 a step
    waves = -(-threads // 64)
    by_lds = MAX_WAVES
    if lds:
        step = LDS_STEP[target]
        blocks = LDS_A_CU[target] // (-(-lds // step) * step)
        by_lds = max(1, blocks * waves // SIMDS)
    return min(MAX_WAVES, by_vgprs, by_sgprs, by_lds)


def resources(path: str | Path, kernel: str, dynamic_lds: int = 0, threads: int | None = None) -> Resources:
    """Of a kernel of a code object; for Triton give its dynamic LDS and threads a block."""
    code = open_code_object(path)
    info = code.kernels[kernel]
    lds = info.lds_size + dynamic_lds
    return Resources(
        info.vgprs,
        info.agprs,
        info.sgprs,
        lds,
        info.scratch_size,
        info.vgpr_spills,
        info.sgpr_spills,
        waves_per_simd(info, lds, threads or info.max_threads, code.architecture),
    )


def opcodes(path: str | Path, kernel: str) -> Counter:
    """Return the number of occurrences of each opcode in the kernel."""
    return Counter(re.sub(r"_(e32|e64|sdwa|dpp)$", "", line.split()[0]) for line in function_lines(str(path), kernel))


def violations(found: Resources, row: dict, present: Counter) -> list[str]:
    """Return the limits that the resources exceed, and the instructions that are missing."""
    broken = [f"{name} {getattr(found, name)} > {row[name]}" for name in LIMITS if getattr(found, name) > row[name]]
    broken += [f"{name} {getattr(found, name)} > 0" for name in NEVER if getattr(found, name)]
    if found.waves_per_simd < row["waves_per_simd"]:
        broken.append(f"waves_per_simd {found.waves_per_simd} < {row['waves_per_simd']}")
    return broken + [f"{name} is missing" for name in row["requires"] if not present[name]]


def kernels_of(source: Path, target: str = ARCH) -> dict[str, tuple[Resources, Counter]]:
    """Every kernel of a .hip file, as it ships."""
    path = shipped_object(source, target)
    return {name: (resources(path, name), opcodes(path, name)) for name in sorted(open_code_object(path).kernels)}


def hip_kernels(target: str = "gfx942") -> dict[str, dict[str, tuple[Resources, Counter]]]:
    """Source name -> kernels, for all of hip_ops."""
    return {source.stem: kernels_of(source, target) for source in kernel_sources() if source.stem != WITHOUT_KERNELS}


def all_kernels() -> dict[str, dict]:
    """Target -> source name -> kernels."""
    return {"gfx942": hip_kernels() | triton_kernels(), "gfx950": hip_kernels("gfx950")}


@functools.cache
def triton_objects() -> dict:
    """Name -> TritonObject of all of triton_cases.py."""
    from tests.gfx942.triton_cases import CASES

    return {name: case() for name, case in CASES.items()}


def triton_kernels() -> dict[str, dict[str, tuple[Resources, Counter]]]:
    """The same of Triton's kernels, under the name triton."""
    return {
        TRITON: {
            name: (resources(found.path, found.name, found.shared, found.threads), opcodes(found.path, found.name))
            for name, found in triton_objects().items()
        }
    }


def read_table(path: Path = TABLE) -> dict[str, dict[str, dict[str, dict]]]:
    """Target -> source name -> kernel -> row."""
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def compare(table: dict, found: dict) -> list[str]:
    """Return all problems: exceeded rows, kernels without a row, rows without a kernel."""
    problems = []
    for source in sorted({*table, *found}):
        rows, kernels = table.get(source, {}), found.get(source, {})
        problems += [f"{source}: row {name} has no kernel" for name in sorted(set(rows) - set(kernels))]
        problems += [f"{source}: kernel {name} has no row" for name in sorted(set(kernels) - set(rows))]
        for name in sorted(set(rows) & set(kernels)):
            problems += [
                f"{source}: {name}: {what}" for what in violations(kernels[name][0], rows[name], kernels[name][1])
            ]
    return problems


def default_requirements(present: Counter) -> list[str]:
    """Return the requirements of a new row, from the kernel's present instructions."""
    notable = (*MATRIX, *WIDE, *(WIDE_LDS if any(present[opcode] for opcode in MATRIX) else ()))
    return [opcode for opcode in notable if present[opcode]]


def render(found: dict, table: dict) -> str:
    """The table's text for these kernels, with the `requires` of the old table."""
    lines = [
        "# Limits of every kernel: gfx942's by clang 19 and, under triton, by the pinned Triton; gfx950's by clang 22. See "
        "tests/gfx942/budgets.py.",
        "# Rewrite: python -m tests.gfx942.budgets --write, and read the difference that it prints.",
    ]
    for target, sources in found.items():
        for source, kernels in sources.items():
            lines += ["", f"[{target}.{source}]"]
            for name, (measured, present) in kernels.items():
                old = table.get(target, {}).get(source, {}).get(name)
                requires = old["requires"] if old else default_requirements(present)
                numbers = [
                    f"{each.name} = {getattr(measured, each.name)}"
                    for each in fields(measured)
                    if each.name not in NEVER
                ]
                quoted = ", ".join(f'"{opcode}"' for opcode in requires)
                lines.append(f"{name} = {{{', '.join(numbers)}, requires = [{quoted}]}}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite budgets.toml")
    options = parser.parse_args(arguments)
    table, found = read_table(), all_kernels()
    if options.write:
        old, new = TABLE.read_text() if TABLE.is_file() else "", render(found, table)
        print(
            "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "before", "after"))
            or "no change\n",
            end="",
        )
        TABLE.write_text(new)
        table = read_table()
    problems = [f"{target}: {problem}" for target in found for problem in compare(table.get(target, {}), found[target])]
    for problem in problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
