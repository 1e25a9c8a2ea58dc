# SPDX-License-Identifier: Apache-2.0
"""Which lane a lane reads from: DPP controls and ds_swizzle patterns (CDNA3 ISA, "Data Parallel Processing" and
DS_SWIZZLE_B32).
"""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.faults import UnknownInstruction

_LANE = np.arange(64)
_ROW, _IN_ROW = _LANE // 16 * 16, _LANE % 16


def dpp_lanes(instruction: Instruction) -> tuple[np.ndarray, np.ndarray]:
    """Source lane for every lane, and whether it lies inside the row or wave."""
    modifiers, always = instruction.modifiers, np.ones(64, bool)
    control = next((key for key in modifiers if key in _CONTROLS), None)
    if control is None:
        raise UnknownInstruction(f"DPP control {modifiers}")
    source, valid = _CONTROLS[control](modifiers[control])
    return np.clip(source, 0, 63), np.broadcast_to(valid, always.shape)


def _quad_permute(text: str):
    return _LANE // 4 * 4 + np.array([int(n) for n in text.strip("[]").split(",")])[_LANE % 4], True


def _broadcast_previous(text: str):
    """row_bcast:15: the last lane of a row goes to the next row; row_bcast:31: lane 31 to the two upper rows."""
    return (_ROW - 1, _ROW > 0) if int(text) == 15 else (np.full(64, 31), _LANE >= 32)


_CONTROLS = {
    "quad_perm": _quad_permute,
    "row_shl": lambda n: (_LANE + int(n), _IN_ROW + int(n) < 16),
    "row_shr": lambda n: (_LANE - int(n), _IN_ROW >= int(n)),
    "row_ror": lambda n: (_ROW + (_IN_ROW - int(n)) % 16, True),
    "row_mirror": lambda _: (_ROW + 15 - _IN_ROW, True),
    "row_half_mirror": lambda _: (_LANE // 8 * 8 + 7 - _LANE % 8, True),
    "row_bcast": _broadcast_previous,
    "row_newbcast": lambda n: (_ROW + int(n), True),
    "wave_shl": lambda _: (_LANE + 1, _LANE < 63),
    "wave_shr": lambda _: (_LANE - 1, _LANE > 0),
    "wave_rol": lambda _: ((_LANE + 1) % 64, True),
    "wave_ror": lambda _: ((_LANE - 1) % 64, True),
}


def swizzle_lanes(pattern: str) -> np.ndarray:
    """ds_swizzle_b32 as llvm-objdump prints its offset: swizzle(MODE,...) or a number."""
    if pattern.startswith("swizzle("):
        mode, *rest = [part.strip(' "') for part in pattern[len("swizzle(") : -1].split(",")]
        if mode == "QUAD_PERM":
            return _LANE // 4 * 4 + np.array([int(n) for n in rest])[_LANE % 4]
        if mode == "BROADCAST":
            group, lane = (int(n) for n in rest)
            return _LANE // group * group + lane
        if mode == "SWAP":
            return _LANE ^ int(rest[0])
        if mode == "REVERSE":
            group = int(rest[0])
            return _LANE // group * group + group - 1 - _LANE % group
        if mode == "BITMASK_PERM":
            source = np.zeros(64, int)
            for bit, character in zip((16, 8, 4, 2, 1), rest[0], strict=True):
                own = _LANE & bit
                source |= {"0": 0 * own, "1": 0 * own + bit, "p": own, "i": own ^ bit}[character]
            return _LANE // 32 * 32 + source
        raise UnknownInstruction(f"ds_swizzle {pattern}")
    offset = int(pattern, 0)
    if offset & 0x8000:
        return _LANE // 4 * 4 + np.array([offset >> (2 * k) & 3 for k in range(4)])[_LANE % 4]
    and_mask, or_mask, xor_mask = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    return _LANE // 32 * 32 + (((_LANE % 32 & and_mask) | or_mask) ^ xor_mask)
