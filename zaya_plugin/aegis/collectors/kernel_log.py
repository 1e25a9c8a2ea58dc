# SPDX-License-Identifier: Apache-2.0
"""The kernel's messages: GPU errors, resets, links, out-of-memory kills, stalls of file servers.

They carry no rule yet: the agent compares them. Reading them needs rights on many systems (kernel.dmesg_restrict).
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.collectors.tail import Tail
from zaya_plugin.aegis.diagnose.evidence import Evidence

RECORD = re.compile(r"(?:\d+,\d+,(?P<micro>\d+),[^;]*;|(?:<\d+>)?\[ *(?P<seconds>\d+\.\d+)\] )(?P<text>.*)", re.DOTALL)
OLD = 3600.0  # seconds; an older stamp is of another boot, as in a recorded file
# Messages of a file system that waits for its server, and of the server's return; both name it.
STALLS = re.compile(r"nfs: server (\S+) not responding|Lustre: (\S+?): Connection to \S+ .*was lost")
RETURNS = re.compile(r"nfs: server (\S+) OK|Lustre: (\S+?): Connection restored to")
RECORDS = 5000  # in one poll


class KernelLog(Collector):
    """Reads the kernel's messages from now on.

    path: the device, or a file or pipe of lines as /dev/kmsg or dmesg print them. Without rights nothing is read.
    """

    name, source, interval, deadline = "kernel_log", "kernel", 0.25, 5.0

    def __init__(self, node: str, path: Path):
        super().__init__(node)
        self.path = path
        self._device: int | None = None
        self._tail: Tail | None = None
        self._stalled: set[str] = set()
        try:
            if path.exists() and stat.S_ISCHR(path.stat().st_mode):
                self._device = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self._device, 0, os.SEEK_END)
            else:
                self._tail = Tail(path)
        except OSError:
            pass

    @property
    def stalled(self) -> bool:
        """Whether a file server does not respond, according to the kernel."""
        return bool(self._stalled)

    def poll(self, now: float) -> list[Evidence]:
        boot = time.time() - time.monotonic()  # computed at each poll: the wall clock may have been set
        evidence = []
        for line in self._lines():
            match = RECORD.match(line)
            text, at = line, now
            if match is not None:
                text = match["text"].split("\n", 1)[0]  # lines of SUBSYSTEM= and DEVICE= follow in the device
                at = boot + (float(match["seconds"]) if match["seconds"] else float(match["micro"]) / 1e6)
                at = at if now - OLD < at <= now + 1 else now
            self._note(text)
            evidence.append(self.evidence(at, None, text))
        return evidence

    def _lines(self) -> Iterator[str]:
        if self._tail is not None:
            yield from (line.decode(errors="replace") for line in self._tail.lines())
        for _ in range(RECORDS if self._device is not None else 0):
            try:
                yield os.read(self._device, 8192).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                return

    def _note(self, text: str) -> None:
        if match := STALLS.search(text):
            self._stalled.add(match[1] or match[2])
        elif match := RETURNS.search(text):
            self._stalled.discard(match[1] or match[2])
