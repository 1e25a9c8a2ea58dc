# SPDX-License-Identifier: Apache-2.0
"""Test `zaya bench data`: the figures of a rank, and the loader of the training on two ranks."""

import json

import pytest

from tests.running import MICRO, zaya
from zaya_plugin.bench.data_rank import row_of


def test_the_first_batch_is_apart_from_the_rate():
    row = row_of(3, [10.0, 12.0, 12.5, 13.0, 14.0], of_step=4, tokens=64)
    assert (row["rank"], row["batches"], row["first_ms"], row["p50_ms"], row["max_ms"]) == (3, 3, 2000, 500, 1000)
    assert row["batches_per_s"] == pytest.approx(1.5) and row["tokens_per_s"] == pytest.approx(96)
    assert row["step_ms"] == pytest.approx(4000 / 1.5)


@pytest.mark.slow
def test_two_ranks_read_with_their_workers(tmp_path, corpus):
    words = [word for word in MICRO if not word.startswith("stage.eval")]
    done = zaya(
        *("bench", "data", *words, "nproc=2", f"data.path={corpus}", "data.num_workers=1", "stage.eval_iters=0"),
        *("--batches=12", f"--output={tmp_path}"),
    )
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "data.json").read_text())
    assert record["schema"] == "zaya bench data/1" and record["num_workers"] == 1
    for rank, row in enumerate(record["rows"]):  # a step has 8 sequences, a micro-batch 2
        assert (row["rank"], row["batches"], row["batches_of_a_step"]) == (rank, 12, 2)
        assert row["tokens_per_s"] == pytest.approx(64 * row["batches_per_s"])
    assert "The data of a step takes" in done.stdout and (tmp_path / "data.png").is_file()
    done = zaya("bench", "data", *words, "nproc=2", "data.path=nowhere", f"--output={tmp_path / 'none'}")
    assert done.returncode == 2 and "data.path=nowhere" in done.stdout
