# SPDX-License-Identifier: Apache-2.0
"""Training that runs away: the step that has no finite gradients ends the run, or is left out, and its weights are
nobody's.
"""

import pytest

from tests.running import train

pytestmark = pytest.mark.slow  # whole runs; tests/optim/test_chained.py does it with an optimizer alone
RUNAWAY = (
    "nproc=1",
    "optim.lr=1e20",
    "optim.min_lr=0",
    "optim.lr_warmup_iters=0",
    "stage.train_iters=4",
    "stage.eval_iters=0",
    "checkpoint.save_interval=1",
)


@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_the_run_ends_and_names_the_step(corpus, tmp_path, optim):
    run = train(tmp_path, corpus, *RUNAWAY, f"optim={optim}", check=False)
    assert run.code != 0
    assert (
        "NonFiniteGradientsError: step 2: " in run.output
        and "gradients (of all ranks) hold an infinity or NaN" in run.output
    )
    assert "optim.non_finite_gradients=skip" in run.output
    assert list(run.steps()) == [1], "nothing is reported of a step that was not taken"
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_steps_are_left_out_where_that_is_asked_for(corpus, tmp_path):
    run = train(tmp_path, corpus, *RUNAWAY, "optim.non_finite_gradients=skip", "checkpoint.save_interval=null")
    assert list(run.steps()) == [1, 2, 3, 4]
    assert [run.steps()[step]["loss"] == run.steps()[step]["loss"] for step in (1, 2)] == [True, False]
