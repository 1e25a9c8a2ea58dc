# SPDX-License-Identifier: Apache-2.0
"""On which nodes the next attempt runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zaya_plugin.aegis.cluster import Cluster
from zaya_plugin.aegis.nodes import Nodes


def available(connected: Collection[str], cluster: Cluster, history: Nodes) -> list[str]:
    """Return the nodes that an attempt may use: those of the last one, then the others by failures in all runs."""
    nodes = [node for node in connected if node not in cluster.out]
    exchanged = (cluster.pending or {}).get("nodes_out") or ()  # such a node may be back already
    known = [node for node in cluster.nodes if node in nodes and node not in exchanged]
    others = [node for node in nodes if node not in known]
    return known + sorted(others, key=lambda node: (history.failures[node], node))


def quarantined(nodes: Sequence[str], size: int, cluster: Cluster, history: Nodes) -> list[str]:
    """Return the nodes with a history that a first attempt would take of those that are `there`."""
    if any(node in nodes for node in cluster.nodes):
        return []
    return [node for node in nodes[:size] if history.quarantined(node)]


def in_order(nodes: Sequence[str], size: int, cluster: Cluster) -> tuple[str, ...]:
    """Return the nodes of the next attempt, of `there` the first ones: a spare takes the place of the node that it
    replaces.
    """
    kept = [node for node in cluster.nodes if node in nodes[:size]]
    spares = [node for node in nodes[:size] if node not in kept]
    if len(cluster.nodes) == size:
        order = [node if node in kept else spares.pop(0) for node in cluster.nodes]
    else:
        order = kept + spares
    turn = cluster.turns % size
    return tuple(order[turn:] + order[:turn])
