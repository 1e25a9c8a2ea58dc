# SPDX-License-Identifier: Apache-2.0
"""The cheapest recomputation with which a step fits into memory. Plain arithmetic over zaya_plugin.plan.memory.

Every choice is tried: each set of modules, and whole layers from the first on, one after the other. Its cost is the time of a forward pass of what is
computed again: operations at a share of the device's matrix-product rate, bytes at its copy rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from zaya_plugin.plan.flops import Shape, forward_flops_by_part
from zaya_plugin.plan.machines import Machine
from zaya_plugin.plan.memory import MemoryPlan, Optimizer, Recompute, memory_plan
from zaya_plugin.plan.parallelism import Batch, Layout

MODULES = ("layernorm", "permute", "core_attn", "moe")
RESERVE = 0.08  # of a device's memory: context, NCCL's buffers, and what the allocator holds and cannot use
# Shares of the matrix-product rate that the parts' forward passes reached on an H100 (benchmarks/results/step12-h100.json); the rest is bound by copies.
FORWARD_SHARE = {"projections": 0.8, "attention": 0.6, "experts": 0.65, "router": 0.2, "prologue": 0.08}


@dataclass(frozen=True)
class Choice:
    """A recomputation, what it leaves in memory, and the milliseconds that it adds to a step."""

    recompute: Recompute
    plan: MemoryPlan
    milliseconds: float

    @property
    def name(self) -> str:
        if self.recompute.full_layers:
            return f"{self.recompute.full_layers} whole layers"
        return " + ".join(name for name in MODULES if name in self.recompute.modules) or "nothing"


def choices(
    shape: Shape,
    layout: Layout,
    batch: Batch,
    optimizer: Optimizer,
    machine: Machine,
    allowed: tuple[str, ...] = MODULES,
    graph: bool = False,
) -> list[Choice]:
    """All of them, cheapest first. graph: as memory_plan's."""
    found = []
    for recompute in _candidates(shape.num_layers // layout.pipeline, allowed):
        plan = memory_plan(shape, layout, batch, recompute, optimizer, graph)
        found.append(Choice(recompute, plan, 1e3 * added_seconds(shape, layout, batch, recompute, machine)))
    return sorted(found, key=lambda choice: (choice.milliseconds, choice.plan.total))


def choose(found: list[Choice], memory_gib: float) -> Choice:
    """The cheapest one that leaves RESERVE of `memory_gib` free; ValueError with the figures where none does."""
    room = (1 - RESERVE) * memory_gib * 2**30
    for choice in found:
        if choice.plan.total <= room:
            return choice
    least = min(found, key=lambda choice: choice.plan.total)
    raise ValueError(
        f"the step needs {least.plan.total / 2**30:.1f} GiB a device even with {least.name} recomputed ({table(least.plan, ', ')}), and "
        f"{room / 2**30:.1f} of cluster.memory_gib = {memory_gib:g} are there"
    )


def table(plan: MemoryPlan, between: str = "\n") -> str:
    """The components in GiB."""
    return between.join(f"{name} {value / 2**30:.2f}" for name, value in plan.components.items())


def _candidates(layers: int, allowed: tuple[str, ...]) -> Iterator[Recompute]:
    for count in range(len(allowed) + 1):
        for modules in itertools.combinations(allowed, count):
            if not {"moe", "permute"} <= {*modules}:  # experts that are recomputed sort their rows again in any case
                yield Recompute(frozenset(modules))
    yield from (Recompute(full_layers=count) for count in range(1, layers + 1))


def added_seconds(shape: Shape, layout: Layout, batch: Batch, recompute: Recompute, machine: Machine) -> float:
    """Time of what a rank computes again in a step."""
    layers = shape.num_layers // layout.pipeline
    flops = forward_flops_by_part(replace(shape, num_layers=1), batch.seq_length)
    a, s, h = batch.dtype_bytes, batch.stream_bytes, shape.hidden_size
    norm = (s + a) * h / machine.copy
    time = {part: flops[part] / machine.gemm / share for part, share in FORWARD_SHARE.items()}
    time["permute"] = 2 * a * h / machine.copy
    time["moe"] = time["experts"] + time["router"] + 2 * time["permute"]
    time["core_attn"] = time["attention"]
    # By themselves the norms no longer ride on the merges, which costs a read of the stream each in both directions.
    time["layernorm"] = 2 * norm + 4 * s * h / machine.copy
    whole = sum(time[part] for part in ("projections", "prologue", "core_attn", "moe")) + 2 * (
        norm + (s + a) * h / machine.copy
    )
    tokens = batch.micro_batches * batch.micro_batch_size * batch.seq_length / (layout.context * layout.tensor)
    again = (
        sum(time[name] for name in recompute.modules) * (layers - recompute.full_layers) + whole * recompute.full_layers
    )
    return tokens * again
