# SPDX-License-Identifier: Apache-2.0
"""What is kept of the check before a start, and for how long; the process is a stand-in (tests/hosts has the real one)."""

import os
import sys
import time
from dataclasses import replace

import pytest

from zaya_plugin import compat
from zaya_plugin.config.compose import compose
from zaya_plugin.ground.parent_death import started
from zaya_plugin.run import dry_run, launch, megatron_check, surroundings
from zaya_plugin.run.rank_plan import make_plan

# Notes each question, and refuses 3 ranks, a crash for 4, no answer for 5.
PROGRAM = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{asked['ranks']}\\n")
    if asked["ranks"] == 4:
        sys.exit("the interpreter is broken")
    if asked["ranks"] == 5:
        if not os.fork():
            with open(os.path.join(os.path.dirname(os.environ["ASKED"]), "fork"), "w") as file:
                file.write(str(os.getpid()))
        time.sleep(600)
    print(json.dumps("megatron: three is refused" if asked["ranks"] == 3 else None), flush=True)
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A function: the questions that the process was asked so far."""
    (tmp_path / "stand_in_check.py").write_text(PROGRAM)
    monkeypatch.setattr(megatron_check, "PROGRAM", "stand_in_check")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("ZAYA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ZAYA_CHECK")
    monkeypatch.setattr(compat, "has_module", lambda name: True)
    monkeypatch.setattr(compat, "zaya_train_fits", lambda: True)
    yield lambda: (tmp_path / "asked").read_text().split() if (tmp_path / "asked").exists() else []
    megatron_check.close()


def check(*overrides, environ=None):
    recipe = compose(["experiment=cpu_demo", *overrides])
    megatron_check.check(recipe, make_plan(recipe, environ or {}))


def test_a_cold_folder_checks_and_a_warm_one_does_not(asked):
    check("nproc=2")
    check("nproc=2", "name=other", "run_dir=other", "resume=must", "logger.wandb=false", "data.path=other")
    assert asked() == ["2"]
    megatron_check.close()
    check("nproc=2")
    assert asked() == ["2"]


@pytest.mark.parametrize("override", ["optim.lr=1e-3", "nproc=1", "megatron.manual_gc=true", "seed=7"])
def test_another_recipe_is_checked(asked, override):
    check("nproc=2")
    check("nproc=2", override)
    assert len(asked()) == 2


def test_other_packages_sources_and_variables_are_checked(asked, monkeypatch):
    recipe = compose(["experiment=cpu_demo", "nproc=2"])
    plan = make_plan(recipe, {})
    known = [megatron_check._digest(recipe, plan)]
    known.append(
        megatron_check._digest(recipe, replace(plan, environment={**plan.environment, "NVTE_FLASH_ATTN": "0"}))
    )
    versions = (megatron_check.compat, "distribution_version", lambda package: "99")
    for change in (versions, (megatron_check, "_sources", lambda: ["arguments.py 1 2"])):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            known.append(megatron_check._digest(recipe, plan))
    assert len(set(known)) == 4
    assert megatron_check._digest(recipe, plan) == known[0]
    found = list(megatron_check._sources())
    for file in ("hosts/argument_check.py", "config/schema.py", "training/arguments.py", "transformer_config.py"):
        assert any(file in line for line in found), file


def test_a_refused_recipe_is_never_kept(asked):
    for _ in range(2):
        with pytest.raises(ValueError, match="^megatron: three is refused$"):
            check("nproc=3", "stage.global_batch_size=12")
    assert asked() == ["3", "3"]


def test_a_process_that_fails_is_reported_with_its_last_words(asked):
    with pytest.raises(ValueError, match="Megatron's parsing of its arguments failed:\nthe interpreter is broken"):
        check("nproc=4")
    megatron_check.close()
    check("nproc=2")


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_ended_with_its_forks(asked, monkeypatch, tmp_path):
    monkeypatch.setattr(megatron_check, "ANSWER_SECONDS", 5.0)
    with pytest.raises(ValueError, match=r"^recipe: Megatron's parsing .* gave no answer in 5 s .* ZAYA_CHECK=off"):
        check("nproc=5", "stage.global_batch_size=20")
    assert asked() == ["5"]
    fork, deadline = int((tmp_path / "fork").read_text()), time.monotonic() + 60
    while started(fork) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_folder_that_cannot_be_written_costs_only_time(asked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZAYA_CACHE", str(tmp_path / "file" / "cache"))
    check("nproc=2")
    check("nproc=2")
    assert asked() == ["2", "2"] and (tmp_path / "file").read_text() == ""


def test_the_folder_is_the_users_and_bounded(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(megatron_check, "KEPT_RECIPES", 2)
    for rate in ("1e-3", "2e-3", "3e-3"):
        check("nproc=2", f"optim.lr={rate}")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    monkeypatch.delenv("ZAYA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(megatron_check.folder()) == "/xdg/zaya_plugin"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(megatron_check.folder()) == "/home/me/.cache/zaya_plugin"


def test_what_was_not_checked_is_reported(asked, monkeypatch):
    recipe = compose(["experiment=cpu_demo", "nproc=2"])
    plan = make_plan(recipe, {})
    assert dry_run.unchecked_parts(recipe, plan) == []
    monkeypatch.setattr(compat, "zaya_train_fits", lambda: False)
    said = "not checked: Megatron's own validation of its arguments: "
    assert dry_run.unchecked_parts(recipe, plan) == [said + "no torch or Megatron 0.19 on this machine"]
    monkeypatch.setenv("ZAYA_CHECK", "off")
    assert dry_run.unchecked_parts(recipe, plan) == [said + "ZAYA_CHECK=off"]
    check("nproc=3", "stage.global_batch_size=12")
    assert asked() == []


def test_a_start_and_a_dry_run_stop_with_the_same_words_before_any_rank(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(surroundings, "check_surroundings", lambda *_: None)
    monkeypatch.setattr(launch, "run_ranks", lambda plan, logs: sys.exit("a rank was started"))
    words = ["experiment=cpu_demo", "nproc=3", "stage.global_batch_size=12", f"run_dir={tmp_path / 'run'}"]
    for more in ([], ["dry_run=true"]):
        with pytest.raises(ValueError, match="^megatron: three is refused$"):
            launch.launch(compose([*words, *more]))
    assert not (tmp_path / "run").exists()


def test_ranks_that_an_outer_launcher_started_validate_themselves(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(surroundings, "check_surroundings", lambda *_: None)
    monkeypatch.setattr(launch, "become_rank", lambda recipe, plan: 7)
    outer = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    words = ["experiment=cpu_demo", "stage.global_batch_size=12", f"run_dir={tmp_path / 'run'}"]
    assert launch.launch(compose(words)) == 7 and asked() == []
