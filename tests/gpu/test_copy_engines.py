# SPDX-License-Identifier: Apache-2.0
"""Training with copy engines in place of NCCL's kernels, parameters gathered (parallel.nccl_ub) and gradients reduced (parallel.reduce_by_copies): the same
numbers, and runs that end by themselves.

As many ranks as there are devices, four at most. Alone there is nothing to copy: registered memory and its end are what is left.
Over few steps, since the demo doubles a difference every few steps; without any reduction its losses are the same up to step 2. A graph takes bf16 alone, whose
weights round a difference in the order of sums up. tests/gpu/test_copied_reduction.py has the reduction alone, to the bit.
"""

import json
import re

import pytest
import torch

STEPS, SECONDS = 6, 150  # of a run, after which it counts as one that does not end
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
EAGER, GRAPH = (
    (("none", "fp32"), 1e-4),
    (("full_iteration", "bf16"), 2e-3),
)  # cluster.graphs, cluster.dtype; relative differences that are allowed
GATHERED, REDUCED = "parallel.nccl_ub=true", "parallel.reduce_by_copies=true"
BY_ITSELF, EXIT_CONDITION = f"stage.train_iters={STEPS}", f"exit_interval={STEPS}"
needs_two = pytest.mark.skipif(RANKS == 1, reason="needs two accelerators: one has nothing to copy")


def train(demo, run_dir, graphs_and_dtype, end, *copied):
    """Rows of metrics.jsonl, and rank 0's log. The schedule is the demo's where it ends early, and fits into the steps where it ends by itself."""
    graphs, dtype = graphs_and_dtype
    recipe = [
        f"cluster.graphs={graphs}",
        f"cluster.dtype={dtype}",
        end,
        "optim.lr_decay_style=constant",
        "optim.lr_warmup_iters=1",
        *copied,
    ]
    demo(run_dir, *RECIPE, *recipe, timeout=SECONDS)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()], (
        run_dir / "logs" / "rank0.log"
    ).read_text()


@pytest.fixture(scope="module")
def usual(demo, tmp_path_factory):
    """usual(graphs_and_dtype) -> rows of the run without copies, made once: how it ends changes none of its numbers (on a CPU it is so to the bit)."""
    known = {}

    def run(graphs_and_dtype):
        if graphs_and_dtype not in known:
            known[graphs_and_dtype], log = train(
                demo, tmp_path_factory.mktemp("usual"), graphs_and_dtype, EXIT_CONDITION
            )
            assert "registered buffers" not in log and "gradients reduced by copies" not in log
        return known[graphs_and_dtype]

    return run


@pytest.mark.timeout(2 * SECONDS + 200)  # the usual run and the demo's data are made on the way
@pytest.mark.parametrize(
    "kind, end, copied",
    [
        (EAGER, BY_ITSELF, (GATHERED,)),
        (GRAPH, EXIT_CONDITION, (GATHERED,)),
        pytest.param(EAGER, EXIT_CONDITION, (REDUCED,), marks=needs_two),
        pytest.param(GRAPH, BY_ITSELF, (REDUCED,), marks=needs_two),
        pytest.param(EAGER, BY_ITSELF, (GATHERED, REDUCED), marks=needs_two),
        pytest.param(GRAPH, EXIT_CONDITION, (GATHERED, REDUCED), marks=needs_two),
    ],
    ids=[
        "eager, by itself, gathered",
        "graph, exit condition, gathered",
        "eager, exit condition, reduced",
        "graph, by itself, reduced",
        "eager, by itself, both",
        "graph, exit condition, both",
    ],
)
def test_training_is_the_same(demo, usual, tmp_path, kind, end, copied):
    """Every pair of a kind of step with a way of copying, of either with an end; not every three of them."""
    graphs_and_dtype, within = kind
    without = usual(graphs_and_dtype)
    by_copies, log = train(demo, tmp_path / "copied", graphs_and_dtype, end, *copied)
    assert [row["step"] for row in by_copies] == [row["step"] for row in without] == list(range(1, STEPS + 1))
    assert by_copies[0]["grad_norm"] == pytest.approx(
        without[0]["grad_norm"], rel=within / 10
    )  # reduced, not yet gathered
    for mine, theirs in zip(by_copies[2:], without[2:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=within)
    registered = re.findall(r"registered buffers: ([0-9.]+) GiB with a group of (\d)", log)
    assert bool(registered) == (GATHERED in copied) and all(
        float(gib) > 0 and int(size) == RANKS for gib, size in registered
    )
    windows = re.findall(r"gradients reduced by copies: a window of ([0-9.]+) MiB with a group of (\d)", log)
    assert [int(size) for _, size in windows] == ([RANKS] if REDUCED in copied else []), (
        "experts share the window of the rest"
    )


@needs_two
@pytest.mark.parametrize(
    "copied, gone", [((GATHERED,), "AllGather"), ((REDUCED,), "ReduceScatter")], ids=["gathered", "reduced"]
)
def test_what_is_copied_needs_no_kernel_of_nccl(zaya, tmp_path, copied, gone):
    recipe = ["experiment=cpu_demo", *RECIPE, "cluster.graphs=full_iteration", *copied]
    zaya(
        "bench", "step", *recipe, "--random-tokens=2048", "--no-trace", "--output", tmp_path / "bench", timeout=SECONDS
    )
    record = json.loads((tmp_path / "bench" / "step.json").read_text())
    names = [each["name"] for row in record["parts"] if row["part"] == "communication" for each in row["longest"]]
    assert any(name.startswith("Memcpy PtoP") for name in names) and not any(gone in name for name in names), names
