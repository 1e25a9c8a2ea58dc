# SPDX-License-Identifier: Apache-2.0
"""Composing, refusing and recording a curriculum; what runs is in tests/faults/test_curriculum.py."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.convert.published import TINY, publish
from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin import cli
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.ground.exit_codes import ENDED_EARLY
from zaya_plugin.handover.predecessor import predecessor, saved_step
from zaya_plugin.handover.published import compose_published
from zaya_plugin.run import curriculum_run
from zaya_plugin.run.curriculum_run import check, domain_table, read_state, table, write_state
from zaya_plugin.run.stages import Curriculum, compose_curriculum

DEMO = ["experiment=cpu_demo", "data.path=x"]


def made(tmp_path: Path, *overrides: str) -> Curriculum:
    return compose_curriculum([*DEMO, f"run_dir={tmp_path}", *overrides])


def pretend(curriculum: Curriculum, number: int, step: int) -> None:
    """Write the files of a stage with a checkpoint of `step` that these tests read."""
    stage = curriculum.stages[number]
    pretend_checkpoint(stage.run_dir, step)
    save_recipe(stage.recipe, stage.run_dir / "recipe.yaml")


def test_stages_take_over_from_each_other(tmp_path):
    curriculum = made(tmp_path, "model.num_layers=2", "demo_3:stage.train_iters=7", "cpu_demo_stage2:seed=5")
    recipes = [stage.recipe for stage in curriculum.stages]
    assert [stage.name for stage in curriculum.stages] == ["demo_1", "demo_2", "demo_3"]
    assert [recipe.handover.from_run for recipe in recipes] == [None, f"{tmp_path}/demo_1", f"{tmp_path}/demo_2"]
    assert [recipe.model.num_layers for recipe in recipes] == [2, 2, 2]
    assert [recipe.stage.train_iters for recipe in recipes] == [60, 30, 7]
    assert [recipe.seed for recipe in recipes] == [1234, 5, 1234]
    assert [recipe.parallel.context_parallel_size for recipe in recipes] == [1, 1, 2]
    assert {recipe.logger.wandb_group for recipe in recipes} == {"cpu_demo"}
    assert {recipe.resume for recipe in recipes} == {"auto"}
    assert [compose(list(stage.overrides)) for stage in curriculum.stages] == recipes, (
        "what a dry run prints is what runs"
    )


def test_each_stage_may_have_data_of_its_own():
    stages = "pretrain_4k", "pretrain_4k_2", "midtrain_32k"
    words = ["experiment=zaya1_base", "cluster=mi300x_8", *(f"{stage}:data.path=data/{stage}" for stage in stages)]
    assert [stage.recipe.data.path for stage in compose_curriculum(words).stages] == [f"data/{one}" for one in stages]
    with pytest.raises(ValueError, match="data.path: has no value"):
        compose_curriculum(words[:-1])


def test_all_stages_have_the_model_of_published_weights(tmp_path):
    """The first stage starts from them, with their RoPE base; the others from the stage before, with their own."""
    model = replace(TINY, num_layers=3, rotary_base=777)
    source = f"handover.from_hf={publish(tmp_path / 'published', model=model)}"
    curriculum = made(tmp_path, source, "demo_3:model.router_hidden_size=24")
    first, second, third = (stage.recipe for stage in curriculum.stages)
    assert [Description.of_recipe(recipe, 64).differing(model) for recipe in (first, second)] == [[], []]
    assert (third.model.num_layers, third.model.router_hidden_size) == (3, 24), "refused when the stage starts"
    assert [recipe.handover.from_hf for recipe in (second, third)] == [None, None]
    assert (
        first.stage.rotary_base == 777 and second.stage.rotary_base == made(tmp_path).stages[1].recipe.stage.rotary_base
    )
    assert compose_published(list(curriculum.stages[0].overrides)) == first
    assert compose(list(curriculum.stages[1].overrides)) == second
    with pytest.raises(ValueError, match="model.num_layers=4: .* has 3"):
        made(tmp_path, source, "model.num_layers=4")


def test_neighbours_with_the_same_data_share_its_order(tmp_path):
    places = [(s.recipe.handover.first_sample, s.recipe.handover.planned_samples) for s in made(tmp_path).stages]
    assert places == [(0, 90 * 32), (60 * 32, 90 * 32), (0, None)]
    other = made(tmp_path, "demo_2:data.blend=['1 y']").stages
    assert [stage.recipe.handover.planned_samples for stage in other] == [None, None, None]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["curriculum.stages=[]"], "cpu_demo lists no stages"),
        (["demo_4:seed=1"], "demo_4:seed=1: no such stage. Allowed: demo_1, demo_2, demo_3"),
        (["curriculum.stages=[cpu_demo_stage1,zaya_2]"], "experiment=zaya_2: no such recipe"),
        (["demo_1:stage.trainiters=1"], "Fix: stage.train_iters=1"),
        (["curriculum.stages=[cpu_demo_stage1,cpu_demo_stage1]"], "two of them have the same stage.name"),
        (["handover.from_hf=x", "optim.lora.rank=8"], "optim.lora.rank=8: the stage demo_1 is to train adapters"),
        (["demo_3:optim.lora.rank=8"], "Fix: zaya train experiment=cpu_demo_stage3 handover.from_hf=... optim.lora"),
    ],
)
def test_mistakes_are_named(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        made(tmp_path, *overrides)


def test_a_finished_stage_is_one_that_took_all_steps_and_saved(tmp_path):
    curriculum = made(tmp_path)
    with pytest.raises(ValueError, match="holds no run"):
        predecessor(curriculum.stages[1].recipe)
    pretend(curriculum, 0, 40)
    assert saved_step(tmp_path / "demo_1") == 40 and not curriculum.stages[0].finished
    with pytest.raises(ValueError, match="demo_1 is not finished: it has a checkpoint of step 40 and takes 60 steps"):
        predecessor(curriculum.stages[1].recipe)
    pretend(curriculum, 0, 60)
    before = predecessor(curriculum.stages[1].recipe)
    assert curriculum.stages[0].finished and before.steps == 60 and before.tokens == 60 * 32 * 128
    pretend(curriculum, 1, 30)
    assert predecessor(curriculum.stages[2].recipe).tokens == 90 * 32 * 128


def test_a_learning_rate_that_promises_to_go_on_has_to(tmp_path):
    curriculum = made(tmp_path, "demo_2:optim.lr=1.1e-3")
    pretend(curriculum, 0, 60)
    with pytest.raises(ValueError, match="ends at a learning rate of 0.008 and this one begins at 0.0011"):
        predecessor(curriculum.stages[1].recipe)
    assert predecessor(made(tmp_path, "demo_2:optim.lr=1.1e-3", "demo_2:handover.continuous_lr=false").stages[1].recipe)


def test_another_optimizer_cannot_take_over(tmp_path):
    pretend(made(tmp_path), 0, 60)
    with pytest.raises(ValueError, match="optim.name=adamw: the stage before .* used muon"):
        predecessor(made(tmp_path, "demo_2:optim=adamw", "demo_2:handover.continuous_lr=false").stages[1].recipe)


def test_another_model_cannot_take_over(tmp_path):
    pretend(made(tmp_path), 0, 60)
    for words, told in (
        ("demo_2:model.num_layers=3", "model.num_layers=3: the stage before .* trained 4: .* Fix: model.num_layers=4"),
        ("demo_2:model.router_eda=false", "model.router_eda=false: the stage before .* trained true: "),
    ):
        with pytest.raises(ValueError, match=told):
            predecessor(made(tmp_path, words).stages[1].recipe)


def test_an_order_that_has_become_longer_is_refused(tmp_path):
    pretend(made(tmp_path), 0, 60)
    with pytest.raises(ValueError, match="the stage before ended at sample 1920 of an order made for 2880"):
        predecessor(made(tmp_path, "demo_2:stage.train_iters=31").stages[1].recipe)
    assert predecessor(made(tmp_path, "demo_2:stage.train_iters=20").stages[1].recipe), (
        "a shorter stage keeps the order"
    )


def test_a_stage_that_was_handed_over_cannot_change(tmp_path):
    pretend(made(tmp_path), 0, 60)
    pretend(made(tmp_path), 1, 10)
    check(made(tmp_path))
    with pytest.raises(
        ValueError,
        match="demo_1: has 60 of 61 steps, but stage demo_2 has already started from it .*took 60 steps then",
    ):
        check(made(tmp_path, "demo_1:stage.train_iters=61"))


def test_the_record_says_what_is_done_and_keeps_other_curricula_out(tmp_path):
    curriculum = made(tmp_path)
    pretend(curriculum, 0, 60)
    write_state(curriculum, {"demo_1": {"exit_code": 0}})
    write_state(curriculum, {"demo_2": {"exit_code": 137}})
    stages = read_state(tmp_path)["stages"]
    assert [stage["finished"] for stage in stages] == [True, False, False]
    assert [stage.get("exit_code") for stage in stages] == [0, 137, None]
    assert [path.name for path in tmp_path.glob("*.json")] == ["curriculum.json"] and not list(tmp_path.glob(".curr*"))
    check(made(tmp_path, "curriculum.stages=[cpu_demo_stage1,cpu_demo_stage2,cpu_demo_stage3,cpu_demo]"))
    with pytest.raises(ValueError, match="holds a curriculum of demo_1, demo_2, demo_3, and this one is demo_3"):
        check(made(tmp_path, "curriculum.stages=[cpu_demo_stage3]"))


def test_the_table_shows_losses_around_a_hand_over(tmp_path):
    curriculum = made(tmp_path)
    for number, (first, last) in enumerate([(8.0, 6.0), (5.9, 5.5)]):
        pretend(curriculum, number, curriculum.stages[number].steps)
        rows = (
            f'{{"step": 0, "valid_loss": {first}}}\n{{"step": 1, "loss": 7.0}}\n{{"step": 9, "valid_loss": '
            f'{last}}}\n{{"st'
        )
        (curriculum.stages[number].run_dir / "metrics.jsonl").write_text(rows)
    lines = table(curriculum).splitlines()
    assert lines[1].split()[:7] == ["demo_1", "128", "10,000", "1", "245.8K", "60/60", "0.0e+00"]
    assert "8.000" in lines[1] and "6.000 -> 5.900" in lines[2]
    assert "0/30" in lines[3] and lines[3].endswith("-            -")


def test_domains_have_losses_of_their_own(tmp_path):
    curriculum = made(tmp_path)
    assert domain_table(curriculum) == ""
    pretend(curriculum, 0, 60)
    rows = [
        {"step": 0, "valid_loss": 8.0, "validation/web/loss": 8.5, "validation/code/loss": 7.5},
        {"step": 1, "loss": 7.0},
    ]
    rows += [{"step": 60, "valid_loss": 5.0, "validation/web/loss": 5.25, "validation/code/loss": 4.75}]
    (tmp_path / "demo_1" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [line.split("  ") for line in domain_table(curriculum).splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[:2] == [["validation", "web", "code"], ["demo_1", "8.500 -> 5.250", "7.500 -> 4.750"]]
    assert cells[2:] == [["demo_2", "-", "-"], ["demo_3", "-", "-"]]


def test_a_mistake_in_the_last_stage_is_named_before_the_first_one_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(curriculum_run, "launch", lambda recipe: pytest.fail("a stage has started"))
    with pytest.raises(ValueError, match=r"optim.lr_warmup_init=0.0008: .* Fix: optim.lr_warmup_init=0.0\."):
        curriculum_run.run_curriculum(made(tmp_path, "optim.lr_warmup_iters=0"))
    assert not (tmp_path / "demo_1").exists()


def test_a_signal_leaves_with_the_way_to_continue(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curriculum_run, "launch", lambda recipe, plan: ENDED_EARLY)
    assert curriculum_run.run_curriculum(made(tmp_path)) == ENDED_EARLY
    assert capsys.readouterr().err == "zaya: the same command continues the curriculum in stage demo_1\n"


def test_a_dry_run_creates_nothing(tmp_path, capsys):
    assert (
        cli.main(
            [
                "curriculum",
                "experiment=zaya1_base",
                "cluster=mi300x_128x8",
                "data.path=x",
                f"run_dir={tmp_path / 'run'}",
                "--dry-run",
                "--verbose",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "stage 2 of 3: pretrain_4k_2 (not started)" in shown and "--rotary-base 1000000" in shown
    assert shown.startswith("verdict      can start (not checked: devices and packages of the nodes, and data)")
    assert "torchrun --nnodes 128 --nproc-per-node 8" in shown and "1024 ranks" in shown
    assert "NCCL_CROSS_NIC=0" in shown and "the weights of stage pretrain_4k and the optimizer's state" in shown
    assert not (tmp_path / "run").exists()
