# SPDX-License-Identifier: Apache-2.0
"""A million values become few points that keep every spike, and the colours can be told apart."""

from itertools import combinations

import numpy as np
import pytest

from zaya_plugin.pictures.content import BUCKETS, COLOURS, HEAT_COLUMNS, Panel, Points, heat, line, x_limits


def test_a_million_values_keep_their_spikes_and_means():
    generator = np.random.default_rng(1)
    steps, values = np.arange(1, 1_000_001), generator.normal(2.0, 0.1, 1_000_000)
    values[[17, 499_999, 999_999]] = 9.5, -3.25, 7.125
    values[[250_000, 250_001]] = np.nan, np.inf
    drawn = line("loss", steps, values, COLOURS[0])
    assert len(drawn.x) == len(drawn.low) == len(drawn.mean) == len(drawn.high) == BUCKETS and drawn.stride == 250
    for step, value in ((18, 9.5), (1_000_000, 7.125)):
        assert drawn.high[(step - 1) // 250] == value
    assert drawn.low[499_999 // 250] == -3.25
    finite = np.where(np.isfinite(values), values, np.nan).reshape(BUCKETS, 250)
    np.testing.assert_array_equal(drawn.high, np.nanmax(finite, 1))
    np.testing.assert_array_equal(drawn.low, np.nanmin(finite, 1))
    np.testing.assert_allclose(drawn.mean, np.nanmean(finite, 1), rtol=1e-12)
    np.testing.assert_array_equal(drawn.x, 250 * np.arange(BUCKETS) + 125)


def test_few_values_are_drawn_as_they_are_and_a_bucket_without_a_number_is_a_gap():
    drawn = line("loss", [1, 2, 3], [1.0, float("inf"), 3.0], COLOURS[0])
    assert drawn.stride == 1 and [*drawn.mean[[0, 2]]] == [1.0, 3.0] and np.isnan(drawn.mean[1])
    drawn = line("loss", [1, 2, 3, 4, 5], [1.0, 2.0, np.nan, np.nan, 7.0], COLOURS[0], 2)
    assert [*drawn.x, *drawn.low, *drawn.high, *drawn.mean] == [1, 4, 1.0, 7.0, 2.0, 7.0, 1.5, 7.0]
    drawn = line("loss", [1, 2, 3, 4], [np.nan, np.nan, 3.0, 4.0], COLOURS[0], 2)
    assert np.isnan([drawn.low[0], drawn.mean[0], drawn.high[0]]).all() and drawn.mean[1] == 3.5


def test_a_heat_map_has_equal_columns_with_the_highest_value_of_each():
    cells = heat([10, 20, 40], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "x")
    assert cells.x == (0, 40)
    np.testing.assert_array_equal(cells.values, [[1, 3, np.nan, 5], [2, 4, np.nan, 6]])
    values = np.random.default_rng(2).random((100_000, 3))
    cells = heat(range(10, 1_000_010, 10), values, "x")
    np.testing.assert_array_equal(cells.values, values.reshape(HEAT_COLUMNS, 250, 3).max(1).T)
    assert heat([7], [[1.0]], "x").x == (6, 7)


def test_the_ends_of_an_axis_are_those_of_all_its_panels():
    panels = [
        Panel("a", "step", [line("l", [0, 50], [1, 2], "")]),
        Panel("b", "step", [Points("r", [100], [""], [""])]),
    ]
    assert x_limits([*panels, Panel("c", "s", [])]) == {"step": (-1.5, 101.5), "s": (-0.015, 1.015)}


def linear(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, two):
    """The contrast of two colours by WCAG."""
    low, high = sorted(float(linear(each) @ (0.2126, 0.7152, 0.0722)) for each in (one, two))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("back", ["#ffffff", "#14181d"])
def test_every_colour_is_visible_on_both_backgrounds(back):
    assert all(contrast(colour, back) > 3 for colour in COLOURS)


# Machado, Oliveira and Fernandes 2009, severity 1: what is seen with protanopia and deuteranopia.
SEEN = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def lab(light):
    x, y, z = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ light.clip(
        0, 1
    )
    roots = np.cbrt(np.array([x / 0.9505, y, z / 1.089]).clip(0.008856, None))
    return np.array([116 * roots[1] - 16, 500 * (roots[0] - roots[1]), 200 * (roots[1] - roots[2])])


@pytest.mark.parametrize("kind", SEEN)
def test_the_colours_differ_for_the_colour_blind(kind):
    """Differences of CIE 1976; 2.3 is just noticeable."""
    seen = [lab(np.array(SEEN[kind]) @ linear(colour)) for colour in COLOURS]
    distances = {
        pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in combinations(range(len(seen)), 2)
    }
    assert min(distances.values()) > 15, distances
