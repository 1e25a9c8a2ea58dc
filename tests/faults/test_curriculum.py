# SPDX-License-Identifier: Apache-2.0
"""A curriculum is handed over exactly and survives kills: the last bits of every weight and momentum are compared (fp32, CPU)."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zaya_plugin.training.curriculum import read_state

SMALL = (
    *("model.num_layers=2", "model.num_experts=4", "model.hidden_size=64", "model.kv_channels=8", "model.moe_ffn_hidden_size=48"),
    *("model.router_hidden_size=16", "stage.seq_length=16", "stage.micro_batch_size=1", "stage.global_batch_size=2"),
    *("stage.eval_iters=0", "stage.eval_at_start=false", "optim.lr_warmup_iters=0", "optim.lr_warmup_init=0", "optim.lr=1e-3"),
    *("checkpoint.keep_last=0", "logger.wandb=false", "logger.tensorboard=false", "cluster.threads_per_rank=1"),
    *("parallel.context_parallel_size=1", "checkpoint.save_interval=2"),
)
CONSTANT = ("optim.lr_decay_style=constant",)
TWO = ("experiment=cpu_demo", "curriculum.stages=[cpu_demo_stage1,cpu_demo_stage2]", *SMALL, *CONSTANT)
THREE = ("experiment=cpu_demo", *SMALL, "optim.min_lr=2e-4", "demo_2:optim.lr_decay_style=constant", "demo_2:optim.lr=2e-4",
         "demo_3:stage.seq_length=48")  # fmt: skip


class Ranks:
    """The process of tests.faults.forked_ranks."""

    def __init__(self, log: Path):
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults.forked_ranks"]
        self.log = log
        self.errors = open(log, "a")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)

    def run(self, *argv: str, kill: tuple[int, float] | None = None) -> dict:
        job = {"argv": argv, "log": str(self.log), "kill": kill}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def finish(self, *argv: str) -> dict:
        """Runs a command that has to succeed."""
        done = self.run(*argv)
        assert done["code"] == 0, self.log.read_text()[-6000:]
        return done

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("log") / "ranks.log")
    yield started
    started.close()


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
    """Weights, momenta and second moments in a checkpoint; without the record of random numbers, which nothing reads (no dropout)."""
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
    """Weights, optimizer state, step count and place in the data: any one of them lost or shifted would show."""
    ranks.finish(
        "train", "experiment=cpu_demo_stage1", *SMALL, *CONSTANT, *_where(tmp_path / "whole", corpus), "stage.train_iters=8"
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
    assert refused["code"] == 2
    assert "the stage demo_1 is not finished: it has a checkpoint of step 2 and takes 4 steps" in ranks.log.read_text()
    assert not (tmp_path / "demo_2").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_kills_leave_no_trace(tmp_path, corpus, ranks, straight):
    kills = _run_with_kills(ranks, ("demo_1", "demo_2"), (*TWO, *_where(tmp_path, corpus), "stage.train_iters=4"), 3, seed=1)
    assert kills >= 2
    _same(_tensors(straight / "demo_2", 4), _tensors(tmp_path / "demo_2", 4))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_twenty_kills_of_a_curriculum_leave_no_trace(tmp_path, corpus, ranks):
    """Three stages, of which the last has longer sequences and a RoPE base of its own."""
    stages, more = ("demo_1", "demo_2", "demo_3"), ("stage.train_iters=8",)
    for stage in stages:
        ranks.finish("curriculum", "--only", stage, *THREE, *_where(tmp_path / "straight", corpus), *more)
    kills = _run_with_kills(ranks, stages, (*THREE, *_where(tmp_path / "killed", corpus), *more), 24, seed=7)
    assert kills >= 20
    _same(_tensors(tmp_path / "straight" / "demo_3", 8), _tensors(tmp_path / "killed" / "demo_3", 8))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_a_fresh_optimizer_keeps_the_weights(tmp_path, corpus, ranks, straight):
    """A first step with a learning rate of zero changes no weight, and shows what the momenta were made from."""
    words = (
        "train", "experiment=cpu_demo_stage2", *SMALL, "stage.train_iters=4", "handover.continuous_lr=false", "optim.clip_grad=1e-30",
        "optim.lr_warmup_iters=2", "exit_interval=1", f"handover.from_run={straight / 'demo_1'}", f"data.path={corpus}",
    )  # fmt: skip
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
                beta = 0.95 if "exp_avg_sq" in name else 0.9
                assert torch.allclose(after[name], beta * value, rtol=1e-5, atol=1e-20), name


def _run_with_kills(ranks: Ranks, stages, words, kills: int, seed: int) -> int:
    """Runs the stages, killing commands up to `kills` times at random: while they start, between lines, in steps and saves.

    Returns how often one was killed; a kill that comes as a command has just ended is none.
    """
    chance, done = random.Random(seed), 0
    for number, stage in enumerate(stages, 1):
        share = kills * number // len(stages)  # of the kills, up to this stage
        while True:
            kill = (chance.randrange(6), chance.uniform(0, 0.3)) if done < share else None
            code = ranks.run("curriculum", "--only", stage, *words, kill=kill)["code"]
            if code == -9:
                done += 1
                continue
            assert code == 0, ranks.log.read_text()[-6000:]
            break
    return done
