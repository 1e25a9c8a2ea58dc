# SPDX-License-Identifier: Apache-2.0
"""Builds what the package ships for MI300X and MI355X in hip_ops/shipped/<target>/: the library libhip_ops.so and the
code objects of Triton kernels (tools/triton_objects.py), each with a manifest.

    python -m tools.ship            builds all; commit it together with the sources that changed
    python -m tools.ship --check    builds in a scratch folder, and fails where the bytes differ from the shipped ones
    python -m tools.ship gfx942     one of them; gfx950 needs `pip install ziglang==0.17.1`, 101 MB, which holds clang 22

Compiler and flags of the device code are those of tests/gfx942/toolchain.py, so that emulator, budgets and bug tests
see the shipped bytes. The same sources give the same bytes in every folder: the commands hold relative paths only, a
unit's name comes from its file's name, and symbol table and dates are left out. The library names no HIP runtime:
hip_ops/runtime/launchers.py binds it to the one that torch has mapped.
"""

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hip_ops.runtime.build import LIBRARY, MANIFEST, kernel_sources, shipped_folder, sources_digest
from hip_ops.runtime.code_objects import OBJECTS_MANIFEST
from hip_ops.runtime.hazards import code_objects
from tests.gfx942 import toolchain
from tests.gfx942.toolchain import COMPILER, TARGETS, is_newer
from tests.tool import require_tool
from tools import triton_objects

ROOT = Path(__file__).resolve().parents[1]
HOST_FLAGS = ("-fPIC", "-fvisibility=hidden", "-Ihip_ops/runtime/csrc")
LINKER = "ld.lld-19"
# Without --as-needed the library would require libstdc++, of which it uses nothing.
LINK_FLAGS = ("-shared", "-fPIC", "--hip-link", "-no-hip-rt", "-fuse-ld=lld-19", "-Wl,--as-needed", "-Wl,--strip-all")


def compile_command(target: str, source: str, output: str) -> list[str]:
    """The arguments that compile one file, without the folders of the machine."""
    flags = toolchain.flags_of(target, is_newer(target))
    return [*flags, *HOST_FLAGS, f"-cuid={Path(source).stem}", "-c", source, "-o", output]


def link_command(objects: list[str], output: str) -> list[str]:
    return [COMPILER, *objects, *LINK_FLAGS, "-o", output]


def build(folder: Path, root: Path = ROOT, target: str = "gfx942") -> Path:
    """Builds the library of the sources in `root`/hip_ops into `folder`, writes its manifest, and returns its path."""
    require_tool(LINKER)
    sources = [file.relative_to(root) for file in kernel_sources(root / "hip_ops")]
    library = folder / LIBRARY
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        objects = [f"{scratch}/{source.stem}.o" for source in sources]
        paths = toolchain.path_flags(target, is_newer(target))
        compiler = [*toolchain.compiler(is_newer(target)), *paths]
        commands = [compile_command(target, str(source), made) for source, made in zip(sources, objects, strict=True)]
        list(pool.map(lambda command: _run([*compiler, *command], root), commands))
        _run(link_command(objects, f"{scratch}/{LIBRARY}"), root)
        content = Path(scratch, LIBRARY).read_bytes()
    library.write_bytes(content)
    (folder / MANIFEST).write_text(json.dumps(manifest(content, root, target), indent=1) + "\n")
    return library


def manifest(content: bytes, root: Path = ROOT, target: str = "gfx942") -> dict[str, str]:
    name = "zig clang" if is_newer(target) else COMPILER
    return {
        "target": target,
        "sources": sources_digest(root / "hip_ops"),
        "sha256": hashlib.sha256(content).hexdigest(),
        "compiler": toolchain.compiler_version(is_newer(target)),
        "command": f"{name} {shlex.join(compile_command(target, 'FILE.hip', 'FILE.o'))}",
        "link": shlex.join(link_command(["FILE.o"], LIBRARY)),
    }


def differences(built: Path, shipped: Path) -> list[str]:
    """Returns what differs between two folders that each hold a library, code objects and their manifests."""
    problems = object_differences(built, shipped)
    old, new = (json.loads((folder / MANIFEST).read_text()) for folder in (shipped, built))
    problems += [f"{key}: shipped {old.get(key)}, built {new[key]}" for key in new if new[key] != old.get(key)]
    if (shipped / LIBRARY).read_bytes() != (built / LIBRARY).read_bytes():
        ours, theirs = ([*code_objects((folder / LIBRARY).read_bytes())] for folder in (shipped, built))
        other = sum(code not in ours for code in theirs)
        problems.append(f"the bytes differ; {other} of {len(theirs)} code objects are not in the shipped library")
    return problems


def object_differences(built: Path, shipped: Path) -> list[str]:
    """Returns what differs between the code objects of two folders, and between their manifests."""
    new, old = ({file.name: file.read_bytes() for file in folder.glob("*.hsaco")} for folder in (built, shipped))
    problems = [f"{name}: not shipped" for name in sorted(new.keys() - old.keys())]
    problems += [f"{name}: no recipe needs it" for name in sorted(old.keys() - new.keys())]
    problems += [f"{name}: the bytes differ" for name in sorted(new.keys() & old.keys()) if new[name] != old[name]]
    files = [folder / OBJECTS_MANIFEST for folder in (built, shipped)]
    texts = [file.read_text() if file.is_file() else "" for file in files]
    return problems or [f"{OBJECTS_MANIFEST}: the text differs"] * (texts[0] != texts[1])


def _run(command: list[str], folder: Path) -> None:
    try:
        toolchain.run(command, cwd=folder)
    except toolchain.CompileError as error:
        raise SystemExit(str(error)) from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ship", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare a new build with what is shipped")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)} (default: all)")
    options = parser.parse_args(arguments)
    if unknown := sorted({*options.targets} - {*TARGETS}):
        parser.error(f"no such target: {', '.join(unknown)}; allowed are {', '.join(TARGETS)}")
    failed = False
    for target in options.targets or TARGETS:
        folder = shipped_folder(target)
        if options.check:
            with tempfile.TemporaryDirectory() as scratch:
                build(Path(scratch), target=target)
                triton_objects.build(Path(scratch), target)
                problems = differences(Path(scratch), folder)
            failed |= bool(problems)
            print(f"{target}: " + ("; ".join(problems) or "the same bytes"))
            continue
        folder.mkdir(parents=True, exist_ok=True)
        library = build(folder, target=target)
        print(f"{library.relative_to(ROOT)}: {library.stat().st_size} bytes")
        print(f"{folder.relative_to(ROOT)}/*.hsaco: {triton_objects.build(folder, target)} bytes")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
