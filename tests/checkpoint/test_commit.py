# SPDX-License-Identifier: Apache-2.0
"""A save that ends at any of its steps leaves the checkpoint before, or the new one complete."""

from pathlib import Path

import pytest

from tests.checkpoint.kills import Killed, kill_at
from zaya_plugin.checkpoint import commit, manifest, on_disk

pytestmark = pytest.mark.usefixtures("one_rank")


def stock(state: dict, folder: str, **named) -> None:
    """Files as Megatron's save writes them."""
    assert named["content_metadata"][on_disk.MANIFEST_MARK]
    for name in ("__0_0.distcp", "__0_1.distcp", ".metadata", "metadata.json"):
        (Path(folder) / name).write_text(f"{name} of {state['step']}")


def save(directory: Path, step: int) -> None:
    folder = on_disk.folder(directory, step)
    folder.mkdir(parents=True, exist_ok=True)  # as Megatron does before
    commit.save(stock, {"step": step}, str(folder))


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "over a damaged one"])
def test_a_kill_at_any_operation_loses_nothing(tmp_path, again):
    number, ended = 0, False
    while not ended:
        directory = tmp_path / str(number)
        save(directory, 1)
        if again:
            save(directory, 2)
            (on_disk.folder(directory, 2) / "__0_1.distcp").unlink()
        with pytest.MonkeyPatch.context() as monkeypatch:
            done = kill_at(monkeypatch, number)
            try:
                save(directory, 2)
                ended = True
            except Killed:
                assert len(done) == number
        newest, _ = on_disk.latest(directory)
        assert manifest.damaged(on_disk.folder(directory, newest)) == []
        assert newest == 2 or not ended
        save(directory, 2)  # the next attempt
        assert on_disk.latest(directory) == (2, []) and len(on_disk.iterations(directory)) == 2
        assert not list(directory.glob(f"iter_*{manifest.UNFINISHED}"))
        number += 1
    assert number > 15, done


def test_a_step_that_is_saved_twice_keeps_its_first_checkpoint(tmp_path):
    save(tmp_path, 3)
    first = (on_disk.folder(tmp_path, 3) / manifest.NAME).stat().st_ino
    save(tmp_path, 3)
    assert (on_disk.folder(tmp_path, 3) / manifest.NAME).stat().st_ino == first
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000003"]


def test_every_file_of_the_folder_is_in_the_manifest(tmp_path):
    save(tmp_path, 3)
    folder = on_disk.folder(tmp_path, 3)
    content = manifest.read(folder)
    assert {*content["files"]} == {path.name for path in folder.iterdir()} - {manifest.NAME}
    assert content["iteration"] == 3 and content["ranks"] == 1


def test_megatrons_own_asynchronous_save_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--async-save: saves without a commit. Fix: leave --async-save out"):
        commit.save(stock, {}, str(tmp_path / "iter_0000001"), async_sharded_save=True)


def test_what_may_be_removed(tmp_path):
    for step in (10, 20, 25, 30):
        save(tmp_path, step)
    (on_disk.folder(tmp_path, 20) / ".metadata").unlink()
    assert on_disk.removable(tmp_path, 1) == [10, 25] and on_disk.removable(tmp_path, 0) == []
    assert on_disk.removable(tmp_path, 1, keep_every=5) == []
    assert on_disk.removable(tmp_path, 1, newest=25) == [10], "later ones are not touched, and none of them counts"
