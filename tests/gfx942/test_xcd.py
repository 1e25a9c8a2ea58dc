# SPDX-License-Identifier: Apache-2.0
"""Operand bytes of each XCD: by arithmetic, and as the emulator counts them."""

from pathlib import Path

import numpy as np
import pytest

from tests.gfx942.emulator import Device
from tests.gfx942.toolchain import code_object
from tests.gfx942.xcd import operand_bytes, saving, square_operands

KERNELS = Path(__file__).parent / "kernels" / "counters.hip"
PANEL = 1024  # bytes of 256 floats
TRIANGLE = [(i, j) for i in range(16) for j in range(i + 1)]  # 136 tiles


def contiguous(tiles, xcds=8):
    """Each XCD gets a run of neighbouring tiles: block b takes tile (b % 8) * (n / 8) + b // 8."""
    share = len(tiles) // xcds
    return [tiles[block % xcds * share + block // xcds] for block in range(len(tiles))]


def test_arithmetic():
    operands = square_operands(PANEL)
    assert operand_bytes([(0, 0), (1, 0)], operands, xcds=1) == [2 * PANEL]
    assert operand_bytes([(0, 0), (1, 0), (2, 3), None], operands, xcds=2) == [3 * PANEL, 2 * PANEL]
    assert saving([8, 8], [4, 8]) == 0.25
    with pytest.raises(ValueError, match="xcds=0"):
        operand_bytes([], operands, xcds=0)


@pytest.mark.parametrize("order", [TRIANGLE, contiguous(TRIANGLE)], ids=["as dispatched", "contiguous"])
def test_agrees_with_the_emulator(order):
    device = Device()
    x, y = device.put(np.ones((16, 256), np.float32)), device.alloc((len(order), 256), np.float32)
    counters = device.launch(
        code_object(KERNELS), "tiles", len(order), 256, [x, y, device.put(np.array(order, np.int32))]
    )
    assert counters.xcd_bytes(8) == operand_bytes(order, square_operands(PANEL))


def test_mapping_saves_bytes():
    before = operand_bytes(TRIANGLE, square_operands(PANEL))
    after = operand_bytes(contiguous(TRIANGLE), square_operands(PANEL))
    assert before == [16 * PANEL] * 8  # every XCD reads everything
    assert saving(before, after) > 0.15
