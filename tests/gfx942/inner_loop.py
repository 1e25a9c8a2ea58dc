# SPDX-License-Identifier: Apache-2.0
"""Static schedule of a kernel's inner loop, from the machine code: matrix passes against other issue slots, and waits
in bad places.

Passes of 4 cycles (AMD CDNA3 ISA, "Dependency Resolution: Required Independent Instructions", and AMD's matrix
instruction calculator): v_mfma_f32_32x32x8 of bf16 and fp16 takes 8 passes, 16x16x16 takes 4. Both follow from the peak
rate: 512 dense half-precision flops a cycle and SIMD (1307 TFLOP/s / 304 CUs / 4 SIMDs / 2.1 GHz), 16384 and 8192 flops
an instruction. On gfx950 32x32x16 and 16x16x32 take as many passes for twice the flops (SISchedule.td of LLVM). Any other instruction of a wave takes one issue slot, a slot being 4 cycles as 64 lanes pass a SIMD of
16; s_nop n takes n + 1.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.gfx942.emulator.code_object import open_code_object
from tests.gfx942.emulator.decode import Instruction, disassemble
from tests.gfx942.emulator.scheduler import parse_wait
from tests.tool import require_tool

MFMA_PASSES = {"32x32x8": 8, "16x16x16": 4, "32x32x16": 8, "16x16x32": 4}
CYCLES_A_PASS = 4
LOADS = "(global|buffer)_load"


def mfma_passes(opcode: str) -> int:
    """Passes of an MFMA; ValueError for a shape that no kernel of this project uses."""
    shape = re.search(r"v_mfma_\w+?_(\d+x\d+x\d+)", opcode)
    if not shape or shape[1] not in MFMA_PASSES:
        raise ValueError(f"{opcode}: passes are known for {', '.join(MFMA_PASSES)}")
    return MFMA_PASSES[shape[1]]


@dataclass(frozen=True)
class Loop:
    """Instructions from the header to the back edge, in order of address."""

    kernel: str
    instructions: tuple[Instruction, ...]

    def named(self, pattern: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if re.match(pattern, instruction.opcode)]

    @property
    def mfma_passes(self) -> int:
        return sum(mfma_passes(instruction.opcode) for instruction in self.named("v_mfma"))

    @property
    def other_slots(self) -> int:
        """Issue slots of everything that is not an MFMA."""
        return sum(
            1 + (int(instruction.modifiers["raw"], 0) if instruction.opcode == "s_nop" else 0)
            for instruction in self.instructions
            if not instruction.opcode.startswith("v_mfma")
        )

    @property
    def passes_per_slot(self) -> float:
        return self.mfma_passes / self.other_slots

    def full_waits_after_barriers(self) -> list[str]:
        """Every s_waitcnt to vmcnt(0) or lgkmcnt(0) that lies between a barrier and the MFMA that comes next, round the
        back edge.

        lgkmcnt(0) means the same as it does in hardware: all LDS reads. Where a loop has no barrier or no MFMA the list
        is empty.
        """
        found, code = [], self.instructions
        if not self.named("v_mfma"):
            return found
        for start in (k for k, instruction in enumerate(code) if instruction.opcode == "s_barrier"):
            for step in range(1, len(code)):
                instruction = code[(start + step) % len(code)]
                if instruction.opcode.startswith("v_mfma"):
                    break
                if instruction.opcode == "s_waitcnt" and 0 in parse_wait(instruction.modifiers["raw"]):
                    found.append(f"{instruction.pc:#x}: {instruction.text}")
        return found

    def text(self) -> str:
        return "\n".join(f"{instruction.pc:#06x}  {instruction.text}" for instruction in self.instructions)


def loops(path: str | Path, kernel: str) -> list[Loop]:
    """Innermost loops: back edges with no other back edge inside."""
    if kernel not in open_code_object(path).kernels:
        raise ValueError(f"{path} has no kernel {kernel!r}")
    code = disassemble(str(path), kernel)
    position = {instruction.pc: instruction.position for instruction in code}
    edges = [
        (position[i.target], i.position)
        for i in code
        if i.target is not None and i.target in position and i.target <= i.pc
    ]
    inner = [
        (head, tail)
        for head, tail in edges
        if not any((h, t) != (head, tail) and head <= h and t <= tail and (h, t) != (head, t) for h, t in edges)
    ]
    widest = {}
    for head, tail in inner:  # several back edges to one header: the loop reaches to the last of them
        widest[head] = max(tail, widest.get(head, tail))
    return [Loop(kernel, tuple(code[head : tail + 1])) for head, tail in sorted(widest.items())]


def inner_loop(path: str | Path, kernel: str) -> Loop:
    """The innermost loop with the most MFMA passes, or the longest one where none has an MFMA. Of several with as many
    passes the one that loads most, and the shortest of those: other loops may hold a pipeline's last steps.
    """
    found = loops(path, kernel)
    if not found:
        raise ValueError(f"{kernel} has no loop")
    length = -1 if any(loop.mfma_passes for loop in found) else 1
    return max(found, key=lambda loop: (loop.mfma_passes, len(loop.named(LOADS)), length * len(loop.instructions)))


@dataclass(frozen=True)
class McaReport:
    """llvm-mca's view of one iteration, in its pass-like cycles: throughput bound by the busiest unit, and the
    simulated length.
    """

    block_throughput: float
    cycles_an_iteration: float


def machine_code_analysis(loop: Loop, iterations: int = 50) -> McaReport:
    """llvm-mca on the loop body without its branches and waits. It models issue and the matrix pipe, no memory: a
    bound, not a timing.
    """
    body = "\n".join(
        instruction.text
        for instruction in loop.instructions
        if not re.match(r"s_c?branch|s_waitcnt|s_barrier", instruction.opcode)
    )
    done = subprocess.run(
        [
            require_tool("llvm-mca-19"),
            "-mtriple=amdgcn",
            "-mcpu=gfx942",
            f"-iterations={iterations}",
            "-instruction-info=0",
            "-resource-pressure=0",
        ],
        input=body,
        capture_output=True,
        text=True,
    )
    throughput = re.search(r"Block RThroughput:\s+([\d.]+)", done.stdout)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode != 0 or not throughput or not total:
        raise RuntimeError(f"llvm-mca on {loop.kernel}: {done.stderr[-2000:]}")
    return McaReport(float(throughput[1]), int(total[1]) / iterations)
