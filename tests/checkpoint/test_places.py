# SPDX-License-Identifier: Apache-2.0
"""An upload gives a file its name at the target only if the target holds what the manifest states."""

import os
import time

import pytest

from zaya_plugin.checkpoint import manifest, places
from zaya_plugin.checkpoint.places import at

CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def files(tmp_path):
    source = tmp_path / "local" / "__0_0.distcp"
    source.parent.mkdir()
    source.write_bytes(CONTENT)
    (tmp_path / "shared").mkdir()
    return source, tmp_path / "shared" / source.name, manifest.describe(source)


def test_an_upload_copies_and_is_recognised_later(files):
    source, target, expected = files
    counted = []
    places.upload(at(source), at(target), expected, progress=counted.append)
    assert target.read_bytes() == CONTENT and sum(counted) == 2 * len(CONTENT), "written, and read back"
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    before, counted[:] = target.stat().st_ino, []
    places.upload(at(source), at(target), expected, progress=counted.append)
    assert target.stat().st_ino == before and sum(counted) == len(CONTENT), "read, and left as it is"


def test_a_wrong_file_at_the_target_is_replaced(files):
    source, target, expected = files
    target.write_bytes(CONTENT[:-1] + b"x")
    places.upload(at(source), at(target), expected)
    assert target.read_bytes() == CONTENT


def test_a_source_that_changed_since_the_manifest_is_not_uploaded(files):
    source, target, expected = files
    source.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(ValueError, match=r"local/__0_0.distcp has 1048576 bytes with the checksum .*manifest states"):
        places.upload(at(source), at(target), expected)
    assert list(target.parent.iterdir()) == []


def test_what_arrived_otherwise_than_it_was_sent_gets_no_name(files, monkeypatch):
    """NVIDIA/nvidia-resiliency-ext#373: staged files were flushed to a wrong place, and nothing looked."""
    source, target, expected = files
    fsync = os.fsync

    def corrupted(descriptor):
        os.pwrite(descriptor, b"x", 500_000)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", corrupted)
    with pytest.raises(ValueError, match=r"shared/__0_0.distcp has 1048576 bytes"):
        places.upload(at(source), at(target), expected)
    assert list(target.parent.iterdir()) == []


def test_a_full_target_is_named_and_left_clean(files):
    source, _, expected = files
    (source.parent / "full").mkdir()
    (source.parent / "full" / f"x.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        places.upload(at(source), at(source.parent / "full" / "x"), expected)
    assert list((source.parent / "full").iterdir()) == []


def test_the_limit_holds_for_writing_and_reading_back(files):
    source, target, expected = files
    began = time.monotonic()
    places.upload(at(source), at(target), expected, limit=8 * 2**20)
    assert time.monotonic() - began >= 0.25
    assert places.Pace(10_000).piece == 4096 and places.Pace(1e12).piece == places.PIECE


def test_what_the_callback_raises_ends_the_upload(files):
    source, target, expected = files

    def stop(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        places.upload(at(source), at(target), expected, progress=stop)
    assert list(target.parent.iterdir()) == []


def test_runs_that_share_a_local_disk_have_folders_of_their_own(tmp_path):
    one = places.local_folder("/nvme", tmp_path / "a" / "run" / "checkpoints")
    other = places.local_folder("/nvme", tmp_path / "b" / "run" / "checkpoints")
    assert one != other and one.parent == other.parent and one.name.startswith("run-checkpoints-")
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert places.local_folder("/nvme", tmp_path / "link" / "run" / "checkpoints") == one
