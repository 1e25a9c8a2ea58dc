# SPDX-License-Identifier: Apache-2.0
"""The process that writes a rank's part of every checkpoint, and on rank 0 completes the checkpoint. Imports no torch.

`python -m zaya_plugin.checkpoint.writer <socket> <memory>`: descriptors of the rank's socket and of the memory that it
fills. It ends with its rank. The writers of a checkpoint meet in its unfinished folder: each publishes the checksum of
its file there, and rank 0's writer waits for all of them. No writer waits for a collective, and no rank for a writer.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from zaya_plugin.checkpoint import manifest, on_disk, places, starts
from zaya_plugin.checkpoint.direct_file import DirectFiles
from zaya_plugin.config.run_directory import iterations
from zaya_plugin.ground.parent_death import follow_rank, on_end_signals
from zaya_plugin.ground.whole_file import write_whole

NICE = 10
POLL_SECONDS = 0.05
REPORT_SECONDS = 0.5


class AbandonedError(Exception):
    """The rank has given the save up."""


@dataclass
class Save:
    """A request of the rank.

    Attributes:
        number: of the saves of this run, the same on all ranks.
        final: folder of the checkpoint; unfinished: where it is written.
        rank, world: of the process; rank 0 completes the checkpoint.
        facts: about the run, for the manifest.
        keep_last, keep_every: which older checkpoints stay.
        deadline: seconds without progress of the other ranks after which the save has failed.
        local: unfinished folder on this node's own disk, where the file is written first; None: there is none.
        leads: this process gives the local folder its name.
        limit: bytes a second of the upload from there.
    """

    number: int
    iteration: int
    final: str
    unfinished: str
    rank: int
    world: int
    facts: dict
    keep_last: int
    keep_every: int | None
    deadline: float
    local: str | None = None
    leads: bool = False
    limit: float | None = None

    @property
    def folder(self) -> Path:
        """The unfinished folder."""
        return Path(self.unfinished)

    def note(self, kind: str, rank: int) -> Path:
        """Return the file in which the writer of `rank` says that its file is durable ("part"), that it is uploaded
        ("uploaded"), or why not ("failed").
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
        self.files = DirectFiles()
        self._reported = 0.0
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Take requests until the rank ends."""
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
        """Tell the rank again and again that this process runs, also while its storage does not answer."""
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
        """Write one checkpoint, and tell the rank how it ends."""
        self.number = save.number
        try:
            start = time.perf_counter()
            self.sweep(save)
            save.folder.mkdir(parents=True, exist_ok=True)
            first = Path(save.local) if save.local else save.folder
            first.mkdir(parents=True, exist_ok=True)
            written = self.write(first / self.file)
            write_whole(save.note("part", save.rank), json.dumps({self.file: written}))
            self.tell("written", bytes=written["bytes"], seconds=time.perf_counter() - start)
            if save.rank == 0:
                self.describe(save)
            if save.local:
                self.upload(save, first, written)
            if save.rank == 0:
                self.complete(save)
            self.tell("done")
        except AbandonedError:
            self.remove(save)
            self.tell("abandoned")
        except ConnectionError:  # the rank has ended: that is no failed save, and a start may finish the upload
            raise
        except (OSError, ValueError) as error:
            reason = _explained(error, save.folder)
            self.fail(save, reason)
            self.tell("failed", reason=reason)
        try:
            self.prune(save)
        except OSError as error:
            print(f"WARNING: old checkpoints were not removed: {error}", file=sys.stderr)

    @staticmethod
    def sweep(save: Save) -> None:
        """Remove what earlier saves of this start that have failed have left: a rank that began late has made the folder
        again, with its file, and a full disk stays full. Not what a start can upload, nor a later save, which a rank may
        have begun already while rank 0 is late with this one.
        """
        folders = [save.folder] if save.rank == 0 else []
        folders += [Path(save.local)] if save.local and save.leads else []
        for folder in folders:
            for left in folder.parent.glob(f"iter_*.{save.facts.get('generation')}_*{manifest.UNFINISHED}"):
                number = int(left.name.removesuffix(manifest.UNFINISHED).rpartition("_")[2])
                if number < save.number and not (save.folder.with_name(left.name) / manifest.NAME).exists():
                    shutil.rmtree(left, ignore_errors=True)

    def fail(self, save: Save, reason: str) -> None:
        """Let the other ranks' writers know that this rank's part will not come."""
        with contextlib.suppress(OSError):
            write_whole(save.note("failed", save.rank), json.dumps(reason))
        self.remove(save)

    def write(self, path: Path) -> dict:
        """Write the rank's file, make it durable, and return its bytes and checksum."""
        total = sum(length for _, length in self.slices)

        def progress(size: int) -> None:
            self.heed()
            self.tell_rarely("writing", bytes=size, of=total)

        return self.files.write(path, self.memory, self.slices, progress)

    def describe(self, save: Save) -> None:
        """Wait for all ranks' files; write index and manifest."""
        start = time.perf_counter()
        files = self.notes(save, "part")
        for name, text in ((on_disk.INDEX, self.index), (on_disk.FORMAT, self.format.encode())):
            files[name] = manifest.write_parts(save.folder / name, [text])
        manifest.write(save.folder, save.iteration, files, **save.facts, save=save.number, ranks=save.world)
        self.tell("described", bytes=sum(file["bytes"] for file in files.values()), waited=time.perf_counter() - start)

    def upload(self, save: Save, local: Path, written: dict) -> None:
        """Complete the checkpoint on this node's disk, then copy this rank's file to the place that all nodes see."""
        named = local.parent / Path(save.final).name
        stated = self.wait_for(save, save.folder / manifest.NAME)
        if save.leads:
            for name in (on_disk.INDEX, on_disk.FORMAT, manifest.NAME):
                write_whole(local / name, (save.folder / name).read_bytes())
            shutil.rmtree(named, ignore_errors=True)  # of this step, saved before
            manifest.give_name(local, named)
        else:
            self.wait_for(save, named / manifest.NAME, stated)

        start, copied = time.perf_counter(), 0

        def progress(count: int) -> None:
            nonlocal copied
            copied += count
            self.heed()
            self.tell_rarely("uploading", bytes=copied, seconds=time.perf_counter() - start)

        places.upload(named / self.file, save.folder / self.file, written, save.limit, progress)
        write_whole(save.note("uploaded", save.rank), json.dumps({}))

    def complete(self, save: Save) -> None:
        """Give the checkpoint its name, once all files are in its folder."""
        kinds = ["part", "uploaded"] if save.local else ["part"]
        self.notes(save, kinds[-1])
        for rank in range(save.world):
            for kind in kinds:
                save.note(kind, rank).unlink()
        directory = Path(save.final).parent
        manifest.give_name(save.folder, Path(save.final))
        with contextlib.suppress(OSError):  # the checkpoint is complete without them
            on_disk.name_as_latest(directory, save.iteration)
            starts.keep_run(directory, save.facts.get("run_id"))
        self.tell("complete")

    def prune(self, save: Save) -> None:
        """Remove what this checkpoint replaces, once it is complete or whole on the nodes' disks, from where a start can
        upload it; no rank and no other writer waits for that.
        """
        directory, complete = Path(save.final).parent, (Path(save.final) / manifest.NAME).exists()
        if not complete and not self.is_described(save):
            return
        newest = save.iteration if complete else save.iteration - 1  # this step may be tried again at once
        if save.rank == 0:
            manifest.remove_leftovers(directory, newest)
            for old in on_disk.removable(directory, save.keep_last, save.keep_every, newest=save.iteration):
                on_disk.remove(directory, old)
        if save.leads and save.local:
            local = Path(save.local).parent
            manifest.remove_leftovers(local, newest)
            for old in iterations(local):
                if old < save.iteration:
                    on_disk.remove(local, old)

    @staticmethod
    def is_described(save: Save) -> bool:
        """Return whether all files of an unfinished checkpoint are whole on the nodes' disks, by its manifest."""
        return save.local is not None and (save.folder / manifest.NAME).exists()

    def wait_for(self, save: Save, path: Path, content: bytes | None = None) -> bytes:
        """Wait until another writer has made a file, with this content if it is given. Return its content.

        Raises:
            OSError: a writer has failed, or nothing came for `deadline` seconds.
        """
        since = looked = time.monotonic()
        while True:
            with contextlib.suppress(FileNotFoundError):
                if (data := path.read_bytes()) and content in (None, data):
                    return data
            now = time.monotonic()
            if now - since > save.deadline:
                raise OSError(f"{path} did not come within {save.deadline:g} s")
            if now - looked > REPORT_SECONDS:
                looked = now
                if not save.folder.exists():
                    raise OSError("rank 0 has given the save up")
                for name in os.listdir(save.folder):
                    if name.startswith("failed_") and name.endswith(".json"):
                        raise OSError(json.loads((save.folder / name).read_text()))
            self.heed(POLL_SECONDS)
            self.tell_rarely("waiting")

    def notes(self, save: Save, kind: str) -> dict[str, dict]:
        """Return what all ranks have noted under `kind`, once all have: their files with size and checksum.

        Raises:
            OSError: a rank has failed, or nothing has changed for `deadline` seconds.
        """
        files, missing = {}, set(range(save.world))
        seen, since = None, time.monotonic()
        while True:
            for rank in sorted(missing):
                # opened, because a network file system shows new names to a reader that opens them
                with contextlib.suppress(FileNotFoundError):
                    files |= json.loads(save.note(kind, rank).read_text())
                    missing.discard(rank)
                with contextlib.suppress(FileNotFoundError):
                    raise OSError(f"rank {rank}: {json.loads(save.note('failed', rank).read_text())}")
            if not missing:
                return files
            sizes = []
            for file in sorted(os.scandir(save.folder), key=lambda entry: entry.name):
                with contextlib.suppress(FileNotFoundError):  # a file that has just been given another name
                    sizes.append((file.name, file.stat().st_size))
            if sizes != seen:
                seen, since = sizes, time.monotonic()
            elif time.monotonic() - since > save.deadline:
                ranks = ", ".join(map(str, sorted(missing)[:8]))
                raise OSError(f"nothing came from rank {ranks} within {save.deadline:g} s")
            self.heed(POLL_SECONDS)
            self.tell_rarely("waiting", ranks=len(missing))

    def heed(self, seconds: float = 0) -> None:
        """Raise AbandonedError if the rank has given the save up; end this process if the rank has ended."""
        while self.connection.poll(seconds):
            request = json.loads(self.connection.recv_bytes())
            if request["do"] == "abandon" and request["number"] == self.number:
                raise AbandonedError
            if request["do"] != "abandon":
                raise ValueError(f"the rank asks for {request['do']!r} during a save")

    def remove(self, save: Save) -> None:
        """Remove what a failed save has left, rank 0 the folder, another rank its file; but not what a start can upload."""
        with contextlib.suppress(OSError):
            if self.is_described(save):
                return
            if save.local and save.leads:
                shutil.rmtree(save.local, ignore_errors=True)
            if save.rank == 0:
                shutil.rmtree(save.folder)
            else:
                (save.folder / self.file).unlink()

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


def _explained(error: Exception, folder: Path) -> str:
    """Return what went wrong with the space that is left, since a full disk has many faces."""
    with contextlib.suppress(OSError):
        while not folder.exists():
            folder = folder.parent
        room = os.statvfs(folder)
        left = f"{room.f_bavail * room.f_frsize / 2**30:.1f} GiB and {room.f_favail} files are free in {folder}"
        return f"{error} ({left})"
    return str(error)


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
