# SPDX-License-Identifier: Apache-2.0
"""What the hardware would move and do, counted while a kernel runs."""

from dataclasses import dataclass, field

import numpy as np

from tests.gfx942.emulator.arena import SEGMENT

XCDS = 8  # of an MI300X


@dataclass
class InstructionCount:
    text: str
    executed: int = 0  # wave instructions
    lds_bank_conflicts: int = 0  # extra LDS cycles
    transactions: int = 0  # 64-byte segments
    global_bytes: int = 0


@dataclass
class Counters:
    """Bytes are those that active lanes ask for. A transaction is a distinct 64-byte segment within one wave
    instruction.

    lds_bank_conflicts are extra LDS cycles by the model of tests/gfx942/lds_banks.py. per_pc maps the program counter
    to an InstructionCount; per_opcode counts wave instructions.
    """

    global_load_bytes: int = 0
    global_store_bytes: int = 0
    global_load_transactions: int = 0
    global_store_transactions: int = 0
    lds_bank_conflicts: int = 0
    lds_cycles: int = 0
    lds_underaligned: int = 0  # wave accesses of 8 or 16 bytes at an address that is not a multiple of their size
    barriers: int = 0
    atomics: int = 0
    scalar_load_bytes: int = 0  # s_load and s_buffer_load, a wave: not in the other global figures
    instructions: int = 0
    blocks: int = 0
    waves: int = 0
    per_pc: dict[int, InstructionCount] = field(default_factory=dict)
    per_opcode: dict[str, int] = field(default_factory=dict)

    def begin(self, memory) -> None:
        self._memory = memory

    @property
    def global_transactions(self) -> int:
        return self.global_load_transactions + self.global_store_transactions

    @property
    def mfma(self) -> int:
        return sum(count for name, count in self.per_opcode.items() if name.startswith("v_mfma"))

    @property
    def mfma_by_opcode(self) -> dict[str, int]:
        return {name: count for name, count in self.per_opcode.items() if name.startswith("v_mfma")}

    def load(self, m, offsets, size, addresses, lanes, some) -> None:
        here = self.per_pc[m.instruction.pc]
        here.global_bytes += len(offsets) * size
        self.global_load_bytes += len(offsets) * size
        segments = _segments(addresses, lanes, size, m)
        here.transactions += segments
        self.global_load_transactions += segments
        xcd = m.spread((m.block[m.rows] % len(self._memory.loaded_by_xcd))[:, None])
        xcd = xcd.ravel() if some is None else xcd[some]
        index = offsets >> 2
        for part in range(max(size // 4, 1)):
            self._memory.loaded_by_xcd[xcd, index + part] = True

    def store(self, m, offsets, size, addresses, lanes) -> None:
        here = self.per_pc[m.instruction.pc]
        here.global_bytes += len(offsets) * size
        self.global_store_bytes += len(offsets) * size
        segments = _segments(addresses, lanes, size, m)
        here.transactions += segments
        self.global_store_transactions += segments
        index = offsets >> 2
        for part in range(max(size // 4, 1)):
            self._memory.stored_words[index + part] = True

    def end(self) -> None:
        """Keep the totals, drop the maps."""
        loaded = self._memory.loaded_by_xcd
        self._xcd_words = {
            n: [int(loaded[k::n].any(axis=0).sum()) for k in range(n)] for n in (1, 2, 4, 8) if XCDS % n == 0
        }
        self.distinct_store_bytes = 4 * int(self._memory.stored_words.sum())
        del self._memory

    @property
    def distinct_load_bytes(self) -> int:
        """Bytes that were loaded at least once, in units of 4."""
        return 4 * self._xcd_words[1][0]

    def xcd_bytes(self, xcds: int = XCDS) -> list[int]:
        """Distinct bytes loaded by the blocks of each XCD when block b runs on XCD b % xcds, in units of 4 bytes."""
        if xcds not in self._xcd_words:
            raise ValueError(f"xcds={xcds}: allowed are {sorted(self._xcd_words)}")
        return [4 * words for words in self._xcd_words[xcds]]


def _segments(addresses, lanes, size, m) -> int:
    """Distinct 64-byte segments, summed over the waves."""
    first = (m.spread(addresses) // np.uint64(SEGMENT)).view(np.int64)
    last = ((m.spread(addresses) + np.uint64(size - 1)) // np.uint64(SEGMENT)).view(np.int64)
    if not lanes.all():
        some = lanes.any(axis=1)
        if not some.any():
            return 0
        # an inactive lane repeats an active one's segment
        start = lanes.argmax(axis=1)
        fill_first, fill_last = (np.take_along_axis(s, start[:, None], 1) for s in (first, last))
        first, last = np.where(lanes, first, fill_first)[some], np.where(lanes, last, fill_last)[some]
    both = first if np.array_equal(first, last) else np.concatenate([first, last], axis=1)
    steps = both[:, 1:] - both[:, :-1]
    if (steps < 0).any():
        both = np.sort(both, axis=1)
        steps = both[:, 1:] - both[:, :-1]
    return int((steps != 0).sum()) + len(both)
