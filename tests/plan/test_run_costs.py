# SPDX-License-Identifier: Apache-2.0
"""Test what a stage and a curriculum cost: hours, checkpoints, storage, failures."""

import json
from dataclasses import replace

import pytest

from zaya_plugin import cli
from zaya_plugin.commands.plan_report import cost_lines
from zaya_plugin.config.compose import compose
from zaya_plugin.plan import checkpoint_plan
from zaya_plugin.plan.prediction import predict
from zaya_plugin.plan.run_costs import RARE_FAILURE_HOURS, RESTART_SECONDS, stage_cost


@pytest.fixture(scope="module")
def recipe():
    return compose(["experiment=zaya1_base", "cluster=h200_8", "data.path=none", "stage.micro_batch_size=4"])


def test_hours_failures_and_checkpoints_follow_from_the_step(recipe):
    step = predict(recipe, 8)
    cost = stage_cost(step, 2.0)
    hours = 476_837 * step.seconds / 3600
    assert (
        cost["hours"] == pytest.approx(hours)
        and cost["tokens"] == 476_837 * 4096 * 4096
        and cost["step"] == step.seconds
    )
    assert cost["failures"] == pytest.approx([8 * hours / 8090, 8 * hours / RARE_FAILURE_HOURS])
    assert RARE_FAILURE_HOURS == pytest.approx(50_677, abs=1)
    waits = checkpoint_plan.ASYNC_COST_SECONDS  # a step is longer than the copy
    assert 3600 * cost["lost"] == pytest.approx(
        cost["failures"][0] * (500 * step.seconds + RESTART_SECONDS) + 476 * waits, rel=1e-9
    )
    assert cost["device_hours"] == pytest.approx(8 * (hours + cost["lost"]))
    assert (cost["kept"], cost["between"]) == (3, 1000 * step.seconds)
    assert cost["saved_bytes"] == checkpoint_plan.plan_of(recipe, 8).total
    kept = replace(recipe, checkpoint=replace(recipe.checkpoint, keep_every=100_000, save_interval=10_000))
    assert stage_cost(replace(step, recipe=kept))["kept"] == 3 + 4
    lines = "\n".join(cost_lines([cost, cost])).splitlines()
    assert f"{2 * cost['device_hours']:,.0f}" in lines[1] and f"{4 * cost['device_hours']:,.0f}" in lines[3]
    assert "storage: 0.44 TB" in lines[-1] and "arXiv 2410.21680" in lines[-2]


def test_the_command_has_every_stage_of_a_curriculum(capsys, tmp_path):
    out = tmp_path / "plan.json"
    words = ["experiment=zaya1_base", "cluster=mi300x_128x8", "--gpus=512", "--price=2.5", f"--output={out}"]
    assert cli.main(["plan", "run", *words]) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    stages = written["stages"]
    assert [stage["name"] for stage in stages] == ["pretrain_4k", "pretrain_4k_2", "midtrain_32k"]
    assert {stage["devices"] for stage in stages} == {512} and written["on"]["devices"] == 512
    assert stages[0]["cost"] == pytest.approx(2.5 * stages[0]["device_hours"])
    assert (
        f"{sum(stage['cost'] for stage in stages):,.0f}" in printed
        and f"{sum(stage['tokens'] for stage in stages):,}" in printed
    )
    assert "PREDICTION, not measured on MI300X" in printed and "-9.2 %" in printed


def test_on_a_cpu_sizes_and_checkpoints_are_printed(capsys):
    assert cli.main(["plan", "run", "experiment=cpu_demo"]) == 0
    printed = capsys.readouterr().out
    assert "step time: not predicted. no rates of a CPU are known" in printed
    header, row, *_ = (line for line in printed.splitlines() if line.startswith(("stage", "demo")))
    assert header.endswith("checkpoints") and " days " not in header and " GB x " in row
    assert "memory of the fullest rank" not in printed and " of them active for a token" in printed
