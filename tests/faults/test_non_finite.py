# SPDX-License-Identifier: Apache-2.0
"""Training that runs away: the step that has no finite gradients ends the run, or is left out, and its weights are
nobody's.
"""

import os

import pytest

from tests.running import MICRO, train, zaya

pytestmark = pytest.mark.slow  # whole runs; tests/optim/test_chained.py does it with an optimizer alone
RUNAWAY = (
    "nproc=1",
    "optim.lr=100",
    "optim.overrides=['* lr_mult=1000000']",
    "optim.weight_decay=1000000",
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
        "zaya: step 2: optim.non_finite_gradients=stop: " in run.output
        and "gradients (of all ranks) hold an infinity or NaN" in run.output
    )
    assert "optim.non_finite_gradients=skip" in run.output and "Traceback" not in run.output
    assert f"The last good checkpoint is {tmp_path}/checkpoints/iter_0000001." in run.output
    assert list(run.steps()) == [1], "nothing is reported of a step that was not taken"
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_steps_are_left_out_where_that_is_asked_for(corpus, tmp_path):
    run = train(tmp_path, corpus, *RUNAWAY, "optim.non_finite_gradients=skip", check=False)
    assert list(run.steps()) == [1, 2, 3, 4]
    assert run.code == 1 and "Traceback" not in run.output
    assert "the gradients of its last step were not finite, so it was not saved" in run.output
    assert f"The last good checkpoint is {tmp_path}/checkpoints/iter_0000001." in run.output
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == ["iter_0000001"]
    assert [run.steps()[step]["loss"] == run.steps()[step]["loss"] for step in (1, 2)] == [True, False]


def test_a_validation_loss_that_is_not_finite_ends_the_run_before_the_save(corpus, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "if '-m' in sys.orig_argv and 'zaya_plugin.hosts.worker' in sys.orig_argv:\n"
        "    from zaya_plugin.data import dataset\n"
        "    plain, count = dataset.mean_loss, []\n"
        "    def mean_loss(losses, weights):\n"
        "        count.append(0)\n"
        "        return float('nan') if len(count) == 2 else plain(losses, weights)\n"
        "    dataset.mean_loss = mean_loss\n"
    )
    words = ("nproc=2", "stage.train_iters=6", "stage.eval_interval=2", "checkpoint.save_interval=1")
    words = ("train", *MICRO, f"run_dir={tmp_path}/run", f"data.path={corpus}", *words, "checkpoint.save=sync")
    done = zaya(*words, PYTHONPATH=os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    assert "step 4: validation loss nan" in done.stdout
    assert "step 4: validation loss=nan: is not finite: the data may hold" in done.stdout
    assert f"The last good checkpoint is {tmp_path}/run/checkpoints/iter_0000003." in done.stdout


def test_skipped_steps_in_a_row_end_the_run(corpus, tmp_path):
    words = ("optim.non_finite_gradients=skip", "optim.max_non_finite_steps=2", "checkpoint.save_interval=null")
    run = train(tmp_path, corpus, *RUNAWAY, *words, check=False)
    assert run.code == 1 and "zaya: step 3: optim.max_non_finite_steps=2: " in run.output
    assert list(run.steps()) == [1, 2] and "There is no complete checkpoint in" in run.output


def test_a_loss_that_is_not_finite_is_never_saved_although_the_gradients_are(corpus, tmp_path):
    """As with the damaged sample index of a cache: the loss is 0 / 0 and every gradient 0. The loss is made so in the
    ranks.
    """
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "if '-m' in sys.orig_argv and 'zaya_plugin.hosts.worker' in sys.orig_argv:\n"
        "    from zaya_plugin.optim import chained\n"
        "    plain = chained.HostCopy.read\n"
        "    count = []\n"
        "    def read(self):\n"
        "        found = plain(self)\n"
        "        if found and found[0].numel() == 1 and found[0].dim() == 0:\n"
        "            count.append(0)\n"
        "            if len(count) == 3:\n"
        "                found[0].fill_(float('nan'))\n"
        "        return found\n"
        "    chained.HostCopy.read = read\n"
    )
    words = (
        "nproc=2",
        "stage.train_iters=6",
        "stage.eval_iters=0",
        "checkpoint.save_interval=1",
        "checkpoint.save=sync",
    )
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    words = ("train", *MICRO, f"run_dir={tmp_path}/run", f"data.path={corpus}", *words)
    done = zaya(*words, PYTHONPATH=path)
    assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout
    assert "step 3: loss=nan: is not finite" in done.stdout
    assert f"The last good checkpoint is {tmp_path}/run/checkpoints/iter_0000002." in done.stdout
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("iter_???????"))
    assert kept == ["iter_0000001", "iter_0000002"]
