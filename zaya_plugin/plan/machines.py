# SPDX-License-Identifier: Apache-2.0
"""Rates of accelerators and their links, for predictions. Each figure has its source. No torch import."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates of one device, per second.

    Attributes:
        gemm: operations of a large bf16 matrix product. copy: bytes read and written by a copy.
        node: devices of a node. link: bytes that a device sends (and receives) in a collective within a node. latency:
            seconds of a small one.
        network: bytes that a device sends between nodes. hop: seconds that each further rank of a ring adds to a
            collective across nodes.
        sources: of each figure, and whether this project measured it.
        copies: whether registered buffers (parallel.nccl_ub) are gathered by copy engines: measured with NCCL on H200s,
            assumed for H100s; RCCL was not tried.
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
    """Return the time of reduce-scatters or all-gathers in which a device sends `sent_bytes` in total, in `messages`
    one after the other.

    Within a node they use its links. Over several nodes a ring crosses each node's border with as many NICs as the node
    has devices, so a device's rate is the smaller of its links' and of all NICs of the node; each further rank of the
    ring adds a hop of latency to a message.
    """
    if ranks == 1 or not sent_bytes:
        return 0.0
    if ranks <= machine.node:
        return sent_bytes / machine.link + messages * machine.latency
    return sent_bytes / min(machine.link, machine.node * machine.network) + messages * (
        machine.latency + machine.hop * (ranks - 1)
    )


def between_instances(machine: Machine, ranks: int, instances: int, shard_bytes: float, messages: float = 1.0) -> float:
    """Return the time of all-reduces of a shard of `shard_bytes` between `instances` instances of `ranks` ranks, one
    rank of each taking part.

    Over several nodes each device uses its own NIC.
    """
    if instances == 1:
        return 0.0
    rate = machine.link if ranks * instances <= machine.node else machine.network
    return 2 * (instances - 1) / instances * shard_bytes / rate + messages * (
        machine.latency + machine.hop * 2 * (instances - 1)
    )
