# SPDX-License-Identifier: Apache-2.0
"""Heartbeats and the loss guard during training on an accelerator: eager steps, and steps that are one graph."""

import json

import pytest

RECIPE = (
    "cluster=gpu",
    "stage.train_iters=20",
    "optim.lr_warmup_iters=2",
    "checkpoint.save_interval=10",
    "guard.loss_spike=roll_back",
)
KINDS = {"eager": ("none", "fp32"), "graph": ("full_iteration", "bf16")}


@pytest.mark.parametrize("kind", KINDS)
def test_heartbeats_change_no_loss_and_say_what_this_rank_needed(demo, tmp_path, monkeypatch, kind):
    graphs, dtype = KINDS[kind]
    words = (*RECIPE, f"cluster.graphs={graphs}", f"cluster.dtype={dtype}")
    monkeypatch.delenv("ZAYA_AEGIS_DIR", raising=False)
    alone = demo(tmp_path / "alone", *words)
    monkeypatch.setenv("ZAYA_AEGIS_DIR", str(tmp_path / "aegis"))
    (tmp_path / "aegis").mkdir()
    watched = demo(tmp_path / "watched", *words)
    assert watched[1] == pytest.approx(alone[1], rel=1e-5) and sorted(watched) == sorted(alone) == list(range(1, 21))
    beat = json.loads((tmp_path / "aegis" / "rank0.json").read_text())
    assert (beat["phase"], beat["step"]) == ("end", 20) and beat["loss"] == pytest.approx(watched[20], rel=1e-6)
    assert beat["step_seconds"] > 0
    if kind == "graph":
        assert beat["busy_seconds"] is None  # the gradients are complete somewhere within the graph
    else:
        assert 0 < beat["busy_seconds"] < beat["step_seconds"]
