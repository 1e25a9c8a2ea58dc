# SPDX-License-Identifier: Apache-2.0
"""A curriculum is handed over exactly and survives kills: the last bits of every weight and momentum are compared
(fp32, CPU).
"""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.faults.micro_curriculum import SMALL, Ranks
from zaya_plugin.handover.predecessor import saved_step
from zaya_plugin.run.curriculum_run import read_state

CONSTANT = ("optim.lr_decay_style=constant",)
TWO = ("experiment=cpu_demo", "curriculum.stages=[cpu_demo_stage1,cpu_demo_stage2]", *SMALL, *CONSTANT)
THREE = (
    "experiment=cpu_demo",
    *SMALL,
    "optim.min_lr=2e-4",
    "demo_2:optim.lr_decay_style=constant",
    "demo_2:optim.lr=2e-4",
    "demo_3:stage.seq_length=48",
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus, ranks) -> Path:
    """Two stages of four steps with one data order and one learning rate, never killed."""
    run_dir = tmp_path_factory.mktemp("straight")
    for stage in ("demo_1", "demo_2"):
        ranks.finish("curriculum", "--only", stage, *TWO, *_where(run_dir, corpus), "stage.train_iters=4")
    return run_dir


def _where(run_dir: Path, corpus: Path) -> tuple[str, str]:
    return f"run_dir={run_dir}", f"data.path={corpus}"


def _tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights, momenta and second moments in a checkpoint; without the record of random numbers, which nothing reads
    (no dropout).
    """
    from torch.distributed import checkpoint

    folder = run_dir / "checkpoints" / f"iter_{step:07d}"
    kept = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in kept.items()
        if hasattr(entry, "size") and "rng" not in name
    }
    checkpoint.load(tensors, checkpoint_id=folder)
    return tensors


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) > 50
    assert sum("exp_avg" in name for name in one) > 20, "the optimizer's state is compared too"
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_stages_are_one_run_to_the_bit(tmp_path, corpus, ranks, straight):
    """Two stages end with the bits of one run: weights, optimizer state, step count and position in the data are
    handed over.
    """
    ranks.finish(
        "train",
        "experiment=cpu_demo_stage1",
        *SMALL,
        *CONSTANT,
        *_where(tmp_path / "whole", corpus),
        "stage.train_iters=8",
    )
    _same(_tensors(straight / "demo_2", 4), _tensors(tmp_path / "whole", 8))
    rows = [json.loads(line) for line in (straight / "demo_2" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["total_tokens"] == 5 * 2 * 16, "tokens of all stages"
    state = read_state(straight)
    assert [stage["finished"] for stage in state["stages"]] == [True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_stage_is_refused_until_the_one_before_is_finished(tmp_path, corpus, ranks):
    words = (*TWO, *_where(tmp_path, corpus), "stage.train_iters=4")
    ranks.finish("curriculum", "--only", "demo_1", *words, "demo_1:exit_interval=2")
    refused = ranks.run("curriculum", "--only", "demo_2", *words)
    assert refused == 2
    assert "the stage demo_1 is not finished: it has a checkpoint of step 2 and takes 4 steps" in ranks.log.read_text()
    assert not (tmp_path / "demo_2").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_kills_leave_no_trace(tmp_path, corpus, ranks, straight):
    kills = _run_with_kills(
        ranks, tmp_path, ("demo_1", "demo_2"), (*TWO, *_where(tmp_path, corpus), "stage.train_iters=4"), 3, seed=1
    )
    assert sum(kills.values()) >= 2
    _same(_tensors(straight / "demo_2", 4), _tensors(tmp_path / "demo_2", 4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_save_starts_no_process(tmp_path, corpus, ranks):
    """A save starts no process; stock Megatron starts a manager at the first save, which survives a killed rank."""
    words = (
        "train",
        "experiment=cpu_demo",
        *SMALL,
        f"data.path={corpus}",
        "stage.train_iters=40",
        "checkpoint.save_interval=2",
    )
    assert ranks.run(*words, f"run_dir={tmp_path}", kill=("step  5/40", 0.0)) == -9, ranks.log.read_text()[-3000:]
    assert saved_step(tmp_path) >= 2 and ranks.spawned == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_twenty_kills_of_a_curriculum_leave_no_trace(tmp_path, corpus, ranks):
    """A curriculum of three stages that is killed twenty times ends with the bits of one without a kill; the last
    stage has longer sequences and its own RoPE base.
    """
    stages, more = ("demo_1", "demo_2", "demo_3"), ("stage.train_iters=8",)
    for stage in stages:
        ranks.finish("curriculum", "--only", stage, *THREE, *_where(tmp_path / "straight", corpus), *more)
    killed = tmp_path / "killed"
    kills = _run_with_kills(ranks, killed, stages, (*THREE, *_where(killed, corpus), *more), 24, seed=7)
    print(f"kills: {dict(kills)}")
    assert sum(kills.values()) >= 20 and min(kills[moment] for moment in ("starting", "running", "saving")) >= 2, kills
    for stage in stages:
        _same(_tensors(tmp_path / "straight" / stage, 8), _tensors(killed / stage, 8))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_a_fresh_optimizer_keeps_the_weights(tmp_path, corpus, ranks, straight):
    """handover.optimizer=reset keeps the weights and zeroes the momenta: a first step with a learning rate of zero
    shows both.
    """
    words = (
        "train",
        "experiment=cpu_demo_stage2",
        *SMALL,
        "stage.train_iters=4",
        "handover.continuous_lr=false",
        "optim.clip_grad=1e-30",
        "optim.lr_warmup_iters=2",
        "exit_interval=1",
        f"handover.from_run={straight / 'demo_1'}",
        f"data.path={corpus}",
    )
    before = _tensors(straight / "demo_1", 4)
    for choice in ("keep", "reset"):
        ranks.finish(*words, f"run_dir={tmp_path / choice}", f"handover.optimizer={choice}")
        after = _tensors(tmp_path / choice, 1)
        for name, value in before.items():
            if "balancing" in name:  # a part of the model that moves with every step, whatever the learning rate
                continue
            if "exp_avg" not in name:
                if value.is_floating_point():
                    assert torch.equal(value, after[name]), name
            elif choice == "reset":
                assert after[name].abs().max() < 1e-20, name
            else:
                betas = (0.95,) if "exp_avg_sq" in name else (0.9, 0.95)  # of AdamW's parameters, of Muon's
                assert any(torch.allclose(after[name], b * value, rtol=1e-5, atol=1e-20) for b in betas), name


def _run_with_kills(ranks: Ranks, run_dir: Path, stages, words, kills: int, seed: int) -> Counter:
    """Runs the stages, killing commands up to `kills` times at random: while they start, between lines, within a save.

    Returns how often one was killed at which kind of moment; a kill that comes as a command has just ended is none.
    """
    chance, done = random.Random(seed), Counter()
    for number, stage in enumerate(stages, 1):
        share = kills * number // len(stages)  # of the kills, up to this stage
        while True:
            moment = chance.choice(("starting", "running", "running", "saving"))
            kill = {
                "starting": ("zaya: parameters", chance.uniform(0, 0.5)),
                "running": ("tok/s", chance.uniform(0, 0.1)),  # behind its first step
                "saving": (str(run_dir / stage / "checkpoints"), chance.uniform(0, 0.1)),
            }[moment]
            code = ranks.run("curriculum", "--only", stage, *words, kill=kill if done.total() < share else None)
            if code == -9:
                done[moment] += 1
                continue
            assert code == 0, ranks.log.read_text()[-6000:]
            break
    return done
