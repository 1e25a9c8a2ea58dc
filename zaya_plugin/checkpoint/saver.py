# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints of a rank while it trains: a copy into host memory, and a process that writes it.

    saver = Saver(directory, ...)            # starts the writer, before the device is used
    saver.prepare(state)                     # once, on all ranks: plans the files, allocates the memory
    saver.save(iteration, objects)           # copies; returns at once
    saver.poll()                             # every step
    saver.close()                            # at the end

Only `prepare` has collectives. All ranks must make the same saves; `Saver.state` and `Saver.agree` are for an agreement
that the training loop makes anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from zaya_plugin.checkpoint import places
from zaya_plugin.checkpoint.host_buffer import HostBuffer, Staging
from zaya_plugin.checkpoint.places import Place
from zaya_plugin.checkpoint.rank_file import (
    COMMON,
    FORMAT,
    RankFile,
    contents,
    copied_weights,
    index,
    main_weights,
    without_derived,
)
from zaya_plugin.checkpoint.restore import gathered, on_rank_0
from zaya_plugin.checkpoint.writer import Save

FREE, BUSY, FAILED = 0, 1, 2  # states of a rank's writer; ranks agree on the largest
DEADLINE = 600.0
# Seconds for a removal of older checkpoints that is still going on; the next save or start ends what is left of it.
CLOSING = 5.0
SILENCE = 60.0  # seconds without progress, beyond the deadline, after which a save has failed
HANGS = 30.0  # seconds without a sign of life, which a writer gives twice a second


class Saver:
    """Saves the state of one rank.

    Args:
        directory: of the checkpoints, which all ranks see.
        deadline: seconds without progress after which a save has failed.
        collectives: seconds after which a collective ends the run. A rank that waits for its writer gives up earlier,
            since other ranks may wait for it in a collective.

    Attributes:
        local: the same on this node's own disk, where a checkpoint is written first; None: nowhere. leads: this rank
            completes the local checkpoints of its node. limit: bytes a second of the upload from there.
        generation: of this start of the run, the same on all ranks and different from earlier starts.
        report: called with a line about a save. before_writing: called with the iteration once its copy is complete.
        completed: the last iteration whose checkpoint is complete, on rank 0. waited: seconds that training has waited
            for the last save. failed: the iteration of the last save, if it has failed on this rank.
        count: of the saves of this run, the same on all ranks. agreed_state: the largest `state` of all ranks.
    """

    def __init__(
        self,
        directory: Place | Path,
        rank: int,
        world: int,
        *,
        keep_last: int = 0,
        keep_every: int | None = None,
        deadline: float = DEADLINE,
        collectives: float = float("inf"),
    ):
        self.directory, self.rank, self.world = directory, rank, world
        self.keep_last, self.keep_every = keep_last, keep_every
        self.deadline, self.collectives = min(deadline, 0.7 * collectives), collectives
        self.local: Place | Path | None = None
        self.leads, self.limit = False, None
        self.generation = ""
        self.report: Callable[[str], None] = print
        self.before_writing: Callable[[int], None] = lambda iteration: None
        self.completed: int | None = None
        self.waited = 0.0
        self.failed: int | None = None
        self.count = 0
        self.agreed_state = FREE
        self.rate: float | None = None  # bytes a second of this rank's last file
        self.upload_rate: float | None = None  # the same of its last upload
        self._buffer = HostBuffer()
        self._file: RankFile | None = None
        self._layout = b""
        self._staging: Staging | None = None
        self._save: Save | None = None
        self._handed_over = False
        self._state = FREE
        self._heard = self._alive = self._began = 0.0
        self._written = self._uploaded = self._total = 0
        self._waits_since: float | None = None
        self._start_writer()

    # The writer

    def _start_writer(self) -> None:
        """Start the writer. Python starts it without a copy of this process' memory, so also after pinning."""
        mine, its = socket.socketpair()
        with mine, its:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "zaya_plugin.checkpoint.writer",
                    str(its.fileno()),
                    str(self._buffer.descriptor),
                ],
                pass_fds=[its.fileno(), self._buffer.descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the rank
                env={**os.environ, "ZAYA_RANK_PID": str(os.getpid())},
            )
            self._connection = Connection(mine.detach())

    def _ask(self, what: str, **more) -> None:
        self._connection.send_bytes(json.dumps({"do": what, **more}).encode())

    def _send_layout(self) -> None:
        """Send the writer the place of the layout in the memory: the text may be larger than what a socket takes
        without a reader.
        """
        with contextlib.suppress(ConnectionError):  # it has ended: the next poll starts another
            self._ask("layout", size=len(self._layout), start=self._file.size)

    def _revive(self) -> str:
        """Replace a writer that has ended or does not answer. Return why that was not possible; the next poll tries it
        again.
        """
        self._process.kill()
        before = self._connection
        try:
            self._start_writer()
        except OSError as error:
            return f", and no other can be started ({error})"
        before.close()
        self._send_layout()
        return ""

    # Plan

    def prepare(self, state: dict, pin: bool) -> None:
        """Plan this rank's file from Megatron's sharded state, allocate the buffer, and make the index. A collective.

        state: with model and optimizer, whose tensors stay where they are. pin: the tensors are on a GPU.

        Raises:
            ValueError: on all ranks, if the ranks' parts do not make whole tensors.
        """
        boxes, objects, common = contents(state)
        shapes = {key: shape for owned in gathered(main_weights(boxes)) for key, shape in owned.items()}
        boxes, derived = without_derived(boxes, shapes)
        derived += [key for key in copied_weights(state) if key not in shapes]  # which `index` refuses
        if self.rank == 0:
            objects[COMMON] = [common]
        self._file = RankFile.plan(f"__{self.rank}_0.distcp", boxes, objects)
        index_bytes = b""
        plans: list | None = [None] * self.world if self.rank == 0 else None
        torch.distributed.gather_object((self._file.entries, derived), plans, dst=0)

        def make_index() -> None:  # kept here, not returned: only rank 0 writes it
            nonlocal index_bytes
            entries, keys = zip(*plans, strict=True)
            index_bytes = index(chain.from_iterable(entries), chain.from_iterable(keys))

        on_rank_0(make_index)
        file = self._file
        layout = dict(
            file=file.name, slices=file.slices, size=file.size, index=index_bytes.decode("latin-1"), format=FORMAT
        )
        self._layout = json.dumps(layout).encode()
        self._buffer.allocate(file.size + len(self._layout), pin)
        self._buffer.write(file.size, self._layout)
        if pin and not self._buffer.pinned:
            self.report(
                f"WARNING: rank {self.rank}: the driver does not pin the {self._file.size / 1e9:.1f} GB of memory for "
                "checkpoints, so training waits for the copy at every save"
            )
        for start, text in self._file.fixed:
            self._buffer.write(start, text)
        self._staging = Staging(self._buffer, self._file.tensors)
        self._send_layout()

    @property
    def prepared(self) -> bool:
        """Whether `prepare` was called."""
        return self._staging is not None

    @property
    def bytes(self) -> int:
        """Bytes of this rank's file and of its buffer."""
        return self._file.size + len(self._layout)

    # Saves

    def save(self, iteration: int, state: dict, facts: dict) -> None:
        """Start a checkpoint: copy the tensors, and let the writer write them. There must be no save in flight.

        state: as in `prepare`, without model and optimizer's tensors. facts: for the manifest.
        """
        assert self._state != BUSY, "one save at a time"
        self.count += 1
        self.failed = None
        self._save = Save(
            number=self.count,
            iteration=iteration,
            place=places.to_text(places.at(self.directory)),
            rank=self.rank,
            world=self.world,
            facts={**facts, "generation": self.generation},
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            deadline=self.deadline,
            local=places.to_text(places.at(self.local)) if self.local else None,
            leads=self.leads,
            limit=self.limit,
        )
        self._state, self._handed_over, self._written, self._uploaded = BUSY, False, 0, 0
        self.agreed_state = BUSY
        self._began = self._heard = time.monotonic()
        try:
            for key, value in self._objects(state).items():
                self._buffer.write(*self._file.archive(key, value))
        except ValueError as error:
            return self._fail(f"rank {self.rank}: {error}", note=True)
        self._staging.start()
        self.poll()

    def _objects(self, state: dict) -> dict[str, object]:
        _, objects, common = contents(state)
        if self.rank == 0:
            objects[COMMON] = [common]
        if objects.keys() != self._file.rooms.keys():
            raise ValueError(f"the objects {sorted(objects)} were planned as {sorted(self._file.rooms)}")
        return objects

    def poll(self) -> None:
        """Hand the copy over once it is complete, and read the writer's messages. Does not wait."""
        try:
            while self._connection.poll():
                self._hear(json.loads(self._connection.recv_bytes()))
        except (EOFError, ConnectionError):
            self._lost("has ended")
        if self._state != BUSY:
            return
        if not self._handed_over:
            if not self._staging.is_complete:
                return
            self.before_writing(self._save.iteration)
            try:
                if self._process.poll() is not None:
                    raise ConnectionError
                self._ask("save", save=dataclasses.asdict(self._save))
            except ConnectionError:
                return self._lost("has ended")
            self._handed_over = True
            self._heard = self._alive = time.monotonic()
            return
        now = time.monotonic()
        if now - self._alive > HANGS:
            self._lost(f"gives no sign of life for {HANGS:g} s", hangs=True)
        elif now - self._heard > self.silence:
            self._lost(f"has not answered for {self.silence:g} s", hangs=True)

    def _hear(self, answer: dict) -> None:
        self._alive = time.monotonic()
        if (state := answer["state"]) == "alive":
            return
        self._heard = self._alive
        if self._save is None or answer["number"] != self._save.number or self._state != BUSY:
            return  # about a save that has ended
        if state in ("writing", "written"):
            self._written = answer["bytes"]
        if state == "written":
            self.rate = answer["bytes"] / max(answer["seconds"], 1e-9)
        elif state == "uploading":
            self._uploaded = answer["bytes"]
            self.upload_rate = answer["bytes"] / max(answer["seconds"], 1e-9)
        elif state == "described":
            self._total = answer["bytes"]
        elif state == "complete":
            self.completed = self._save.iteration
            now = time.monotonic()
            seconds, waited = now - self._began, self.waited + (now - self._waits_since if self._waits_since else 0.0)
            self.report(
                f"step {self._save.iteration}: checkpoint saved: {self._total / 1e9:.2f} GB in {seconds:.1f} s, of "
                f"which training waited {waited:.3f} s"
            )
        elif state in ("done", "abandoned"):
            self._state = FREE
        elif state == "failed":
            self._fail(f"rank {self.rank}: {answer['reason']}")

    def _lost(self, what: str, hangs: bool = False) -> None:
        was_busy = self._state == BUSY
        if self.prepared:
            self._staging.wait()
            what += self._revive()
        if was_busy and self.completed == self._save.iteration:
            self._state = FREE
        elif was_busy:
            # A new writer would hang too, where the storage hangs;
            # the other ranks' writers have a deadline of their own.
            self._fail(f"rank {self.rank}: the process that writes it {what}", note=not hangs)

    def _fail(self, reason: str, note: bool = False) -> None:
        """End the save. note: the writer has to note it for the other ranks' writers, which would wait for this one."""
        self._state, self.failed = FAILED, self._save.iteration
        if note:
            with contextlib.suppress(ConnectionError):
                self._ask("fail", save=dataclasses.asdict(self._save), reason=reason)
        self.report(f"WARNING: the checkpoint of step {self._save.iteration} was not written: {reason}")

    @property
    def silence(self) -> float:
        """Seconds without a message after which the writer hangs."""
        return min(self.deadline + SILENCE, 0.9 * self.collectives)

    @property
    def state(self) -> int:
        """FREE, BUSY or FAILED: the state of this rank's writer, for `agree`."""
        return self._state

    def agree(self, state: int) -> None:
        """Take the largest `state` of all ranks: where one has failed, all give the save up."""
        self.agreed_state = state
        if state != FAILED:
            return
        if self._state == BUSY:
            self.report(
                f"WARNING: the checkpoint of step {self._save.iteration} is given up: another rank has failed to write "
                "its part; its log has the reason"
            )
            self.failed = self._save.iteration
        self.abandon()

    def abandon(self) -> None:
        """Give the save up that is in flight."""
        if self._state == BUSY:
            self._staging.wait()
            if self._handed_over:
                with contextlib.suppress(ConnectionError):
                    self._ask("abandon", number=self._save.number)
                self._await(lambda: self._state == BUSY, 10.0)
        self._state = FREE

    def before_change(self, tensors) -> None:
        """Let the device wait until `tensors` are copied, before a kernel changes them."""
        if self.prepared:
            self._staging.before_change(tensors)

    @property
    def seconds_left(self) -> float:
        """Seconds that the save in flight still takes, by the rates at which it is written and uploaded; 0 without
        one.
        """
        if self._state != BUSY:
            return 0.0
        elapsed = time.monotonic() - self._began
        rate = self._written / elapsed if self._written else self.rate
        return _seconds(self._file.size - self._written, rate) + _seconds(
            self._to_upload - self._uploaded, self._rate_of_uploads
        )

    @property
    def seconds_for_one(self) -> float:
        """Seconds that a new save takes, by the rates of the last one; 0 if none was written."""
        if not self.rate:
            return 0.0
        return _seconds(self._file.size, self.rate) + _seconds(self._to_upload, self._rate_of_uploads)

    @property
    def _to_upload(self) -> int:
        """Bytes that an upload transfers: it reads back what it has written."""
        return 2 * self._file.size if self.local else 0

    @property
    def _rate_of_uploads(self) -> float | None:
        """Before one was measured the limit; without a limit that of the local disk, at best."""
        return self.upload_rate or self.limit or self.rate

    def wait(self, seconds: float = float("inf")) -> bool:
        """Wait for the save in flight. Return whether it has ended."""
        if self._state == BUSY:
            self._waits_since = time.monotonic()
            self._staging.wait()
            self.poll()
            self._await(lambda: self._state == BUSY, seconds)
            self._waits_since = None
        return self._state != BUSY

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while condition() and time.monotonic() < end:
            self._connection.poll(0.1)
            self.poll()

    def close(self) -> None:
        """End the writer and give the memory back."""
        if self.prepared:
            self._staging.wait()
        self._connection.close()  # the writer ends when it reads this
        try:
            self._process.wait(CLOSING)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._staging = None
        self._buffer.release()


def _seconds(size: int, rate: float | None) -> float:
    if size <= 0:
        return 0.0
    return size / rate if rate else float("inf")
