# SPDX-License-Identifier: Apache-2.0
"""Rates of accelerators and their links, for predictions. Each figure has its source. No torch import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Rates of one device, per second.

    Attributes:
        gemm: operations of a large bf16 matrix product. copy: bytes read and written by a copy.
        node: devices of a node. link: bytes that a device sends (and receives) in a collective within a node. latency: seconds of a small one.
        network: bytes that a device sends between nodes. hop: seconds that each further rank of a ring adds to a collective across nodes.
        sources: of each figure, and whether this project measured it.
        copies: whether registered buffers (parallel.nccl_ub) are gathered by copy engines: measured with NCCL on H200s, assumed for H100s;
            RCCL was not tried.
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


# Bandwidth is NCCL's "bus bandwidth", which counts the bytes that a device sends; 45 us fit all-reduces of 1 MiB (35 GB/s) to 1 GiB (360 GB/s) on eight H200s.
H100 = Machine(
    "H100",
    790e12,
    3.0e12,
    8,
    340e9,
    45e-6,
    50e9,
    10e-6,
    "gemm, copy: zaya bench step on one H100 (770 to 799 TFLOP/s, 3.00 to 3.02 TB/s); link, latency: as measured on H200s, the same NVLink; "
    "network: one 400 Gb/s NIC a device, hop: assumed",
    copies=True,
)
H200 = Machine(
    "H200",
    790e12,
    4.2e12,
    8,
    344e9,
    45e-6,
    50e9,
    10e-6,
    "gemm, link, latency: measured by this project on eight H200s (790 TFLOP/s; reduce-scatter 343, all-gather 345 GB/s at 1 GiB, NVLink multicast "
    "off); copy: 4.8 TB/s of NVIDIA's data sheet less an eighth, not measured; network and hop as H100",
    copies=True,
)
MI300X = Machine(
    "MI300X",
    700e12,
    4.33e12,
    8,
    336e9,
    60e-6,
    50e9,
    10e-6,
    "gemm: between 668 (Stas Bekman's MAMF, ML Engineering) and 732 TFLOP/s (750 PFLOP/s of 1024, ROCm blog, November 2025); copy: 4.33 TB/s "
    "(AMD, arXiv 2511.17127, as others quote it); link: 7 xGMI links of 64 GB/s, of which 48 are usable (ROCm blog, Understanding RCCL Bandwidth "
    "and xGMI Performance on MI300X, March 2025); network: one Pollara 400 Gb/s a device (arXiv 2605.05365, table XIV); latency and hop: assumed",
)

MACHINES = {"h100_8": H100, "h200_8": H200, "mi300x_8": MI300X, "mi300x_128x8": MI300X}  # by cluster.name


def collective_seconds(machine: Machine, ranks: int, sent_bytes: float, messages: float = 1.0) -> float:
    """Return the time of reduce-scatters or all-gathers in which a device sends `sent_bytes` in total, in `messages` one after the other.

    Within a node they use its links. Over several nodes a ring crosses each node's border with as many NICs as the node has devices, so a
    device's rate is the smaller of its links' and of all NICs of the node; each further rank of the ring adds a hop of latency to a message.
    """
    if ranks == 1 or not sent_bytes:
        return 0.0
    if ranks <= machine.node:
        return sent_bytes / machine.link + messages * machine.latency
    return sent_bytes / min(machine.link, machine.node * machine.network) + messages * (
        machine.latency + machine.hop * (ranks - 1)
    )


def between_instances(machine: Machine, ranks: int, instances: int, shard_bytes: float, messages: float = 1.0) -> float:
    """Return the time of all-reduces of a shard of `shard_bytes` between `instances` instances of `ranks` ranks, one rank of each taking part.

    Over several nodes each device uses its own NIC.
    """
    if instances == 1:
        return 0.0
    rate = machine.link if ranks * instances <= machine.node else machine.network
    return 2 * (instances - 1) / instances * shard_bytes / rate + messages * (
        machine.latency + machine.hop * 2 * (instances - 1)
    )
