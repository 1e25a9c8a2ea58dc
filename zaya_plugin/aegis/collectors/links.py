# SPDX-License-Identifier: Apache-2.0
"""The network links of a node: carrier changes of its interfaces, the state of its InfiniBand and RoCE ports.

Two integers of each interface find a link that went down and came back between two polls, without a line in any log.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from zaya_plugin.aegis.collectors.host import read
from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence


class Links(Collector):
    """Watches the links that were up once.

    interfaces: names to watch; () for all that a device stands behind (a virtual one has no link of its own).
    """

    name, source, interval, deadline = "links", "link", 0.5, 5.0

    def __init__(self, node: str, interfaces: Collection[str] = (), root: Path = Path("/")):
        super().__init__(node)
        self.interfaces, self.root = tuple(interfaces), root
        self._downs: dict[str, int] = {}
        self._since: dict[str, float] = {}  # of links that are down
        self._up: set[str] = set()  # links that were up

    def poll(self, now: float) -> list[Evidence]:
        net = self.root / "sys/class/net"
        evidence, watched = [], set()
        for folder in sorted(net.glob("*")):
            if folder.name in self.interfaces or not self.interfaces and (folder / "device").exists():
                watched.add(folder.name)
                up, downs = read(folder / "operstate").strip() == "up", carrier_downs(folder)
                evidence += self._compare(now, folder.name, up, downs)
        for name in [name for name in self._up if "/" not in name and name not in watched]:
            evidence += self._compare(now, name, False, None)  # the interface is gone, as when its card was reset
        for port in sorted((self.root / "sys/class/infiniband").glob("*/ports/*")):
            # A RoCE port has the link of its interface, and its state may stay ACTIVE when the carrier flaps.
            if read(port / "gid_attrs/ndevs/0").strip() not in watched:
                up = "ACTIVE" in read(port / "state")
                evidence += self._compare(now, f"{port.parent.parent.name}/{port.name}", up, None)
        return evidence

    def _compare(self, now: float, name: str, up: bool, downs: int | None) -> list[Evidence]:
        before = self._downs.get(name, downs)
        if downs is not None:
            self._downs[name] = downs
        if name not in self._up:
            if up:
                self._up.add(name)
            return []
        if not up and name not in self._since:
            self._since[name] = now
            return [self.found(now, "link_down", f"link {name} is down", interface=name)]
        if up and name in self._since:
            seconds = now - self._since.pop(name)
            text = f"link {name} is up again after {seconds:.1f} s"
            return [self.found(now, "link_flap", text, interface=name, seconds=seconds, recovered=True)]
        if up and downs is not None and before is not None and downs > before:
            text = f"link {name} went down and up {downs - before} time(s) within {self.interval:g} s"
            values = {"interface": name, "count": downs - before, "recovered": True}
            return [self.found(now, "link_flap", text, **values)]
        return []


def carrier_downs(interface: Path) -> int | None:
    """Return how often the carrier of an interface was lost: half its changes where the kernel counts only these."""
    downs, changes = (read(interface / name).strip() for name in ("carrier_down_count", "carrier_changes"))
    return int(downs) if downs.isdecimal() else int(changes) // 2 if changes.isdecimal() else None
