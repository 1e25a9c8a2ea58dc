# SPDX-License-Identifier: Apache-2.0
"""The host: memory, processes that the kernel killed for it, pressure,
and the file systems in memory or on a local disk.

A shared file system is not asked by this collector, since it may not answer (storage.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector, Growth
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.ground.mounts import read

LEAST_MEMORY = 0.03  # of the whole
# Resource -> percent of 10 s in which all processes waited. A node that reads data waits for disks often.
PRESSURE = {"memory": 20.0, "io": 80.0}
LOCAL = (Path("dev/shm"), Path("tmp"))
LEAST_SPACE = 0.02


class Host(Collector):
    """Reads /proc and the memory cgroup of this process. root: of a recorded or fake system."""

    name, source, interval, deadline = "host", "host", 2.0, 5.0

    def __init__(self, node: str, root: Path = Path("/")):
        super().__init__(node)
        self.root = root
        self._growth = Growth()
        self._low: set[str] = set()  # states that last, reported once

    def poll(self, now: float) -> list[Evidence]:
        return [*self._kills(now), *self._memory(now), *self._pressure(now), *self._space(now)]

    def _kills(self, now: float) -> list[Evidence]:
        places = [("the machine", self.root / "proc/vmstat"), *self._cgroup_files()]
        counts = [(place, path, number(path, "oom_kill")) for place, path in places]
        grown = {place: self._growth.of(path, count) for place, path, count in counts if count is not None}
        grown = {place: count for place, count in grown.items() if count}
        if not grown:
            return []
        where, count = next(reversed(grown.items()))  # the cgroup, where it counted too
        text = f"the kernel killed {count} process(es) of {where} for want of memory"
        return [self.evidence(now, "oom_kill", text, count=count, where=where)]

    def _cgroup_files(self) -> list[tuple[str, Path]]:
        """Return the files that count kills in this process's memory cgroup: of version 2, or of version 1."""
        files = []
        for line in read(self.root / "proc/self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0":
                files.append(self.root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(self.root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control")
        return [("its memory cgroup", path) for path in files if path.exists()]

    def _memory(self, now: float) -> list[Evidence]:
        info = self.root / "proc/meminfo"
        total, free = number(info, "MemTotal:"), number(info, "MemAvailable:")
        low = total is not None and free is not None and free < LEAST_MEMORY * total
        text = f"{(free or 0) / 2**20:.1f} of {(total or 0) / 2**20:.0f} GiB of memory are available"
        return self._once(now, "memory", low, "memory_low", text, available=free, total=total)

    def _pressure(self, now: float) -> list[Evidence]:
        evidence = []
        for resource, limit in PRESSURE.items():
            match = re.search(r"^full avg10=([\d.]+)", read(self.root / "proc/pressure" / resource), re.MULTILINE)
            share = float(match[1]) if match else 0.0
            text = f"all processes waited for {resource} in {share:.0f} % of the last 10 s"
            evidence += self._once(now, f"pressure {resource}", share > limit, "pressure", text, resource=resource)
        return evidence

    def _space(self, now: float) -> list[Evidence]:
        evidence = []
        for name in LOCAL:
            try:
                space = os.statvfs(self.root / name)
            except OSError:
                continue
            low = space.f_blocks > 0 and space.f_bavail < LEAST_SPACE * space.f_blocks
            low = low or space.f_files > 0 and space.f_favail < LEAST_SPACE * space.f_files
            text = f"/{name}: {space.f_bavail * space.f_frsize / 2**30:.2f} GiB and {space.f_favail} inodes are free"
            evidence += self._once(now, str(name), low, "disk_low", text, path=f"/{name}")
        return evidence

    def _once(self, now: float, key: str, holds: bool, rule: str, text: str, **values) -> list[Evidence]:
        """Return evidence when a state begins, and nothing while it lasts."""
        begins = holds and key not in self._low
        (self._low.add if holds else self._low.discard)(key)
        return [self.evidence(now, rule, text, **values)] if begins else []


def number(path: Path, name: str) -> int | None:
    """Return the number behind `name` in a file of lines `name number ...`."""
    for line in read(path).splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[0] == name and fields[1].isdecimal():
            return int(fields[1])
    return None
