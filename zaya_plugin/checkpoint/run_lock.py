# SPDX-License-Identifier: Apache-2.0
"""One run at a time in a directory: two would tear metrics.jsonl and mix their checkpoints. Imports no torch.

The lock is a file `run.lock.<generation>`, created with O_EXCL, which NFS has too (flock is often local to a node). The
highest generation is the owner's. A start that finds a dead owner creates the next one, so that of two such starts one
wins. The file's time of change is the owner's sign of life. The owner's processes are the launcher and rank 0:

- On the owner's machine the lock holds while one of them lives, stopped (SIGSTOP) or not, and no longer.
- On another machine it holds until the sign of life is EXPIRES seconds old, by the clock of the file system.
- Under `zaya aegis run` it does not hold against a later attempt of the same run: the supervisor has ended the earlier
  one, or its node is cut off.

An owner that was stopped for so long finds a higher generation, or no file, when it goes on: `check` then ends it before
it writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.parent_death import started

NAME = re.compile(r"run\.lock\.(\d+)")
BEAT_SECONDS = 10.0
EXPIRES = 60.0
CHECK_SECONDS = 1.0  # a run that was stopped for a shorter time has not lost its lock
AEGIS_RUN, AEGIS_GENERATION = "ZAYA_AEGIS_RUN", "ZAYA_AEGIS_GENERATION"  # set by `zaya aegis run` for its ranks
LOCKS = "ZAYA_RUN_LOCKS"  # from the launcher to rank 0: the files of its locks and their token


# What a lock states, and what this version can read of it.
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


class LostLockError(ValueError):
    """Another start has taken the directory over; this run must not write there."""


def machine() -> str:
    """Return what two processes have in common that can see each other's process ids: host, boot and pid namespace."""
    parts = [os.uname().nodename]
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            parts.append(read().strip())
    return " ".join(parts)


class RunLock:
    """The locks of one run: of run_dir, and of the checkpoints' directory if that is elsewhere.

    Attributes:
        files: the lock files; token: what this run has written into them, the same for all its processes.
    """

    def __init__(self, files: list[Path], token: str):
        self.files, self.token = files, token
        self._checked = time.monotonic()
        self._ended = threading.Event()

    @classmethod
    def take(cls, directories: dict[str, Path]) -> RunLock:
        """Take the locks of `directories`, which are named by their recipe keys, and keep them alive until `release`.

        Raises:
            ValueError: another run holds one of them. None is taken then.
        """
        lock = cls([], secrets.token_hex(8))
        try:
            for key, directory in directories.items():
                lock.files.append(_take(directory, key, lock.token))
        except BaseException:
            lock.release()
            raise
        lock._keep_alive()
        return lock

    @classmethod
    def of_launcher(cls) -> RunLock | None:
        """In rank 0: return the lock that the launcher took, kept alive by this process too; None without one."""
        if LOCKS not in os.environ:
            return None
        locks = json.loads(os.environ[LOCKS])
        lock = cls([Path(file) for file in locks["files"]], locks["token"])
        lock.check(now=True)
        for file in lock.files:
            with open(file, "r+") as added:  # not "a", which would create a file that was removed
                added.seek(0, os.SEEK_END)
                added.write(json.dumps(_process()) + "\n")
        lock._keep_alive()
        return lock

    def shared(self) -> str:
        """Return the value of LOCKS for rank 0."""
        return json.dumps({"files": [os.path.abspath(file) for file in self.files], "token": self.token})

    def check(self, now: bool = False) -> None:
        """Raise LostLockError if another start has taken a directory over. Reads at most every CHECK_SECONDS."""
        if not now and time.monotonic() - self._checked < CHECK_SECONDS:
            return
        for file in self.files:
            owner = read(file)
            if _newest(file.parent) != file or owner is None or owner["token"] != self.token:
                self._ended.set()
                newest = _newest(file.parent)
                other = None if newest is None or newest == file else read(newest)
                by = "its lock was removed" if other is None else f"it was taken over by {_described(newest, other)}"
                raise LostLockError(
                    str(
                        mistake(
                            "run_dir",
                            file.parent,
                            problem=f"{by}, after this run gave no sign of life for {EXPIRES:.0f} s or more. This run "
                            "stops and writes nothing more",
                            allowed="one run at a time",
                            fix="end one of the two before you start again",
                        )
                    )
                )
        self._checked = time.monotonic()

    def release(self) -> None:
        """Remove the locks that are still this run's."""
        self._ended.set()
        for file in self.files:
            owner = read(file)
            if owner is not None and owner["token"] == self.token:
                with contextlib.suppress(OSError):
                    file.unlink()

    def _keep_alive(self) -> None:
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            for file in self.files:
                with contextlib.suppress(OSError):
                    if (owner := read(file)) is not None and owner["token"] == self.token:
                        os.utime(file)


def check_free(directories: dict[str, Path]) -> None:
    """Raise the ValueError of `RunLock.take` if another run holds one of `directories`; creates nothing.

    The sign of life of another machine's run is compared with this machine's clock.
    """
    for key, directory in directories.items():
        newest = _newest(directory) if directory.is_dir() else None
        if newest is None:
            continue
        try:
            silent = time.time() - newest.stat().st_mtime
        except FileNotFoundError:  # released meanwhile
            continue
        owner = read(newest)
        if _holds(owner, silent):
            raise _refused(directory, key, newest, owner, silent)


def _take(directory: Path, key: str, token: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    seen: dict[Path, float] = {}
    while True:
        newest = _newest(directory)
        if newest is not None:
            owner = read(newest)
            silent = _silence(newest)
            if silent is None:
                continue  # released meanwhile
            if _holds(owner, silent) and not _is_of_earlier_attempt(owner):
                # An elastic restart or a requeued job whose rank 0 has moved to another node: its lock expires, unless
                # the one before is still alive.
                same_launch = owner is not None and owner.get("launch") == _launch() is not None
                if same_launch and owner["machine"] != machine() and silent >= seen.get(newest, 0.0):
                    seen[newest] = silent
                    time.sleep(CHECK_SECONDS)
                    continue
                raise _refused(directory, key, newest, owner, silent)
        generation = 1 + (int(NAME.fullmatch(newest.name)[1]) if newest is not None else 0)
        file = directory / f"run.lock.{generation}"
        content = (
            json.dumps(
                {
                    "token": token,
                    "machine": machine(),
                    "launch": _launch(),
                    "attempt": _attempt(),
                    "since": time.time(),
                    **_process(),
                }
            )
            + "\n"
        )
        try:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:  # another start was faster
            time.sleep(0.05)
            continue
        try:
            with os.fdopen(descriptor, "w") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            file.unlink(missing_ok=True)
            error.filename = error.filename or str(file)
            raise
        for older in directory.glob("run.lock.*"):
            if NAME.fullmatch(older.name) and int(NAME.fullmatch(older.name)[1]) < generation:
                older.unlink(missing_ok=True)
        if _newest(directory) == file:
            return file
        file.unlink(missing_ok=True)  # a later start found this one's file before its content


def read(file: Path) -> dict | None:
    """Return a lock's content, with "processes": [pid, start] of its launcher and rank 0; None: it has none (yet), or
    it is damaged or of another version.
    """
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        owner = {**lines[0], "processes": [(line["pid"], line["start"]) for line in lines]}
    except (OSError, ValueError, RecursionError, IndexError, KeyError, TypeError):
        return None
    return owner if all(holds(owner.get(name)) for name, holds in FIELDS.items()) else None


def _launch() -> str | None:
    """Return what the restarts of one launch have in common; None: unknown."""
    launch = os.environ.get(AEGIS_RUN) or os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID")
    return None if launch == "none" else launch  # torchrun's default


def _attempt() -> int | None:
    """Return the number of this attempt under `zaya aegis run`, which starts one at a time."""
    return int(os.environ.get(AEGIS_GENERATION) or 0) if AEGIS_RUN in os.environ else None


def _is_of_earlier_attempt(owner: dict | None) -> bool:
    own, before = _attempt(), owner.get("attempt") if owner is not None else None
    return None not in (own, before) and owner.get("launch") == _launch() and before < own


def _process() -> dict:
    return {"pid": os.getpid(), "start": started(os.getpid())}


def _newest(directory: Path) -> Path | None:
    locks = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
    return max(locks, key=lambda path: int(NAME.fullmatch(path.name)[1]), default=None)


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


def _holds(owner: dict | None, silent: float) -> bool:
    if (
        owner is not None
        and owner["machine"] == machine()
        and all(start is not None for _, start in owner["processes"])
    ):
        return any(started(pid) == start for pid, start in owner["processes"])
    return silent < EXPIRES


def _described(file: Path, owner: dict | None) -> str:
    with contextlib.suppress(OSError):
        if owner is None and file.stat().st_size:
            return f"the owner of {file.name}, which is damaged or of another version"
    if owner is None:
        return f"a start that is just beginning ({file.name})"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner["since"]))
    host = owner["machine"].split()[0]
    return f"process {owner['pid']} on {host}, since {since}, generation {NAME.fullmatch(file.name)[1]}"


def _refused(directory: Path, key: str, file: Path, owner: dict | None, silent: float) -> ValueError:
    same_machine = owner is not None and owner["machine"] == machine()
    end = f"`kill {owner['pid']}` there, which saves first" if owner is not None else "end it"
    wait = "" if same_machine else f"; if its host is gone, wait until its last sign of life ({silent:.0f} s ago) is "
    wait += "" if same_machine else f"{EXPIRES:.0f} s old"
    return mistake(
        key,
        directory,
        problem=f"a run is writing there: {_described(file, owner)}",
        allowed="one run at a time",
        fix=f"{key}=<another directory>, or end that run first ({end}){wait}",
    )
