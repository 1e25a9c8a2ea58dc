# SPDX-License-Identifier: Apache-2.0
"""The bank model on patterns with known answers, and its lane groups against each other."""

import numpy as np
import pytest

from tests.gfx942.lds_banks import cycles, phases

LANE = np.arange(64)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("write", [False, True])
def test_every_lane_is_in_one_phase(size, write):
    assert sorted(phases(size, write).ravel().tolist()) == list(range(64))


def test_sizes():
    with pytest.raises(ValueError, match="size=5"):
        phases(5, False)


@pytest.mark.parametrize(("size", "ideal"), [(4, 2), (8, 4), (16, 8)])
def test_consecutive_lanes_do_not_conflict(size, ideal):
    for write in (False, True):
        assert cycles(LANE * size, size, write) == (ideal, 0)


def test_broadcast_and_worst_case():
    assert cycles(np.zeros(64), 4, False) == (2, 0)
    assert cycles(LANE * 128, 4, False) == (2, 62)
    assert cycles(LANE * 128, 16, False) == (8, 56)
    assert cycles(LANE // 2 * 128, 4, False) == (2, 30)  # pairs share a dword


def test_inactive_lanes_do_not_count():
    active = LANE % 32 == 5
    assert cycles(LANE * 128, 4, False, active) == (2, 0)
    assert cycles(LANE * 128, 4, False, LANE < 2) == (1, 1)
    assert cycles(LANE * 128, 4, False, np.zeros(64, bool)) == (0, 0)


def test_reads_and_writes_of_16_bytes_group_lanes_differently():
    """Lanes 0-3 read together with 20-23 but write together with 4-7: exchange 16-19 and 20-23, and only reads
    conflict.
    """
    exchanged = np.where((LANE >= 16) & (LANE < 32), LANE ^ 4, LANE) * 16
    assert cycles(exchanged, 16, True) == (8, 0)
    assert cycles(exchanged, 16, False) == (8, 4)


def test_column_reads_of_mfma_operands():
    """A 32 x 32 bf16 tile read as b64 by 32 rows: rows of 64 bytes conflict, 8 bytes of padding cure it."""
    row, half = LANE % 32, LANE // 32
    assert cycles(row * 64 + half * 8, 8, False)[1] > 0
    assert cycles(row * 72 + half * 8, 8, False) == (4, 0)
