# SPDX-License-Identifier: Apache-2.0
"""Whole documents into bins of one length, and which positions of a bin count in the loss. Plain arithmetic.

Best-fit decreasing, as in "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830, section 3) and, for bins of
131,072 tokens, the ZAYA1-8B technical report (arXiv 2605.05365): documents in order of falling length, each into the bin
with the least room that still holds it. Ties go to the document that comes first and the bin that was opened last; nothing
depends on chance.
"""

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Packs items into bins.

    Args:
        lengths: int [items], each from 1 to `capacity`.

    Returns:
        int64 [items], the bin of each item, and the number of bins. Time grows with items, not with their square.
    """
    assert len(lengths) == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    bin_of = np.empty(len(lengths), np.int64)
    rooms: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by the room left in them
    occupied, bins = 0, 0  # bit r of `occupied`: some bin has room r
    for item in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[item])
        fitting = occupied >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = rooms[room].pop()
            if not rooms[room]:
                occupied ^= 1 << room
        else:
            room, number, bins = capacity, bins, bins + 1
        bin_of[item] = number
        left = room - length
        if left:
            if not rooms[left]:
                occupied |= 1 << left
            rooms[left].append(number)
    return bin_of, bins


def packed_loss_mask(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Positions of a bin whose next token is to be predicted, bool [s].

    What follows the end of a document is another document or filling, and what follows the last position is another bin:
    none of them can be predicted from what is seen.

    Args:
        tokens: the bin, int [s]; documents end with `eod`, and the rest of the bin is filled with it.
    """
    mask = tokens != eod
    mask[-1] = False
    return mask
