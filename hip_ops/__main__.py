# SPDX-License-Identifier: Apache-2.0
"""`python -m hip_ops build` builds the kernels before their first use; `python -m hip_ops info` prints which version
runs where and why; `python -m hip_ops scan` finds stores in gfx942 and gfx950 code whose data is overwritten too early.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

import torch

from hip_ops.runtime import conditions, hazards
from hip_ops.runtime.build import BuildError, build, cache_folder, library_note, prebuilt
from hip_ops.runtime.code_objects import objects_note
from hip_ops.runtime.compilers import (
    AMD_ARCHITECTURES,
    CompilerNotFound,
    check_target,
    default_amd_target,
    find_compiler,
)
from hip_ops.runtime.launchers import default_target, target_of
from hip_ops.runtime.operator import Operator, all_operators, table
from hip_ops.runtime.rocm import torch_is_built_for

VARIABLES_HELP = """\
environment:
  HIP_OPS_KERNELS    auto (default), hip, triton, compiled or reference; then single operators, as in
                     auto,router_mlp=compiled
  HIP_OPS_LIBRARY    shipped (default): the verified libraries (gfx942, gfx950) and Triton kernels of the package; source:
                     them with hipcc and Triton
  HIP_OPS_CACHE      folder of the built libraries (default: ~/.cache/hip_ops)
  HIP_OPS_ARCH       AMD architecture to build for on a machine without a GPU (default: PYTORCH_ROCM_ARCH, else gfx942)
  ROCM_PATH, CUDA_HOME   folders that are searched for hipcc and nvcc before PATH; then ROCm's Python wheels
  HO_CPU_SCHEDULE    order of the threads in the cpu library: forward (default), reverse, random:<seed>
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m hip_ops",
        description=__doc__,
        epilog=VARIABLES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="{build,info,scan}")
    build_options = commands.add_parser(
        "build",
        help="build the kernels into the cache, and print the library's path",
        description="Builds the kernels for one target into the cache and prints the path of the library. Does nothing "
        "where it is there, or where the package ships it (gfx942, gfx950).",
    )
    build_options.add_argument(
        "--target",
        type=check_target_argument,
        help="gfx942, sm_90, cpu, ... (default: this machine's GPU, else HIP_OPS_ARCH or gfx942)",
    )
    build_options.add_argument(
        "--force", action="store_true", help="build although the library is shipped or in the cache"
    )
    info_options = commands.add_parser(
        "info",
        help="print the version of every operator on every device and why, compilers, cache",
        description="Prints which version of every operator runs on every device and why, the available compilers, "
        "and where the "
        "cache is. Exit status: 1 if a requested version is not available or fails its check.",
    )
    info_options.add_argument(
        "--check",
        action="store_true",
        help="compare every operator with its reference on every device, on GPUs also on streams, in a captured graph "
        "and on a full device; prints the seconds of each; builds the kernels where hip is used",
    )
    scan_options = commands.add_parser(
        "scan",
        help="find stores in gfx942 and gfx950 code whose data is overwritten too early",
        description="Disassembles gfx942 and gfx950 code objects and libraries and prints every wide store with an instruction "
        "that overwrites its data too early. Exit status: 1 if there are any.",
    )
    scan_options.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="OBJECT_OR_FOLDER",
        help="files, or folders that are searched (default: the .hsaco files of Triton's caches, torch.compile's too)",
    )
    return top


def check_target_argument(text: str) -> str:
    try:
        return check_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def devices() -> list[torch.device]:
    accelerators = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [*(torch.device("cuda", i) for i in range(accelerators)), torch.device("cpu")]


def info(check: bool) -> int:
    """Print the versions to stdout; return 1 where a requested version is not available or failed its self-check."""
    print(f"torch {torch.__version__} ({torch_is_built_for(torch)})")
    failed = 0
    for device in devices():
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        choices, started = {}, time.monotonic()
        for operator in all_operators():
            since = time.monotonic()
            try:
                choices[operator.name] = operator.choice(device, check)
            except ValueError as error:
                choices[operator.name] = f"none. {str(error).splitlines()[0]}".replace(f" of {operator.name}", "")
                failed = 1
            else:
                failed |= check and device.type == "cuda" and under_conditions(operator, device)
            checked = {version: result for (where, version), result in operator.results.items() if where == device}
            failed |= any(result != "passed" for result in checked.values())
            if check and checked:  # one after the other, because a device may take minutes
                print(f"{device}: {operator.name} ({', '.join(checked)}) {time.monotonic() - since:.1f} s", flush=True)
        if check:
            print(f"{device}: checked in {time.monotonic() - started:.1f} s")
        print(f"\n{device} ({name}){'' if check else ', operators not checked (add --check)'}")
        print("\n".join(f"  {line}" for line in table(choices)))
    print("\nlibraries of AMD targets")
    print("\n".join(f"  {target}: {library_note(target)}" for target in AMD_ARCHITECTURES))
    print("\nTriton kernels of AMD targets")
    print("\n".join(f"  {target}: {objects_note(target)}" for target in AMD_ARCHITECTURES))
    print("\ncompilers")
    targets = {default_amd_target(), "cpu", *filter(None, map(target_or_none, devices()))}
    for target in sorted(targets if any(target.startswith("sm_") for target in targets) else {*targets, "sm_90"}):
        try:
            compiler = find_compiler(target)
            print(f"  {target}: {compiler.program} ({compiler.version.splitlines()[0]})")
        except CompilerNotFound as error:
            print(f"  {target}: none, {error}")
        print(f"    in the cache: {prebuilt(target) or 'no library of these sources'}")
    print(f"\ncache: {cache_folder()}")
    return failed


def under_conditions(operator: Operator, device: torch.device) -> bool:
    """Compare the versions that run under the conditions of the device and print what differs; return whether any
    does.
    """
    wrong = [result for result in conditions.check(operator, device) if result.difference]
    for name, version, condition, difference in wrong:
        print(f"{device}: {name}, version {version}, {condition}: {difference.splitlines()[0]}")
    return bool(wrong)


def scan(paths: list[Path]) -> int:
    """Print the violations; return 1 where there are any."""
    files = [file for path in paths for file in (hazards.files_in(path) if path.is_dir() else [path])]
    if not paths:
        print("Triton's caches:", *hazards.triton_folders())
        files = hazards.triton_objects()
    by_file = {file: hazards.scan(file) for file in files}
    for file, violations in by_file.items():
        for violation in violations:
            print(f"{file}: {violation}")
    print(f"{len(files)} files, {sum(map(len, by_file.values()))} violations")
    return int(any(by_file.values()))


def target_or_none(device: torch.device) -> str | None:
    try:
        return target_of(device)
    except ValueError:
        return None


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        if options.command == "build":
            print(build(options.target or default_target(), force=options.force))
            return 0
        return scan(options.paths) if options.command == "scan" else info(options.check)
    except (BuildError, CompilerNotFound, hazards.ToolNotFound, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
