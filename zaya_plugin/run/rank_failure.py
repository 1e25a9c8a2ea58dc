# SPDX-License-Identifier: Apache-2.0
"""Which rank failed first and what it said, from the files that torchrun leaves behind.

When one rank dies the others follow within moments, with errors about closed connections; torchrun then prints a page that
names one of them. The rank that wrote its traceback first is the one to show, unless a rank was killed by a signal.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

SHOWN_LINES = 30
FROM_TORCHRUN = (signal.SIGTERM,)  # how torchrun itself stops the surviving ranks


@dataclass(frozen=True)
class RankFailure:
    """The first failure of a launch: rank, exit code as a shell shows it, and the end of what the rank wrote."""

    rank: int
    exit_code: int
    text: str
    log: Path

    @property
    def message(self) -> str:
        """What the console shows: of a user's mistake (exit code 2) the rank's own line, else the traceback."""
        start = self.text.rfind("zaya: ")
        if self.exit_code == 2 and start >= 0:
            return self.text[start:]
        return (
            f"zaya: rank {self.rank} failed first, exit code {self.exit_code}:\n{self.text}\n"
            f"zaya: everything that it wrote: {self.log}"
        )


def first_failure(log_dir: Path, torchrun_log: Path) -> RankFailure | None:
    """The first failing rank under `log_dir` (torchrun's folder of this launch), or None if no rank has failed."""
    exit_codes = _exit_codes(torchrun_log)
    stderr = {int(path.parent.name): path for path in log_dir.glob("attempt_*/*/stderr.log")}
    killed = [rank for rank, code in exit_codes.items() if code < 0 and -code not in FROM_TORCHRUN and rank in stderr]
    # A rank that leaves with a message for the user takes the others with it; their tracebacks are about the connection.
    mistaken = [
        rank for rank, code in exit_codes.items() if code == 2 and "zaya: " in _read(stderr.get(rank, log_dir / "none"))
    ]
    told = [rank for rank, path in stderr.items() if "Traceback (most recent call last)" in _read(path)]
    told.sort(key=lambda rank: stderr[rank].stat().st_mtime_ns)
    rank = next(iter(mistaken + killed + told + [rank for rank in exit_codes if rank in stderr]), None)
    if rank is None:
        return None
    code = exit_codes.get(rank, 1)
    if code < 0:
        text = f"killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            text += " (the system ends a process like this when memory runs out)"
        return RankFailure(rank, 128 - code, text, stderr[rank])
    return RankFailure(rank, code, last_words(_read(stderr[rank])), stderr[rank])


def last_words(stderr: str) -> str:
    """The last traceback in `stderr`, or its last lines where there is none."""
    start = stderr.rfind("Traceback (most recent call last)")
    lines = stderr[max(start, 0) :].rstrip().splitlines()
    if start >= 0 and len(lines) > SHOWN_LINES:
        return "\n".join([lines[0], "  ...", *lines[-SHOWN_LINES:]])
    return "\n".join(lines[-SHOWN_LINES:])


def _exit_codes(torchrun_log: Path) -> dict[int, int]:
    """Exit codes in torchrun's summary, rank -> code; the root cause comes first."""
    text = _read(torchrun_log)
    root = text.rfind("Root Cause")
    pattern = r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)"
    found: dict[int, int] = {}
    for rank, code in re.findall(pattern, text[max(root, 0) :]) + re.findall(pattern, text):
        found.setdefault(int(rank), int(code))
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
