# SPDX-License-Identifier: Apache-2.0
"""A resume with a changed recipe: every key has a rule, and every rule is kept, before any rank starts."""

import functools
import json
import os
from dataclasses import replace

import pytest

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin.checkpoint import manifest
from zaya_plugin.checkpoint.run_lock import RunLock
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.config.resume import changes, trains_alike, values_in, values_of
from zaya_plugin.config.schema import leaves
from zaya_plugin.run import dry_run, start_recipe
from zaya_plugin.run.rank_plan import make_plan

FIELDS = dict(leaves())
RULES = {path: field.metadata["resume"] for path, field in FIELDS.items()}
BASE = ["experiment=cpu_demo", "data.path=x"]


@functools.cache
def demo(run_dir, *overrides):
    return compose([*BASE, f"run_dir={run_dir}", "resume=auto", *overrides])


def other(path, value):
    """A value that differs from `value`, of the key's kind."""
    field = FIELDS[path]
    if path == "data.blend":
        return ["1 x", "2 y"]
    if path == "optim.overrides":
        return ["*.router.* optimizer=adamw"]
    if field.metadata["choices"]:
        return next(choice for choice in field.metadata["choices"] if choice != value)
    kind = str(field.type)
    if kind.startswith("bool"):
        return not value
    if kind.startswith(("int", "float")):
        return (value or 1) * 2
    if kind.startswith("list"):
        return [7] if "int" in kind else ["another"]
    return {"a": "b"} if kind.startswith("dict") else "another"


@pytest.mark.parametrize(
    "override, alike",
    [
        *[
            (override, True)
            for override in ("stage.train_iters=999", "exit_interval=7", "logger.wandb=false", "name=b")
        ],
        *[
            (override, False)
            for override in ("cluster.core_attention=cudnn", "cluster.kernels=reference", "optim.lr=1")
        ],
        *[(override, False) for override in ("cluster.transformer_impl=transformer_engine", "nproc=1", "seed=7")],
    ],
)
def test_a_failure_counts_against_a_checkpoint_with_its_own_recipe_alone(override, alike):
    before = values_of(demo("runs/a"))
    assert trains_alike(before, demo("runs/b")) and trains_alike({}, demo("runs/b", override))
    assert trains_alike(before, demo("runs/a", override)) == alike


def test_every_key_has_a_rule_and_its_reason():
    for path, rule in RULES.items():
        assert rule.rule in ("may change", "warns", "refused", "kept"), path
        assert bool(rule.why) == (rule.rule != "may change"), path
    refused = {path for path, rule in RULES.items() if rule.rule == "refused"}
    assert {"model.num_layers", "optim.name", "data.blend", "seed", "stage.seq_length"} <= refused
    assert {path for path, field in FIELDS.items() if field.metadata["fixed"]} <= refused
    harmless = ("cluster.kernels", "parallel.context_parallel_size", "logger.wandb", "checkpoint.keep_last", "nproc")
    assert all(RULES[path].rule == "may change" for path in harmless)


@pytest.mark.parametrize("path", FIELDS)
def test_a_change_does_what_its_rule_says(tmp_path, path):
    recipe = demo("run")
    now = values_of(recipe)[path]
    before = {**values_of(recipe), path: (was := other(path, now))}
    assert was != now
    refused, warned = changes(json.loads(json.dumps(before)), recipe, tmp_path)
    assert [bool(refused), bool(warned)] == [RULES[path].rule == "refused", RULES[path].rule == "warns"]
    for text in (*refused, *warned):
        assert path in text and "\n" not in text and RULES[path].why in text
        assert all(str(value).lower() in text.lower() for value in (was, now) if value is not None)
    assert all(f"Fix: {path}=" in text and "run_dir=<another directory>" in text for text in refused)


def test_the_same_recipe_changes_nothing(tmp_path):
    recipe = demo(tmp_path, "optim.overrides=['*.router.* lr_mult=0.5']", "data.blend=['1 x']")
    save_recipe(recipe, tmp_path / "recipe.yaml")
    for before in (values_in(tmp_path), json.loads(json.dumps(values_of(recipe)))):
        assert before.keys() == FIELDS.keys()
        assert changes(before, recipe, tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("was", "now", "refuses"),
    [
        ("data.blend=['1 x','2 y']", "data.blend=['1 elsewhere/x','2 y']", False),
        ("data.blend=['1 x','2 y']", "data.blend=['2 x','2 y']", True),
        ("optim.overrides=['*.a lr_mult=0.5']", "optim.overrides=['*.a lr_mult=2']", False),
        ("optim.overrides=['*.a optimizer=muon']", "optim.overrides=['*.a optimizer=muon lr_mult=2']", False),
        ("optim.overrides=['*.a optimizer=muon']", "optim.overrides=[]", True),
    ],
)
def test_of_lists_only_the_part_that_decides_is_refused(tmp_path, was, now, refuses):
    refused, warned = changes(values_of(demo(tmp_path, was)), demo(tmp_path, now), tmp_path)
    assert (bool(refused), bool(warned)) == (refuses, not refuses)


def test_weights_of_sources_may_change_where_data_may(tmp_path):
    now = demo(tmp_path, "data.blend=['2 x','2 y']", "data.changed=accept")
    refused, warned = changes(values_of(demo(tmp_path, "data.blend=['1 x','2 y']")), now, tmp_path)
    assert (refused, len(warned)) == ([], 1)


def saved(run_dir, recipe, step=40, facts=True):
    """A run directory with recipe.yaml and a checkpoint, which keeps the recipe unless an earlier version wrote it."""
    pretend_checkpoint(run_dir, step)
    if facts:
        folder = run_dir / "checkpoints" / f"iter_{step:07d}"
        manifest.write(folder, step, {}, **{manifest.RECIPE: values_of(recipe)})
    save_recipe(recipe, run_dir / "recipe.yaml")


@pytest.mark.parametrize("facts", [True, False], ids=["in the checkpoint", "in recipe.yaml"])
def test_a_resume_with_another_optimizer_is_refused_before_the_start(tmp_path, capsys, monkeypatch, facts):
    monkeypatch.setenv("ZAYA_CHECK", "off")
    saved(tmp_path, demo(tmp_path), facts=facts)
    recipe = demo(tmp_path, "optim=adamw", "seed=5")
    with pytest.raises(
        ValueError, match=r"optim\.name=adamw: the run in .* was trained with muon; .*\nseed=5: "
    ) as error:
        start_recipe.check_changed_keys(recipe, make_plan(recipe, {}))
    assert "Fix: optim.name=muon to continue this run" in str(error.value)
    assert str(error.value) in dry_run.stops(recipe, make_plan(recipe, {})), "the dry run says it too"
    fast = demo(tmp_path, "optim.lr=0.005", "nproc=1")
    start_recipe.check_changed_keys(fast, make_plan(fast, {}))
    told = capsys.readouterr().err
    changed, rate = told.splitlines()
    assert changed.startswith("zaya: resume: optim.lr: was 0.01, is 0.005; the learning rates")
    assert rate.startswith("zaya: resume: the learning rate of step 41 is 0.001858; the recipe before had 0.003586")


def test_the_recipe_in_the_checkpoint_counts_more_than_that_of_a_start_that_failed(tmp_path):
    saved(tmp_path, demo(tmp_path))
    save_recipe(demo(tmp_path, "optim.lr=0.005"), tmp_path / "recipe.yaml")
    assert start_recipe.changed_keys(demo(tmp_path)) == ([], [])
    assert len(start_recipe.changed_keys(demo(tmp_path, "optim.lr=0.005"))[1]) == 2


def test_another_length_says_what_becomes_of_the_learning_rate(tmp_path):
    """The rates are Megatron's formula, and a run that has as many steps as it is asked for says that it trains none."""
    then = demo(tmp_path, "stage.train_iters=100", "optim.lr_warmup_iters=0", "optim.lr_decay_style=linear")
    then = replace(then, optim=replace(then.optim, lr=1.0, min_lr=0.0))
    saved(tmp_path, then)

    def told(**stage):
        return start_recipe.changed_keys(replace(then, stage=replace(then.stage, **stage)))

    assert told() == ([], [])
    for steps, rate in ((80, "0.5"), (200, "0.8"), (41, "0.02439")):
        refused, (changed, line) = told(train_iters=steps)
        assert refused == [] and changed.startswith(f"zaya: resume: stage.train_iters: was 100, is {steps}; ")
        assert line == f"zaya: resume: the learning rate of step 41 is {rate}; the recipe before had 0.6"
    for steps in (40, 7):
        refused, (_, line) = told(train_iters=steps)
        assert refused == [] and f"is of step 40, and the recipe has {steps} steps (stage.train_iters={steps})" in line
        assert "none is left. The run trains nothing and ends with exit code 0" in line
    assert told(eval_interval=7) == ([], []), "no key of the schedule"


def test_a_finished_run_that_is_asked_again_says_so(tmp_path):
    recipe = demo(tmp_path, "stage.train_iters=40")
    saved(tmp_path, recipe)
    refused, (line,) = start_recipe.changed_keys(recipe)
    assert refused == [] and "newest checkpoint is of step 40, and the recipe has 40 steps" in line


def test_a_new_run_and_a_new_stage_are_no_resumes(tmp_path):
    before, stage = tmp_path / "before", tmp_path / "stage"
    saved(before, demo(before))
    assert start_recipe.changed_keys(demo(stage, "optim=adamw", f"handover.from_run={before}")) == ([], [])
    save_recipe(demo(stage), (stage.mkdir(), stage / "recipe.yaml")[1])  # begun, and never saved
    assert start_recipe.changed_keys(demo(stage, "optim=adamw")) == ([], [])


def test_recipes_of_other_versions_resume(tmp_path):
    saved(tmp_path, demo(tmp_path), facts=False)
    path = tmp_path / "recipe.yaml"
    lines = [line for line in path.read_text().splitlines() if "muon_dtype" not in line and "seed:" not in line]
    path.write_text("\n".join([*lines, "of_another_version:", "  key: 1"]) + "\n")
    assert "seed" not in values_in(tmp_path)
    assert start_recipe.changed_keys(demo(tmp_path, "seed=5", "optim.muon_dtype=fp32")) == ([], [])
    assert len(start_recipe.changed_keys(demo(tmp_path, "optim.name=adamw"))[0]) == 1
    path.unlink()
    assert start_recipe.changed_keys(demo(tmp_path, "optim.name=adamw")) == ([], []), "nothing to compare with"


@pytest.mark.parametrize("content", ["a: [", "- 1", "\x00", "seed: ${nowhere}"])
def test_a_damaged_recipe_is_one_message(tmp_path, content):
    saved(tmp_path, demo(tmp_path), facts=False)
    (tmp_path / "recipe.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"recipe\.yaml: is damaged .* Fix: copy the newest"):
        start_recipe.changed_keys(demo(tmp_path))


def test_a_dry_run_says_that_a_run_is_writing_there(tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_CHECK", "off")
    recipe = demo(tmp_path / "run")
    lock = RunLock.take({"run_dir": tmp_path / "run"})
    try:
        found = dry_run.stops(recipe, make_plan(recipe, {}))
    finally:
        lock.release()
    assert found[0].startswith(f"run_dir={tmp_path / 'run'}: a run is writing there: process {os.getpid()} on ")
    assert len(dry_run.stops(recipe, make_plan(recipe, {}))) == len(found) - 1
