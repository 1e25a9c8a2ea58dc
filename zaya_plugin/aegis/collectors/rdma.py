# SPDX-License-Identifier: Apache-2.0
"""Counters of network cards: retransmissions, time-outs and errors of ionic, bnxt and mlx5 ports.

All ports of a training node carry the same traffic, so a port is evidence when its counters grow faster than those of
its peers. Errors from which a card does not recover are evidence by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from zaya_plugin.aegis.collectors.host import read
from zaya_plugin.aegis.collectors.runner import Collector, Growth, Tool
from zaya_plugin.aegis.evidence import Evidence

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
LEAST, FASTER = 1000, 10  # growth between two polls; x the median growth of the other ports


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
                    evidence.append(self.found(now, "counter_rdma_fatal", text, **values))
                elif growth >= LEAST and growth > FASTER * median(peers or [0]):
                    text += f"; the median of its peers is {median(peers or [0]):g}"
                    evidence.append(self.found(now, "counter_rdma", text, **values))
        return evidence

    def _counters(self) -> Iterator[tuple[str, str, int]]:
        """Yield port, counter and value."""
        ports = sorted((self.root / "sys/class/infiniband").glob("*/ports/*"))
        for port in ports:
            for path in sorted((port / "hw_counters").glob("*")):
                if path.name in FATAL | LOSSES and (value := read(path).strip()).isdecimal():
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
