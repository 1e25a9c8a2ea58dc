# SPDX-License-Identifier: Apache-2.0
"""Triton kernels as an H100 would run them, compiled without one, and how many programs a multiprocessor holds."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.gfx942.triton_objects import compiled_kernel

# of a multiprocessor of sm_90; of these the system's, a program
SHARED_MEMORY, RESERVED, REGISTERS = (233_472, 1024, 65_536)


def compiled_for_hopper(
    kernel,
    signature: Mapping[str, str],
    constexprs: Mapping[str, object],
    divisible_by_16: Sequence[str] = (),
    **options,
):
    """Triton's compiled kernel, with `asm` and `metadata`. Arguments as of triton_objects.compiled_kernel."""
    return compiled_kernel(kernel, ("cuda", 90, 32), signature, constexprs, divisible_by_16, **options)


def programs(compiled, folder: Path) -> tuple[int, int]:
    """Programs that a multiprocessor holds at a time, and bytes of a thread's stack, to which registers spill."""
    tool = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        pytest.skip("this Triton comes without cuobjdump")
    file = folder / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    told = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr).groups())
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * compiled.metadata.num_warps)
    return min(by_registers, SHARED_MEMORY // (compiled.metadata.shared + RESERVED)), stack
