# SPDX-License-Identifier: Apache-2.0
"""Best-fit decreasing against its definition, and the loss mask of a bin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_plugin.corpus.pack import best_fit_decreasing
from zaya_plugin.data.prepared import packed_loss_mask


def by_definition(lengths, capacity):
    """Reference: compare every item with every bin."""
    bin_of, rooms, opened = [None] * len(lengths), [], []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[item]]
        if fitting:
            least = min(rooms[number] for number in fitting)
            number = max((number for number in fitting if rooms[number] == least), key=lambda number: opened[number])
        else:
            rooms.append(capacity)
            opened.append(0)
            number = len(rooms) - 1
        rooms[number] -= lengths[item]
        opened[number] = max(opened) + 1  # of bins with equal room the one that got it last
        bin_of[item] = number
    return bin_of, len(rooms)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_is_best_fit_decreasing(case):
    capacity, lengths = case
    bin_of, bins = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert (bin_of.tolist(), bins) == by_definition(lengths, capacity)
    loads = np.bincount(bin_of, lengths, minlength=bins) if lengths else np.empty(0)
    assert (loads <= capacity).all() and (loads > 0).all()


def test_fill_of_many_short_documents():
    lengths = np.random.default_rng(0).geometric(1 / 90, 20_000).clip(1, 512)
    _, bins = best_fit_decreasing(lengths, 512)
    assert bins == -(-int(lengths.sum()) // 512)  # not one bin more than the tokens need
    with pytest.raises(AssertionError):
        best_fit_decreasing(np.array([513]), 512)


def test_positions_that_predict_nothing_are_out_of_the_loss():
    assert packed_loss_mask(np.array([5, 6, 0, 7, 0, 0, 0]), 0).tolist() == [
        True,
        True,
        False,
        True,
        False,
        False,
        False,
    ]
    assert packed_loss_mask(np.array([5, 6, 7]), 0).tolist() == [True, True, False]
