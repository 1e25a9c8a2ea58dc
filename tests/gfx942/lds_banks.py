# SPDX-License-Identifier: Apache-2.0
"""LDS bank model of CDNA3 (MI300X, gfx942): 32 banks of 4 bytes, bank = (byte address / 4) % 32.

A wave instruction is served in phases. Lanes of one phase access LDS together; a phase takes as many cycles as the most
loaded bank has distinct dwords, and lanes that ask for the same dword share it (broadcast). Conflicts are the cycles
above one a phase.

    access                 phases
    b32 and narrower       2:  lanes 0-31, 32-63
    b64                    4:  0-15, 16-31, 32-47, 48-63
    read  b128 (and b96)   8:  0-3+20-23, 32-35+52-55, 4-7+16-19, 36-39+48-51, 8-11+28-31, 40-43+60-63, 12-15+24-27,
                               44-47+56-59
    write b128 (and b96)   8:  0-7, 8-15, 16-23, ... 56-63
    read2, write2          two accesses, one after the other

Sources: AMDGPU Kernel Optimization Guide (nod-ai/amd-shark-ai, docs/amdgpu_kernel_optimization_guide.md, "Avoiding LDS
Bank Conflicts, MI300"), whose read phases were confirmed by latency measurements on an MI300X (same repository,
docs/empirical-lds/lds_summary.md); the same b128 read phases stand in Triton's AMD back end (triton-lang/triton pull
request 11365); the write phases also stand in the Composable Kernel documentation ("Understanding AMD GPU LDS and Bank
Conflicts"). rocprof's SQ_LDS_BANK_CONFLICT counts stalled cycles of this kind.

Not certain: phases of b96 (taken as b128's), and of write_b64 (taken as read_b64's: no source measured it); two lanes
that write different bytes of one dword (taken as no conflict, the banks have byte enables); how two waves' accesses
interleave in the shared crossbar (each instruction is counted alone). Where access is not aligned to its size hardware
may split it; this model does not.
"""

from functools import lru_cache

import numpy as np

BANKS = 32
BANK_BYTES = 4
_READ_B128 = [
    [*range(a, a + 4), *range(b, b + 4)]
    for a, b in ((0, 20), (32, 52), (4, 16), (36, 48), (8, 28), (40, 60), (12, 24), (44, 56))
]


def phases(size: int, write: bool) -> np.ndarray:
    """Lanes of every phase, [phases, lanes a phase], for an access of `size` bytes a lane."""
    if size <= 4:
        return np.arange(64).reshape(2, 32)
    if size == 8:
        return np.arange(64).reshape(4, 16)
    if size in (12, 16):
        return np.arange(64).reshape(8, 8) if write else np.array(_READ_B128)
    raise ValueError(f"size={size}: LDS accesses have 1, 2, 4, 8, 12 or 16 bytes a lane")


def cycles(addresses, size: int, write: bool, active=None) -> tuple[int, int]:
    """(cycles without conflicts, extra cycles) of one wave access; byte addresses [64], active lanes bool [64]."""
    addresses = np.asarray(addresses, np.int64)
    active = np.ones(64, bool) if active is None else np.asarray(active, bool)
    ideal = extra = 0
    for lanes in phases(size, write):
        chosen = addresses[lanes[active[lanes]]]
        if not chosen.size:
            continue
        dwords = np.unique(chosen[:, None] // BANK_BYTES + np.arange(max(size // BANK_BYTES, 1)))
        ideal += 1
        extra += int(np.bincount(dwords % BANKS).max()) - 1
    return ideal, extra


@lru_cache(maxsize=1 << 16)
def cached_cycles(addresses: bytes, active: bytes, size: int, write: bool) -> tuple[int, int]:
    """`cycles` for uint32 addresses and bool lanes given as bytes: kernels repeat the same few patterns."""
    return cycles(np.frombuffer(addresses, np.uint32), size, write, np.frombuffer(active, bool))
