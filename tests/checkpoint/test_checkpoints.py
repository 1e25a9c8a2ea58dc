# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a loop of one's own, on a disk and in memory; and errors at every operation of a storage without renames."""

import errno
import os
from multiprocessing import Pipe

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from tests.checkpoint.storages import Memory
from tests.checkpoint.writer_process import request
from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.checkpoints import Checkpoints
from zaya_plugin.checkpoint.places import names
from zaya_plugin.checkpoint.writer import Writer

pytestmark = pytest.mark.usefixtures("one_rank")
CHANGES = ("make", "write", "copy", "remove")


def test_a_loop_saves_and_loads(storage):
    checkpoints, weights = Checkpoints(storage.place / "checkpoints", keep_last=2), torch.zeros(64, 64)
    assert checkpoints.newest() is None

    def state(step: int) -> dict:
        return {"weights": ShardedTensor.from_rank_offsets("weights", weights), "step": step}

    for step in (10, 20, 30):
        weights.fill_(step)
        checkpoints.save(step, state(step))
    weights.fill_(31)
    assert checkpoints.wait() and checkpoints.newest() == 30
    weights.zero_()
    loaded = checkpoints.load(20, state(0))
    assert torch.equal(loaded["weights"], torch.full((64, 64), 20.0)) and loaded["step"] == 20
    (on_disk.folder(checkpoints.place, 20) / "__0_0.distcp").put(b"short")
    with pytest.raises(ValueError, match="__0_0.distcp has 5 bytes"):
        checkpoints.load(20, state(0))
    checkpoints.close()


def test_an_error_at_any_operation_loses_nothing(tmp_path, monkeypatch):
    """The counterpart of test_commit.py for a storage that copies at a commit."""
    memory, (mine, its), content = Memory(tmp_path), Pipe(), os.memfd_create("content")
    os.ftruncate(content, 4096)
    writer = Writer(its, content)
    writer.take_layout("__0_0.distcp", [(0, 4096)], 4096, "index", "{}")
    monkeypatch.setattr(writer, "_send", lambda **message: None)
    number, done = 0, []
    while number == 0 or len(done) > number - 1:
        place = memory.place / str(number)
        memory.repair()
        writer.save(request(place, 10))
        done.clear()

        def fault(operation: str, name: str, last: int = number) -> None:
            if operation in CHANGES:
                done.append(f"{operation} {name}")
                if len(done) - 1 == last:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), name)

        memory.store.fault = fault
        writer.save(request(place, 20, 2))
        newest, _ = on_disk.latest(place)
        assert newest in (10, 20) and manifest.damaged(on_disk.folder(place, newest)) == [], done
        memory.repair()
        writer.save(request(place, 20, 3))
        assert on_disk.latest(place) == (20, []) and manifest.damaged(on_disk.folder(place, 20)) == [], done
        number += 1
    assert number > 20
    memory.close()
    os.close(content)
    mine.close()


def test_an_error_while_a_complete_step_is_saved_again_loses_nothing(tmp_path, monkeypatch):
    memory, (mine, its), content = Memory(tmp_path), Pipe(), os.memfd_create("content")
    os.ftruncate(content, 4096)
    writer = Writer(its, content)
    writer.take_layout("__0_0.distcp", [(0, 4096)], 4096, "index", "{}")
    monkeypatch.setattr(writer, "_send", lambda **message: None)
    number, reached = 0, True
    while reached:
        place, done = memory.place / str(number), []
        memory.repair()
        writer.save(request(place, 20))

        def fault(operation: str, name: str, last: int = number, done: list = done) -> None:
            if operation in CHANGES:
                done.append(name)
                if len(done) - 1 == last:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), name)

        memory.store.fault = fault
        writer.save(request(place, 20, 2))
        reached = len(done) > number
        assert on_disk.latest(place) == (20, []) and manifest.damaged(on_disk.folder(place, 20)) == [], done
        number += 1
    assert number > 5
    memory.close()
    os.close(content)
    mine.close()


def test_an_error_at_any_operation_of_a_removal_leaves_nothing_for_good(tmp_path):
    """A storage without renames: no content is copied, and the manifest goes first."""
    memory, content, number, reached = Memory(tmp_path), b"weights" * 100, 0, True
    while reached:
        memory.repair()
        place, done = memory.place / str(number), []
        for step in (10, 20):
            folder = on_disk.folder(place, step)
            folder.make()
            files = {name: (folder / name).write([content]) for name in ("__0_0.distcp", ".metadata", "common.pt")}
            manifest.write(folder, step, files)

        def fault(operation: str, name: str, last: int = number, done: list = done) -> None:
            if operation in CHANGES:
                done.append((operation, name))
                if len(done) - 1 == last:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), name)

        memory.store.fault = fault
        reached = not _removed(place, 10)
        assert [name for operation, name in done if operation != "remove"] == [f"{number}/iter_0000010.removed"]
        assert on_disk.problems(place, 20) == [] and on_disk.latest(place)[0] == 20
        left = on_disk.folder(place, 10)
        # Either nothing of it is gone, or it is no checkpoint any more.
        whole = on_disk.has_manifest(left)
        assert not whole or manifest.problems(left) == manifest.damaged(left) == []
        memory.repair()
        manifest.remove_leftovers(place)
        assert sorted(names(place)) == (["iter_0000010"] if whole else []) + ["iter_0000020"]
        number += 1
    assert number - 1 == 7, "the mark, four files, the folder, the mark"
    memory.close()


def _removed(place, step: int) -> bool:
    try:
        return on_disk.remove(place, step)
    except OSError:
        return False
