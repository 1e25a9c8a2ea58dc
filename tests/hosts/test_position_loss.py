# SPDX-License-Identifier: Apache-2.0
"""Loss by position: which ranges are compared, their means, and what is printed."""

import pytest
import torch

from zaya_plugin.hosts.position_loss import means, ranges, table


@pytest.mark.parametrize(
    ("short", "long", "expected"),
    [
        (128, 1024, [(0, 128), (128, 256), (256, 512), (512, 1024)]),
        (100, 250, [(0, 100), (100, 200), (200, 250)]),
        (64, 64, [(0, 64)]),
    ],
)
def test_ranges_double_up_to_the_longer_context(short, long, expected):
    assert ranges(short, long) == expected


def test_means_and_lines():
    by_position = [torch.tensor([[1.0, 2.0, 9.0, 7.0], [3.0, 2.0, 5.0, 7.0]]), torch.full((2, 4), 2.5)]
    rows = [(start, end, *means(by_position, start, end)) for start, end in ranges(2, 4)]
    assert rows == [(0, 2, 2.0, 2.5), (2, 4, 7.0, 2.5)]
    result = {"sequences": 2, "stages": ["four", "eight"], "rows": rows, "beyond": [7.0, 2.5]}
    lines = list(table(result, 2, 4, better=True))
    assert lines[0] == "loss by position, nats a token, 2 sequences of 4 validation tokens"
    assert [line.split() for line in lines[1:4]] == [
        ["positions", "four", "eight"],
        ["0-1", "2.0000", "2.5000"],
        ["2-3", "7.0000", "2.5000"],
    ]
    assert lines[4] == "past 2 tokens: 2.5000 against 7.0000, below"
    assert list(table(result, 2, 4, better=False))[-1].endswith("NOT below")
