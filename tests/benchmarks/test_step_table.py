# SPDX-License-Identifier: Apache-2.0
"""Test the table of full-size steps: its commands are valid recipes, and its figures are those of the records."""

import json
import sys
from pathlib import Path

import pytest

from zaya_plugin.bench.measurement import recipe_of
from zaya_plugin.commands.bench import settings_of, step
from zaya_plugin.config.validate import validate

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORDS = {
    "alone": "h200-flash_attention_4",
    "whole": "4xh200-copy_engines",
    "short": "4xh200-copy_engines-16k_tokens",
    "passes": "4xh200-copy_engines-forward_backward",
    "long": "2xh200-32k",
}


@pytest.fixture
def step_table(script):
    return script("step_table")


@pytest.fixture
def steps():
    return {row: json.loads((RESULTS / f"step40-{name}.json").read_text()) for row, name in RECORDS.items()}


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("row", RECORDS)
def test_each_command_is_a_recipe_that_can_run(step_table, row, devices, tmp_path):
    command = step_table.ROWS[row].command(
        devices, tmp_path, "0", ["parallel.nccl_ub=true", "cluster.core_attention=flash_attn_4"]
    )
    assert command[1:5] == ["-m", "zaya_plugin.cli", "bench", "step"]
    options = step().read(command[5:])
    recipe = recipe_of(settings_of(options), options.output, options.overrides)
    world = 1 if row == "alone" else devices
    validate(recipe, world)
    assert options.output == str(tmp_path) and options.optimizer == (row in ("whole", "short"))
    assert step_table.ROWS[row].compared == (row == "short")
    assert recipe.nproc == recipe.cluster.gpus_per_node == world and recipe.cluster.core_attention == "flash_attn_4"
    assert recipe.parallel.nccl_ub == (row != "alone")
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length / world
    assert tokens == (16_384 if row == "short" else 65_536)
    assert recipe.stage.seq_length == (32_768 if row == "long" else 4096)


def test_the_figures_are_those_of_the_records(step_table, steps):
    found = {
        (row, what): (round(value, 4), goal, reached) for row, what, value, goal, reached in step_table.compared(steps)
    }
    assert found == {
        ("alone", "share of the GEMM rate"): (0.5819, 0.55, True),
        ("whole", "tokens/s a device"): (45811.9289, 50_000, False),
        ("whole", "communication and idle"): (0.0323, 0.10, True),
        ("whole", "GiB reserved"): (99.5957, 90, False),
        ("short", "tokens/s a device"): (32396.8371, 40_000, False),
        ("short", "times transformers"): (1.3135, 1.6, False),
        ("passes", "weak scaling"): (0.9616, 0.95, True),
        ("long", "TFLOP/s of those at 4,096 tokens"): (0.9623, 0.85, True),
    }
    assert step_table.compared({"passes": steps["passes"]}) == []
    said = step_table.table(steps, step_table.compared(steps)).splitlines()
    assert len(said) == 1 + 5 + 2 + 8 and sum(line.endswith("missed") for line in said) == 4


def test_rows_that_are_there_are_not_run_again_and_a_failed_one_is_named(
    step_table, steps, tmp_path, monkeypatch, capsys
):
    run = []

    def ended(command):
        run.append(command)
        output = Path(command[-1])
        if output.name != "short":
            output.mkdir(parents=True)
            (output / "step.json").write_text(json.dumps(steps[output.name]))
        return step_table.subprocess.CompletedProcess(command, 3 if output.name == "short" else 0)

    monkeypatch.setattr(step_table.subprocess, "run", ended)
    words = [
        "--devices",
        "4",
        "--work",
        str(tmp_path / "work"),
        "--results",
        str(tmp_path),
        "--commit",
        "0",
        "--rows",
        "whole",
        "short",
    ]
    monkeypatch.setattr(sys, "argv", ["step_table.py", *words, "--dry-run"])
    assert step_table.main() == 0 and not run
    monkeypatch.setattr(sys, "argv", ["step_table.py", *words])
    assert [step_table.main(), step_table.main()] == [1, 1]
    assert [Path(command[-1]).name for command in run] == ["whole", "short", "short"]
    assert "short: ended with 3" in capsys.readouterr().err
    record = json.loads((tmp_path / "step_table.json").read_text())
    assert record["failed"] == ["short"] and record["devices"] == 4 and record["device"] == "NVIDIA H200"
    assert (
        record["steps"]["whole"]["step"] == steps["whole"]["step"]
        and [goal["row"] for goal in record["goals"]] == ["whole"] * 3
    )


def test_an_odd_number_of_devices_is_refused(step_table, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step_table.py", "--devices", "3"])
    with pytest.raises(SystemExit):
        step_table.main()
    assert "--devices 3: allowed: an even number from 2 on" in capsys.readouterr().err
