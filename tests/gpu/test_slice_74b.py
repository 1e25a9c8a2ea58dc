# SPDX-License-Identifier: Apache-2.0
"""Eight layers of ZAYA1-74B on four GPUs of one host, EP 4: every kernel passes its self-check at the model's sizes,
memory is what was planned, a step has a rate, and the loss falls.

docs/recipes.md has the command that measures it in full.
"""

import json

import pytest
import torch

from tests.running import zaya

SLICE = (
    "experiment=zaya1_74b",
    "cluster=h200_8",
    "nproc=4",
    "cluster.gpus_per_node=4",
    "cluster.numa_nodes=[]",
    "model.num_layers=8",
    "parallel.expert_model_parallel_size=4",
    "parallel.context_parallel_size=1",
    "stage.seq_length=8192",
    "stage.train_iters=30",
    "optim.lr_warmup_iters=3",
    "logger=none",
)
PLANNED_GIB = 49.8  # `zaya plan run` of these words and 32 sequences a step
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(autouse=True)
def four_gpus():
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")


def test_a_step_has_the_planned_memory_and_a_rate(tmp_path, record_property):
    words = ("stage.global_batch_size=32", "--random-tokens", "--no-trace", "--steps=4", f"--output={tmp_path}")
    done = zaya("bench", "step", *SLICE, *words)
    assert done.returncode == 0, done.stdout
    assert "failed its self-check" not in done.stdout, done.stdout
    step = json.loads((tmp_path / "step.json").read_text())["step"]
    record_property("step", step)
    print(step)
    assert step["allocated_gib"] == pytest.approx(PLANNED_GIB, rel=0.1)
    # 0.55 is predicted, from H200 records of ZAYA1-base, of which no layout had expert parallelism
    assert 0.25 < step["share_of_gemm"] < 1


def test_the_loss_falls(tmp_path):
    corpus, run_dir = tmp_path / "corpus", tmp_path / "run"
    words = ("--max-bytes", "8M", "--valid-fraction", "0.1", "--train-bpe", "512", "--workers", "4")
    done = zaya("data", "prepare", "--output", str(corpus), *words)
    assert done.returncode == 0, done.stdout
    words = ("stage.global_batch_size=8", "stage.eval_iters=0", "checkpoint.save_interval=null", "exit_interval=12")
    done = zaya("train", *SLICE, *words, f"data.path={corpus}", f"run_dir={run_dir}")
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5, losses
