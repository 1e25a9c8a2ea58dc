# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose checkpoints are in other places than usual, or at places that fail. Each is forked from one process
(tests/faults/forked_ranks.py).
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.micro_curriculum import SMALL
from zaya_plugin.checkpoint import manifest, on_disk, places, starts

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TRAIN = ("train", "experiment=cpu_demo", "optim=adamw", *SMALL, "resume=auto")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus, ranks) -> Path:
    """A run of four steps with checkpoints at 2 and 4."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    ranks.finish(*TRAIN, f"run_dir={run_dir}", f"data.path={corpus}", "stage.train_iters=6", "exit_interval=4")
    return run_dir


@pytest.fixture
def start(tmp_path, corpus, ranks, saved):
    """Start the run of `saved`, copied to tmp_path/run, up to step 6, and return exit code and new output."""
    shutil.copytree(saved, tmp_path / "run")

    def begin(*words: str, run_dir: Path = tmp_path / "run") -> tuple[int, str]:
        before = len(ranks.log.read_text())
        code = ranks.run(*TRAIN, f"run_dir={run_dir}", f"data.path={corpus}", "stage.train_iters=6", *words)
        return code, ranks.log.read_text()[before:]

    return begin


def losses(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def poison(folder: Path) -> None:
    """Write NaNs into the weights, with checksums that are right: the checkpoint is intact and useless."""
    shard = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4096] = b"\xff" * 4096
    shard.write_bytes(content)
    kept = manifest.read(folder)
    files = kept.pop("files") | {shard.name: manifest.describe(shard)}
    manifest.write(folder, kept["iteration"], files, run_id=kept["run_id"])


def test_two_failures_at_the_same_step_fall_back_one_checkpoint(start, tmp_path):
    """LLNL/scr#174: restarts from a bad checkpoint without end."""
    checkpoints = tmp_path / "run" / "checkpoints"
    poison(on_disk.folder(checkpoints, 4))
    for warned in (False, True):
        code, output = start()
        assert code != 0 and "continuing after step 4" in output, output
        assert "zaya: step 6: optim.non_finite_gradients=stop" in output and "Traceback" not in output, output
        assert ("the last start from the checkpoint of step 4 failed at step 5" in output) == warned
    code, output = start("resume=must")
    assert code != 0 and "continuing after step 4" in output, "asked for, it is taken again"
    code, output = start()
    assert code == 0 and "continuing after step 2" in output, output
    assert "two starts from the checkpoint of step 4 failed at step 5. It is kept as iter_0000004.failed" in output
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == [
        "iter_0000002",
        "iter_0000004",
        "iter_0000004.failed",
        "iter_0000006",
    ]
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_kills_are_no_failures_and_a_copy_is_another_run_in_wandb(start, tmp_path, ranks, corpus, saved):
    words = (*TRAIN, f"run_dir={tmp_path}/run", f"data.path={corpus}", "stage.train_iters=6")
    (tmp_path / "run" / "checkpoints" / starts.NAME).unlink()  # as if only the checkpoints had been copied
    before = len(ranks.log.read_text())
    for _ in range(2):
        assert ranks.run(*words, kill=("continuing after step 4", 0.0)) == -9
    copied = "this run is a copy of the one in"
    assert ranks.log.read_text()[before:].count(f"{copied} {saved}") <= 1, "only the first start finds that out"
    fork = starts.read(tmp_path / "run" / "checkpoints")["fork"]
    code, output = start()
    assert code == 0 and "continuing after step 4" in output and "failed" not in output and copied not in output
    kept = starts.read(tmp_path / "run" / "checkpoints")
    assert kept["step"] == 4 and len(fork) == 4 and kept["fork"] == fork


def test_an_upload_that_a_kill_interrupted_is_finished_and_local_files_are_read(start, tmp_path):
    shared = tmp_path / "run" / "checkpoints"
    local = places.local_folder(tmp_path / "nvme", shared)
    whole = on_disk.folder(shared, 4)
    shutil.copytree(whole, on_disk.folder(local, 4))
    unfinished = whole.rename(whole.with_name(f"{whole.name}.0123abcd{manifest.UNFINISHED}"))
    for shard in unfinished.glob("*.distcp"):
        shard.unlink()
    code, output = start(f"checkpoint.local_path={tmp_path}/nvme")
    assert code == 0 and "the interrupted upload of step 4 was finished" in output, output
    assert "continuing after step 4" in output
    assert f"the checkpoint of step 4 is read from {local}: " in output and "on 1 of 1 nodes" in output
    assert manifest.damaged(whole) == []


def test_the_only_checkpoint_may_be_on_the_node(start, tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#4900: local checkpoints were not looked at, and the run began at step 0."""
    shared = tmp_path / "run" / "checkpoints"
    local = places.local_folder(tmp_path / "nvme", shared)
    shutil.rmtree(on_disk.folder(shared, 2))
    whole = on_disk.folder(shared, 4)
    shutil.copytree(whole, on_disk.folder(local, 4))
    unfinished = whole.rename(whole.with_name(f"{whole.name}.0123abcd{manifest.UNFINISHED}"))
    for shard in unfinished.glob("*.distcp"):
        shard.unlink()
    code, output = start(f"checkpoint.local_path={tmp_path}/elsewhere")
    assert code == 2 and "cannot be finished: " in output and "no checkpoint is complete" in output, output
    code, output = start(f"checkpoint.local_path={tmp_path}/nvme")
    assert code == 0 and "continuing after step 4" in output, output


def test_a_local_path_that_cannot_be_used_is_named_and_left_out(start, tmp_path):
    (tmp_path / "file").write_text("")
    code, output = start(f"checkpoint.local_path={tmp_path}/file")
    assert code == 0 and "continuing after step 4" in output, output
    assert "WARNING: checkpoints are not written locally: checkpoint.local_path=" in output
    assert "cannot be written (Not a directory)" in output


def test_checkpoints_of_another_run_are_not_taken(start, tmp_path):
    """A manifest of another run, and a folder of another step: the one before is taken, and both are named."""
    checkpoints = tmp_path / "run" / "checkpoints"
    foreign = on_disk.folder(checkpoints, 8)
    shutil.copytree(on_disk.folder(checkpoints, 4), foreign)
    kept = manifest.read(on_disk.folder(checkpoints, 4))
    manifest.write(foreign, 8, kept["files"], run_id="feedbeef")
    shutil.copytree(on_disk.folder(checkpoints, 2), on_disk.folder(checkpoints, 9))
    code, output = start()
    assert code == 0 and "continuing after step 4" in output, output
    assert "is of the run feedbeef" in output and "is of step 2, and not of this folder's" in output


def test_a_run_with_its_checkpoints_elsewhere_resumes_and_is_handed_over(tmp_path, corpus, ranks):
    """checkpoint.path outside run_dir: resuming, the stages of a curriculum, `zaya checkpoint`."""
    words = ("curriculum", "experiment=cpu_demo", "curriculum.stages=[cpu_demo_stage1,cpu_demo_stage2]", *SMALL)
    words = (*words, f"run_dir={tmp_path}/runs", f"checkpoint.path={tmp_path}/fast", f"data.path={corpus}")
    words = (*words, "stage.train_iters=2", "optim.lr_decay_style=constant")
    ranks.finish(*words, "--only", "demo_1")
    ranks.finish(*words, "--only", "demo_2")
    assert sorted(path.name for path in (tmp_path / "fast").iterdir()) == ["demo_1", "demo_2"]
    assert not (tmp_path / "runs" / "demo_1" / "checkpoints").exists()
    assert on_disk.latest(tmp_path / "fast" / "demo_2") == (2, [])
    assert ranks.run("checkpoint", "verify", f"{tmp_path}/runs/demo_2") == 0
