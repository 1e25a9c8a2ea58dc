# SPDX-License-Identifier: Apache-2.0
"""Read metrics.jsonl on while its run writes it."""

import contextlib
import os
from pathlib import Path

from zaya_plugin.ground.metrics_file import row_of
from zaya_plugin.runs.run_data import Metrics

MOST_BYTES = 1 << 24  # of the rows before the first look, about 20,000 steps


class Follower:
    """The rows of a file up to the last `update`. metrics: of its last MOST_BYTES at the first look, and all later ones."""

    def __init__(self, file: Path):
        self.file, self.metrics = file, Metrics()
        self._read, self._inode = 0, -1

    def update(self) -> Metrics:
        """Read what was written since the last call. A last line without its end waits for the next one."""
        with contextlib.suppress(FileNotFoundError), open(self.file, "rb") as file:
            present = os.fstat(file.fileno())
            if present.st_ino != self._inode or present.st_size < self._read:  # a resume writes the file again
                self.metrics, self._inode = Metrics(), present.st_ino
                self._read = max(0, present.st_size - MOST_BYTES)
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                if (row := row_of(line)) is not None:
                    self.metrics.add(row)
        return self.metrics
