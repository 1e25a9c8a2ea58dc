# SPDX-License-Identifier: Apache-2.0
"""Where a dataset is built: beside its final name, under a lock, so the final name only ever shows a whole dataset.

<output>            the dataset; appears by one rename
<output>.partial/   plan.json, tokenizer/, parts/ and final/ of a run that is under way or was interrupted
<output>.replaced/  the dataset that --overwrite is replacing, for the moment between two renames
<output>.lock       held while a process works on any of them
"""

import fcntl
import json
import os
import shutil
import socket
from contextlib import contextmanager

from zaya_plugin.data.manifest import NAME as MANIFEST_NAME


class Workspace:
    def __init__(self, output: str):
        self.output = os.path.abspath(output)
        self.partial = self.output + ".partial"
        self.replaced = self.output + ".replaced"
        self.plan_file = os.path.join(self.partial, "plan.json")
        self.tokenizer = os.path.join(self.partial, "tokenizer")
        self.parts = os.path.join(self.partial, "parts")
        self.final = os.path.join(self.partial, "final")

    @contextmanager
    def locked(self):
        """Holds the lock, which the kernel drops when the process dies.

        Raises:
            ValueError: another process holds it.
        """
        path = self.output + ".lock"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        while True:
            # Not through open(), whose buffering would truncate what the holder wrote before the lock is ours.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(descriptor, 1000).decode(errors="replace").strip()
                os.close(descriptor)
                raise ValueError(
                    f"another process is preparing {self.output} ({holder or 'just starting'}). "
                    f"Wait for it to end, or choose another --output"
                ) from None
            # Whoever held it before may have removed the file between our open and our lock: nobody else sees this one then.
            try:
                if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                    break
            except FileNotFoundError:
                pass
            os.close(descriptor)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        finally:
            os.unlink(path)
            os.close(descriptor)

    def load_plan(self) -> dict | None:
        """The plan of an interrupted run; None if there is none that can be read."""
        try:
            with open(self.plan_file, encoding="utf-8") as stream:
                return json.load(stream)
        except (FileNotFoundError, ValueError):
            return None

    def begin(self, plan: dict) -> None:
        """Starts from nothing: drops what an earlier run left and stores the plan.

        Raises:
            ValueError: `<output>.partial` exists and was not made by an earlier run.
        """
        if (
            os.path.isdir(self.partial)
            and not os.path.isfile(self.plan_file)
            and set(os.listdir(self.partial)) - {"plan.json.tmp"}
        ):
            raise ValueError(
                f"{self.partial} is in the way: it was not made by `zaya data prepare`. "
                f"Move it, or choose another --output"
            )
        self.discard()
        os.makedirs(self.partial)
        with open(self.plan_file + ".tmp", "w", encoding="utf-8") as out:
            json.dump(plan, out, indent=2)
            out.flush()
            os.fsync(out.fileno())
        os.replace(self.plan_file + ".tmp", self.plan_file)

    def discard(self) -> None:
        """Removes an unfinished run; its plan last, because a directory without plan is taken for somebody else's."""
        for directory in (self.final, self.parts, self.tokenizer, self.tokenizer + ".tmp"):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(self.partial, ignore_errors=True)

    def has_work(self) -> bool:
        """Whether an unfinished run has got far enough that dropping it would lose something."""
        return os.path.isdir(self.tokenizer) or (os.path.isdir(self.parts) and bool(os.listdir(self.parts)))

    def drop_work(self) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)
        shutil.rmtree(self.tokenizer, ignore_errors=True)

    def publish(self) -> None:
        """Gives the whole dataset in `final` its name, in place of an older one, and removes everything else."""
        for folder, _, files in os.walk(self.final):
            for name in files:
                _sync(os.path.join(folder, name))
            _sync(folder)
        if os.path.isdir(self.output) and not os.listdir(self.output):
            os.rmdir(self.output)
        elif os.path.exists(self.output):
            self.remove_replaced()
            os.rename(self.output, self.replaced)
        os.rename(self.final, self.output)
        _sync(os.path.dirname(self.output))
        self.discard()
        self.remove_replaced()

    def remove_replaced(self) -> None:
        if os.path.isfile(os.path.join(self.replaced, MANIFEST_NAME)):
            shutil.rmtree(self.replaced)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
