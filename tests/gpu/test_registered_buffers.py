# SPDX-License-Identifier: Apache-2.0
"""Training from buffers that are registered with NCCL, parameters gathered by copy engines: the same numbers, and runs that end by themselves.

As many ranks as there are devices, four at most. Alone there is nothing to gather: memory, its registration and its end are what is left.
Over few steps, since the demo doubles a difference every few steps; without any reduction its losses are the same up to step 2. A graph takes bf16 alone, whose
weights round a difference in the order of sums up.
"""

import json
import re

import pytest
import torch

STEPS = 6
RANKS = max(count for count in (1, 2, 4) if count <= max(torch.cuda.device_count(), 1))
RECIPE = [
    "cluster=gpu", "optim=muon", f"nproc={RANKS}", f"cluster.gpus_per_node={RANKS}", "parallel.overlap_grad_reduce=true",
    "parallel.overlap_param_gather=true", "parallel.ddp_bucket_size=200000",
]  # fmt: skip


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("end", [f"stage.train_iters={STEPS}", f"exit_interval={STEPS}"], ids=["by itself", "exit condition"])
@pytest.mark.parametrize("graphs, dtype, within", [("none", "fp32", 1e-4), ("full_iteration", "bf16", 2e-3)])
def test_training_from_registered_buffers_is_the_same(demo, tmp_path, graphs, dtype, within, end):
    # The schedule is the demo's where it ends early, and fits into six steps where it ends by itself.
    recipe = [*RECIPE, f"cluster.graphs={graphs}", f"cluster.dtype={dtype}", end, "optim.lr_decay_style=constant", "optim.lr_warmup_iters=1"]
    demo(tmp_path / "usual", *recipe)
    demo(tmp_path / "registered", *recipe, "parallel.nccl_ub=true")
    usual, registered = rows(tmp_path / "usual"), rows(tmp_path / "registered")
    assert [row["step"] for row in registered] == [row["step"] for row in usual] == list(range(1, STEPS + 1))
    assert registered[0]["grad_norm"] == pytest.approx(usual[0]["grad_norm"], rel=within / 10)  # reduced, not yet gathered
    for mine, theirs in zip(registered[2:], usual[2:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=within)
    log = (tmp_path / "registered" / "logs" / "rank0.log").read_text()
    found = re.findall(r"registered buffers: ([0-9.]+) GiB with a group of (\d)", log)
    assert found and all(float(gib) > 0 and int(size) == RANKS for gib, size in found)
    assert "registered buffers" not in (tmp_path / "usual" / "logs" / "rank0.log").read_text()


@pytest.mark.skipif(RANKS == 1, reason="needs two accelerators: one has nothing to gather")
def test_parameters_come_by_copies_between_devices(zaya, tmp_path):
    zaya("bench", "step", "experiment=cpu_demo", *RECIPE, "parallel.nccl_ub=true", "--random-tokens=2048", "--no-trace", "--output", tmp_path / "bench")
    record = json.loads((tmp_path / "bench" / "step.json").read_text())
    names = [each["name"] for row in record["parts"] if row["part"] == "communication" for each in row["longest"]]
    assert any(name.startswith("Memcpy PtoP") for name in names) and not any("AllGather" in name for name in names), names
