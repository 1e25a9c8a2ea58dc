# SPDX-License-Identifier: Apache-2.0
"""Which nodes fail a preflight, by thresholds and beside their peers, and the table that says so."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from zaya_plugin.aegis.preflight_node import Node

FLOORS = {"MI300X": {"gemm_tflops": 600.0, "copy_tb_per_s": 2.0, "all_reduce_gb_per_s": 100.0}}
SLOWER = 0.1  # Megatron's gpu_sniff_test.py calls a GPU an outlier from 10 % on
STORAGE_SLOWER = 0.5  # a shared file system answers nodes at different moments


def judge(nodes: Sequence[Node], least: Mapping[str, float], slower: float) -> None:
    """Add the failures that follow from thresholds and from the other nodes."""
    for node in nodes:
        if node.doing:
            node.fail(f"it did not end: {node.doing}")
        floors = next((floor for name, floor in FLOORS.items() if name in node.name), {}) | least
        for name in sorted(set().union(*(other.figures for other in nodes)) | (set(least) - {"pair_gb_per_s"})):
            peers = [value for other in nodes if other is not node for value in other.figures.get(name, {}).values()]
            middle = statistics.median(peers) if peers else 0.0
            own, share = (
                node.figures.get(name, {}),
                max(STORAGE_SLOWER, slower) if name == "storage_mb_per_s" else slower,
            )
            if not own and node.figures:
                node.fail(f"{name} was not measured")
            for device, value in sorted(own.items()):
                where = f"{name} of {device}" if device else name
                if value < floors.get(name, 0.0):
                    node.fail(f"{where} is {value:.4g}, the threshold {floors[name]:.4g}")
                elif value < middle if name == "rails" else value < (1 - share) * middle:
                    text = f"{where} is {value:.4g}, {1 - value / middle:.0%} below the others' median {middle:.4g}"
                    node.fail(text, name)
    rates = [rate for node in nodes for rate in node.pairs.values() if rate is not None]
    limit = max((1 - slower) * statistics.median(rates), least.get("pair_gb_per_s", 0.0)) if rates else 0.0

    def bad(node: Node) -> bool:
        return bool(node.pairs) and all(rate is None or rate < limit for rate in node.pairs.values())

    for node in [other for other in nodes if bad(other)]:
        pairs = ", ".join(f"{name} {'failed' if rate is None else f'{rate:.3g}'}" for name, rate in node.pairs.items())
        node.fail(f"the all-reduce is slow or fails with each partner (GB/s: {pairs})")


def table(nodes: Sequence[Node]) -> str:
    """Return a line a node with the worst value of each figure, and the reasons below."""
    names = sorted({name for node in nodes for name in node.figures})
    rows = [("node", "", *names, "pair_gb_per_s")]
    for node in nodes:
        cells = [f"{min(values.values()):.4g}" if (values := node.figures.get(name)) else "-" for name in names]
        known = [rate for rate in node.pairs.values() if rate is not None]
        rows.append((node.node, "fail" if node.failures else "pass", *cells, f"{min(known):.3g}" if known else "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for node in nodes:
        lines += [f"{node.node}: {reason}" + f" [AMD code {code}]" * bool(code) for code, reason in node.failures]
        lines += [f"{node.node}: note: {text}" for text in node.notes]
    return "\n".join(lines)
