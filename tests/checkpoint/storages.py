# SPDX-License-Identifier: Apache-2.0
"""The storages under which checkpoints are tested, with their faults."""

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.checkpoint.memory_place import Store
from zaya_plugin.checkpoint.places import PosixPlace


class Disk:
    """A folder, with the faults of a disk. place: of checkpoints; it is empty."""

    def __init__(self, folder: Path):
        self.place = PosixPlace(folder)
        self.place.make()

    def fill(self, folder: str, file: str) -> None:
        """Let writes to a file of a new folder fail, because the disk is full."""
        (self.place / folder).make()
        (self.place / folder / file).path.symlink_to("/dev/full")

    def close(self) -> None:
        pass


class Memory:
    """The same in memory, with faults of the store."""

    def __init__(self, folder: Path):
        self.store = Store(folder / "store")
        self.place = self.store.place
        self._ended = threading.Event()

    def fill(self, folder: str, file: str) -> None:
        full = f"{folder}/{file}"

        def fault(operation: str, name: str) -> None:
            if (operation, name) == ("write", full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

        self.store.fault = fault

    def hang(self, operation: str, name: str = "") -> None:
        """Do not answer an operation on names that hold `name`, until the end of the test."""

        def fault(asked: str, of: str) -> None:
            if asked == operation and name in of:
                self._ended.wait(60)

        self.store.fault = fault

    def repair(self) -> None:
        self.store.fault = lambda operation, name: None

    def close(self) -> None:
        self._ended.set()
        self.store.close()


MEMORY_IS_SLOW = pytest.mark.parametrize(
    "storage", [Disk, pytest.param(Memory, marks=pytest.mark.slow)], ids=["posix", "memory"], indirect=True
)
