# SPDX-License-Identifier: Apache-2.0
"""Test that tuning some shapes of the experts' products keeps the table's other rows."""

import sys

import pytest

pytest.importorskip("triton")


@pytest.fixture
def tune(script):
    return script("tune_grouped_product")


def test_rows_that_were_not_measured_stay(tune):
    before = tune.read_table()["sm_90"]["rows"]
    config = tune.GroupedConfig(block_m=64)
    rows = [
        {"kind": "outer", "rows": 16384 // tune.EXPERTS, "k": k, "n": 2048, "config": config, "ms": 1.0}
        for k in (4096, 2048)
    ]
    after = tune.updated(before, rows)
    assert len(after) == len(before) and [row for row in after if row["config"] == config] == rows
    changed = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new]
    assert [(before[i]["kind"], before[i]["rows"], before[i]["k"]) for i in changed] == [
        ("outer", 1024, 4096),
        ("outer", 1024, 2048),
    ]


def test_rows_of_a_new_shape_come_last(tune):
    row = {"kind": "rows", "rows": 3, "k": 5, "n": 7, "config": tune.GroupedConfig(), "ms": 1.0}
    assert tune.updated([], [row]) == [row]
    assert tune.updated(tune.read_table()["sm_90"]["rows"], [row])[-1] is row


def test_only_takes_shapes_that_there_are(tune, monkeypatch, capsys):
    assert tune.NAMES == ("outer:32768", "rows_t:32768", "rows:32768", "outer:16384", "rows_t:16384", "rows:16384")
    monkeypatch.setattr(sys, "argv", ["tune_grouped_product.py", "--only", "outer:16383"])
    with pytest.raises(SystemExit):
        tune.main()
    assert "'outer:16383' (choose from" in capsys.readouterr().err
