# SPDX-License-Identifier: Apache-2.0
"""One process at a time: a lock in a file, the same on every file system. It needs no flock, which some file systems
lack (Lustre mounted with noflock) and others keep to one node.

The lock `run.lock` is a file `run.lock.<generation>`, created with O_EXCL, which NFS has too. The highest generation is
the owner's. A process that finds a dead owner creates the next one, so that of two such processes one wins. The file's
time of change is the owner's sign of life:

- On the owner's machine the lock holds while one of its processes lives, stopped (SIGSTOP) or not, and no longer.
- On another machine it holds until the sign of life is EXPIRES seconds old, by the clock of the file system.

  Some file systems (Lustre, CephFS) take a node's clock: clocks of nodes must then agree within a minute.

An owner that was stopped for so long finds a higher generation, or no file, when it goes on; see `Lock.why_lost`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.parent_death import started

BEAT_SECONDS = 10.0
EXPIRES = 60.0
CHECK_SECONDS = 1.0  # a process that was stopped for a shorter time has not lost its lock

# The content of a lock's file, and the values that this version can read.
FIELDS: dict[str, Callable[[Any], bool]] = {
    "token": lambda value: isinstance(value, str),
    "machine": lambda value: isinstance(value, str) and bool(value.split()),
    "since": lambda value: isinstance(value, float) and 0 <= value < 2**32,
    "launch": lambda value: value is None or isinstance(value, str),
    "attempt": lambda value: value is None or isinstance(value, int),
    "processes": lambda value: all(
        isinstance(pid, int) and (start is None or isinstance(start, int)) for pid, start in value
    ),
}


def machine() -> str:
    """Return host, boot and pid namespace: equal for two processes that can see each other's process ids."""
    parts = [os.uname().nodename]
    for read_one in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with contextlib.suppress(OSError):
            parts.append(read_one().strip())
    return " ".join(parts)


@dataclass(frozen=True)
class Held:
    """A lock that another process has.

    Attributes:
        name: of the lock; file: of its newest generation.
        owner: content of the file (see `read`), None where it has none that this version can read.
        silent: seconds since the owner's last sign of life.
    """

    name: Path
    file: Path
    owner: dict | None
    silent: float

    @property
    def is_far(self) -> bool:
        """Whether the owner is known, and on another machine."""
        return self.owner is not None and self.owner["machine"] != machine()

    @property
    def holds(self) -> bool:
        """Whether the owner lives, as far as this machine can know."""
        if self.owner is not None and not self.is_far:
            if all(start is not None for _, start in self.owner["processes"]):
                return any(started(pid) == start for pid, start in self.owner["processes"])
        return self.silent < EXPIRES

    @property
    def host(self) -> str:
        """The owner's."""
        return "another host" if self.owner is None else self.owner["machine"].split()[0]

    @property
    def wait(self) -> str:
        """The end of a message about the lock: until when it holds; empty for an owner on this machine."""
        if self.owner is not None and not self.is_far:
            return ""
        age = f"{self.silent:.0f} s ago"
        return f"; if its host is gone, wait until its last sign of life ({age}) is {EXPIRES:.0f} s old"

    def __str__(self) -> str:
        return described(self.file, self.owner)


class Lock:
    """One lock or several, taken together.

    Attributes:
        files: the lock files; token: the owner's, written into them, the same for all its processes.
        lost: called once, by a thread, when another process has taken the lock over.
    """

    def __init__(self, files: list[Path], token: str):
        self.files, self.token = files, token
        self.lost: Callable[[], object] = lambda: None
        self._ended = threading.Event()

    @classmethod
    def acquire(
        cls,
        names: Iterable[Path],
        refused: Callable[[Held], Exception],
        *,
        launch: str | None = None,
        attempt: int | None = None,
        patience: float = 0.0,
        waits: Callable[[Held], None] = lambda held: None,
    ):
        """Take locks and keep them alive until `release`, or until this process ends.

        Args:
            names: of the locks, in folders that are made if they do not exist.
            refused: returns the error where another process has a lock. None is taken then.
            launch: equal in processes of which one replaces the other on another machine. The lock of a silent owner of
                the same launch is waited for until it expires.
            attempt: the lock of a lower attempt of the same launch does not hold.
            patience: seconds to wait for any owner on another machine. waits: called once before a wait.
        """
        lock = cls([], secrets.token_hex(8))
        try:
            for name in names:
                lock.files.append(_take(name, lock.token, refused, launch, attempt, patience, waits))
        except BaseException:
            lock.release()
            raise
        lock.keep_alive()
        return lock

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def join(self) -> None:
        """Add this process to the owner's; the lock then holds as long as one of them lives."""
        for file in self.files:
            with open(file, "r+") as added:  # not "a", which would create a file that was removed
                added.seek(0, os.SEEK_END)
                added.write(json.dumps(_process()) + "\n")
        self.keep_alive()

    def why_lost(self) -> tuple[Path, str] | None:
        """Return the folder of a lock that this process no longer has, and the reason; None: it has all."""
        for file in self.files:
            owner, newest = read(file), _newest(_name(file))
            if newest != file or owner is None or owner["token"] != self.token:
                self._ended.set()
                other = None if newest is None or newest == file else read(newest)
                by = "its lock was removed" if other is None else f"it was taken over by {described(newest, other)}"
                return file.parent, by
        return None

    def release(self) -> None:
        """Remove the locks that are still this process's."""
        self._ended.set()
        for file in self.files:
            owner = read(file)
            if owner is not None and owner["token"] == self.token:
                with contextlib.suppress(OSError):
                    os.unlink(file)

    def keep_alive(self) -> None:
        """Give signs of life."""
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            for file in self.files:
                with contextlib.suppress(OSError):
                    if (owner := read(file)) is not None and owner["token"] == self.token:
                        os.utime(file)
                    elif owner is not None or _is_removed(file):
                        self._ended.set()
                        self.lost()


@contextlib.contextmanager
def locked(output: str | os.PathLike, doing: str) -> Iterator[None]:
    """Hold the lock <output>.lock, so that one command at a time writes an output.

    doing: what the command does with the output, for the message of the other one.

    Raises:
        ValueError: another process holds it.
    """
    output = Path(os.path.abspath(output))

    def refused(held: Held) -> ValueError:
        problem = f"another process is {doing} {output} ({held})"
        return mistake(
            "--output", output, problem=problem, fix=f"wait for it to end, or choose another --output{held.wait}"
        )

    with Lock.acquire([output.with_name(output.name + ".lock")], refused) as lock:
        lock.lost = lambda: os.kill(os.getpid(), signal.SIGTERM)  # another process writes the output now
        yield
        if lost := lock.why_lost():
            raise mistake(
                "--output", output, problem=f"this process lost its lock: {lost[1]}", fix="run the command again"
            )


def held_by_other(name: Path) -> Held | None:
    """Return the lock that another process has; creates nothing.

    The sign of life of another machine's process is compared with this machine's clock.
    """
    newest = _newest(name) if name.parent.is_dir() else None
    if newest is None:
        return None
    try:
        silent = time.time() - newest.stat().st_mtime
    except FileNotFoundError:  # it was released
        return None
    held = Held(name, newest, read(newest), silent)
    return held if held.holds else None


def _take(name: Path, token: str, refused, launch, attempt, patience: float, waits) -> Path:
    name.parent.mkdir(parents=True, exist_ok=True)
    seen: dict[Path, float] = {}
    deadline = time.monotonic() + patience
    while True:
        newest = _newest(name)
        if newest is not None:
            held = _held(name, newest)
            if held is None:
                continue  # it was released
            owner, silent = held.owner, held.silent
            same_launch = owner is not None and owner["launch"] == launch is not None
            if held.holds and not _is_earlier(owner, launch, attempt):
                # An owner of this launch whose machine is lost: its lock expires, unless it is still alive.
                expires = same_launch and silent >= seen.get(newest, 0.0)
                if not held.is_far or not expires and time.monotonic() >= deadline:
                    raise refused(held)
                if not seen:
                    waits(held)
                seen[newest] = silent
                time.sleep(CHECK_SECONDS)
                continue
        generation = 1 + (_generation(newest) if newest is not None else 0)
        file = name.with_name(f"{name.name}.{generation}")
        content = {"token": token, "machine": machine(), "launch": launch, "attempt": attempt, "since": time.time()}
        try:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:  # another process was faster
            time.sleep(0.05)
            continue
        try:
            with os.fdopen(descriptor, "w") as out:
                out.write(json.dumps(content | _process()) + "\n")
                out.flush()
                os.fsync(out.fileno())
        except BaseException as error:
            os.unlink(file)
            if isinstance(error, OSError):
                error.filename = error.filename or str(file)
            raise
        older = [path for path in _files(name) if _generation(path) < generation]
        # A generation is free again once all locks are released, so an older one may be newer than the judgement above.
        owners = [held for path in older if (held := _held(name, path)) is not None]
        if _newest(name) == file and not any(
            held.holds and not _is_earlier(held.owner, launch, attempt) for held in owners
        ):
            for path in older:
                with contextlib.suppress(OSError):  # the highest generation counts
                    path.unlink()
            return file
        file.unlink(missing_ok=True)  # or a later process read this one's file before its content


def _held(name: Path, file: Path) -> Held | None:
    """Return a generation of a lock with its owner; None: it was released."""
    owner, silent = read(file), _silence(file)
    return None if silent is None else Held(name, file, owner, silent)


def _is_earlier(owner: dict | None, launch: str | None, attempt: int | None) -> bool:
    """Return whether the owner is a lower attempt of the same launch."""
    same_launch = owner is not None and owner["launch"] == launch is not None
    return same_launch and None not in (attempt, owner["attempt"]) and owner["attempt"] < attempt


def _is_removed(file: Path) -> bool:
    try:
        os.stat(file)
    except FileNotFoundError:
        return True
    return False  # another OSError leaves by `_beat`


def read(file: Path) -> dict | None:
    """Return a lock's content, with "processes": [pid, start] of the owner's processes; None: it has none (yet), or it
    is damaged or of another version.
    """
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        owner = {**lines[0], "processes": [(line["pid"], line["start"]) for line in lines]}
    except (OSError, ValueError, RecursionError, IndexError, KeyError, TypeError):
        return None
    return owner if all(valid(owner.get(name)) for name, valid in FIELDS.items()) else None


def described(file: Path, owner: dict | None) -> str:
    """Return who has a lock, since when."""
    with contextlib.suppress(OSError):
        if owner is None and file.stat().st_size:
            return f"the owner of {file.name}, which is damaged or of another version"
    if owner is None:
        return f"a start that is just beginning ({file.name})"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    host = owner["machine"].split()[0]
    return f"process {owner['pid']} on {host}, since {since}, generation {_generation(file)}"


def _process() -> dict:
    return {"pid": os.getpid(), "start": started(os.getpid())}


def _name(file: Path) -> Path:
    return file.with_name(file.name.rpartition(".")[0])


def _generation(file: Path) -> int:
    return int(file.name.rpartition(".")[2])


def _files(name: Path) -> list[Path]:
    numbered = (path.name.rpartition(".") for path in name.parent.iterdir())
    return [name.with_name(f"{base}.{end}") for base, _, end in numbered if base == name.name and end.isdecimal()]


def _newest(name: Path) -> Path | None:
    return max(_files(name), key=_generation, default=None)


def _silence(file: Path) -> float | None:
    """Return the seconds since the owner's last sign of life, by the file system's clock; None: the file is gone.

    Clocks of two nodes differ, so that the time of a file that is written now is compared, not this node's time.
    """
    probe = file.with_name(f".{file.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        probe.write_text("the time of the file system\n")
        with open(file) as opened:  # NFS asks the server when a file is opened
            return probe.stat().st_mtime - os.fstat(opened.fileno()).st_mtime
    except FileNotFoundError:
        return None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
