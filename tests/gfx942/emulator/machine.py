# SPDX-License-Identifier: Apache-2.0
"""State of the waves that run together: registers as numpy arrays [waves, 64 lanes], EXEC, SCC, program position."""

import numpy as np

from tests.gfx942.emulator.code_object import KernelInfo

LANES = 64
VCC, M0, EXEC = 106, 124, 126
# a signalling NaN: what is used uninitialised shows in the result as well
REGISTER_POISON, LDS_POISON = (0x7FB1_5BAD, 0xFF)


def pack_lanes(lanes: np.ndarray) -> np.ndarray:
    """bool [waves, 64] -> uint64 [waves], lane 0 in the lowest bit."""
    return np.packbits(lanes, axis=1, bitorder="little").view(np.uint64)[:, 0]


def unpack_lanes(masks: np.ndarray) -> np.ndarray:
    """uint64 [waves] -> bool [waves, 64]."""
    octets = np.ascontiguousarray(masks, dtype=np.uint64)[:, None].view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little").view(bool)


class Machine:
    """`rows` selects the waves that execute the current instruction: a slice where possible, so that reads are
    views.
    """

    def __init__(
        self, kernel: KernelInfo, blocks: np.ndarray, waves_per_block: int, memory, lds, counters, image_base: int
    ):
        waves = len(blocks) * waves_per_block
        self.kernel, self.memory, self.lds, self.counters, self.image_base = kernel, memory, lds, counters, image_base
        self.waves, self.waves_per_block = waves, waves_per_block
        self.block = np.repeat(blocks, waves_per_block)  # id in the grid
        self.block_row = np.repeat(np.arange(len(blocks)), waves_per_block)  # index among the blocks that run together
        self.wave = np.tile(np.arange(waves_per_block), len(blocks))
        self.bits = np.full((kernel.vgprs + kernel.agprs, waves, LANES), REGISTER_POISON, np.uint32)
        self.vector = [row for row in self.bits]
        self.vector_float = [row.view(np.float32) for row in self.bits]
        self.scalar = [row for row in np.full((128, waves), REGISTER_POISON, np.uint32)]
        self.scc = np.zeros(waves, bool)
        self.active = np.zeros((waves, LANES), bool)  # EXEC, unpacked
        self.full = False
        self.rows: slice | np.ndarray = slice(None)
        self.enabled = self.active
        self.jump: np.ndarray | None = None  # set by a branch: next position for every selected wave

    # Selection -----------------------------------------------------------------------------------------------------
    def select(self, indices: np.ndarray) -> None:
        """Make these waves (ascending) the ones that execute."""
        self.indices = indices
        step = int(indices[1] - indices[0]) if len(indices) > 1 else 1
        evenly = len(indices) < 3 or bool((np.diff(indices) == step).all())
        self.rows = slice(int(indices[0]), int(indices[-1]) + 1, step) if evenly else indices
        self.sliced = evenly
        self.selected = len(indices)
        self.refresh()

    def refresh(self) -> None:
        """After a change of selection or of EXEC."""
        self.enabled = self.active[self.rows]
        self.full = bool(self.enabled.all())

    def spread(self, value: np.ndarray) -> np.ndarray:
        """A value for every lane of the selected waves; np.broadcast_to costs microseconds, so it is left out where it
        does nothing.
        """
        return value if value.shape == self.enabled.shape else np.broadcast_to(value, self.enabled.shape)

    # Registers -----------------------------------------------------------------------------------------------------
    def write_vector(self, position: int, value: np.ndarray, mask: np.ndarray | None = None) -> None:
        """uint32 value to lanes of EXEC, or of `mask` where given."""
        register = self.vector[position]
        if mask is None:
            if self.full:
                register[self.rows] = value
                return
            mask = self.enabled
        if self.sliced:
            np.copyto(register[self.rows], value, where=mask)
        else:
            register[self.rows] = np.where(mask, value, register[self.rows])

    def read_scalar64(self, index: int) -> np.ndarray:
        pair = np.empty((self.selected, 2), np.uint32)
        pair[:, 0], pair[:, 1] = self.scalar[index][self.rows], self.scalar[index + 1][self.rows]
        return pair.view(np.uint64)[:, 0]

    def write_scalar(self, index: int, value) -> None:
        self.scalar[index][self.rows] = value
        if index >= EXEC:
            self._exec_written()

    def write_scalar64(self, index: int, value: np.ndarray) -> None:
        pair = np.ascontiguousarray(value).view(np.uint32).reshape(-1, 2)
        self.scalar[index][self.rows] = pair[:, 0]
        self.scalar[index + 1][self.rows] = pair[:, 1]
        if index == EXEC:
            self._exec_written()

    def _exec_written(self) -> None:
        self.active[self.rows] = unpack_lanes(self.read_scalar64(EXEC))
        self.refresh()

    def write_mask(self, index: int, lanes: np.ndarray) -> None:
        """A comparison's result: bits of inactive lanes are zero."""
        self.write_scalar64(index, pack_lanes(lanes & self.enabled))

    def read_mask(self, index: int) -> np.ndarray:
        return unpack_lanes(self.read_scalar64(index))

    def set_active(self, lanes: np.ndarray) -> None:
        """EXEC of all waves, at the start."""
        self.active[:] = lanes
        masks = pack_lanes(lanes)
        self.scalar[EXEC][:] = masks.astype(np.uint32)
        self.scalar[EXEC + 1][:] = (masks >> np.uint64(32)).astype(np.uint32)
