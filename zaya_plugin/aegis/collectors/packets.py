# SPDX-License-Identifier: Apache-2.0
"""Packets that the network loses, by the TCP segments that this node had to send again.

RDMA does not pass here (rdma.py); the store of the ranks, gloo, NCCL's sockets and NFS do.
"""

from __future__ import annotations

from pathlib import Path

from zaya_plugin.aegis.collectors.host import read
from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence

SHARE, LEAST = 0.02, 20  # of the segments of two polls, and so many of them: a few are lost everywhere


class Packets(Collector):
    """Compares the kernel's counters of sent and repeated segments; tells when many are repeated, once until few are."""

    name, interval, deadline = "packets", 1.0, 5.0

    def __init__(self, node: str, root: Path = Path("/")):
        super().__init__(node)
        self.path = root / "proc/self/net/snmp"
        self._before: list[tuple[int, int]] = []  # sent and repeated, of the last two polls
        self._told = False

    def poll(self, now: float) -> list[Evidence]:
        rows = [line.split() for line in read(self.path).splitlines() if line.startswith("Tcp:")]
        values = dict(zip(*rows, strict=True)) if len(rows) == 2 and len(rows[0]) == len(rows[1]) else {}
        if "RetransSegs" not in values:
            return []
        newest = int(values["OutSegs"]), int(values["RetransSegs"])
        self._before.append(newest)
        sent, repeated = (new - old for new, old in zip(newest, self._before[0], strict=True))
        del self._before[:-2]
        many = repeated >= LEAST and repeated > SHARE * sent
        reported, self._told = self._told, many
        if reported or not many:
            return []
        return [
            self.found(
                now, "packets_lost", f"{repeated} of {sent} TCP segments were sent again", sent=sent, again=repeated
            )
        ]
