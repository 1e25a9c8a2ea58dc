# SPDX-License-Identifier: Apache-2.0
"""The process that writes a rank's part of every checkpoint, and on rank 0 completes the checkpoint. Imports no torch.
Its only access to files is a place (places.py).

`python -m zaya_plugin.checkpoint.writer <socket> <memory>`: descriptors of the rank's socket and of the memory that it
fills. It ends with its rank. The writers of a checkpoint meet in its unfinished folder: each publishes the checksum of
its file in it, and rank 0's writer waits for all of them. No writer waits for a collective, and no rank for a writer.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from zaya_plugin.checkpoint import manifest, on_disk, places, starts
from zaya_plugin.checkpoint.places import Place, exists
from zaya_plugin.config.run_directory import iterations
from zaya_plugin.ground.parent_death import follow_rank, on_end_signals

NICE = 10
POLL_SECONDS = 0.05
REPORT_SECONDS = 0.5


class AbandonedError(Exception):
    """The rank has given the save up."""


@dataclass(kw_only=True)
class Save:
    """A request of the rank.

    Attributes:
        number: of the saves of this run, the same on all ranks.
        iteration: of the checkpoint.
        place: of the run's checkpoints; local: of those on this node's own disk, where the file is written first, or
            None. Both as `places.to_text` returns them.
        rank, world: of the process; rank 0 completes the checkpoint.
        facts: about the run, for the manifest; `generation` is that of this start.
        keep_last, keep_every: which older checkpoints stay.
        deadline: seconds without progress of the other ranks after which the save has failed.
        leads: this process gives the local folder its name.
        limit: bytes a second of the upload from the local place.
    """

    number: int
    iteration: int
    place: str
    rank: int
    world: int
    facts: dict
    keep_last: int
    keep_every: int | None
    deadline: float
    local: str | None = None
    leads: bool = False
    limit: float | None = None

    @functools.cached_property
    def final(self) -> Place:
        """The folder of the complete checkpoint."""
        return on_disk.folder(places.from_text(self.place), self.iteration)

    @functools.cached_property
    def folder(self) -> Place:
        """The folder in which the checkpoint is written."""
        return self.final.parent / self._unfinished

    @functools.cached_property
    def local_folder(self) -> Place | None:
        """The same on this node's disk."""
        return places.from_text(self.local) / self._unfinished if self.local else None

    @property
    def _unfinished(self) -> str:
        return f"{self.final.name}.{self.facts['generation']}_{self.number}{manifest.UNFINISHED}"

    def note(self, kind: str, rank: int) -> Place:
        """Return the file in which the writer of `rank` states that its file is durable ("part"), that it is uploaded
        ("uploaded"), or the reason of its failure ("failed").
        """
        return self.folder / f"{kind}_{rank}.json"


class Writer:
    """Serves the requests of one rank."""

    def __init__(self, connection: Connection, memory: int):
        self.connection = connection
        self.descriptor = memory
        self.memory = memoryview(b"")
        self.file = ""
        self.slices: list[tuple[int, int]] = []
        self.index = b""
        self.format = ""
        self.number = 0
        self._reported = 0.0
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Serve requests until the rank ends."""
        while True:
            request = json.loads(self.connection.recv_bytes())
            if request["do"] == "layout":
                self.take_layout(**json.loads(os.pread(self.descriptor, request["size"], request["start"])))
            elif request["do"] == "save":
                with self.alive():
                    self.save(Save(**request["save"]))
            elif request["do"] == "fail":
                self.fail(Save(**request["save"]), request["reason"])
            elif request["do"] != "abandon":  # that of a save that has ended
                raise ValueError(f"the rank asks for {request['do']!r}, which this version does not know")

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Send the rank a sign of life twice a second, also while the storage does not answer."""
        over = threading.Event()

        def tell() -> None:
            with contextlib.suppress(ConnectionError):  # the rank has ended, which the other thread notices
                while not over.wait(REPORT_SECONDS):
                    self._send(state="alive")

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def take_layout(self, file: str, slices: list, size: int, index: str, format: str) -> None:
        """Take the plan of the rank's file. index: of the checkpoint, a character for each byte; "" but on rank 0."""
        self.file, self.slices, self.format = file, [tuple(part) for part in slices], format
        self.memory = memoryview(mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ))
        self.index = index.encode("latin-1")

    def save(self, save: Save) -> None:
        """Write one checkpoint, and send the rank its outcome."""
        self.number = save.number
        try:
            start = time.perf_counter()
            self.sweep(save)
            save.folder.make()
            first = save.local_folder or save.folder
            first.make()
            written = self.write(first / self.file)
            save.note("part", save.rank).put(json.dumps({self.file: written}))
            self.tell("written", bytes=written["bytes"], seconds=time.perf_counter() - start)
            if save.rank == 0:
                self.describe(save)
            if save.local:
                self.upload(save, written)
            if save.rank == 0:
                self.complete(save)
            self.tell("done")
        except AbandonedError:
            self.remove(save)
            self.tell("abandoned")
        except ConnectionError:  # the rank has ended: the save has not failed, and a start may finish the upload
            raise
        except (OSError, ValueError) as error:
            reason = f"{error} ({save.folder.free()})"  # a full disk has many faces
            self.fail(save, reason)
            self.tell("failed", reason=reason)
        try:
            self.prune(save)
        except OSError as error:
            print(f"WARNING: old checkpoints were not removed: {error}", file=sys.stderr)

    @staticmethod
    def sweep(save: Save) -> None:
        """Remove unfinished folders of earlier failed saves of this run: a rank that began late has made the folder
        again, with its file, and a full disk stays full. Folders that a start can upload stay, and later saves, which a
        rank may have begun while rank 0 is late with this one.
        """
        folders = [save.folder] if save.rank == 0 else []
        folders += [save.local_folder] if save.local_folder and save.leads else []
        generation = re.escape(save.facts["generation"])
        for folder in (folder.parent for folder in folders):
            for name in places.names(folder):
                unfinished = re.fullmatch(rf"iter_\d+\.{generation}_(\d+){re.escape(manifest.UNFINISHED)}", name)
                if unfinished and int(unfinished[1]) < save.number:
                    if not exists(save.final.parent / name / manifest.NAME):
                        (folder / name).remove()

    def fail(self, save: Save, reason: str) -> None:
        """Let the other ranks' writers know that this rank's part will not come."""
        with contextlib.suppress(OSError):
            save.note("failed", save.rank).put(json.dumps(reason))
        self.remove(save)

    def write(self, file: Place) -> dict:
        """Write the rank's file, make it durable, and return its bytes and checksum."""
        size = 0

        def progress(count: int) -> None:
            nonlocal size
            size += count
            self.heed()
            self.tell_rarely("writing", bytes=size)

        parts = (self.memory[start : start + length] for start, length in self.slices)
        return file.write(parts, progress, direct=True)

    def describe(self, save: Save) -> None:
        """Wait for all ranks' files; write index and manifest."""
        files = self.notes(save, "part")
        for name, text in ((on_disk.INDEX, self.index), (on_disk.FORMAT, self.format.encode())):
            files[name] = (save.folder / name).write([text])
        manifest.write(save.folder, save.iteration, files, **save.facts, save=save.number, ranks=save.world)
        self.tell("described", bytes=sum(file["bytes"] for file in files.values()))

    def upload(self, save: Save, written: dict) -> None:
        """Complete the checkpoint on this node's disk, then copy this rank's file to the place that all nodes see."""
        local, stated = save.local_folder, self.wait_for(save, save.folder / manifest.NAME)
        complete = local.parent / save.final.name
        if save.leads:
            for name in (on_disk.INDEX, on_disk.FORMAT, manifest.NAME):
                (local / name).put(places.read(save.folder / name))
            complete.remove()  # of this step, saved before
            manifest.give_name(local, complete)
        else:
            self.wait_for(save, complete / manifest.NAME, stated)

        start, copied = time.perf_counter(), 0

        def progress(count: int) -> None:
            nonlocal copied
            copied += count
            self.heed()
            self.tell_rarely("uploading", bytes=copied, seconds=time.perf_counter() - start)

        places.upload(complete / self.file, save.folder / self.file, written, save.limit, progress)
        save.note("uploaded", save.rank).put(json.dumps({}))

    def complete(self, save: Save) -> None:
        """Give the checkpoint its name, once all files are in its folder."""
        kinds = ["part", "uploaded"] if save.local else ["part"]
        self.notes(save, kinds[-1])
        for rank in range(save.world):
            for kind in kinds:
                save.note(kind, rank).remove()
        directory = save.final.parent
        manifest.give_name(save.folder, save.final)
        with contextlib.suppress(OSError):  # the checkpoint is complete without them
            on_disk.name_as_latest(directory, save.iteration)
            starts.keep_run(directory, save.facts.get("run_id"))
        self.tell("complete")

    def prune(self, save: Save) -> None:
        """Remove the checkpoints that this one replaces, once it is complete or whole on the nodes' disks, from where a
        start can upload it; no rank and no other writer waits for that.
        """
        directory, complete = save.final.parent, exists(save.final / manifest.NAME)
        if not complete and not self.is_described(save):
            return
        newest = save.iteration if complete else save.iteration - 1  # this step may be tried again at once
        if save.rank == 0:
            manifest.remove_leftovers(directory, newest)
            for old in on_disk.removable(directory, save.keep_last, save.keep_every, newest=save.iteration):
                on_disk.remove(directory, old)
        if save.leads and save.local:
            local = save.local_folder.parent
            manifest.remove_leftovers(local, newest)
            for old in iterations(local):
                if old < save.iteration:
                    on_disk.remove(local, old)

    @staticmethod
    def is_described(save: Save) -> bool:
        """Return whether all files of an unfinished checkpoint are whole on the nodes' disks, by its manifest."""
        return save.local is not None and exists(save.folder / manifest.NAME)

    def wait_for(self, save: Save, file: Place, content: bytes | None = None) -> bytes:
        """Wait until another writer has made a file, with this content unless it is None. Return its content.

        Raises:
            OSError: a writer has failed, or the file is missing after `deadline` seconds.
        """
        since = looked = time.monotonic()
        while True:
            with contextlib.suppress(FileNotFoundError):
                if (data := places.read(file)) and content in (None, data):
                    return data
            now = time.monotonic()
            if now - since > save.deadline:
                raise OSError(f"{file} did not come within {save.deadline:g} s")
            if now - looked > REPORT_SECONDS:
                looked = now
                try:
                    names = save.folder.list(sizes=False)
                except FileNotFoundError:
                    raise OSError("rank 0 has given the save up") from None
                for name in names:
                    if name.startswith("failed_") and name.endswith(".json"):
                        raise OSError(json.loads(places.read(save.folder / name)))
            self.heed(POLL_SECONDS)
            self.tell_rarely("waiting")

    def notes(self, save: Save, kind: str) -> dict[str, dict]:
        """Return the notes of all ranks of this kind, once all have written one: their files with size and checksum.

        Raises:
            OSError: a rank has failed, or nothing has changed for `deadline` seconds.
        """
        files, missing = {}, set(range(save.world))
        seen, since = None, time.monotonic()
        while True:
            for rank in sorted(missing):
                # opened, because a network file system shows new names to a reader that opens them
                with contextlib.suppress(FileNotFoundError):
                    files |= json.loads(places.read(save.note(kind, rank)))
                    missing.discard(rank)
                with contextlib.suppress(FileNotFoundError):
                    raise OSError(f"rank {rank}: {json.loads(places.read(save.note('failed', rank)))}")
            if not missing:
                return files
            if (sizes := save.folder.list()) != seen:
                seen, since = sizes, time.monotonic()
            elif time.monotonic() - since > save.deadline:
                ranks = ", ".join(map(str, sorted(missing)[:8]))
                raise OSError(f"nothing came from rank {ranks} within {save.deadline:g} s")
            self.heed(POLL_SECONDS)
            self.tell_rarely("waiting")

    def heed(self, seconds: float = 0) -> None:
        """Raise AbandonedError if the rank has given the save up; end this process if the rank has ended."""
        while self.connection.poll(seconds):
            request = json.loads(self.connection.recv_bytes())
            if request["do"] == "abandon" and request["number"] == self.number:
                raise AbandonedError
            if request["do"] != "abandon":
                raise ValueError(f"the rank asks for {request['do']!r} during a save")

    def remove(self, save: Save) -> None:
        """Remove the folder of a failed save, or its file on another rank than 0;
        but not files that a start can upload.
        """
        with contextlib.suppress(OSError):
            if self.is_described(save):
                return
            if save.local_folder and save.leads:
                save.local_folder.remove()
            (save.folder if save.rank == 0 else save.folder / self.file).remove()

    def tell(self, state: str, **more) -> None:
        """Tell the rank about the save."""
        self._reported = time.monotonic()
        self._send(state=state, **more)

    def _send(self, **message) -> None:
        with self._sending:
            self.connection.send_bytes(json.dumps({"number": self.number, **message}).encode())

    def tell_rarely(self, state: str, **more) -> None:
        """Tell the rank how far the save is."""
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self.tell(state, **more)


def main(argv: list[str]) -> None:
    """Serve the rank whose descriptors are given."""
    on_end_signals(signal.SIG_IGN)  # the rank decides what happens to a save
    follow_rank()
    with contextlib.suppress(OSError):
        os.nice(NICE)
    with Connection(int(argv[0])) as connection:
        try:
            Writer(connection, int(argv[1])).serve()
        except (EOFError, ConnectionError):  # the rank has ended
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
