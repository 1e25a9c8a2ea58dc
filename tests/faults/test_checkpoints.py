# SPDX-License-Identifier: Apache-2.0
"""What can go wrong around checkpoints: signals, kills, damage, another model, a full disk. Nothing may be lost."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.running import Run, train, train_and_signal

LONG = ("nproc=1", "stage.train_iters=400", "stage.eval_interval=1000", "checkpoint.save_interval=1000")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus) -> Run:
    """A run of six steps with checkpoints at 2, 4 and 6, of which the last two are kept."""
    return train(
        tmp_path_factory.mktemp("saved"),
        corpus,
        "nproc=1",
        "stage.train_iters=6",
        "stage.eval_interval=100",
        "checkpoint.save_interval=2",
        "checkpoint.keep_last=2",
    )


def _copy(run: Run, to: Path) -> Path:
    shutil.copytree(run.run_dir, to)
    return to


def test_only_the_newest_checkpoints_are_kept(saved):
    kept = sorted(path.name for path in (saved.run_dir / "checkpoints").iterdir())
    assert kept == ["iter_0000004", "iter_0000006", "latest_checkpointed_iteration.txt"]


def test_a_killed_run_and_a_stopped_run_resume(tmp_path, corpus, saved):
    """One run: killed after step 9, resumed from its checkpoint of step 6, stopped by SIGTERM, resumed where it
    stopped.
    """
    run_dir = _copy(saved, tmp_path / "run")
    killed = train_and_signal(run_dir, corpus, signal.SIGKILL, 9, *LONG, "resume=auto")
    assert killed.code != 0 and max(killed.steps()) >= 9

    # A later step than the killed run reached: rows of its lost steps are in metrics.jsonl until the resumed run
    # removes them.
    stopped = train_and_signal(run_dir, corpus, signal.SIGTERM, max(killed.steps()) + 1, *LONG, "resume=auto")
    assert stopped.code == 128 + signal.SIGTERM, stopped.output
    assert "continuing after step 6" in stopped.output
    last = max(stopped.steps())
    assert (run_dir / "checkpoints" / f"iter_{last:07d}").is_dir(), stopped.output
    assert list(stopped.steps()) == list(range(1, last + 1)), "rows of the lost steps must be gone"

    resumed = train(run_dir, corpus, *LONG, "resume=must", f"exit_interval={last + 2}")
    assert f"continuing after step {last}" in resumed.output
    assert list(resumed.steps()) == list(range(1, last + 3))


@pytest.mark.slow
def test_a_half_written_checkpoint_is_not_loaded(tmp_path, corpus, saved):
    """After a kill in the middle of a save the run resumes from the checkpoint before, which the tracker still
    names.
    """
    run_dir = _copy(saved, tmp_path / "run")
    half = run_dir / "checkpoints" / "iter_0000008"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    resumed = train(run_dir, corpus, "nproc=1", "resume=auto", "stage.train_iters=8", "stage.eval_interval=100")
    assert "continuing after step 6" in resumed.output
    assert (half / "metadata.json").is_file(), "the same iteration is saved again, whole"


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["truncated", "tracker", "missing"])
def test_damage_is_named_and_nothing_is_touched(tmp_path, corpus, saved, harm):
    run_dir = _copy(saved, tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    shard = max((checkpoints / "iter_0000006").glob("*.distcp"), key=lambda path: path.stat().st_size)
    if harm == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    elif harm == "missing":
        shard.unlink()
    else:
        (checkpoints / "latest_checkpointed_iteration.txt").write_text("")
    before = sorted((path, path.stat().st_size) for path in checkpoints.rglob("*"))
    refused = train(run_dir, corpus, "nproc=1", "resume=auto", "stage.train_iters=8", check=False)
    assert refused.code == 2, refused.output
    assert "Traceback" not in refused.output
    assert ("latest_checkpointed_iteration" if harm == "tracker" else shard.name) in refused.output
    assert "whole checkpoints" in refused.output and "4" in refused.output
    assert before == sorted((path, path.stat().st_size) for path in checkpoints.rglob("*"))
    # What the message advises works.
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    resumed = train(run_dir, corpus, "nproc=1", "resume=auto", "stage.train_iters=8", "stage.eval_interval=100")
    assert "continuing after step 4" in resumed.output


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path, corpus, saved):
    run_dir = _copy(saved, tmp_path / "run")
    refused = train(
        run_dir, corpus, "nproc=1", "resume=auto", "model.num_layers=5", "model.temperature_form=exp", check=False
    )
    assert refused.code == 2, refused.output
    for part in (
        "another model",
        "num_layers: checkpoint 4, recipe 5",
        "temperature_form: checkpoint 'linear', recipe 'exp'",
    ):
        assert part in refused.output
    assert "Traceback" not in refused.output


@pytest.mark.slow
def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, corpus, saved):
    """A save that does not fit on a (real, small) file system leaves the checkpoint before intact. The save that
    does not fit fails the run; what was whole before stays whole.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in saved.run_dir.rglob("*") if path.is_file())
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={int(size * 1.2)}", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        run_dir = disk / "run"
        shutil.copytree(saved.run_dir, run_dir)
        failed = train(
            run_dir,
            corpus,
            "nproc=1",
            "resume=auto",
            "stage.train_iters=8",
            "stage.eval_interval=100",
            "checkpoint.keep_last=2",
            check=False,
        )
        assert failed.code != 0, failed.output
        assert "No space left on device" in failed.output
        assert (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "6"
        shutil.rmtree(run_dir / "checkpoints" / "iter_0000008", ignore_errors=True)
        shutil.copytree(run_dir, tmp_path / "rescued")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    resumed = train(
        tmp_path / "rescued", corpus, "nproc=1", "resume=must", "stage.train_iters=7", "stage.eval_interval=100"
    )
    assert "continuing after step 6" in resumed.output
