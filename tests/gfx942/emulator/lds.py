# SPDX-License-Identifier: Apache-2.0
"""LDS contents of the blocks that run together, with what has been written, and who touched what since the last
barrier.
"""

import numpy as np

from tests.gfx942.emulator.faults import LdsRace, MisalignedAccess, OutOfBounds, UninitialisedLds
from tests.gfx942.lds_banks import cached_cycles

U16, U32, U64 = np.uint16, np.uint32, np.uint64
_ALL_VALID = U32(0x01010101)
_FOUR = U64(0x0001_0001_0001_0001)  # one wave's bit for each of four bytes


class Lds:
    """`writers` and `readers` hold 16 bits a byte, one for each wave of a block (at most 16), cleared at every barrier.

    A conflict of two waves within an epoch is detected whichever of them runs first, hence under every schedule.
    """

    def __init__(self, blocks: int, size: int, waves_per_block: int):
        self.size, self.stride = size, (size + 15) // 16 * 16 + 16
        self.track = waves_per_block > 1
        self.bytes = np.full(blocks * self.stride, 0xA5, np.uint8)
        self.halves, self.words = self.bytes.view(U16), self.bytes.view(U32)
        self.valid = np.zeros(blocks * self.stride, np.uint8)
        self.valid_words = self.valid.view(U32)
        self.writers = np.zeros(blocks * self.stride, U16)
        self.readers = np.zeros(blocks * self.stride, U16)
        self.writer_words, self.reader_words = self.writers.view(U64), self.readers.view(U64)

    def end_epoch(self, block_rows: np.ndarray) -> None:
        """A barrier of these blocks: what was done before is ordered before what follows."""
        if self.track:
            self.writers.reshape(-1, self.stride)[block_rows] = 0
            self.readers.reshape(-1, self.stride)[block_rows] = 0

    # Addresses -----------------------------------------------------------------------------------------------------
    def _positions(self, m, address, size, lanes):
        """Compacted byte positions in the flat arrays, and the wave bit of each."""
        chosen = address[lanes]
        if chosen.size:
            high = int(chosen.max())
            if high + size > self.size:
                row, lane = (int(index[0]) for index in np.nonzero(lanes & (address + size > self.size)))
                raise OutOfBounds(
                    f"LDS: {size} bytes at {int(address[row, lane])}, the block has {self.size}", row, lane
                )
            unit = min(size, 4)
            if unit > 1 and (chosen & (unit - 1)).any():
                row, lane = (int(index[0]) for index in np.nonzero(lanes & ((address & (unit - 1)) != 0)))
                raise MisalignedAccess(
                    f"LDS: {size} bytes at {int(address[row, lane])}, not a multiple of {unit}", row, lane
                )
            if size > unit and (chosen & (min(size, 16) - 1)).any() and size != 12:
                m.counters.lds_underaligned += 1
        block = m.spread(m.block_row[m.rows][:, None])[lanes]
        return block * self.stride + chosen

    def _wave_bits(self, m, lanes):
        return m.spread((U16(1) << m.wave[m.rows].astype(U16))[:, None])[lanes]

    def _count(self, m, address, size, write, lanes) -> None:
        """Bank cycles of every wave; waves with equal rows are looked up once."""
        here = m.counters.per_pc[m.instruction.pc]
        rows, row_lanes = np.ascontiguousarray(address, U32), np.ascontiguousarray(lanes)
        repeat = 1
        wpb = m.waves_per_block
        if m.selected % wpb == 0 and m.selected > wpb:
            grouped = rows.reshape(-1, wpb, 64)
            if (grouped == grouped[0]).all() and (row_lanes.reshape(-1, wpb, 64) == row_lanes[:wpb]).all():
                repeat, rows, row_lanes = m.selected // wpb, rows[:wpb], row_lanes[:wpb]
        ideal = extra = 0
        for row, active in zip(rows, row_lanes, strict=True):
            one = cached_cycles(row.tobytes(), active.tobytes(), size, write)
            ideal, extra = ideal + one[0], extra + one[1]
        m.counters.lds_cycles += (ideal + extra) * repeat
        m.counters.lds_bank_conflicts += extra * repeat
        here.lds_bank_conflicts += extra * repeat

    # Access --------------------------------------------------------------------------------------------------------
    def read(self, m, address: np.ndarray, size: int, lanes: np.ndarray) -> list[np.ndarray]:
        """int64 addresses [waves, 64] -> one uint32 [waves, 64] a register; inactive lanes give 0."""
        position = self._positions(m, address, size, lanes)
        self._count(m, address, size, False, lanes)
        if size >= 4:
            index = (position >> 2)[None] + np.arange(size // 4)[:, None]
            if (self.valid_words[index] != _ALL_VALID).any():
                self._uninitialised(address, lanes, (self.valid_words[index] != _ALL_VALID).any(axis=0))
            if self.track:
                self._mark_read(m, lanes, index, self.writer_words, self.reader_words, _FOUR, address)
            values = self.words[index]
        else:
            index = position[None] + np.arange(size)[:, None]
            if not self.valid[index].all():
                self._uninitialised(address, lanes, ~self.valid[index].all(axis=0))
            if self.track:
                self._mark_read(m, lanes, index, self.writers, self.readers, U16(1), address)
            values = (self.bytes[position] if size == 1 else self.halves[position >> 1]).astype(U32)[None]
        if lanes.all():
            return [value.reshape(m.enabled.shape) for value in values]
        results = np.zeros((len(values), *m.enabled.shape), U32)
        results[:, lanes] = values
        return list(results)

    def write(self, m, address: np.ndarray, size: int, lanes: np.ndarray, values: np.ndarray) -> None:
        """values uint32 [registers, waves, 64]."""
        position = self._positions(m, address, size, lanes)
        self._count(m, address, size, True, lanes)
        chosen = values.reshape(len(values), -1) if lanes.all() else values[:, lanes]
        if size >= 4:
            index, data, valid = (position >> 2)[None] + np.arange(size // 4)[:, None], self.words, self.valid_words
            writers, readers, spread, all_valid = self.writer_words, self.reader_words, _FOUR, _ALL_VALID
        else:
            index, data, valid = position[None] + np.arange(size)[:, None], self.bytes, self.valid
            writers, readers, spread, all_valid = self.writers, self.readers, U16(1), np.uint8(1)
            chosen = np.concatenate([(chosen >> U32(8 * byte)).astype(np.uint8) for byte in range(size)])
        if self.track:
            own = self._wave_bits(m, lanes).astype(spread.dtype) * spread
            self._check_write(m, lanes, index, own, chosen, data, writers, readers, address)
        data[index] = chosen
        valid[index] = all_valid
        if self.track:
            for select, bit in self._each_wave(m, own):
                writers[select(index)] |= bit
            clash = (writers[index] & ~own) * (data[index] != chosen)
            if clash.any():
                self._race("writes what another wave wrote", m, lanes, clash, address)

    def atomic(self, m, address: np.ndarray, value: np.ndarray, operate, kind) -> np.ndarray:
        """32-bit read-modify-write, lane after lane; -> the values before."""
        lanes = m.enabled
        position = self._positions(m, address, 4, lanes) >> 2
        if (self.valid_words[position] != _ALL_VALID).any():
            self._uninitialised(address, lanes, self.valid_words[position] != _ALL_VALID)
        words, before = self.words.view(kind), np.empty(len(position), U32)
        for k, (index, operand) in enumerate(zip(position, value[lanes].view(kind), strict=True)):
            before[k] = self.words[index]
            words[index] = operate(words[index], operand)
        result = np.zeros(lanes.shape, U32)
        result[lanes] = before
        return result

    # Checks --------------------------------------------------------------------------------------------------------
    def _mark_read(self, m, lanes, index, writers, readers, spread, address) -> None:
        own = self._wave_bits(m, lanes).astype(spread.dtype) * spread
        written = writers[index]
        if written.any():
            clash = written & ~own
            if clash.any():
                self._race("reads what another wave wrote", m, lanes, clash, address)
        for select, bit in self._each_wave(m, own):
            readers[select(index)] |= bit

    def _check_write(self, m, lanes, index, own, chosen, data, writers, readers, address) -> None:
        """Against what came before in this epoch. Two waves may write the same value to one place: compilers replicate
        data so.
        """
        clash = readers[index] & ~own
        if clash.any():
            self._race("writes what another wave read", m, lanes, clash, address)
        clash = writers[index] & ~own
        if clash.any():
            clash = clash * (data[index] != chosen)
            if clash.any():
                self._race("writes what another wave wrote", m, lanes, clash, address)

    def _each_wave(self, m, own):
        """(selector of the entries of one wave of every block, its bits): entries of one wave may repeat, those of two
        may not.
        """
        waves = set(m.wave[m.rows].tolist())
        spread = own.dtype.type(_FOUR if own.dtype == U64 else 1)
        if len(waves) == 1:
            yield (lambda index: index), own.dtype.type(1 << waves.pop()) * spread
            return
        for wave in waves:
            bit = own.dtype.type(1 << wave) * spread
            members = own == bit
            yield (lambda index, members=members: index[:, members]), bit

    def _race(self, what, m, lanes, clash, address) -> None:
        """The first lane with a clash, and the lowest of the other waves."""
        entry = int(np.flatnonzero(clash.any(axis=0))[0])
        row, lane = (int(index[entry]) for index in np.nonzero(lanes))
        bits = int(clash[:, entry].max())
        others = [wave for wave in range(16) if any(bits >> (16 * byte) >> wave & 1 for byte in range(4))]
        raise LdsRace(
            f"{what} (waves {others}) at LDS byte {int(address[row, lane])}, no barrier in between", row, lane
        )

    def _uninitialised(self, address, lanes, bad) -> None:
        entry = int(np.flatnonzero(bad)[0])
        row, lane = (int(index[entry]) for index in np.nonzero(lanes))
        raise UninitialisedLds(f"LDS at byte {int(address[row, lane])} was never written", row, lane)
