# SPDX-License-Identifier: Apache-2.0
"""What accelerators and their links reach: the rates that predictions are made with. Each figure has its source. No torch import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates of one device, per second.

    Attributes:
        gemm: operations of a large bf16 matrix product; copy: bytes read and written by a copy.
        node: devices of a node; link: bytes that a device sends (and gets) in a collective among them; latency: seconds of a small one.
        network: bytes that a device sends between nodes; hop: seconds that a further node adds to a collective.
        sources: of each figure, and whether this project measured it.
        copies: whether registered buffers (parallel.nccl_ub) are gathered by copy engines there: seen with NCCL on H200s, H100s taken as alike; RCCL was not tried.
    """

    name: str
    gemm: float
    copy: float
    node: int
    link: float
    latency: float
    network: float
    hop: float
    sources: str
    copies: bool = False


def collective_seconds(machine: Machine, ranks: int, sent_bytes: float, messages: float = 1.0) -> float:
    """Time of reduce-scatters or all-gathers in which a device sends `sent_bytes` in all, in so many messages one after the other.

    Within a node over its links. Over several nodes a ring crosses each node's border with as many NICs as it has devices, so a device's rate is the
    smaller one of its links' and of the node's NICs together; each further rank of the ring adds a hop of latency to a message.
    """
    if ranks == 1 or not sent_bytes:
        return 0.0
    if ranks <= machine.node:
        return sent_bytes / machine.link + messages * machine.latency
    return sent_bytes / min(machine.link, machine.node * machine.network) + messages * (
        machine.latency + machine.hop * (ranks - 1)
    )


def between_instances(machine: Machine, ranks: int, instances: int, shard_bytes: float, messages: float = 1.0) -> float:
    """Time of all-reduces of a shard of `shard_bytes` between `instances` instances of `ranks` ranks each, one rank of each taking part.

    Over several nodes each device has a NIC of its own for it.
    """
    if instances == 1:
        return 0.0
    rate = machine.link if ranks * instances <= machine.node else machine.network
    return 2 * (instances - 1) / instances * shard_bytes / rate + messages * (
        machine.latency + machine.hop * 2 * (instances - 1)
    )
