# SPDX-License-Identifier: Apache-2.0
"""Time of collectives on a machine, for predictions. Its rates are the recipe's keys `machine.*`. No torch import."""

from zaya_plugin.config.schema import MachineConfig


def collective_seconds(machine: MachineConfig, ranks: int, sent_bytes: float, messages: float = 1.0) -> float:
    """Return the time of reduce-scatters or all-gathers in which a device sends `sent_bytes` in total, in `messages`
    one after the other.

    Within a node they use its links. Over several nodes a ring crosses each node's border with as many NICs as the node
    has devices, so a device's rate is the smaller of its links' and of all NICs of the node; each further rank of the
    ring adds a hop of latency to a message.
    """
    if ranks == 1 or not sent_bytes:
        return 0.0
    rate, latency = machine.link_gb_per_s, machine.latency_us
    if ranks > machine.devices_per_node:
        rate = min(rate, machine.devices_per_node * machine.network_gb_per_s)
        latency += machine.hop_us * (ranks - 1)
    return sent_bytes / (rate * 1e9) + messages * latency / 1e6


def between_instances(
    machine: MachineConfig, ranks: int, instances: int, shard_bytes: float, messages: float = 1.0
) -> float:
    """Return the time of all-reduces of a shard of `shard_bytes` between `instances` instances of `ranks` ranks, one
    rank of each taking part.

    Over several nodes each device uses its own NIC.
    """
    if instances == 1:
        return 0.0
    rate = machine.link_gb_per_s if ranks * instances <= machine.devices_per_node else machine.network_gb_per_s
    latency = machine.latency_us + machine.hop_us * 2 * (instances - 1)
    return 2 * (instances - 1) / instances * shard_bytes / (rate * 1e9) + messages * latency / 1e6
