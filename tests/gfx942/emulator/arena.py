# SPDX-License-Identifier: Apache-2.0
"""Global memory: one growing array with guard space around every allocation, and what the counters and race checks
need.
"""

import numpy as np

from tests.gfx942.emulator.faults import GlobalRace, MisalignedAccess, OutOfBounds

BASE = 0x7F00_0000_0000
GUARD = 4096
ALIGNMENT = 256  # of hipMalloc
UNWRITTEN_BYTE = 0xFF  # alloc() fills with this: NaN in every float format, -1 in every integer format
SEGMENT = 64  # bytes of one memory transaction


class Arena:
    """Addresses are BASE + offset. `owner` holds, for every 2 bytes, 1 + the block that stored there in the current
    launch.
    """

    def __init__(self):
        self.top = GUARD
        self.starts, self.ends, self.stored_to = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool)
        self._grow(1 << 20)

    def _grow(self, size: int) -> None:
        data = np.full(size, UNWRITTEN_BYTE, np.uint8)
        if hasattr(self, "bytes"):
            data[: self.bytes.size] = self.bytes
        self.bytes, self.halves, self.words = data, data.view(np.uint16), data.view(np.uint32)

    def allocate(self, size: int) -> int:
        """-> offset of `size` bytes."""
        offset = self.top
        self.top = (offset + size + GUARD + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if self.top + GUARD > self.bytes.size:
            self._grow(max(2 * self.bytes.size, self.top + GUARD + ALIGNMENT) // 16 * 16)
        self.starts, self.ends = np.append(self.starts, offset), np.append(self.ends, offset + size)
        self.stored_to = np.append(self.stored_to, False)
        return offset

    def begin_launch(self, xcds: int) -> None:
        self.stored_to[:] = False
        self.owner = np.zeros(self.bytes.size // 2, np.uint32)
        self.loaded_by_xcd = np.zeros((xcds, self.words.size), bool)
        self.stored_words = np.zeros(self.words.size, bool)

    # Checks --------------------------------------------------------------------------------------------------------
    def offsets(self, addresses: np.ndarray, size: int, where=None) -> np.ndarray:
        """int64 offsets of uint64 addresses [n] after bounds and alignment checks; where(k) -> (row, lane) of entry
        k.
        """
        offsets = addresses.view(np.int64) - BASE
        if not offsets.size:
            return offsets
        low, high = int(offsets.min()), int(offsets.max())
        buffer = int(np.searchsorted(self.starts, low, side="right")) - 1
        if buffer < 0 or high + size > self.ends[buffer]:
            buffers = np.searchsorted(self.starts, offsets, side="right") - 1
            outside = (buffers < 0) | (offsets + size > self.ends[np.maximum(buffers, 0)])
            if outside.any():
                first = int(np.flatnonzero(outside)[0])
                raise OutOfBounds(
                    f"{size} bytes at {int(addresses[first]):#x}: {self.nearest(int(offsets[first]))}",
                    *(where(first) if where else ()),
                )
        unit = min(size, 4)
        if unit > 1 and (offsets & (unit - 1)).any():
            first = int(np.flatnonzero(offsets & (unit - 1))[0])
            raise MisalignedAccess(
                f"{size} bytes at {int(addresses[first]):#x}, not a multiple of {unit}",
                *(where(first) if where else ()),
            )
        return offsets

    def nearest(self, offset: int) -> str:
        if not self.starts.size or not -(1 << 40) < offset < 1 << 40:
            return "no allocation near"
        distance = np.maximum(np.maximum(self.starts - offset, offset - self.ends + 1), 0)
        index = int(distance.argmin())
        return (
            f"byte {offset - int(self.starts[index])} of allocation {index}, which has "
            f"{int(self.ends[index] - self.starts[index])} bytes"
        )

    def buffers_of(self, offsets: np.ndarray) -> np.ndarray:
        if not offsets.size:
            return np.zeros(0, np.int64)
        low, high = (
            int(np.searchsorted(self.starts, edge, side="right")) - 1 for edge in (offsets.min(), offsets.max())
        )
        return np.array([low]) if low == high else np.unique(np.searchsorted(self.starts, offsets, side="right") - 1)

    # Access: offsets int64 [n] -> values
    def gather(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """uint32 [registers, n]; sub-dword sizes are zero-extended."""
        if size == 1:
            return self.bytes[offsets].astype(np.uint32)[None]
        if size == 2:
            return self.halves[offsets >> 1].astype(np.uint32)[None]
        index, count = offsets >> 2, size // 4
        if count == 4 and not (offsets & 15).any():
            return self.words[: self.words.size // 4 * 4].reshape(-1, 4)[index >> 2].T
        return self.words[index[None] + np.arange(count)[:, None]]

    def scatter(self, offsets: np.ndarray, size: int, values: np.ndarray) -> None:
        """values uint32 [registers, n]; of two lanes with the same address the later one wins, as on hardware in
        practice.
        """
        if size == 1:
            self.bytes[offsets] = values[0].astype(np.uint8)
        elif size == 2:
            self.halves[offsets >> 1] = values[0].astype(np.uint16)
        else:
            index = offsets >> 2
            for part in range(size // 4):
                self.words[index + part] = values[part]

    def load_scalar(self, addresses: np.ndarray, words: int) -> np.ndarray:
        """uint32 [waves, words] for scalar loads. Bounds are those of a dword each: s_load may be widened over
        padding.
        """
        offsets = self.offsets(np.ascontiguousarray(addresses), 4 * words, where=lambda k: (k, None))
        return self.words[(offsets >> 2)[:, None] + np.arange(words)]

    # Races between blocks
    def _owners(self, offsets: np.ndarray, size: int, block: np.ndarray):
        """(owner array, stored data, indices [parts, n], tag of each entry): dwords where the access has any, else 2
        bytes.
        """
        tag = (block + 1).astype(np.uint32)
        if size < 4:
            return self.owner, self.halves, (offsets >> 1)[None], tag
        index = (offsets >> 2)[None] + np.arange(size // 4)[:, None]
        return self.owner.view(np.uint64), self.words, index, tag.astype(np.uint64) * np.uint64(0x1_0000_0001)

    def check_load(self, offsets: np.ndarray, size: int, block: np.ndarray, where) -> None:
        if not self.stored_to.any() or not self.stored_to[self.buffers_of(offsets)].any():
            return
        owners, _, index, _ = self._owners(offsets, size, block)
        found = owners[index].view(np.uint32).reshape(len(index), -1, index.dtype.itemsize // 4 if size >= 4 else 1)
        wrong = (found != 0) & (found != (block + 1)[None, :, None])
        if wrong.any():
            part, entry, half = (int(position[0]) for position in np.nonzero(wrong))
            raise GlobalRace(
                f"reads what block {int(found[part, entry, half]) - 1} stored in this launch", *where(entry)
            )

    def store(self, offsets: np.ndarray, size: int, values: np.ndarray, block: np.ndarray, where) -> None:
        """scatter, with the check that no other block has stored different bytes there, before or in this very
        instruction.
        """
        self.stored_to[self.buffers_of(offsets)] = True
        owners, data, index, tag = self._owners(offsets, size, block)
        before = owners[index]
        foreign = (before != 0) & (before != tag) if before.any() else None
        old = data[index] if foreign is not None and foreign.any() else None
        owners[index] = tag
        self.scatter(offsets, size, values)
        several = block.size and (block != block[0]).any()
        if old is None and not several:
            return
        late = owners[index] != tag  # a lane of another block came later in this instruction
        if old is not None or late.any():
            new = self._as_stored(offsets, size, values)
            clash = late & (data[index] != new)
            if old is not None:
                clash |= foreign & (old != new)
            if clash.any():
                part, entry = (int(position[0]) for position in np.nonzero(clash))
                who = before[part, entry] if old is not None and foreign[part, entry] else owners[index][part, entry]
                raise GlobalRace(
                    f"block {(int(who) & 0xFFFFFFFF or int(who) >> 32) - 1} stored another value here in this launch",
                    *where(entry),
                )

    def _as_stored(self, offsets: np.ndarray, size: int, values: np.ndarray) -> np.ndarray:
        """The values in the type of the compared units; a single byte is completed by its neighbour's present value."""
        if size >= 4:
            return values
        if size == 2:
            return values.astype(np.uint16)
        high = (offsets & 1).astype(bool)
        neighbour = self.bytes[offsets ^ 1].astype(np.uint16)
        byte = values[0].astype(np.uint8).astype(np.uint16)
        return np.where(high, neighbour | byte << 8, byte | neighbour << 8)[None]
