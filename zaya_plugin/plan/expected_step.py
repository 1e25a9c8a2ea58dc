# SPDX-License-Identifier: Apache-2.0
"""Time of a step's collectives, in total and exposed. No torch import."""

from zaya_plugin.config.schema import MachineConfig, Recipe
from zaya_plugin.plan.flops import Shape, count_parameters
from zaya_plugin.plan.memory import padded_parameters
from zaya_plugin.plan.parallelism import Batch, ParallelSizes, largest_matrices, sent_bytes

# Read by NCCL 2.28 and later, and by RCCL of that age: registered buffers are gathered by copy engines.
COPY_ENGINES = {"NCCL_CTA_POLICY": "2"}
# Kernels that run during a collective take longer, since it uses processors and memory bandwidth: this share of the
# collective's expected time. Measured in two steps on four H200s, of one and of four micro-batches (docs/log.md), and
# used with a record of the user's; the fit of several records has a value of its own (fitted_step.json).
SLOWED = 0.26
MIN_BUCKET_ELEMENTS = 40_000_000  # elements of Megatron's own bucket, or a million for each rank if that is more


def buckets_of(shape: Shape, layout: ParallelSizes, part: str, elements: float, least: float) -> int:
    """Return the number of buckets of at least `least` elements in a buffer of `elements`.

    Buckets of experts close at a block (gate+up or down of a layer); the embedding has a bucket of its own.
    """
    if part == "rest":
        embedding = count_parameters(shape)["embedding"] / layout.tensor
        return max(1, int((elements - embedding) // least) + 1)
    down = shape.num_experts // layout.expert * shape.moe_ffn_hidden_size * shape.hidden_size
    count, since = 0, 0.0
    for block in (down, 2 * down) * round(elements / (3 * down)):
        since += block
        if since >= least:
            count, since = count + 1, 0.0
    return max(1, count)


def communication(
    recipe: Recipe, shape: Shape, layout: ParallelSizes, batch: Batch, forward: float, backward: float
) -> dict[str, dict]:
    """Return milliseconds of a step's collectives, in total and exposed. forward, backward: seconds of one
    micro-batch's pass.

    Gradients of a bucket are sent when the backward pass of the last micro-batch has filled it, and overlap with the
    rest of that pass; parameters are gathered bucket by bucket during the first forward pass. Without overlap, and
    where a layer waits for a collective, all of it is exposed.
    """
    costs, machine, parallel = {}, recipe.machine, recipe.parallel
    muon, sharded = recipe.optim.name == "muon", layout.distributed_optimizer
    padded, largest = padded_parameters(shape, layout, muon), largest_matrices(shape, layout, muon)
    embedding, total = count_parameters(shape)["embedding"] / layout.tensor, sum(padded.values())
    for name, overlapped, size, window in (
        ("gradients", parallel.overlap_grad_reduce, 4, backward),
        ("parameters", parallel.overlap_param_gather, batch.dtype_bytes, forward),
    ):
        time = exposed = 0.0
        for part, ranks in layout.reduced_over.items():
            # A shard holds whole matrices, so a large number of ranks needs large buckets (docs/another-part.md).
            least = max(parallel.ddp_bucket_size or max(MIN_BUCKET_ELEMENTS, 1_000_000 * ranks), ranks * largest[part])
            buckets = buckets_of(shape, layout, part, padded[part], least)
            sent = (ranks - 1) / ranks * padded[part] * size * (1 if sharded else 2)
            seconds = collective_seconds(machine, ranks, sent, buckets)
            if name == "gradients":  # a bucket's second collective, behind its first
                seconds += between_instances(machine, ranks, layout.instances, padded[part] * size / ranks, buckets)
            elif not sharded:
                seconds = 0.0
            # Never hidden is the bucket that is reduced last and gathered first: all experts of the first layer
            # (optim/gradient_buffers.py), or the embedding.
            last = embedding / padded["rest"] if part == "rest" else layout.pipeline / shape.num_layers
            hidden = (
                min(seconds * (1 - max(1 / buckets, last)), window * padded[part] / total * (1 - 1 / buckets))
                * overlapped
            )
            time, exposed = time + seconds, exposed + seconds - hidden
        costs[name] = {"ms": 1e3 * time, "exposed_ms": 1e3 * exposed}
    sent = sent_bytes(shape, layout, batch)
    for name, ranks, times in (
        ("key_values", layout.context, 2),
        ("dispatch", layout.expert, 4),
        ("activations", layout.tensor, 4),
    ):
        if ranks > 1:
            ms = 1e3 * collective_seconds(machine, ranks, sent[name], times * batch.micro_batches * shape.num_layers)
            costs[name] = {"ms": ms, "exposed_ms": ms}
    return costs


def link_rate(machine: MachineConfig, ranks: int, stride: int = 1) -> float:
    """Return the GB/s that a device of a group can send, the ceiling of busBw. stride: ranks between two of the group.

    xGMI has a link to each other device of the node, so fewer devices have fewer links. A group of whole nodes crosses
    each node's border with all its NICs; of one rank a node each has its own.
    """
    if stride * ranks > machine.devices_per_node:
        return min(machine.link_gb_per_s, machine.network_gb_per_s * (1 if stride > 1 else machine.devices_per_node))
    links = (ranks - 1) / (machine.devices_per_node - 1) if (machine.name or "").startswith("MI") else 1.0
    return machine.link_gb_per_s * links


def collective_seconds(machine: MachineConfig, ranks: int, sent_bytes: float, messages: float = 1.0) -> float:
    """Return the time of reduce-scatters or all-gathers in which a device sends `sent_bytes` in total, in `messages`
    one after the other.

    Their rate is that of `link_rate`; over several nodes each further rank of the ring adds a hop of latency to a message.
    """
    if ranks == 1 or not sent_bytes:
        return 0.0
    latency = machine.latency_us + (machine.hop_us * (ranks - 1) if ranks > machine.devices_per_node else 0.0)
    return sent_bytes / (link_rate(machine, ranks) * 1e9) + messages * latency / 1e6


def between_instances(
    machine: MachineConfig, ranks: int, instances: int, shard_bytes: float, messages: float = 1.0
) -> float:
    """Return the time of all-reduces of a shard of `shard_bytes` between `instances` instances of `ranks` ranks, one
    rank of each taking part.
    """
    if instances == 1:
        return 0.0
    rate = link_rate(machine, instances, ranks)
    latency = machine.latency_us + machine.hop_us * 2 * (instances - 1)
    return 2 * (instances - 1) / instances * shard_bytes / (rate * 1e9) + messages * latency / 1e6
