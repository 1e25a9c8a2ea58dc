# SPDX-License-Identifier: Apache-2.0
"""Whole runs under Muon: one, two and four ranks, resumption with the same and with another number of them."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import MICRO, Run, train

MUON = (*MICRO, "optim=muon", "optim.lr_warmup_iters=2", "optim.lr=2e-3", "optim.min_lr=2e-4", "stage.train_iters=12")
MUON += ("checkpoint.save_interval=6", "stage.eval_interval=12", "optim.muon_dtype=fp32")
NUMBERS = ("loss", "grad_norm", "lr", "load_entropy", "router_entropy", "consumed_samples", "expert_load")


@pytest.fixture(scope="module")
def run_on(tmp_path_factory, corpus) -> Callable[[int], Run]:
    """The same run on a number of ranks, each made once."""
    return functools.cache(
        lambda ranks: train(tmp_path_factory.mktemp(f"muon{ranks}"), corpus, f"nproc={ranks}", recipe=MUON)
    )


def _at_step_6(run: Run, to: Path) -> Path:
    """A copy of the run as it was when its checkpoint of step 6 was whole and the next one not begun."""
    shutil.copytree(run.run_dir, to)
    shutil.rmtree(to / "checkpoints" / "iter_0000012")
    (to / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("6")
    return to


def _difference(a: Run, b: Run, steps) -> float:
    return max(abs(a.steps()[step]["loss"] - b.steps()[step]["loss"]) for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_rank_and_several_agree(run_on, ranks):
    one, several = run_on(1), run_on(ranks)
    assert list(several.steps()) == list(range(1, 13))
    # Gradients of the ranks are summed in another order; a near tie between experts may fall otherwise later on.
    assert _difference(one, several, range(1, 13)) < 5e-5
    assert one.steps()[12]["loss"] < one.steps()[1]["loss"] - 0.3


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, run_on, corpus):
    resumed = train(_at_step_6(run_on(2), tmp_path / "run"), corpus, "nproc=2", "resume=auto", recipe=MUON)
    assert "continuing after step 6" in resumed.output
    assert list(resumed.steps()) == list(range(1, 13)), "rows of steps taken again must appear once"
    for step in range(7, 13):
        for key in NUMBERS:
            assert resumed.steps()[step][key] == run_on(2).steps()[step][key], (step, key)
    assert resumed.validation() == run_on(2).validation()


@pytest.mark.slow
def test_saved_by_four_continued_by_two_equals_never_having_stopped(tmp_path, run_on, corpus):
    resumed = train(_at_step_6(run_on(4), tmp_path / "run"), corpus, "nproc=2", "resume=must", recipe=MUON)
    assert _difference(resumed, run_on(4), range(7, 13)) < 5e-5


@pytest.mark.slow
def test_bf16_with_overlap_follows_fp32(tmp_path, run_on, corpus):
    run = train(
        tmp_path,
        corpus,
        "nproc=2",
        "cluster.dtype=bf16",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
        "optim.muon_dtype=bf16",
        "optim.muon_momentum_dtype=bf16",
        recipe=MUON,
    )
    assert _difference(run, run_on(2), range(1, 4)) < 0.03
    assert run.steps()[12]["loss"] == pytest.approx(run_on(2).steps()[12]["loss"], abs=0.2)
