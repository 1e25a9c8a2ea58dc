# SPDX-License-Identifier: Apache-2.0
"""Whole runs under AdamW that must give the same losses: ranks, recomputation, resumption. Real processes, gloo, fp32.

tests/distributed/test_muon.py has what `make test` runs of it: one and two ranks, and resumption.
"""

import shutil
from pathlib import Path

import pytest

from tests.running import MICRO, Run, train

NUMBERS = ("loss", "grad_norm", "lr", "load_entropy", "router_entropy", "consumed_samples", "expert_load")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, corpus) -> Run:
    return train(tmp_path_factory.mktemp("one"), corpus, "nproc=1")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, corpus) -> Run:
    return train(tmp_path_factory.mktemp("two"), corpus, "nproc=2", "logger.wandb=true")


def _at_step_10(run: Run, to: Path) -> Path:
    """A copy of the run as it was when its checkpoint of step 10 was whole and the next one not begun."""
    shutil.copytree(run.run_dir, to)
    shutil.rmtree(to / "checkpoints" / "iter_0000020")
    (to / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("10")
    return to


def _largest_difference(a: Run, b: Run, steps, key: str = "loss") -> float:
    return max(abs(a.steps()[step][key] - b.steps()[step][key]) for step in steps)


@pytest.mark.slow
def test_two_ranks_equal_one_over_20_steps(one_rank, two_ranks):
    assert list(one_rank.steps()) == list(two_ranks.steps()) == list(range(1, 21))
    # Expert choices first: the sums of the gradients differ in their last bits, so a near tie may fall otherwise.
    flips = sum(
        one_rank.steps()[step]["expert_load"] != two_ranks.steps()[step]["expert_load"] for step in range(1, 21)
    )
    assert flips <= 2, f"steps with other expert counts: {flips}"
    assert _largest_difference(one_rank, two_ranks, range(1, 21)) < 2e-5
    assert _largest_difference(one_rank, two_ranks, range(1, 21), "grad_norm") < 1e-3
    assert abs(one_rank.validation()[20] - two_ranks.validation()[20]) < 2e-5


@pytest.mark.slow
def test_the_loss_falls(two_ranks):
    steps = two_ranks.steps()
    assert steps[1]["loss"] > 6.0 > steps[20]["loss"]


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, corpus, two_ranks):
    resumed = train(_at_step_10(two_ranks, tmp_path / "run"), corpus, "nproc=2", "resume=auto", "logger.wandb=true")
    assert "continuing after step 10" in resumed.output
    assert list(resumed.steps()) == list(range(1, 21)), "rows of steps taken again must appear once"
    for step in range(11, 21):
        for key in NUMBERS:
            assert resumed.steps()[step][key] == two_ranks.steps()[step][key], (step, key)
    assert resumed.validation() == two_ranks.validation()
    before, after = (
        {path.name.rsplit("-", 1)[-1] for path in (run.run_dir / "wandb").glob("offline-run-*")}
        for run in (two_ranks, resumed)
    )
    assert len(before) == 1 and before < after and len(after) == 2, "a copied run is another W&B run"


@pytest.mark.slow
def test_resuming_on_one_rank_equals_to_within_summation_order(tmp_path, corpus, two_ranks):
    resumed = train(_at_step_10(two_ranks, tmp_path / "run"), corpus, "nproc=1", "resume=must")
    assert _largest_difference(resumed, two_ranks, range(11, 21)) < 2e-5
    assert resumed.steps()[11]["consumed_samples"] == two_ranks.steps()[11]["consumed_samples"]


@pytest.mark.slow  # tests/model compares recomputation in one process
@pytest.mark.parametrize(
    "recompute",
    [
        ["parallel.recompute_granularity=full", "parallel.recompute_method=uniform", "parallel.recompute_num_layers=2"],
        ["parallel.recompute_granularity=selective", "parallel.recompute_modules=[core_attn,moe,layernorm]"],
    ],
    ids=["full", "selective"],
)
def test_recomputation_changes_nothing(tmp_path, corpus, one_rank, recompute):
    run = train(tmp_path, corpus, "nproc=1", "exit_interval=5", *recompute)
    for step in range(1, 6):
        assert run.steps()[step]["expert_load"] == one_rank.steps()[step]["expert_load"]
    if "full" in recompute[0]:
        assert _largest_difference(run, one_rank, range(1, 6)) == 0
    else:  # a part computed again adds its gradients in another order
        assert _largest_difference(run, one_rank, range(1, 6)) < 2e-6


@pytest.mark.slow
def test_bf16_trains_with_two_ranks_and_overlap(tmp_path, corpus, two_ranks):
    run = train(
        tmp_path,
        corpus,
        "nproc=2",
        "cluster.dtype=bf16",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
    )
    assert _largest_difference(run, two_ranks, range(1, 6)) < 0.02
    assert run.steps()[20]["loss"] == pytest.approx(two_ranks.steps()[20]["loss"], abs=0.15)


@pytest.mark.slow
def test_without_the_distributed_optimizer_the_losses_are_the_same(tmp_path, corpus, two_ranks):
    run = train(tmp_path, corpus, "nproc=2", "exit_interval=6", "parallel.use_distributed_optimizer=false")
    assert _largest_difference(run, two_ranks, range(1, 7)) < 2e-5


def test_micro_is_a_real_zaya():
    from zaya_plugin.config.compose import compose

    model = compose(list(MICRO) + ["data.path=x"]).model
    assert (model.num_experts, model.num_layers) == (16, 4)
    assert model.num_attention_heads == 4 * model.num_query_groups and model.num_query_groups == 2
