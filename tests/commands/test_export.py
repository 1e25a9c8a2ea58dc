# SPDX-License-Identifier: Apache-2.0
"""The commands `zaya export primus` and `zaya export megatron`."""

import pytest
import yaml

from zaya_plugin import cli
from zaya_plugin.config.compose import load_recipe

WITHOUT_RANKS = ("experiment=cpu_demo", "data.path=nowhere")
DEMO = (*WITHOUT_RANKS, "nproc=1")


def test_primus_gets_an_experiment_a_recipe_and_the_line_that_runs_it(tmp_path, capsys):
    assert cli.main(["export", "primus", *DEMO, f"run_dir={tmp_path}/team/demo"]) == 0
    out = capsys.readouterr().out
    path = tmp_path / "team" / "demo" / "primus.yaml"
    assert f"zaya_primus.py -- train pretrain --config {path}" in out and "# ignored by the host: logger" in out
    overrides = yaml.safe_load(path.read_text())["modules"]["pre_trainer"]["overrides"]
    assert overrides["zaya_recipe"] == str(path.with_name("recipe.yaml"))
    assert load_recipe(overrides["zaya_recipe"]).run_dir == str(tmp_path / "team" / "demo")


def test_paths_hold_wherever_the_host_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "data.path=data/a",
        "data.blend=['0.5 data/a','1.5 data/b']",
        "data.cache_path=cache",
        "run_dir=runs/team/demo",
    ]
    assert cli.main(["export", "primus", "experiment=cpu_demo", "nproc=1", *words]) == 0
    recipe = load_recipe(tmp_path / "runs" / "team" / "demo" / "recipe.yaml")
    assert recipe.data.path == str(tmp_path / "data" / "a") and recipe.data.cache_path == str(tmp_path / "cache")
    assert recipe.data.blend == [f"0.5 {tmp_path}/data/a", f"1.5 {tmp_path}/data/b"]


def test_recomputation_is_chosen_before_a_host_gets_it(tmp_path, capsys):
    words = [
        "experiment=zaya1_base",
        "cluster=h100_8",
        "data.path=nowhere",
        "stage.micro_batch_size=4",
        f"run_dir={tmp_path}/team/base",
    ]
    assert cli.main(["export", "primus", *words]) == 0
    path = tmp_path / "team" / "base" / "primus.yaml"
    overrides = yaml.safe_load(path.read_text())["modules"]["pre_trainer"]["overrides"]
    assert (overrides["recompute_granularity"], overrides["recompute_method"]) == ("full", "block") and overrides[
        "recompute_num_layers"
    ] > 20
    assert f"# recomputed: {overrides['recompute_num_layers']} whole layers" in capsys.readouterr().out
    assert load_recipe(path.with_name("recipe.yaml")).parallel.recompute_num_layers == overrides["recompute_num_layers"]


def test_a_curriculum_gives_one_experiment_a_stage_and_each_names_the_one_before(tmp_path):
    assert (
        cli.main(["export", "primus", "--curriculum", *WITHOUT_RANKS, "nproc=2", f"run_dir={tmp_path}/team/demo"]) == 0
    )
    stages = sorted((tmp_path / "team" / "demo").iterdir())
    assert [stage.name for stage in stages] == ["demo_1", "demo_2", "demo_3"]
    recipes = [load_recipe(stage / "recipe.yaml") for stage in stages]
    assert [recipe.handover.from_run for recipe in recipes] == [None, str(stages[0]), str(stages[1])]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nemo", *DEMO], "zaya export nemo: no such command. Allowed: slurm, megatron, primus"),
        (["megatron", "--spec", *DEMO], "--spec: no such option"),
        (["primus", "cpu_demo"], " Fix: experiment=cpu_demo"),
        (["primus", "--curriculum", *DEMO], "cannot be divided by"),  # the third stage
        (["primus", *WITHOUT_RANKS, "nproc=3"], "stage.global_batch_size=16: is not a multiple"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path, argv, message, capsys):
    assert cli.main(["export", *argv, f"run_dir={tmp_path}/team/demo"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "team").exists()
