# SPDX-License-Identifier: Apache-2.0
"""One run at a time in a directory: two would tear metrics.jsonl and mix their checkpoints. Imports no torch.

The lock `run.lock` (ground/lock.py) is that of the launcher and of rank 0. Under `zaya aegis run` it does not hold
against a later attempt of the same run: the supervisor has ended the earlier one, or its node is cut off. `check` ends
a run that has lost its lock before it writes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from zaya_plugin.ground import lock
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.lock import EXPIRES, Held, Lock, held_by_other

NAME = "run.lock"
AEGIS_RUN, AEGIS_GENERATION = "ZAYA_AEGIS_RUN", "ZAYA_AEGIS_GENERATION"  # set by `zaya aegis run` for its ranks
LOCKS = "ZAYA_RUN_LOCKS"  # from the launcher to rank 0: the files of its locks and their token


class LostLockError(ValueError):
    """Another start has taken the directory over; this run must not write into it."""


class RunLock(Lock):
    """The locks of one run: of run_dir, and of the checkpoints' directory if that is elsewhere."""

    def __init__(self, files: list[Path], token: str):
        super().__init__(files, token)
        self._checked = time.monotonic()

    @classmethod
    def take(cls, directories: dict[str, Path]) -> RunLock:
        """Take the locks of `directories`, which are named by their recipe keys, and keep them alive until `release`.

        Raises:
            ValueError: another run holds one of them. None is taken then.
        """
        keys = {directory / NAME: key for key, directory in directories.items()}
        return cls.acquire(keys, lambda held: _refused(keys[held.name], held), launch=_launch(), attempt=_attempt())

    @classmethod
    def of_launcher(cls) -> RunLock | None:
        """In rank 0: return the lock that the launcher took, kept alive by this process too; None without one."""
        if LOCKS not in os.environ:
            return None
        locks = json.loads(os.environ[LOCKS])
        joined = cls([Path(file) for file in locks["files"]], locks["token"])
        joined.check(now=True)
        joined.join()
        return joined

    def shared(self) -> str:
        """Return the value of LOCKS for rank 0."""
        return json.dumps({"files": [os.path.abspath(file) for file in self.files], "token": self.token})

    def check(self, now: bool = False) -> None:
        """Raise LostLockError if another start has taken a directory over. Reads at most every CHECK_SECONDS."""
        if not now and time.monotonic() - self._checked < lock.CHECK_SECONDS:
            return
        if lost := self.why_lost():
            directory, by = lost
            problem = (
                f"{by}, after this run gave no sign of life for {EXPIRES:.0f} s or more. This run stops and writes "
                "nothing more"
            )
            fix = "end one of the two before you start again"
            raise LostLockError(
                str(mistake("run_dir", directory, problem=problem, allowed="one run at a time", fix=fix))
            )
        self._checked = time.monotonic()


def check_free(directories: dict[str, Path]) -> None:
    """Raise the ValueError of `RunLock.take` if another run holds one of `directories`; creates nothing."""
    for key, directory in directories.items():
        if held := held_by_other(directory / NAME):
            raise _refused(key, held)


def _launch() -> str | None:
    """Return the identity that the restarts of one launch have in common; None: unknown."""
    launch = os.environ.get(AEGIS_RUN) or os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID")
    return None if launch == "none" else launch  # torchrun's default


def _attempt() -> int | None:
    """Return the number of this attempt under `zaya aegis run`, which starts one at a time."""
    return int(os.environ.get(AEGIS_GENERATION) or 0) if AEGIS_RUN in os.environ else None


def _refused(key: str, held: Held) -> ValueError:
    end = f"`kill {held.owner['pid']}` there, which saves first" if held.owner is not None else "end it"
    return mistake(
        key,
        held.name.parent,
        problem=f"a run is writing there: {held}",
        allowed="one run at a time",
        fix=f"{key}=<another directory>, or end that run first ({end}){held.wait}",
    )
