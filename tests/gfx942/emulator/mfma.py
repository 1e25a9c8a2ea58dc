# SPDX-License-Identifier: Apache-2.0
"""Matrix instructions of the shapes that bf16 and fp16 kernels use: 32x32x8 and 16x16x16, and 32x32x16 and 16x16x32 of
gfx950.

Register layout (AMD matrix instruction calculator; gem5 states the same): with lanes l and elements e of a lane's n
halves, 4 or on gfx950 8,
    A[i][k]: i = l % M, k = n * (l // M) + e          B[k][j]: j = l % M, same k
    D 32x32: i = 8 * (r // 4) + 4 * (l // 32) + r % 4, j = l % 32, registers r = 0..15
    D 16x16: i = 4 * (l // 16) + r,                   j = l % 16, registers r = 0..3
Products of halves are exact in fp64; the sum with C is rounded once to fp32. Hardware adds in an order of its own, so
results may differ by a few ulp of the largest partial sum. EXEC is ignored, as on hardware.
"""

import numpy as np

from tests.gfx942.emulator.decode import Instruction, constant_bits
from tests.gfx942.emulator.faults import UnknownInstruction
from tests.gfx942.emulator.registry import opcode_pattern


@opcode_pattern(r"v_mfma_f32_(32x32x8|16x16x16|32x32x16|16x16x32)_?(bf16|f16)(_1k)?")
def _mfma(instruction: Instruction, match):
    (size, _, depth), brain = map(int, match[1].split("x")), match[2] == "bf16"
    groups = 64 // size
    each = depth // groups  # halves of a lane
    if any(key in instruction.modifiers for key in ("cbsz", "abid", "blgp")):
        raise UnknownInstruction("MFMA with broadcast or lane-group controls")
    destination, first, second, addend = instruction.operands
    registers = size * size // 64

    def matrix(m, operand):
        """float64 [waves, size, k] of A; B has the same shape transposed."""
        words = m.bits[operand.position : operand.position + each // 2, m.rows]
        halves = np.ascontiguousarray(words.transpose(1, 2, 0)).view(np.uint16)  # [waves, lane, each]
        values = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32) if brain else halves.view(np.float16)
        spread = values.astype(np.float64).reshape(-1, groups, size, each)
        return spread.transpose(0, 2, 1, 3).reshape(-1, size, depth)

    def run(m):
        product = np.matmul(matrix(m, first), matrix(m, second).transpose(0, 2, 1))
        if size == 32:
            spread = product.reshape(-1, 4, 2, 4, 32).transpose(1, 3, 0, 2, 4).reshape(16, -1, 64)
        else:
            spread = product.reshape(-1, 4, 4, 16).transpose(2, 0, 1, 3).reshape(4, -1, 64)
        if addend.kind in "va":
            base = m.bits[addend.position : addend.position + registers, m.rows].view(np.float32)
        else:
            base = np.uint32(constant_bits(addend)).reshape(1).view(np.float32)
        m.bits[destination.position : destination.position + registers, m.rows] = (
            (spread + base).astype(np.float32).view(np.uint32)
        )

    return run
