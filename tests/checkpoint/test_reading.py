# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is read while the run removes old ones."""

import pytest

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin.checkpoint import manifest, on_disk, reading


@pytest.fixture
def directory(tmp_path):
    for step in (1, 2, 3):
        pretend_checkpoint(tmp_path, step)
    return tmp_path / "checkpoints"


def test_a_checkpoint_that_is_read_is_not_removed(directory):
    held = reading.begin(directory, 2)
    other = reading.begin(directory, 2)
    assert on_disk.removable(directory, keep_last=1) == [1, 2]
    assert [on_disk.remove(directory, step) for step in (1, 2)] == [True, False] and held.folder.is_dir()
    held.lock.close()
    assert not on_disk.remove(directory, 2), "the other one reads it"
    del other
    assert on_disk.remove(directory, 2) and not held.folder.exists()


def test_a_checkpoint_that_is_removed_before_it_is_held_is_replaced_by_the_next(directory, monkeypatch):
    """A run goes on between the choice and the lock: it removes the checkpoint, and has a newer one."""
    stock, chosen = manifest.hold, []

    def hold(folder):
        file = stock(folder) if len(chosen) == 1 else None  # once after it was opened, once before
        chosen.append(folder.name)
        if len(chosen) < 3:
            folder.rename(folder.with_name(folder.name + manifest.REMOVED))
            pretend_checkpoint(directory.parent, 3 + len(chosen))
        return file if len(chosen) < 3 else stock(folder)

    monkeypatch.setattr(manifest, "hold", hold)
    assert reading.begin(directory).folder == on_disk.folder(directory, 5)
    assert chosen == ["iter_0000003", "iter_0000004", "iter_0000005"]


def test_a_path_that_does_not_exist_suggests_the_folder_that_was_meant(tmp_path):
    (tmp_path / "cpu_demo").mkdir()
    with pytest.raises(ValueError, match=f"the path does not exist. .* Fix: {tmp_path}/cpu_demo.$"):
        reading.folder_of(tmp_path / "demo")
    with pytest.raises(ValueError, match="the path does not exist. Allowed: [^:]*$"):
        reading.folder_of(tmp_path / "other" / "demo")


def test_an_incomplete_checkpoint_is_named_with_the_one_before(directory):
    manifest.write(on_disk.folder(directory, 3), 3, {"__0_0.distcp": {"bytes": 7, "xxh3_128": "0"}})
    with pytest.raises(ValueError, match="__0_0.distcp is missing. Allowed: .* that of step 2. Fix: --step 2"):
        reading.begin(directory)
    with pytest.raises(ValueError, match="--step=9: no such checkpoint in .*. Allowed: 1, 2, 3"):
        reading.begin(directory, 9)
    with pytest.raises(ValueError, match="--step=2: .* is the checkpoint of step 1"):
        reading.begin(on_disk.folder(directory, 1), 2)
