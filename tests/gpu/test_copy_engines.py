# SPDX-License-Identifier: Apache-2.0
"""Training with copy engines in place of NCCL's kernels, parameters gathered (parallel.nccl_ub) and gradients reduced (parallel.reduce_by_copies): the same
numbers, and runs that end by themselves.

As many ranks as there are devices, four at most. Alone there is nothing to copy: registered memory and its end are what is left.
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


GATHERED, REDUCED = "parallel.nccl_ub=true", "parallel.reduce_by_copies=true"
needs_two = pytest.mark.skipif(RANKS == 1, reason="needs two accelerators: one has nothing to copy")


@pytest.mark.parametrize(
    "copied", [(GATHERED,), pytest.param((REDUCED,), marks=needs_two), pytest.param((GATHERED, REDUCED), marks=needs_two)], ids=["gathered", "reduced", "both"],
)  # fmt: skip
@pytest.mark.parametrize("end", [f"stage.train_iters={STEPS}", f"exit_interval={STEPS}"], ids=["by itself", "exit condition"])
@pytest.mark.parametrize("graphs, dtype, within", [("none", "fp32", 1e-4), ("full_iteration", "bf16", 2e-3)])
def test_training_is_the_same(demo, tmp_path, graphs, dtype, within, end, copied):
    # The schedule is the demo's where it ends early, and fits into six steps where it ends by itself.
    recipe = [*RECIPE, f"cluster.graphs={graphs}", f"cluster.dtype={dtype}", end, "optim.lr_decay_style=constant", "optim.lr_warmup_iters=1"]
    demo(tmp_path / "usual", *recipe)
    demo(tmp_path / "copied", *recipe, *copied)
    usual, by_copies = rows(tmp_path / "usual"), rows(tmp_path / "copied")
    assert [row["step"] for row in by_copies] == [row["step"] for row in usual] == list(range(1, STEPS + 1))
    assert by_copies[0]["grad_norm"] == pytest.approx(usual[0]["grad_norm"], rel=within / 10)  # reduced, not yet gathered
    for mine, theirs in zip(by_copies[2:], usual[2:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=within)
    log = (tmp_path / "copied" / "logs" / "rank0.log").read_text()
    found = re.findall(r"registered buffers: ([0-9.]+) GiB with a group of (\d)", log)
    assert bool(found) == (GATHERED in copied) and all(float(gib) > 0 and int(size) == RANKS for gib, size in found)
    assert "registered buffers" not in (tmp_path / "usual" / "logs" / "rank0.log").read_text()


@needs_two
@pytest.mark.parametrize("copied, gone", [((GATHERED,), "AllGather"), ((REDUCED,), "ReduceScatter")], ids=["gathered", "reduced"])
def test_what_is_copied_needs_no_kernel_of_nccl(zaya, tmp_path, copied, gone):
    zaya("bench", "step", "experiment=cpu_demo", *RECIPE, *copied, "--random-tokens=2048", "--no-trace", "--output", tmp_path / "bench")
    record = json.loads((tmp_path / "bench" / "step.json").read_text())
    names = [each["name"] for row in record["parts"] if row["part"] == "communication" for each in row["longest"]]
    assert any(name.startswith("Memcpy PtoP") for name in names) and not any(gone in name for name in names), names
