# SPDX-License-Identifier: Apache-2.0
"""What can go wrong around checkpoints: signals, kills, damage, another model, a full disk. Nothing may be lost."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.running import MICRO, Run, train, train_and_signal, zaya
from zaya_plugin.checkpoint.rank_file import COMMON
from zaya_plugin.ground.exit_codes import ENDED_EARLY

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
        "checkpoint.save=sync",  # an asynchronous save is left out while the one before is written
    )


def _copy(run: Run, to: Path) -> Path:
    shutil.copytree(run.run_dir, to)
    return to


@pytest.mark.slow  # tests/checkpoint/test_writer.py does it without a run
def test_only_the_newest_checkpoints_are_kept(saved):
    kept = sorted(path.name for path in (saved.run_dir / "checkpoints").iterdir())
    assert kept == ["iter_0000004", "iter_0000006", "last_start.json", "latest_checkpointed_iteration.txt"]


def test_a_killed_run_resumes_and_a_stopped_run_is_saved(tmp_path, corpus):
    """One run: killed after step 12, resumed from its newest checkpoint, stopped by SIGTERM; the next test resumes
    where a run stopped. Its data loader is a process, as in the recipes for GPUs: Megatron lets it ignore SIGTERM.
    """
    run_dir, long = tmp_path / "run", (*LONG, "data.num_workers=1")
    killed = train_and_signal(run_dir, corpus, signal.SIGKILL, 12, *long, "checkpoint.save_interval=5")
    assert killed.code != 0 and max(killed.steps()) >= 12
    whole = (run_dir / "checkpoints").glob("iter_???????")  # those that are not have a longer name
    newest = max(int(path.name.removeprefix("iter_")) for path in whole)
    assert newest >= 5

    # A later step than the killed run reached: rows of its lost steps are in metrics.jsonl until the resumed run
    # removes them.
    stopped = train_and_signal(run_dir, corpus, signal.SIGTERM, max(killed.steps()) + 1, *long, "resume=auto")
    assert stopped.code == ENDED_EARLY, stopped.output
    assert f"continuing after step {newest}" in stopped.output
    last = max(stopped.steps())
    assert f"a signal ended the run early, at step {last} of 400; step {last} is saved" in stopped.output
    assert f"ended at step {last} of 400: " in stopped.output
    assert (run_dir / "checkpoints" / f"iter_{last:07d}").is_dir(), stopped.output
    assert list(stopped.steps()) == list(range(1, last + 1)), "rows of the lost steps must be gone"


@pytest.mark.slow
@pytest.mark.parametrize("at_step", [5, 6])
def test_a_signal_to_two_ranks_just_before_an_interval_save(tmp_path, corpus, at_step):
    """Both ranks save the step at which they leave, once, whether an interval's save is due there or in flight."""
    every_second = ("nproc=2", "stage.train_iters=400", "stage.eval_interval=1000", "checkpoint.save_interval=2")
    stopped = train_and_signal(tmp_path, corpus, signal.SIGTERM, at_step, *every_second)
    assert stopped.code == ENDED_EARLY, stopped.output
    last = max(stopped.steps())
    saves = re.findall(r"step (\d+): checkpoint saved", stopped.output)
    assert saves[-1] == str(last) and len(saves) == len(set(saves)), stopped.output
    assert f"step {last} is saved" in stopped.output
    assert not list((tmp_path / "checkpoints").glob("iter_*.*"))
    assert zaya("checkpoint", "verify", str(tmp_path), "--all").returncode == 0
    resumed = train(tmp_path, corpus, *every_second, "resume=must", f"exit_interval={last + 2}")
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


def _flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)


def _harm(checkpoints: Path, harm: str) -> str:
    """Damage the checkpoint of step 6; return what a message about it must name."""
    newest = checkpoints / "iter_0000006"
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if harm == "flipped":  # in the middle of the weights: Megatron's loader reads it without an error
        _flip(shard, shard.stat().st_size // 2)
        return f"{shard.name} has the checksum"
    if harm == "arguments":  # 400 bytes of them: their reader ended in a traceback, before anything was compared
        stored = FileSystemReader(newest).read_metadata().storage_data.items()
        place = next(place for key, place in stored if key.fqn.startswith(COMMON))
        _flip(newest / place.relative_path, *range(place.offset + 60, place.offset + 460))
        return f"{place.relative_path} has the checksum"
    if harm == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
        return f"{shard.name} has {shard.stat().st_size} bytes, its manifest states"
    if harm == "missing":
        shard.unlink()
        return f"{shard.name} is missing"
    if harm == "no manifest":
        (newest / "manifest.json").unlink()
        return "manifest.json is missing"
    _flip(newest / "manifest.json", 200)
    return "manifest.json"


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["flipped", "arguments", "truncated", "missing", "no manifest", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, corpus, saved, harm):
    run_dir = _copy(saved, tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    named = _harm(checkpoints, harm)
    before = sorted((path, path.stat().st_size) for path in checkpoints.rglob("*"))
    refused = train(run_dir, corpus, "nproc=1", "resume=must", "stage.train_iters=8", check=False)
    assert refused.code == 2, refused.output
    assert "Traceback" not in refused.output and named in refused.output
    assert "Fix: resume=auto" in refused.output
    assert before == sorted((path, path.stat().st_size) for path in checkpoints.rglob("*"))
    six = ("stage.train_iters=6", "stage.eval_interval=100", "checkpoint.keep_last=2")
    resumed = train(run_dir, corpus, "nproc=1", "resume=auto", *six)
    assert "continuing after step 4" in resumed.output and named in resumed.output, resumed.output
    aside = (
        "iter_0000006.damaged" if harm in ("flipped", "arguments") else "iter_0000006.replaced"
    )  # by the start, or by the new save
    kept = sorted(path.name for path in checkpoints.glob("iter_*"))
    assert kept == ["iter_0000004", "iter_0000006", aside], "the damaged one does not count as one of two to keep"
    sizes = {path.name: size for path, size in before if path.parent == checkpoints / "iter_0000006"}
    assert {path.name: path.stat().st_size for path in (checkpoints / aside).iterdir()} == sizes
    unbroken = saved.steps()
    assert all(row["loss"] == unbroken[step]["loss"] for step, row in resumed.steps().items())


@pytest.mark.slow
@pytest.mark.parametrize("tracker", [None, "", "12"])
def test_megatrons_tracker_file_is_not_needed(tmp_path, corpus, saved, tracker):
    """Without it Megatron would begin again at step 0, over a finished run. NVIDIA-NeMo/Automodel#1040: no pointer in
    asynchronous mode.
    """
    run_dir = _copy(saved, tmp_path / "run")
    path = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    path.unlink() if tracker is None else path.write_text(tracker)
    again = train(run_dir, corpus, "nproc=1", "stage.train_iters=7", check=False)
    assert again.code == 2 and "contains a checkpoint of step 6" in again.output
    resumed = train(run_dir, corpus, "nproc=1", "resume=auto", "stage.train_iters=7", "stage.eval_interval=100")
    assert "continuing after step 6" in resumed.output and path.read_text() == "7"


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["truncated", "flipped"])
def test_no_complete_checkpoint_is_an_error_and_not_a_new_run(tmp_path, corpus, saved, harm):
    run_dir = _copy(saved, tmp_path / "run")
    for shard in (run_dir / "checkpoints").rglob("__0_0.distcp"):
        os.truncate(shard, 100) if harm == "truncated" else _flip(shard, shard.stat().st_size // 2)
    for _ in range(2):  # also the next start is refused
        refused = train(run_dir, corpus, "nproc=1", "resume=auto", check=False)
        assert refused.code == 2 and "no checkpoint" in refused.output, refused.output


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_loaded_with_a_warning_and_kept(tmp_path, corpus):
    """Without the mark of this version and the manifest, as Megatron's own save writes it."""
    run_dir = tmp_path / "run"
    six = (
        "nproc=1",
        "optim.lr_warmup_iters=1",
        "stage.eval_interval=100",
        "checkpoint.save_interval=2",
        "checkpoint.keep_last=1",
    )
    unmarked = "from zaya_plugin.checkpoint import on_disk; on_disk.MANIFEST_MARK = 'another mark'"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import sys\nif '-m' in sys.orig_argv:\n    {unmarked}\n")
    environment = {"PYTHONPATH": os.pathsep.join((str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")))}
    done = zaya(
        "train", *MICRO, *six, f"run_dir={run_dir}", f"data.path={corpus}", "stage.train_iters=2", **environment
    )
    assert done.returncode == 0, done.stdout
    (run_dir / "checkpoints" / "iter_0000002" / "manifest.json").unlink()
    resumed = train(run_dir, corpus, *six, "resume=auto", "stage.train_iters=6")
    assert "continuing after step 2" in resumed.output and "has no checksums" in resumed.output
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("iter_*"))
    assert kept == ["iter_0000002", "iter_0000006"]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path, corpus, saved):
    run_dir = _copy(saved, tmp_path / "run")
    refused = train(
        run_dir, corpus, "nproc=1", "resume=auto", "model.num_layers=5", "model.temperature_form=exp", check=False
    )
    assert refused.code == 2, refused.output
    for key, before in (("model.num_layers=5", 4), ("model.temperature_form=exp", "linear")):
        assert f"{key}: the run in {run_dir} was trained with {before}; " in refused.output
    assert "Traceback" not in refused.output and "torchrun" not in refused.output


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
