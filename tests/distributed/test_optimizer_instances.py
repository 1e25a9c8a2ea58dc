# SPDX-License-Identifier: Apache-2.0
"""Two instances of the optimizer's state over four ranks, under Muon: the steps of one instance, and checkpoints that
move between the two.
"""

import shutil

import pytest

from tests.running import MICRO, Run, train

RECIPE = (
    *(
        "nproc=4",
        "optim=muon",
        "optim.muon_dtype=fp32",
        "optim.lr=2e-3",
        "stage.train_iters=12",
        "stage.eval_interval=12",
        "checkpoint.save_interval=6",
    ),
    *("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true", "stage.micro_batch_size=1"),
)
TWO = "parallel.num_distributed_optimizer_instances=2"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus) -> dict[int, Run]:
    folder = tmp_path_factory.mktemp("instances")
    return {
        1: train(folder / "one", corpus, *RECIPE, recipe=MICRO),
        2: train(folder / "two", corpus, *RECIPE, TWO, recipe=MICRO),
    }


def from_step_6(run: Run, to, corpus, *overrides: str) -> Run:
    shutil.copytree(run.run_dir, to)
    shutil.rmtree(to / "checkpoints" / "iter_0000012")
    (to / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("6")
    return train(to, corpus, *RECIPE, *overrides, "resume=must")


def largest_difference(a: Run, b: Run, steps=range(1, 13)) -> float:
    return max(abs(a.steps()[step]["loss"] - b.steps()[step]["loss"]) for step in steps)


def test_the_steps_are_those_of_one_instance(runs):
    assert largest_difference(runs[1], runs[2]) < 2e-5
    assert runs[2].steps()[12]["loss"] < runs[2].steps()[1]["loss"] - 0.1
    norms = [[run.steps()[step]["grad_norm"] for step in range(1, 13)] for run in runs.values()]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_a_resumed_run_is_the_uninterrupted_one(runs, tmp_path, corpus):
    resumed = from_step_6(runs[2], tmp_path / "run", corpus, TWO)
    assert [resumed.steps()[step]["loss"] for step in range(7, 13)] == [
        runs[2].steps()[step]["loss"] for step in range(7, 13)
    ]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1)])
def test_checkpoints_move_between_numbers_of_instances(runs, tmp_path, corpus, saved_by, loaded_by):
    resumed = from_step_6(
        runs[saved_by], tmp_path / "run", corpus, f"parallel.num_distributed_optimizer_instances={loaded_by}"
    )
    assert largest_difference(resumed, runs[1], range(7, 13)) < 2e-5
