# SPDX-License-Identifier: Apache-2.0
"""A rank's saves with a real writer process, which is killed, stopped or cut off; training must go on, and hear of it."""

import ctypes
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from tests.checkpoint.storages import MEMORY_IS_SLOW, Memory
from tests.checkpoint.test_writer import broken_disk, ended, names
from zaya_plugin.checkpoint import places, saver
from zaya_plugin.checkpoint.checkpoints import Checkpoints
from zaya_plugin.checkpoint.places import PosixPlace
from zaya_plugin.checkpoint.saver import BUSY, FAILED, FREE, Saver
from zaya_plugin.hosts import saved_state
from zaya_plugin.hosts.saved_state import SavedState

SHAPE = (512, 512)


pytestmark = pytest.mark.usefixtures("one_rank")


class Training:
    """A saver and the tensor that it saves. lines: what it has reported."""

    def __init__(self, directory, **named):
        self.directory, self.lines = directory, []
        self.weights = torch.zeros(SHAPE)
        self.saver = Saver(directory, 0, 1, keep_last=1, **named)
        self.saver.generation, self.saver.report = "g", self.lines.append
        self.saver.prepare(self.state(0), pin=False)

    def state(self, step: int, model: bool = True) -> dict:
        tensors = {"w": ShardedTensor.from_rank_offsets("w", self.weights)} if model else {}
        return {**tensors, "rng": ShardedObject("rng", {"step": step}, (1,), (0,)), "step": step}

    def save(self, step: int, world: int = 1) -> None:
        """world=2: the writer waits for another rank's file, so the save stays in flight."""
        self.weights.fill_(step)
        self.saver.world = world
        self.saver.save(step, self.state(step, model=False), {})

    def first_save(self) -> None:
        """Save once, so that the writer has started; the report of it is dropped."""
        self.save(1)
        assert self.saver.wait(60) and self.saver.failed is None
        self.lines.clear()

    def saved(self, step: int) -> dict:
        """Read the newest checkpoint, of this step, with Megatron's loader."""
        checkpoints = Checkpoints(self.directory)
        assert checkpoints.newest() == step
        read = self.state(0)
        read["w"] = ShardedTensor.from_rank_offsets("w", torch.empty(SHAPE))
        return checkpoints.load(step, read)

    def poll_until(self, condition, seconds: float = 60.0) -> None:
        """Poll as a training loop does."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.lines
            self.saver.poll()
            time.sleep(0.01)

    def until_part(self) -> None:
        """Wait until the file is written, and only the other rank's is missing."""
        note = self.saver._save.note("part", 0)
        self.poll_until(lambda: places.exists(note))


@pytest.fixture
def training(storage):
    started = Training(storage.place)
    yield started
    started.saver.close()
    assert ended(started.saver._process.pid, 5)


def test_the_file_holds_the_values_of_the_save_and_not_of_later_steps(training, monkeypatch):
    """Megatron-core's own writer, on the CPU, wrote 13.2 M of 54.1 M elements of later steps (no copy of CPU tensors).
    NVIDIA/Megatron-LM#2288: a buffer was filled again before it was written. NVIDIA-NeMo/RL#949: a save during a
    collective; this save has none.
    """
    collectives = "all_gather_object", "gather_object", "broadcast_object_list", "barrier", "all_reduce", "all_gather"
    pid = training.saver._process.pid
    for step in (10, 20, 30):
        with monkeypatch.context() as without:
            for name in collectives:
                without.setattr(torch.distributed, name, None)
            training.save(step)
            while training.saver.state == BUSY:
                training.weights += 1  # the next steps
                training.saver.poll()
        loaded = training.saved(step)
        assert torch.equal(loaded["w"], torch.full(SHAPE, float(step)))
        assert loaded["step"] == step and loaded["rng"] == {"step": step}
    assert training.saver._process.pid == pid
    assert [line.partition(":")[0] for line in training.lines] == ["step 10", "step 20", "step 30"]


def test_the_memory_is_that_of_the_shard(training):
    """vllm-project/vime#139: the host ran out of memory while the state was gathered."""
    assert training.saver.bytes <= 1.1 * training.weights.nbytes + 2**18
    assert os.fstat(training.saver._buffer.descriptor).st_size == training.saver.bytes


@MEMORY_IS_SLOW
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_killed_writer_is_noticed_at_the_next_poll_and_replaced(training, when):
    """NVIDIA/Megatron-LM#6970, #6971: a dead writer was never noticed. NVIDIA-NeMo/Automodel#3824: a race at its start."""
    first = training.saver._process
    if when == "before":
        first.kill()
        first.wait()
        training.saver.poll()
        assert training.lines == [] and training.saver.state == FREE
    elif when == "during":
        training.save(10, world=2)
        training.until_part()
        first.kill()
        first.wait()
        training.saver.poll()
        assert (training.saver.state, training.saver.failed) == (FAILED, 10)
        assert training.lines == [
            "WARNING: the checkpoint of step 10 was not written: rank 0: the process that writes it has ended"
        ]
    else:
        training.save(10)
        training.saver.wait()
        first.kill()
        first.wait()
        training.saver.poll()
        assert len(training.lines) == 1 and training.saver.state == FREE
    assert training.saver._process.pid != first.pid
    training.saver.agree(training.saver.state)
    training.save(20)
    assert training.saver.wait(60) and training.saver.failed is None
    assert torch.equal(training.saved(20)["w"], torch.full(SHAPE, 20.0))
    # the writer removes the folder of the killed one after it has stated that the save is done
    training.poll_until(lambda: names(training.directory) == ["iter_0000020", "latest_checkpointed_iteration.txt"])


def test_a_writer_that_dies_again_and_again_does_not_end_training(training):
    for _ in range(3):
        training.saver._process.kill()
        training.saver._process.wait()
        training.save(10)  # handed over to a process that has ended
        training.poll_until(lambda: training.saver.state == FAILED)
        training.saver.agree(FAILED)
        assert training.saver.state == FREE
    assert len(training.lines) == 3
    training.saver._process.kill()
    training.saver.abandon()
    training.saver._send_layout()  # to a process that has ended, as a new one may have
    training.save(20)
    training.poll_until(lambda: training.saver.state != BUSY)


@MEMORY_IS_SLOW
def test_the_writer_notes_for_the_other_ranks_that_its_predecessor_was_killed(training, tmp_path):
    """Else rank 0's writer waits ten minutes for the file of a rank whose writer was killed in the last save."""
    training.save(10, world=2)
    training.until_part()
    save = training.saver._save
    training.saver.rank = save.rank = 1
    training.saver._process.kill()
    training.saver._process.wait()
    training.saver.poll()
    training.poll_until(lambda: places.exists(save.note("failed", 1)))
    assert json.loads(places.read(save.note("failed", 1))) == "rank 1: the process that writes it has ended"


@MEMORY_IS_SLOW
def test_rank_0s_new_writer_notes_its_predecessors_end_too(training):
    """With local_path the other ranks' writers wait for rank 0's manifest."""
    training.save(10, world=2)
    training.until_part()
    folder, told = training.saver._save.folder, []
    ask = training.saver._ask
    training.saver._ask = lambda what, **more: (told.append(what), ask(what, **more))
    training.saver._process.kill()
    training.saver._process.wait()
    training.saver.poll()
    assert told == ["layout", "fail"]
    training.poll_until(lambda: folder.name not in names(folder.parent))


@MEMORY_IS_SLOW
def test_a_writer_that_hangs_is_replaced_after_the_deadline(training, monkeypatch):
    """NVIDIA/Megatron-LM#2422, radixark/miles#2816: training waited for a save for ever."""
    training.first_save()
    monkeypatch.setattr(saver, "SILENCE", 0.3)
    training.saver.deadline = 0.2
    first = training.saver._process
    first.send_signal(signal.SIGSTOP)
    training.save(10)
    began = time.monotonic()
    assert training.saver.wait(60)
    assert time.monotonic() - began < 60 and training.saver.failed == 10
    assert training.lines == [
        "WARNING: the checkpoint of step 10 was not written: rank 0: the process that writes it has not answered for "
        "0.5 s"
    ]
    assert ended(first.pid, 5)
    monkeypatch.setattr(saver, "SILENCE", 20.0)
    training.save(20)
    assert training.saver.wait(60)
    training.saved(20)


@pytest.mark.slow
def test_a_stopped_writer_is_noticed_long_before_the_deadline(training, monkeypatch):
    """As NVIDIA/Megatron-LM#6970, where a dead one was never noticed."""
    training.first_save()
    monkeypatch.setattr(saver, "HANGS", 1.0)
    first = training.saver._process
    first.send_signal(signal.SIGSTOP)
    training.save(10)
    assert training.saver.wait(10) and training.saver.failed == 10
    assert "gives no sign of life for 1 s" in training.lines[0] and ended(first.pid, 5)
    training.saver.agree(FAILED)
    monkeypatch.setattr(saver, "HANGS", 30.0)
    training.save(20, world=2)  # waits for the other rank's file
    training.until_part()
    monkeypatch.setattr(saver, "HANGS", 3.0)
    assert not training.saver.wait(4.0) and training.saver.failed is None


@pytest.fixture
def hanging(storage, tmp_path):
    """A place that never answers: on a mount without a file server, or of the store."""
    if isinstance(storage, Memory):
        storage.hang("make", "hanging")
        yield storage.place / "hanging"
        return
    folder, libc = tmp_path / "mount", ctypes.CDLL(None, use_errno=True)
    folder.mkdir()
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE: {error}")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"none", str(folder).encode(), b"fuse", 0, options):
        os.close(server)
        pytest.skip(f"mounting needs root: {os.strerror(ctypes.get_errno())}")
    yield PosixPlace(folder) / "checkpoints"
    os.close(server)
    libc.umount2(str(folder).encode(), 2)  # MNT_DETACH


def test_a_new_writer_that_does_not_come_up_does_not_hold_training_up(training, tmp_path, monkeypatch):
    """The layout and the index, some MB on rank 0, are more than a socket takes without a reader."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    asked, ask = [], training.saver._ask
    training.saver._ask = lambda what, **more: (asked.append(len(json.dumps(more))), ask(what, **more))
    training.saver._process.kill()
    training.saver._process.wait()
    monkeypatch.setattr(saver.sys, "executable", str(python))
    training.saver.poll()
    assert asked and max(asked) < 100
    training.saver._process.kill()


@MEMORY_IS_SLOW
def test_a_new_writer_that_cannot_be_started_fails_the_save_and_not_the_training(training, monkeypatch):
    training.save(10, world=2)
    training.until_part()
    training.saver._process.kill()
    training.saver._process.wait()

    def refuse(*arguments, **named):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(saver.subprocess, "Popen", refuse)
        for _ in range(3):
            training.saver.poll()
    assert training.saver.failed == 10 and len(training.lines) == 1
    assert "has ended, and no other can be started ([Errno 11] Resource temporarily" in training.lines[0]
    training.saver.agree(FAILED)
    training.saver.poll()
    training.save(20)
    assert training.saver.wait(60)
    training.saved(20)


@pytest.mark.parametrize("minutes, deadline, silence", [(10, 420, 480), (1, 42, 54), (60, 600, 660)])
def test_a_rank_gives_its_writer_up_before_a_collective_of_the_others_ends_the_run(
    tmp_path, minutes, deadline, silence
):
    waiting = Saver(tmp_path, 0, 1, collectives=60 * minutes)
    assert (waiting.deadline, waiting.silence) == (deadline, silence) and silence < 60 * minutes
    waiting.close()


@MEMORY_IS_SLOW
def test_storage_that_hangs_does_not_hold_training_up(training, hanging, monkeypatch):
    training.first_save()
    good, training.saver.directory = training.saver.directory, hanging
    monkeypatch.setattr(saver, "SILENCE", 0.3)
    monkeypatch.setattr(saver, "HANGS", 1.5)  # not taken for a process that hangs
    training.saver.deadline = 2.0
    first, slowest = training.saver._process, 0.0
    training.save(10)
    while training.saver.state == BUSY:
        began = time.monotonic()
        training.saver.poll()
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 2 and training.saver.failed == 10 and "has not answered for 2.3 s" in training.lines[0]
    assert ended(first.pid, 5)
    training.saver.directory, training.saver.deadline = good, 30.0
    monkeypatch.setattr(saver, "SILENCE", 20.0)
    training.saver.agree(FAILED)
    training.save(20)
    assert training.saver.wait(60)
    training.saved(20)


def test_a_writer_that_is_killed_after_the_checkpoint_is_complete_has_not_failed(training):
    training.save(10, world=2)
    training.until_part()
    training.saver.poll()
    training.saver._hear({"state": "complete", "number": 1})
    training.saver._process.kill()
    training.saver._process.wait()
    training.saver.poll()
    assert (training.saver.state, training.saver.failed) == (FREE, None)
    assert [line.partition(":")[0] for line in training.lines] == ["step 10"]


def test_a_completion_of_another_save_is_ignored(training):
    """NVIDIA-NeMo/Megatron-Bridge#5117: a stale completion finished the retry's first save."""
    training.save(10, world=2)
    training.until_part()
    training.saver.poll()
    for state in ("complete", "done", "failed", "abandoned"):
        training.saver._hear({"state": state, "number": 0, "reason": "old"})
    assert training.saver.state == BUSY and training.saver.completed is None and training.lines == []


def test_a_disk_without_room_fails_the_save_and_not_the_training(training, storage):
    storage.fill("iter_0000010.g_1.unfinished", "__0_0.distcp")
    training.save(10)
    assert training.saver.wait(60) and training.saver.failed == 10
    (line,) = training.lines
    assert line.startswith("WARNING: the checkpoint of step 10 was not written: rank 0: [Errno 28] No space left")
    if isinstance(storage, Memory):
        assert line.endswith(f"({training.directory.free()})")
    else:
        assert "GiB and" in line and "files are free" in line
    training.saver.agree(FAILED)
    training.save(20)
    assert training.saver.wait(60)
    training.saved(20)


def test_an_object_that_has_grown_too_large_fails_the_save(training):
    training.saver.save(10, {**training.state(10, model=False), "step": os.urandom(2**20)}, {})
    assert training.saver.failed == 10 and "rank 0" in training.lines[0]
    training.saver.agree(FAILED)
    training.save(20)
    assert training.saver.wait(60)
    assert training.saved(20)["step"] == 20


@MEMORY_IS_SLOW
def test_the_end_of_a_run_during_a_slow_removal_loses_nothing(storage, tmp_path, monkeypatch, require_tool):
    """The removal is cut off by the end of the writer; the next save removes what is left."""
    directory, doomed = storage.place / "checkpoints", "iter_0000010.removed"
    monkeypatch.setattr(saver, "CLOSING", 0.2)
    with monkeypatch.context() as slow:
        if isinstance(storage, Memory):
            storage.hang("remove", "iter_0000010/metadata.json")  # after the manifest
        else:
            for name, value in broken_disk(tmp_path, require_tool, "unlinkat").items():
                slow.setenv(name, value)
        training = Training(directory)
    for step in (10, 20):
        training.save(step)
        assert training.saver.wait(60)
    training.poll_until(lambda: doomed in names(directory))
    began = time.monotonic()
    training.saver.close()
    assert time.monotonic() - began < 60 and ended(training.saver._process.pid, 60)
    training.saved(20)
    # A storage without renames marks a folder before it removes it.
    old = {"iter_0000010"} & set(names(directory)) if isinstance(storage, Memory) else set()
    assert set(names(directory)) == {doomed, "iter_0000020", "latest_checkpointed_iteration.txt"} | old
    if isinstance(storage, Memory):
        storage.repair()
    again = Training(directory)
    again.save(30)
    assert again.saver.wait(60)
    again.poll_until(lambda: names(directory) == ["iter_0000030", "latest_checkpointed_iteration.txt"])
    again.saver.close()


def test_another_ranks_failure_gives_the_save_up(training):
    training.save(10, world=2)
    training.until_part()
    training.saver.agree(FAILED)
    assert training.saver.state == FREE and training.saver.failed == 10
    assert names(training.directory) == []
    assert "another rank has failed" in training.lines[0]


# When a run saves


@pytest.fixture
def run(training, monkeypatch):
    """SavedState of a run of 100 steps with a checkpoint every 10, without a model."""
    recipe = SimpleNamespace(
        checkpoint=SimpleNamespace(save="async", save_interval=10), stage=SimpleNamespace(train_iters=100)
    )
    state = SavedState(recipe, training.saver)
    monkeypatch.setattr(saved_state, "_tensors", lambda model, optimizer: [])
    monkeypatch.setattr(saved_state, "get_args", lambda: SimpleNamespace())
    monkeypatch.setattr(
        SavedState, "state", staticmethod(lambda model, optimizer, scheduler, step, *_: training.state(step, False))
    )
    state.at = lambda step: state.save(step, None, None, None, 0.0)
    return state


def release(training) -> None:
    """Let the save in flight end: the other rank has nothing to write."""
    save = training.saver._save
    training.until_part()
    save.note("part", 1).put("{}")


def test_a_save_while_the_one_before_is_written_is_left_out_and_reported(run, training):
    training.saver.world = 2
    run.at(10)
    training.until_part()
    training.saver.agree(training.saver.state)
    run.at(20)
    assert training.saver.count == 1
    assert training.lines[-1].startswith("WARNING: no checkpoint at step 20: the one before is still being written")
    release(training)
    training.poll_until(lambda: training.saver.state == FREE)
    training.saver.agree(FREE)
    training.saver.world = 1
    run.at(30)
    run.finish(30)
    training.saved(30)


def test_the_last_save_waits_for_the_one_before_and_for_itself(run, training):
    training.saver.world = 2
    run.at(10)
    training.saver.agree(BUSY)
    release(training)
    training.saver.world = 1
    run.at(100)
    run.finish(100)
    assert training.saved(100)["step"] == 100
    assert [line.partition(":")[0] for line in training.lines] == ["step 10", "step 100"]


def test_a_save_that_was_left_out_at_the_end_is_made(run, training):
    training.saver.world = 2
    run.at(10)
    training.saver.agree(BUSY)
    run.at(20)
    release(training)
    training.saver.world = 1
    run.finish(20)  # exit_interval=20 ends the run at this step
    training.saved(20)


def test_a_failed_last_save_is_tried_once_more(run, training):
    (training.directory / "iter_0000100.g_1.unfinished").put("in the way")
    run.at(100)
    run.finish(100)
    assert training.saved(100)["step"] == 100


def test_a_failed_last_save_is_an_error_with_the_step(run, training):
    for number in (1, 2):
        (training.directory / f"iter_0000100.g_{number}.unfinished").put("in the way")
    run.at(100)
    with pytest.raises(RuntimeError, match="the last checkpoint, of step 100, was not written; a WARNING above has"):
        run.finish(100)
    assert "[Errno 17] File exists" in training.lines[0]


@MEMORY_IS_SLOW
@pytest.mark.parametrize(
    "grace, old, new", [(600, "complete", "complete"), (120, "abandoned", "complete"), (2.5, "", "")]
)
def test_sigterm_with_a_save_in_flight(run, training, monkeypatch, grace, old, new):
    """It is completed where old and new fit into the grace by the measured rate, given up where only the new one does;
    else no other is begun.
    """
    training.save(10)
    training.saver.wait()
    training.saver.agree(FREE)
    training.saver.world = 2
    run.at(20)
    training.until_part()
    monkeypatch.setattr(Saver, "seconds_left", property(lambda self: 70.0 if self.state == BUSY else 0.0))
    monkeypatch.setattr(Saver, "seconds_for_one", property(lambda self: 80.0))
    monkeypatch.setenv("ZAYA_GRACE_SECONDS", str(grace))
    run.end_is_near(time.monotonic())
    if old == "complete":
        release(training)
    unfinished = training.saver._save.folder
    training.saver.world = 1
    began = time.monotonic()
    run.at(23)
    run.finish(23)
    assert time.monotonic() - began < max(grace, 60)
    kept = names(training.directory)
    if new:
        assert training.saved(23)["step"] == 23 and training.saver.completed == 23
        assert unfinished.name not in kept
        assert any("given up for one of this step" in line for line in training.lines) == (old == "abandoned")
        assert any(line.startswith("step 20: checkpoint saved") for line in training.lines) == (old == "complete")
    else:
        assert training.saver.count == 2 and "iter_0000010" in kept
        assert any("no checkpoint of this step: the save in flight takes" in line for line in training.lines)
        assert "WARNING: the last checkpoint was not complete when the time was over" in training.lines


@MEMORY_IS_SLOW
def test_sigterm_during_an_upload_starts_no_save_that_cannot_be_uploaded(run, training, tmp_path, monkeypatch):
    """An upload transfers twice the file, since it reads back what it has written."""
    training.first_save()
    training.saver.local, training.saver.leads, training.saver.limit = tmp_path / "local", True, 100e3
    training.saver.agree(FREE)
    run.at(10)
    training.poll_until(lambda: training.saver._uploaded)
    size = training.saver.bytes
    assert 0.5 * 2 * size / 100e3 < training.saver.seconds_left < 2 * 2 * size / 100e3
    assert 0.5 * 2 * size / 100e3 < training.saver.seconds_for_one < 2 * 2 * size / 100e3
    monkeypatch.setenv("ZAYA_GRACE_SECONDS", "3")
    run.end_is_near(time.monotonic())
    began = time.monotonic()
    run.at(23)
    run.finish(23)
    assert time.monotonic() - began < 60 and training.saver.count == 2
    assert "no checkpoint of this step: the save in flight takes the 1 s that are left" in training.lines
    assert "WARNING: the last checkpoint was not complete when the time was over" in training.lines


@MEMORY_IS_SLOW
def test_no_save_starts_while_the_one_before_is_still_in_flight_when_the_time_is_over(run, training, monkeypatch):
    """Its rates let it fit, but another rank's file does not come."""
    training.first_save()
    training.saver.agree(FREE)
    training.saver.world = 2
    run.at(10)
    training.until_part()
    monkeypatch.setattr(Saver, "seconds_left", property(lambda self: 0.1 if self.state == BUSY else 0.0))
    monkeypatch.setattr(Saver, "seconds_for_one", property(lambda self: 0.1))
    monkeypatch.setenv("ZAYA_GRACE_SECONDS", "2.5")
    run.end_is_near(time.monotonic())
    run.at(23)
    run.finish(23)
    assert training.saver.count == 2
    assert "WARNING: the last checkpoint was not complete when the time was over" in training.lines
