# SPDX-License-Identifier: Apache-2.0
"""A process validates the recipe that it runs once: where the plan of the ranks is made, or, in a rank that another
process started, the file that it gets (tests/hosts/test_worker.py).
"""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.run import launch, rank_plan, surroundings
from zaya_plugin.run.curriculum_run import dry_run, run_curriculum
from zaya_plugin.run.stages import compose_curriculum

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


@pytest.fixture
def validated(monkeypatch):
    """The run directories of the recipes that were validated; starts have data and end at once."""
    directories, validate = [], rank_plan.validate
    monkeypatch.setattr(
        rank_plan, "validate", lambda recipe, ranks: (directories.append(recipe.run_dir), validate(recipe, ranks))
    )
    monkeypatch.setattr(surroundings, "check_surroundings", lambda *_: None)
    monkeypatch.setattr(launch, "run_ranks", lambda plan, logs: launch.Ended(0))
    return directories


@pytest.mark.parametrize("words", [(), ("dry_run=true",)], ids=["start", "dry run"])
def test_of_one_run(validated, tmp_path, words):
    assert launch.launch(compose(["experiment=cpu_demo", f"run_dir={tmp_path}/run", *words])) == 0
    assert validated == [f"{tmp_path}/run"]


def test_of_a_rank_of_another_launcher(validated, monkeypatch, tmp_path):
    """The worker runs in the same process; where `zaya train` starts the ranks, it has validated for them."""
    for name, text in RANK.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(launch, "become_rank", lambda recipe, plan: 0)
    assert launch.launch(compose(["experiment=cpu_demo", f"run_dir={tmp_path}/run"])) == 0
    assert validated == [f"{tmp_path}/run"]


def test_of_a_curriculum(validated, tmp_path):
    curriculum = compose_curriculum(["experiment=cpu_demo", f"run_dir={tmp_path}"])
    stages = [str(stage.run_dir) for stage in curriculum.stages]
    dry_run(curriculum)
    assert validated == stages
    validated.clear()
    assert run_curriculum(curriculum) == 0  # the first stage has no checkpoint when it ends, so no other starts
    assert validated == stages
