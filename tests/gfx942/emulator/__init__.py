# SPDX-License-Identifier: Apache-2.0
"""Runs compiled gfx942 code objects on the CPU, byte for byte as the compiler made them, and faults on what hardware
would let pass.

    device = Device(schedule="serial")
    x, y = device.put(array), device.alloc(array.shape, array.dtype)
    counters = device.launch(path, "kernel_name", grid=(8, 1, 1), block=(256, 1, 1), args=[x, y, np.int32(n)])
    y.read()

Modelled: values of the integer, fp32, fp16 and fp64 instructions that clang and Triton emit, bf16 and fp16 MFMA of
32x32x8 and 16x16x16, DPP, SDWA, EXEC, LDS, barriers, three schedules; bounds, alignment, uninitialised LDS and
registers, races of waves in LDS and of blocks in global memory, missing s_waitcnt and wait states behind wide
stores; bytes, transactions, LDS bank conflicts.

Not modelled: time, clocks and caches; memory ordering between blocks, and between waves of a block through global
memory; read-then-write races of blocks (a block that stores where another block has only read); scratch; calls; images;
MFMA with broadcast, other shapes and types; wait states but those behind wide stores (tests/gfx942/wait_states.py checks
them in the code, on all paths); exceptions; rounding modes other than nearest even and flushed denormals; floating point
atomics' order (lane after lane in the emulator). MFMA sums in fp64 and rounds once where hardware rounds between; rcp,
rsq, sqrt, exp, log, sin and cos are rounded correctly where hardware may be 1 ulp off. Two threads of one wave that
race are not noticed, nor is a pair of waves that race through global memory, nor a scalar load of what another block
stores. Uninitialised registers are known a wave, not a lane; uninitialised global memory is only poisoned (NaN). The
faults are in tests/gfx942/emulator/faults.py.
"""

from tests.gfx942.emulator.counters import Counters, InstructionCount
from tests.gfx942.emulator.device import Buffer, Device
from tests.gfx942.emulator.faults import EmulatorFault
from tests.gfx942.emulator.scheduler import SCHEDULES

__all__ = ["SCHEDULES", "Buffer", "Counters", "Device", "EmulatorFault", "InstructionCount"]
