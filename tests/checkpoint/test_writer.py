# SPDX-License-Identifier: Apache-2.0
"""The writer of checkpoints as a process of its own: its protocol, its end, and disks that fail. Real faults."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tests.checkpoint.writer_process import CONTENT, WriterProcess, checksum, request
from zaya_plugin.checkpoint import manifest, on_disk, places, starts
from zaya_plugin.checkpoint.writer import Save, Writer
from zaya_plugin.config.run_directory import uploads

EIO = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>

/* The disk reports its errors where data is made durable, or at a write, or removes slowly: FAILS says which. */
static int fails(const char* call) {
    extern char* getenv(const char*);
    extern int strcmp(const char*, const char*);
    extern int access(const char*, int);
    const char* chosen = getenv("FAILS");
    return chosen && !strcmp(chosen, call) && access(getenv("FAILS_WHILE"), F_OK) == 0;
}

int fsync(int file) {
    if (fails("fsync")) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}

int unlinkat(int folder, const char* name, int flags) {
    if (fails("unlinkat")) sleep(60);
    return ((int (*)(int, const char*, int))dlsym(RTLD_NEXT, "unlinkat"))(folder, name, flags);
}

ssize_t pwrite64(int file, const void* data, size_t count, off64_t place) {
    if (fails("pwrite")) { errno = EIO; return -1; }
    return ((ssize_t (*)(int, const void*, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64"))(file, data, count, place);
}
"""


@pytest.fixture
def start():
    started = []

    def begin(*arguments, **named) -> WriterProcess:
        started.append(WriterProcess(*arguments, **named))
        return started[-1]

    yield begin
    for writer in started:
        writer.close()


@pytest.fixture
def directory(storage):
    """The place of the checkpoints, on a disk and in memory."""
    (storage.place / "checkpoints").make()
    return storage.place / "checkpoints"


@pytest.fixture
def disk(tmp_path):
    """Mounts a small file system, with options as of mount(8)."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a small file system needs root")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


def ended(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def broken_disk(folder: Path, require_tool, call: str) -> dict[str, str]:
    """Return the environment of a process whose `call` fails as long as folder/broken is there."""
    source, library, broken = folder / "eio.c", folder / "eio.so", folder / "broken"
    source.write_text(EIO)
    subprocess.run([require_tool("g++"), "-x", "c", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    broken.touch()
    return {"LD_PRELOAD": str(library), "FAILS": call, "FAILS_WHILE": str(broken)}


def names(directory) -> list[str]:
    return sorted(places.names(places.at(directory)))


def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_checkpoints_are_complete_and_the_older_ones_are_removed_after(start, directory):
    """NVIDIA-NeMo/Megatron-Bridge#4678, NovaSky-AI/SkyRL#2145: the removal ran before the new checkpoint was durable.
    NVIDIA/Megatron-LM#6767: one process makes all saves, also the last. NVIDIA-NeMo/Megatron-Bridge#5184: two threads
    removed; in this package rank 0's writer alone does.
    """
    writer = start()
    for number, iteration in enumerate((10, 20), 1):
        writer.save(directory, iteration, number)
        writer.hear("done")
    writer.ask(do="abandon", number=2)  # too late, and ignored
    writer.save(directory, 30, 3, keep_every=20)
    writer.hear("done")
    writer.connection.close()
    assert writer.end() == (0, "")
    assert names(directory) == ["iter_0000020", "iter_0000030", starts.NAME, on_disk.TRACKER]
    assert places.read(directory / on_disk.TRACKER) == b"30"
    folder = directory / "iter_0000030"
    assert names(folder) == [".metadata", "__0_0.distcp", "manifest.json", "metadata.json"]
    assert places.read(folder / "__0_0.distcp") == CONTENT
    content = manifest.read(folder)
    assert content["files"]["__0_0.distcp"] == {"bytes": len(CONTENT), "xxh3_128": checksum(CONTENT)}
    assert (content["iteration"], content["ranks"], content["run_id"]) == (30, 1, "r")
    states = [
        told["state"] for told in writer.told if told["number"] == 3 and told["state"] not in ("writing", "waiting")
    ]
    assert states == ["written", "described", "complete", "done"]


def test_nothing_is_named_before_all_ranks_are_durable(start, directory):
    """KempnerInstitute/KempnerForge#102: the pointer moved before the data was durable."""
    first, second = start(0), start(1)
    save = first.save(directory, 10, world=2)
    first.hear("written")
    time.sleep(0.2)
    assert names(directory) == [save.folder.name] and on_disk.latest(directory) == (None, [])
    second.save(directory, 10, world=2)
    second.hear("done")
    first.hear("done")
    assert on_disk.latest(directory) == (10, []) and not manifest.damaged(directory / "iter_0000010")
    assert len(manifest.read(directory / "iter_0000010")["files"]) == 4


def test_a_checkpoint_is_complete_on_the_nodes_disk_before_the_upload(start, tmp_path):
    """NVIDIA/nvidia-resiliency-ext#373: the files of a node's disk were uploaded to the wrong place."""
    shared, local = tmp_path / "shared", tmp_path / "local"
    pair = start(0), start(1)
    for number, step in enumerate((10, 20), 1):
        for rank, writer in enumerate(pair):
            writer.save(shared, step, number, world=2, local=local, leads=rank == 0, limit=10e6)
        for writer in pair:
            writer.hear("done")
    assert on_disk.latest(shared) == (20, [])
    whole = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "metadata.json"]
    assert names(shared / "iter_0000020") == whole
    assert not manifest.damaged(shared / "iter_0000020")
    until(lambda: names(local) == ["iter_0000020"])
    assert names(local / "iter_0000020") == whole and not manifest.damaged(local / "iter_0000020")


def local_saves(tmp_path, writers, step: int, number: int = 1, **changes) -> Save:
    """Ask writers for a checkpoint below `local` first, then below `shared`. Return the request of rank 0."""
    named = dict(world=len(writers), local=tmp_path / "local", **changes)
    return [
        writer.save(tmp_path / "shared", step, number, leads=rank == 0, **named) for rank, writer in enumerate(writers)
    ][0]


def block_upload(save: Save, rank: int = 0) -> Path:
    """Let the upload of a rank's file fail: its name is that of a folder with a file."""
    blocked = save.folder.path / f"__{rank}_0.distcp"
    blocked.mkdir(parents=True)
    (blocked / "file").touch()
    return blocked


def test_a_failed_upload_leaves_what_a_start_can_finish_and_the_older_ones_are_removed(start, tmp_path):
    """The shared disk failed again and again: the manifests went, and the local copies filled the node's disk.
    NVIDIA-NeMo/Megatron-Bridge#4900, #5090: local checkpoints were not looked at.
    """
    pair = start(0), start(1)
    for number, step in enumerate((10, 20, 30), 1):
        block_upload(request(tmp_path / "shared", step, number), rank=1)
        save = local_saves(tmp_path, pair, step, number)
        assert "__1_0.distcp" in pair[1].hear("failed")["reason"]
        pair[0].hear("failed")
        until(lambda step=step: names(tmp_path / "local") == [f"iter_{step:07d}"])
        until(lambda save=save: names(tmp_path / "shared") == [save.folder.name])
        assert not manifest.damaged(tmp_path / "local" / f"iter_{step:07d}")
        assert manifest.read(save.folder)["iteration"] == step
    local_saves(tmp_path, pair, 40, 4)
    for writer in pair:
        writer.hear("done")
    until(lambda: names(tmp_path / "local") == ["iter_0000040"])
    until(lambda: names(tmp_path / "shared") == ["iter_0000040", starts.NAME, on_disk.TRACKER])


def test_two_nodes_upload_their_own_files_side_by_side(start, tmp_path):
    """Each node has its own disk, whose first rank completes the local checkpoint there; one node's disk breaks later."""
    shared, disks, ranks = tmp_path / "shared", (tmp_path / "node0", tmp_path / "node1"), [start(n) for n in range(4)]
    common = [".metadata", "manifest.json", "metadata.json"]

    def save(step: int, number: int) -> Path:
        for rank, writer in enumerate(ranks):
            save = writer.save(shared, step, number, world=4, local=disks[rank // 2], leads=rank % 2 == 0, limit=20e6)
        return save.folder.path

    save(10, 1)
    for writer in ranks:
        writer.hear("done")
    assert on_disk.latest(shared) == (10, []) and manifest.damaged(shared / "iter_0000010") == []
    files = [f"__{rank}_0.distcp" for rank in range(4)]
    assert names(shared / "iter_0000010") == sorted([*common, *files])
    for node, disk in enumerate(disks):
        assert names(disk / "iter_0000010") == sorted([*common, *files[2 * node : 2 * node + 2]])

    disks[1].rename(tmp_path / "broken")
    disks[1].write_text("no disk")
    unfinished = save(20, 2)
    assert "Not a directory" in ranks[3].hear("failed")["reason"] or "File exists" in ranks[3].told[-1]["reason"]
    assert "rank 2: " in ranks[0].hear("failed")["reason"] or "rank 3: " in ranks[0].told[-1]["reason"]
    ranks[1].ask(do="abandon", number=2)  # as its rank does at the next step
    ranks[1].hear("failed", "abandoned")
    assert on_disk.latest(shared) == (10, [])
    until(lambda: not (unfinished / manifest.NAME).exists())
    disks[1].unlink()
    save(30, 3)
    for writer in ranks:
        writer.hear("done")
    assert on_disk.latest(shared) == (30, [])
    until(lambda: names(shared) == ["iter_0000030", starts.NAME, on_disk.TRACKER])
    until(lambda: names(disks[0]) == names(disks[1]) == ["iter_0000030"])


def test_an_upload_of_a_state_that_is_rolled_back_is_not_finished_by_the_next_start(start, tmp_path):
    """A guard rolls back while the spoiled state is uploaded: the next start finished the upload, and resumed from it."""
    writer = start()
    local_saves(tmp_path, [writer], 10)
    writer.hear("done")
    save = local_saves(tmp_path, [writer], 20, 2, limit=2**18)
    writer.hear("uploading")
    writer.ask(do="abandon", number=2)
    writer.hear("abandoned")
    assert uploads(tmp_path / "shared") == [(20, save.folder.path)], "of an abandoned save, which may be a good one"
    assert on_disk.put_aside_from(tmp_path / "shared", 15) == [save.folder.path.with_name(f"{save.folder.name}.failed")]
    assert uploads(tmp_path / "shared") == [] and on_disk.latest(tmp_path / "shared") == (10, [])
    manifest.remove_leftovers(tmp_path / "shared")
    assert (tmp_path / "shared" / f"{save.folder.name}.failed" / manifest.NAME).exists()


def test_a_late_rank_of_a_failed_save_leaves_nothing_on_a_full_disk(start, directory):
    """It makes the folder again that rank 0 has removed; its file kept the disk full, and every later save failed."""
    pair = start(0), start(1)
    for number, local in ((1, None), (3, directory / "local")):
        more = {"local": local}
        save = pair[0].save(directory / "shared", 10, number, world=2, leads=True, **more)
        pair[0].hear("written")
        save.note("failed", 1).put(json.dumps("a full disk"))
        pair[0].hear("failed")
        pair[1].save(directory / "shared", 10, number, world=2, **more)
        until(lambda save=save: places.exists(save.note("part", 1)))
        pair[1].ask(do="abandon", number=number)  # as its rank does at the next step
        pair[1].hear("done" if local is None else "abandoned")
        assert local is None or names(local) == [save.folder.name]
        number += 1
        pair[0].save(directory / "shared", 20, number, world=2, leads=True, **more)
        pair[0].hear("written")
        assert names(directory / "shared") == [f"iter_0000020.g_{number}.unfinished"]
        assert local is None or names(local) == [f"iter_0000020.g_{number}.unfinished"]
        pair[0].ask(do="abandon", number=number)
        pair[0].hear("abandoned")


def test_a_later_save_that_a_rank_has_begun_stays_while_rank_0_is_late(start, tmp_path):
    """A rank is done with a save once its own part is written, and rank 0's writer may have been started again."""
    pair = start(0), start(1)
    for step, number in ((10, 1), (20, 2)):
        pair[1].save(tmp_path, step, number, world=2)
        pair[1].hear("done")
    for step, number in ((10, 1), (20, 2)):
        pair[0].save(tmp_path, step, number, world=2)
        pair[0].hear("done")
        assert on_disk.latest(tmp_path) == (step, []) and not manifest.damaged(tmp_path / f"iter_{step:07d}")


def test_the_end_of_the_rank_during_an_upload_is_no_failed_save(start, tmp_path):
    """A closed socket with unread messages is an error for its other end, which took it for one of the disk."""
    writer = start()
    save = local_saves(tmp_path, [writer], 10, limit=2**18)  # 4 s
    until(lambda: (tmp_path / "local" / "iter_0000010").exists())
    time.sleep(1.2)  # two messages, unread
    writer.connection.close()
    assert writer.end()[0] == 0
    assert manifest.read(save.folder)["iteration"] == 10
    assert not manifest.damaged(tmp_path / "local" / "iter_0000010")


def test_a_killed_first_writer_ends_the_wait_of_the_others(start, tmp_path):
    """Rank 1 waited ten minutes for the manifest of a writer that had been killed, in a run's last save."""
    first, second = start(0), start(1)
    first.process.send_signal(signal.SIGSTOP)
    save = local_saves(tmp_path, [first, second], 10)
    second.hear("written")
    first.process.kill()
    again = start(0)
    again.ask(do="fail", save=dataclasses.asdict(save), reason="killed")
    assert "rank 0 has given the save up" in second.hear("failed")["reason"]


def test_an_old_local_checkpoint_of_the_step_is_not_taken_for_the_new_one(start, tmp_path):
    for number in (1, 2):  # the second upload waits for the first rank, which stops for a while
        pair = start(0), start(1)
        if number == 2:
            (tmp_path / "shared" / "iter_0000010" / "__0_0.distcp").write_bytes(b"damaged")
            pair[0].process.send_signal(signal.SIGSTOP)
        local_saves(tmp_path, pair, 10, number)
        if number == 2:
            pair[1].hear("waiting")
            pair[0].process.send_signal(signal.SIGCONT)
        for writer in pair:
            writer.hear("done")
            writer.close()
    local = manifest.read(tmp_path / "local" / "iter_0000010")
    assert local["save"] == 2 == manifest.read(tmp_path / "shared" / "iter_0000010")["save"]


def test_a_checkpoint_of_another_run_or_version_is_put_aside_and_not_kept_in_place(start, tmp_path):
    """The new checkpoint was removed as a repetition, and reported as saved."""
    writer = start()
    writer.save(tmp_path, 10, facts={"run_id": "other", "generation": "g"})
    writer.hear("done")
    old = tmp_path / "iter_0000020"
    old.mkdir()
    (old / "weights").write_text("of an earlier version")
    for number, step in ((2, 10), (3, 20)):
        writer.save(tmp_path, step, number, keep_last=0)
        writer.hear("done")
        assert manifest.read(on_disk.folder(tmp_path, step))["run_id"] == "r"
    assert manifest.read(tmp_path / "iter_0000010.replaced")["run_id"] == "other"
    assert (tmp_path / "iter_0000020.replaced" / "weights").exists()


def test_a_tracker_that_cannot_be_written_does_not_fail_the_save(start, tmp_path):
    (tmp_path / on_disk.TRACKER).mkdir()
    writer = start()
    writer.save(tmp_path, 10)
    assert writer.hear("done", "failed")["state"] == "done"
    assert manifest.read(tmp_path / "iter_0000010")["iteration"] == 10


def test_a_file_that_is_renamed_while_the_folder_is_listed(tmp_path, monkeypatch):
    """Notes and uploads of other ranks get their names at any time; it failed one save in ten with 64 ranks."""
    mine, its = Pipe()
    writer = Writer(its, os.memfd_create("content"))
    save = request(tmp_path, 10)
    save.folder.make()
    gone, passes = save.folder.path / "part_0.json.tmp", []
    scan = os.scandir

    def scandir(folder):
        if not str(folder).startswith(str(tmp_path)):  # a thread of a test before
            return scan(folder)
        passes.append(folder)
        if len(passes) > 1:
            save.note("part", 0).put("{}")
        gone.touch()
        listed = list(scan(folder))
        gone.unlink()
        return listed

    monkeypatch.setattr(os, "scandir", scandir)
    assert writer.notes(save, "part") == {} and len(passes) == 2
    os.close(writer.descriptor)
    mine.close()


def test_the_name_and_the_pointer_come_after_the_data_and_removal_after_both(tmp_path, monkeypatch):
    """KempnerInstitute/KempnerForge#102, #103, NovaSky-AI/SkyRL#2145: the pointer moved before the data was durable.
    allenai/open-instruct#1810, #1821: ranks waited for a removal; with this writer the rank is free before it begins.
    """
    memory = os.memfd_create("content")
    os.ftruncate(memory, 4096)
    mine, its = Pipe()
    writer = Writer(its, memory)
    writer.take_layout("__0_0.distcp", [(0, 4096)], 4096, "index", "{}")
    done: list[str] = []

    def noted(name, call, shown):
        def wrapped(*arguments):
            result = call(*arguments)
            done.append(f"{name} {shown(*arguments)}".replace(f".{os.getpid()}.tmp", ""))
            return result

        return wrapped

    for step in (10, 20):
        done.clear()
        with monkeypatch.context() as patched:
            patched.setattr(
                os, "fsync", noted("sync", os.fsync, lambda file: Path(os.readlink(f"/proc/self/fd/{file}")).name)
            )
            for call in ("rename", "replace"):
                patched.setattr(os, call, noted("name", getattr(os, call), lambda _, new: Path(new).name))
            patched.setattr(writer, "tell", lambda state, **_: done.append(f"tell {state}"))
            writer.save(request(tmp_path, step, facts={"generation": "g"}))
    os.close(memory)
    place = {text: number for number, text in reversed(list(enumerate(done)))}
    order = [
        "sync __0_0.distcp",
        "sync .metadata",
        "sync manifest.json",
        "name manifest.json",
        "sync iter_0000020.g_1.unfinished",
        "name iter_0000020",
        f"sync {tmp_path.name}",
        f"name {on_disk.TRACKER}",
        "tell complete",
        "tell done",
        "name iter_0000010.removed",
    ]
    assert [text for text in order if text not in place] == []
    assert sorted(order, key=place.get) == order
    assert place["sync metadata.json"] < place["sync iter_0000020.g_1.unfinished"]


@pytest.mark.parametrize("busy", [False, True])
def test_an_unknown_message_is_an_error_and_not_a_wait(start, tmp_path, busy):
    """NVIDIA-NeMo/Megatron-Bridge#6098: a request of a foreign class was never acknowledged."""
    writer = start()
    if busy:
        writer.save(tmp_path, 10, world=2)
        writer.hear("written")
    writer.ask(do="dance")
    if busy:
        assert "'dance'" in writer.hear("failed")["reason"]
        assert names(tmp_path) == []
    else:
        code, errors = writer.end()
        assert code == 1 and "the rank asks for 'dance', which this version does not know" in errors


@pytest.mark.parametrize("how", ["leaves", "killed"])
def test_the_writer_ends_with_its_rank_and_its_folder_is_no_checkpoint(start, tmp_path, how):
    if how == "leaves":
        writer = start()
        writer.save(tmp_path, 10, world=2)
        writer.hear("written")
        pid = writer.process.pid
        writer.connection.close()
    else:
        code = (
            "import sys, time; from pathlib import Path; from tests.checkpoint.writer_process import WriterProcess\n"
            "writer = WriterProcess(); writer.save(Path(sys.argv[1]), 10, world=2); writer.hear('written')\n"
            "print(writer.process.pid, flush=True); time.sleep(60)"
        )
        rank = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        pid = int(rank.stdout.readline())
        rank.kill()
        rank.wait()
        rank.stdout.close()
    assert ended(pid, 5)
    assert on_disk.latest(tmp_path) == (None, [])
    manifest.remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_a_writer_killed_while_it_writes_leaves_the_checkpoint_before(start, directory):
    first = start()
    first.save(directory, 10)
    first.hear("done")
    first.save(directory, 20, 2, world=2)
    first.hear("written")
    first.process.kill()
    assert first.end()[0] == -signal.SIGKILL
    assert on_disk.latest(directory) == (10, [])
    again = start()
    again.save(directory, 20, 3)
    again.hear("done")
    until(lambda: names(directory) == ["iter_0000020", starts.NAME, on_disk.TRACKER])


def test_a_writer_of_an_earlier_start_cannot_complete_a_checkpoint(start, tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#5117: a stale completion finished the retry's first save."""
    orphan = start()
    old = orphan.save(tmp_path, 10, world=2)
    orphan.hear("written")
    manifest.remove_leftovers(tmp_path)  # what a start does
    new = start(1).save(tmp_path, 10, world=2, facts={"generation": "new"})
    until(lambda: places.exists(new.note("part", 1)))
    assert "No such file" in orphan.hear("failed")["reason"]
    assert old.folder.name not in names(tmp_path) and on_disk.latest(tmp_path) == (None, [])


def test_a_rank_that_fails_or_says_nothing_ends_the_save(start, directory):
    """OLMo-core's done_callback: a checkpoint was completed although a rank's upload had failed.
    NVIDIA/Megatron-LM#2422, radixark/miles#2816: a save without a deadline waited for ever.
    """
    writer = start()
    save = writer.save(directory, 10, world=2)
    writer.hear("written")
    save.note("failed", 1).put(json.dumps("no space"))
    assert writer.hear("failed")["reason"].startswith("rank 1: no space")
    writer.save(directory, 10, 2, world=3, deadline=0.3)
    began = time.monotonic()
    assert "nothing came from rank 1, 2 within 0.3 s" in writer.hear("failed")["reason"]
    assert time.monotonic() - began < 60
    assert names(directory) == []


@pytest.mark.parametrize(
    "options, reason",
    [
        ("size=600k", r"\[Errno 28\] No space left on device"),
        ("size=8m,nr_inodes=6", r"\[Errno 28\].*0 files are free"),
    ],
    ids=["bytes", "inodes"],
)
def test_a_full_disk_is_named_and_what_was_written_is_removed(start, disk, options, reason):
    directory = disk(options)
    filler = [directory / str(number) for number in range(3)]
    for path in filler:
        path.write_text("")
    writer = start()
    writer.save(directory, 10)
    failed = writer.hear("failed", "done")
    assert failed["state"] == "failed"
    assert re.search(reason, failed["reason"]), failed
    assert names(directory) == ["0", "1", "2"], "the space is free again"
    for path in filler:
        path.unlink()
    subprocess.run(["mount", "-o", "remount,size=16m,nr_inodes=100", str(directory)], check=True)
    writer.save(directory, 20, 2)
    assert writer.hear("done", "failed")["state"] == "done"
    assert on_disk.latest(directory) == (20, [])


def test_a_disk_that_became_read_only(start, disk):
    directory = disk("size=16m")
    writer = start()
    writer.save(directory, 10)
    writer.hear("done")
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    writer.save(directory, 20, 2)
    assert "[Errno 30] Read-only file system" in writer.hear("failed")["reason"]
    subprocess.run(["mount", "-o", "remount,rw", str(directory)], check=True)
    assert on_disk.latest(directory) == (10, [])
    writer.save(directory, 30, 3)
    writer.hear("done")
    assert on_disk.latest(directory) == (30, [])


def test_a_device_that_is_always_full(start, tmp_path):
    writer = start()
    save = tmp_path / "iter_0000010.g_1.unfinished"
    save.mkdir()
    (save / "__0_0.distcp").symlink_to("/dev/full")
    writer.save(tmp_path, 10)
    assert "[Errno 28] No space left on device" in writer.hear("failed")["reason"]
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_an_error_of_the_disk(start, tmp_path, require_tool, call):
    """Also an error that comes only when the data is made durable; Megatron-core hung there
    (NVIDIA/Megatron-LM#6970, #6971).
    """
    broken = tmp_path / "broken"
    writer = start(**broken_disk(tmp_path, require_tool, call))
    directory = tmp_path / "checkpoints"
    writer.save(directory, 10)
    assert "[Errno 5] Input/output error" in writer.hear("failed")["reason"]
    assert names(directory) == []
    broken.unlink()
    writer.save(directory, 20, 2)
    writer.hear("done")
    assert not manifest.damaged(directory / "iter_0000020")


def test_a_directory_without_permission(start, tmp_path):
    """As root all is permitted but /proc."""
    directory = Path("/proc/self") if os.geteuid() == 0 else tmp_path
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
    writer = start()
    writer.save(directory, 10)
    reason = writer.hear("failed")["reason"]
    assert "iter_0000010.g_1.unfinished" in reason and "[Errno" in reason


def test_abandoned_saves_leave_nothing(start, tmp_path):
    writer = start()
    writer.save(tmp_path, 10, world=2)
    writer.hear("written")
    writer.ask(do="abandon", number=1)
    assert writer.hear("abandoned")["number"] == 1
    assert names(tmp_path) == []
