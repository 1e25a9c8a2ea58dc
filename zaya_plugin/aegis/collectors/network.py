# SPDX-License-Identifier: Apache-2.0
"""The network of a node: carrier changes of its interfaces, the state of its InfiniBand and RoCE ports, TCP segments
that were sent again, and the counters of ionic, bnxt and mlx5 ports.

Two integers of each interface reveal a link that went down and came back between two polls, without a line in any log.
All ports of a training node carry the same traffic, so a port is evidence when its counters grow faster than those of
its peers. Errors from which a card does not recover are evidence by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import median

from zaya_plugin.aegis.collectors.runner import Collector, Growth, Tool
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.ground.mounts import read

LOST_SHARE, LEAST_LOST = 0.02, 20  # of the segments of two polls, and their least number: a few are lost everywhere
FATAL = {"unrecoverable_err", "res_tx_pci_err", "res_rx_pci_err", "res_mem_err"}  # bnxt
# The first line is of ionic, the second of mlx5 and bnxt.
LOSSES = {
    *(
        "req_tx_retry_excd_err",
        "tx_rdma_ack_timeout",
        "tx_rdma_retx_pkts",
        "req_rx_cqe_err",
        "rx_rdma_mtu_discard_pkts",
    ),
    *("out_of_sequence", "local_ack_timeout_err", "packet_seq_err", "rnr_nak_retry_err", "roce_adp_retrans"),
}
ETHTOOL = re.compile(r"crc_err|fcs_err|symbol_err|uncorrectable|pci.*err", re.IGNORECASE)
LEAST_GROWTH, FASTER = 1000, 10  # growth between two polls; x the median growth of the other ports


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
                up, downs = read(folder / "operstate") == "up", carrier_downs(folder)
                evidence += self._compare(now, folder.name, up, downs)
        for name in [name for name in self._up if "/" not in name and name not in watched]:
            evidence += self._compare(now, name, False, None)  # the interface is gone, as when its card was reset
        for port in sorted((self.root / "sys/class/infiniband").glob("*/ports/*")):
            # A RoCE port has the link of its interface, and its state may stay ACTIVE when the carrier flaps.
            if read(port / "gid_attrs/ndevs/0") not in watched:
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
            return [self.evidence(now, "link_down", f"link {name} is down", interface=name)]
        if up and name in self._since:
            seconds = now - self._since.pop(name)
            text = f"link {name} is up again after {seconds:.1f} s"
            return [self.evidence(now, "link_flap", text, interface=name, seconds=seconds, recovered=True)]
        if up and downs is not None and downs > before:
            text = f"link {name} went down and up {downs - before} time(s) within {self.interval:g} s"
            values = {"interface": name, "count": downs - before, "recovered": True}
            return [self.evidence(now, "link_flap", text, **values)]
        return []


def carrier_downs(interface: Path) -> int | None:
    """Return how often the carrier of an interface was lost: half its changes where the kernel counts only these."""
    downs, changes = (read(interface / name) for name in ("carrier_down_count", "carrier_changes"))
    return int(downs) if downs.isdecimal() else int(changes) // 2 if changes.isdecimal() else None


class Packets(Collector):
    """Compares the kernel's counters of sent and repeated segments; reports many repeats, once until they are few.

    RDMA is not counted (Rdma); the store of the ranks, gloo, NCCL's sockets and NFS are.
    """

    name, interval, deadline = "packets", 1.0, 5.0

    def __init__(self, node: str, root: Path = Path("/")):
        super().__init__(node)
        self.path = root / "proc/self/net/snmp"
        self._before: list[tuple[int, int]] = []  # sent and repeated, of the last two polls
        self._reported = False

    def poll(self, now: float) -> list[Evidence]:
        rows = [line.split() for line in read(self.path).splitlines() if line.startswith("Tcp:")]
        values = dict(zip(*rows, strict=True)) if len(rows) == 2 and len(rows[0]) == len(rows[1]) else {}
        if "RetransSegs" not in values:
            return []
        newest = int(values["OutSegs"]), int(values["RetransSegs"])
        self._before.append(newest)
        sent, repeated = (new - old for new, old in zip(newest, self._before[0], strict=True))
        del self._before[:-2]
        many = repeated >= LEAST_LOST and repeated > LOST_SHARE * sent
        reported, self._reported = self._reported, many
        if reported or not many:
            return []
        return [
            self.evidence(
                now, "packets_lost", f"{repeated} of {sent} TCP segments were sent again", sent=sent, again=repeated
            )
        ]


class Rdma(Collector):
    """Reads the ports' counters in sysfs, else those of `rdma statistic`, and those of `ethtool -S`."""

    name, source, interval, deadline = "rdma", "counter", 30.0, 40.0

    def __init__(self, node: str, root: Path = Path("/"), rdma: str = "rdma", ethtool: str = "ethtool"):
        super().__init__(node)
        self.root, self.rdma, self.ethtool = root, rdma, ethtool
        self._tool = Tool(10.0)
        self._growth = Growth()

    def poll(self, now: float) -> list[Evidence]:
        grown: dict[str, dict[str, int]] = {}  # counter -> port -> growth
        for port, name, value in self._counters():
            grown.setdefault(name, {})[port] = self._growth.of((port, name), value)
        evidence = []
        for name, by_port in grown.items():
            for port, growth in by_port.items():
                peers = [value for other, value in by_port.items() if other != port]
                values = {"port": port, "counter": name, "growth": growth}
                text = f"{port}: {name} has grown by {growth} in {self.interval:g} s"
                if name in FATAL and growth:
                    evidence.append(self.evidence(now, "counter_rdma_fatal", text, **values))
                elif growth >= LEAST_GROWTH and growth > FASTER * median(peers or [0]):
                    text += f"; the median of its peers is {median(peers or [0]):g}"
                    evidence.append(self.evidence(now, "counter_rdma", text, **values))
        return evidence

    def _counters(self) -> Iterator[tuple[str, str, int]]:
        """Yield port, counter and value."""
        ports = sorted((self.root / "sys/class/infiniband").glob("*/ports/*"))
        for port in ports:
            for path in sorted((port / "hw_counters").glob("*")):
                if path.name in FATAL | LOSSES and (value := read(path)).isdecimal():
                    yield f"{port.parent.parent.name}/{port.name}", path.name, int(value)
        if ports and not any((port / "hw_counters").exists() for port in ports):
            yield from statistics(self._tool.output(self.rdma, "statistic", "-j") or "")
        for folder in sorted((self.root / "sys/class/net").glob("*")):
            if (folder / "device").exists():
                for line in (self._tool.output(self.ethtool, "-S", folder.name) or "").splitlines():
                    name, _, value = line.strip().rpartition(":")
                    if ETHTOOL.search(name) and value.strip().isdecimal():
                        yield folder.name, name, int(value)


def statistics(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield port, counter and value from what `rdma statistic -j` printed; its form differs between versions."""
    try:
        rows = json.loads(text)
    except ValueError:
        return
    for row in rows if isinstance(rows, list) else [rows]:
        if isinstance(row, dict):
            port = f"{row.get('ifname', '?')}/{row.get('port', '?')}"
            for name, value in {**row, **(row.get("hw_counters") or {})}.items():
                if name in FATAL | LOSSES and isinstance(value, int):
                    yield port, name, value
