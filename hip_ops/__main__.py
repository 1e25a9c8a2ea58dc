# SPDX-License-Identifier: Apache-2.0
"""`python -m hip_ops build` builds the kernels ahead of their first use; `python -m hip_ops info` tells what runs where and why."""

import argparse
import logging
import sys

import torch

from hip_ops import backend
from hip_ops.build import BuildError, build, prebuilt
from hip_ops.cache import cache_folder
from hip_ops.compilers import CompilerNotFound, check_target, default_amd_target, find_compiler
from hip_ops.library import default_target, target_of
from hip_ops.operator import warm_up

ENVIRONMENT = """\
environment:
  HIP_OPS_BACKEND    auto (default), hip, triton or torch; one that cannot be had is an error
  HIP_OPS_CACHE      where libraries are kept (default: ~/.cache/hip_ops)
  HIP_OPS_ARCH       AMD architecture to build for where there is no GPU; else PYTORCH_ROCM_ARCH, else gfx942
  ROCM_PATH, CUDA_HOME   where hipcc and nvcc are looked for before PATH
  HO_CPU_SCHEDULE    order of the threads in the cpu library: forward (default), reverse, random:<seed>
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m hip_ops",
        description=__doc__,
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="{build,info}")
    builder = commands.add_parser(
        "build",
        help="build the kernels into the cache, and print the library's path",
        description="Builds the kernels for one target into the cache and prints the path of the library. Does nothing where it is there.",
    )
    builder.add_argument(
        "--target",
        type=check_target_argument,
        help="gfx942, sm_90, cpu, ... (default: this machine's GPU, else HIP_OPS_ARCH or gfx942)",
    )
    builder.add_argument("--force", action="store_true", help="build although the library is in the cache")
    teller = commands.add_parser(
        "info",
        help="the backend of every device and why, compilers, cache",
        description="Tells for every device which backend is active and why, which compilers were found, and where the cache is.",
    )
    teller.add_argument(
        "--check",
        action="store_true",
        help="also compare every operator with torch on every device; builds the kernels where hip is active",
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
    """Prints to stdout; returns 1 where an operator failed its check or a backend cannot be had."""
    kind = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU only"
    )
    print(f"torch {torch.__version__} ({kind}), backend requested: {' '.join(dict.fromkeys(backend.requested()))}")
    failed = 0
    for device in devices():
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        try:
            choice = backend.choose(device)
            print(f"\n{device} ({name}): {choice.backend}\n  why: {choice.reason}")
        except ValueError as error:
            print(f"\n{device} ({name}): none\n  why: {error}")
            failed = 1
            continue
        if not check:
            print("  operators: not checked (add --check)")
            continue
        try:
            results = warm_up(device)
        except ValueError as error:
            print(f"  operators: {error}")
            failed = 1
            continue
        for operator, result in results.items():
            passed = result in ("passed", "torch") or result == f"no {choice.backend} version"
            failed |= not passed
            print(
                f"  {operator}: "
                + {
                    "passed": "agrees with torch",
                    "torch": "torch itself",
                    f"no {choice.backend} version": f"has no {choice.backend} version",
                }.get(result, f"FAILED, torch runs instead. {result}")
            )
    print("\ncompilers")
    gpu_targets = {target for target in map(target_or_none, devices()) if target and target != "cpu"}
    for target in sorted(
        gpu_targets
        | {default_amd_target(), "cpu"}
        | (set() if any(t.startswith("sm_") for t in gpu_targets) else {"sm_90"})
    ):
        try:
            compiler = find_compiler(target)
            print(f"  {target}: {compiler.program} ({compiler.version.splitlines()[0]})")
        except CompilerNotFound as error:
            print(f"  {target}: none, {error}")
        print(f"    in the cache: {prebuilt(target) or 'no library of these sources'}")
    print(f"\ncache: {cache_folder()}")
    return failed


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
        return info(options.check)
    except (BuildError, CompilerNotFound, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
