# SPDX-License-Identifier: Apache-2.0
"""Wait states between a store of more than 8 bytes and a VALU instruction that writes its data registers.

The emulator's store is done at once, so only this check notices that hardware would store what was written too early.
The distances are those of hip_ops/runtime/hazards.py, which checks all paths without running them.
"""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import MissingWaitStates


class WideStores:
    """The last wide stores of every wave, and the wait states that each wave has spent since."""

    def __init__(self, waves: int):
        self.waves = waves
        # position -> the store, its data registers, and by wave the wait states that are still needed
        self.recent: dict[int, tuple[Instruction, int, np.ndarray]] = {}

    def issue(self, instruction: Instruction, rows) -> None:
        mask, distance = instruction.hazard.stored
        if instruction.position not in self.recent:
            self.recent[instruction.position] = (instruction, mask, np.zeros(self.waves, np.int64))
        self.recent[instruction.position][2][rows] = distance

    def step(self, instruction: Instruction, rows) -> None:
        """Checks an instruction that follows and counts its wait states."""
        writes = instruction.hazard.writes if instruction.hazard.valu else 0
        for position, (store, mask, needed) in list(self.recent.items()):
            late = needed[rows] > 0
            if writes & mask and late.any():
                row = int(np.flatnonzero(late)[0])
                raise MissingWaitStates(
                    f"data of `{store.text}` is overwritten {needed[rows][row]} wait states too early", row
                )
            needed[rows] -= instruction.hazard.wait_states
            if not (needed > 0).any():
                del self.recent[position]
