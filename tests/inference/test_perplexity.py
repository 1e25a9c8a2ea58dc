# SPDX-License-Identifier: Apache-2.0
"""Loss by position: which ranges are compared, their means, and what is printed."""

import numpy as np
import pytest
import torch

from zaya_plugin.config.compose import compose
from zaya_plugin.data.indexed_dataset import write_index
from zaya_plugin.data.tokenizer import train_bpe
from zaya_plugin.inference.perplexity import means, position_table, ranges, validation_tokens


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
    lines = list(position_table(result, 2, 4, better=True))
    assert lines[0] == "loss by position, nats a token, 2 sequences of 4 validation tokens"
    assert [line.split() for line in lines[1:4]] == [
        ["positions", "four", "eight"],
        ["0-1", "2.0000", "2.5000"],
        ["2-3", "7.0000", "2.5000"],
    ]
    assert lines[4] == "past 2 tokens: 2.5000 against 7.0000, below"
    assert list(position_table(result, 2, 4, better=False))[-1].endswith("NOT below")


@pytest.mark.filterwarnings("ignore::zaya_plugin.data.prepared.DatasetWarning")
def test_validation_tokens_have_their_own_width_and_are_spread_over_the_file(tmp_path):
    """They were read with the width of the training data, 0, 0, 1, 0, ..., and from the beginning alone."""
    train_bpe(["a few words"], 300, str(tmp_path / "tokenizer"))
    stored = {name: np.arange(110, dtype=dtype) for name, dtype in (("train", "int32"), ("valid", "uint16"))}
    for name, tokens in stored.items():
        tokens.tofile(tmp_path / f"{name}.bin")
        write_index(str(tmp_path / f"{name}.idx"), tokens.dtype, np.array([len(tokens)], np.int32))
    recipe = compose(
        [
            "experiment=cpu_demo",
            f"data.path={tmp_path / 'train'}",
            f"data.valid_path={tmp_path / 'valid'}",
            f"data.tokenizer={tmp_path / 'tokenizer'}",
            "stage.seq_length=4",
        ]
    )
    rows = validation_tokens(recipe, 2)
    assert rows.tolist() == [[25, 26, 27, 28, 29], [80, 81, 82, 83, 84]]
    assert validation_tokens(recipe, 100).flatten().tolist() == list(range(110))
