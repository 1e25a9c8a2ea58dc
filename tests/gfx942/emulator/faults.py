# SPDX-License-Identifier: Apache-2.0
"""What a kernel can do wrong. Every fault says where: kernel, pc, instruction, block, wave of the block, lane."""


class EmulatorFault(RuntimeError):
    """Raised by an instruction with the row (index among the selected waves) and lane; the scheduler adds the place."""

    def __init__(self, what: str, row: int | None = None, lane: int | None = None):
        super().__init__(what)
        self.what = what
        self.row = row  # index into the waves that execute the instruction
        self.lane = lane
        self.kernel: str | None = None
        self.pc: int | None = None
        self.instruction: str | None = None
        self.block: int | None = None
        self.wave: int | None = None

    def __str__(self) -> str:
        place = [f"kernel {self.kernel}"] if self.kernel else []
        if self.pc is not None:
            place.append(f"pc {self.pc:#x} `{self.instruction}`")
        for name in ("block", "wave", "lane"):
            value = getattr(self, name)
            if value is not None:
                place.append(f"{name} {value}")
        return f"{type(self).__name__}: {self.what}" + (f" ({', '.join(place)})" if place else "")


class OutOfBounds(EmulatorFault):
    """Global or LDS access outside every allocation, or a register that the kernel did not allocate."""


class MisalignedAccess(EmulatorFault):
    """Address not a multiple of min(access size, 4)."""


class UninitialisedLds(EmulatorFault):
    """LDS byte read that no wave of the block has written."""


class UninitialisedRegister(EmulatorFault):
    """Register read that this wave has never written."""


class BarrierMismatch(EmulatorFault):
    """Waves of one block wait at different barriers (if the device does not allow it), or some ended while others
    wait.
    """


class LdsRace(EmulatorFault):
    """Two waves touch the same LDS byte, one of them writing, with no barrier in between; two equal writes are let
    pass.
    """


class GlobalRace(EmulatorFault):
    """Two blocks touch the same global byte in one launch: both write different values, or one reads what another
    wrote.
    """


class MissingWait(EmulatorFault):
    """A register is used while the load that fills it may still be outstanding, or LDS writes are outstanding at a
    barrier.
    """


class MissingWaitStates(EmulatorFault):
    """A VALU instruction overwrites the data of a wide store before hardware has read it."""


class UnknownInstruction(EmulatorFault):
    """The emulator has no semantics for this instruction, modifier or mode."""


class ScratchAccess(EmulatorFault):
    """The kernel needs scratch memory: registers spill or an array is indexed dynamically."""


class NotTerminating(EmulatorFault):
    """More instructions than the launch's limit."""
