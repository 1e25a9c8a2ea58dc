# SPDX-License-Identifier: Apache-2.0
"""Training with parameters that copy engines gather in place of NCCL's kernels (parallel.nccl_ub): the same numbers,
and runs that end by themselves.

As many ranks as there are devices, four at most. Alone there is nothing to copy: registered memory and its end are what
is left. Over few steps, since the demo doubles a difference every few steps; without any reduction its losses are the
same up to step 2. A graph takes bf16 alone, whose weights round a difference in the order of sums up.
"""

import json
import re

import pytest
import torch

STEPS = 6
RANKS = max(count for count in (1, 2, 4) if count <= max(torch.cuda.device_count(), 1))
RECIPE = [
    "cluster=gpu",
    "logger=none",
    "optim=muon",
    f"nproc={RANKS}",
    f"cluster.gpus_per_node={RANKS}",
    "parallel.overlap_grad_reduce=true",
    "parallel.overlap_param_gather=true",
    "parallel.ddp_bucket_size=200000",
]
# cluster.graphs, cluster.dtype; relative differences that are allowed
EAGER, GRAPH = ((("none", "fp32"), 1e-4), (("full_iteration", "bf16"), 2e-3))
GATHERED = "parallel.nccl_ub=true"
BY_ITSELF, EXIT_CONDITION = f"stage.train_iters={STEPS}", f"exit_interval={STEPS}"


def train(demo, run_dir, graphs_and_dtype, end, *overrides):
    """Rows of metrics.jsonl, and rank 0's log. The schedule is the demo's where it ends early, and fits into the steps
    where it ends by itself.
    """
    graphs, dtype = graphs_and_dtype
    recipe = [
        f"cluster.graphs={graphs}",
        f"cluster.dtype={dtype}",
        end,
        "optim.lr_decay_style=constant",
        "optim.lr_warmup_iters=1",
        *overrides,
    ]
    demo(run_dir, *RECIPE, *recipe)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()], (
        run_dir / "logs" / "rank0.log"
    ).read_text()


@pytest.mark.parametrize(
    "kind, end", [(EAGER, BY_ITSELF), (GRAPH, EXIT_CONDITION)], ids=["eager, by itself", "graph, exit condition"]
)
def test_training_is_the_same(demo, tmp_path, kind, end):
    """Compares the losses of both kinds of step, one of them with both kinds of run end. The way in which a run ends
    changes none of its numbers (on a CPU they are bitwise equal).
    """
    graphs_and_dtype, within = kind
    try:
        gathered, log = train(demo, tmp_path / "gathered", graphs_and_dtype, end, GATHERED)
    except AssertionError as failed:
        if "torch has no NCCL memory for this device" in str(failed):  # a single H200 without a switch
            pytest.skip("torch has no NCCL memory for this device: no multicast")
        raise
    usual, usual_log = train(demo, tmp_path / "usual", graphs_and_dtype, EXIT_CONDITION)
    assert "registered buffers" not in usual_log
    assert [row["step"] for row in gathered] == [row["step"] for row in usual] == list(range(1, STEPS + 1))
    assert gathered[0]["grad_norm"] == pytest.approx(usual[0]["grad_norm"], rel=within / 10)  # not yet gathered
    for mine, theirs in zip(gathered[2:], usual[2:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=within)
    registered = re.findall(r"registered buffers: ([0-9.]+) GiB with a group of (\d)", log)
    assert registered and all(float(gib) > 0 and int(size) == RANKS for gib, size in registered)


@pytest.mark.skipif(RANKS == 1, reason="needs two accelerators: one has nothing to copy")
def test_what_is_copied_needs_no_kernel_of_nccl(zaya, tmp_path):
    recipe = ["experiment=cpu_demo", *RECIPE, "cluster.graphs=full_iteration", GATHERED]
    zaya("bench", "step", *recipe, "--random-tokens=2048", "--no-trace", "--output", tmp_path / "bench")
    record = json.loads((tmp_path / "bench" / "step.json").read_text())
    names = [each["name"] for row in record["parts"] if row["part"] == "communication" for each in row["longest"]]
    assert any(name.startswith("Memcpy PtoP") for name in names) and not any("AllGather" in name for name in names), (
        names
    )
