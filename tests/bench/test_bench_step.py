# SPDX-License-Identifier: Apache-2.0
"""Test `zaya bench step` end to end on the CPU: real ranks, Megatron's loop, torch's profiler."""

import gzip
import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.running import MICRO, zaya
from zaya_plugin.bench.step_parts import PARTS, STEP
from zaya_plugin.bench.step_record import SCHEMA
from zaya_plugin.bench.trace import read
from zaya_plugin.plan.flops import Shape, training_flops

ROWS = 512
SMALL = (
    *(word for word in MICRO if not word.startswith(("stage.", "checkpoint."))),
    "stage.seq_length=32",
    "stage.micro_batch_size=2",
    "stage.global_batch_size=4",
    "model.num_layers=2",
    f"--random-tokens={ROWS}",
    "--warmup=1",
)


def checked(run_dir: Path, ranks: int, steps: int) -> dict:
    """Return the record in `run_dir` after checking that its numbers agree with each other."""
    found = json.loads((run_dir / "step.json").read_text())
    step, traced, rows = found["step"], found["traced"], {row["part"]: row for row in found["parts"]}
    assert found["schema"] == SCHEMA and found["world_size"] == ranks and found["device"].startswith("CPU")
    assert found["versions"]["torch"] == torch.__version__ and found["recipe"]["run_dir"] == str(run_dir)
    assert len(step["ms_all"]) == step["steps"] == steps and sum(step["ms_all"]) == pytest.approx(steps * step["ms"])
    assert step["tokens"] == 4 * 32 and step["micro_batches"] == 2 // ranks
    assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["ms"] * 1e3)
    assert step["tokens_per_s_per_device"] == pytest.approx(step["tokens_per_s"] / ranks)
    shape = Shape(2, 64, 8, 2, 8, 16, 48, 16, ROWS, lora_targets=("attention", "experts"))
    assert found["model"] == json.loads(json.dumps(asdict(shape)))
    assert step["tflops_per_device"] == pytest.approx(training_flops(shape, 128, 32) / step["ms"] * 1e3 / ranks / 1e12)
    assert step["share_of_gemm"] == pytest.approx(step["tflops_per_device"] / found["rates"]["gemm_tflops"])
    computing = sum(row["ms"] for row in rows.values() if row["part"] not in ("communication", "idle"))
    assert step["not_computing_share"] == pytest.approx(max(0, 1 - computing / step["ms"]))
    assert step["allocated_gib"] is None and 0.1 < step["resident_gib"] < 16
    assert list(rows) == list(PARTS) and sum(row["share"] for row in rows.values()) == pytest.approx(1, abs=1e-9)
    assert sum(row["ms"] for row in rows.values()) == pytest.approx(traced["ms"]) and traced["source"] == "operators"
    assert sum(row["tflop"] or 0 for row in rows.values() if row["part"] != "optimizer") == pytest.approx(
        training_flops(shape, 128, 32) / ranks / 1e12
    )
    for part in ("norms", "projections", "prologue", "attention", "router", "experts", "head"):
        assert rows[part]["forward_ms"] > 0 and rows[part]["backward_ms"] > 0, part
    assert rows["gradients"]["ms"] > 0 and rows["embedding"]["ms"] > 0 and rows["communication"]["ms"] > 0
    return found


@pytest.mark.slow
def test_a_step_of_one_rank(tmp_path):
    """The test is the rank of an outer launcher, which saves the start of our own."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        rank = dict(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(probe.getsockname()[1])
        )
    done = zaya("bench", "step", *SMALL, "--steps=1", f"run_dir={tmp_path}", **rank)
    assert done.returncode == 0, done.stdout
    found = checked(tmp_path / "bench", ranks=1, steps=1)
    rows = {row["part"]: row for row in found["parts"]}
    assert found["step"]["optimizer"] and rows["optimizer"]["ms"] > 0 and rows["optimizer"]["gb"] > 0
    assert found["command"].startswith("zaya bench step experiment=cpu_demo ")
    assert "No device: the parts are times of operators on the host" in done.stdout and "\nexperts " in done.stdout
    assert not (tmp_path / "bench" / "checkpoints").exists() and not (tmp_path / "bench" / "wandb").exists()
    with gzip.open(tmp_path / "bench" / "trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    # One step: two micro-batches, two layers.
    assert names.count(STEP) == 1 and names.count("ExpertMLP") == names.count("ExpertMLPBackward") == 2 * 2
    start, end = read(tmp_path / "bench" / "trace.json.gz").window(STEP)
    assert (end - start) / 1e3 == pytest.approx(found["traced"]["ms"])


@pytest.mark.slow
def test_two_ranks_without_an_optimizer_compared_with_transformers(tmp_path):
    done = zaya(
        *("bench", "step", *SMALL, "nproc=2", "--steps=2", f"--output={tmp_path}"),
        *("--forward-backward-only", "--no-trace"),
    )
    assert done.returncode == 0, done.stdout
    step, rows = (found := checked(tmp_path, ranks=2, steps=2))["step"], {row["part"]: row for row in found["parts"]}
    assert not step["optimizer"] and rows["optimizer"]["ms"] == 0 and rows["optimizer"]["tflop"] is None
    assert not (tmp_path / "trace.json.gz").exists() and found["traced"]["trace"] is None
    script = Path(__file__).parents[2] / "benchmarks" / "step_vs_transformers.py"
    done = subprocess.run([sys.executable, script, tmp_path, "--warmup=1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "step.json").read_text())
    anchor = found.pop("anchor")
    assert found["step"] == step and anchor["tokens"] == step["tokens"]
    assert anchor["micro_batches"] == step["micro_batches"] == 1
    assert anchor["tokens_per_s_per_device"] == pytest.approx(64 / anchor["ms"] * 1e3)
    assert anchor["ratio"] == pytest.approx(step["tokens_per_s_per_device"] / anchor["tokens_per_s_per_device"])
    assert abs(anchor["loss"] - 6.24) < 0.5  # fresh weights: ln 512
    assert "no optimizer" in anchor["what"] and f"ours / theirs: {anchor['ratio']:.3f}" in done.stdout


def test_a_user_reads_what_to_mend(tmp_path):
    """Missing data and a layout that does not fit are reported before any rank starts."""
    done = zaya("bench", "step", *SMALL[:-2], "nproc=1", "data.path=nowhere", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 2 and "nowhere" in done.stdout and not (tmp_path / "run").exists()
    done = zaya("bench", "step", *SMALL, "nproc=3", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 2 and "global_batch_size" in done.stdout and not (tmp_path / "run").exists()
