# SPDX-License-Identifier: Apache-2.0
"""Checks and describes the layout of a large run, from what zaya_plugin.hosts.rank_layout has built of its ranks. No
torch import.
"""

from __future__ import annotations

from collections.abc import Sequence

from zaya_plugin.plan.flops import Shape, count_parameters
from zaya_plugin.plan.parallelism import ParallelSizes


def ranks_to_build(layout: ParallelSizes, world: int) -> list[int]:
    """Return the first, a middle and the last rank, and ranks that hold every different part of the model."""
    stage = world // layout.pipeline
    parts = {
        first * stage + place for first in range(layout.pipeline) for place in range(max(layout.expert, layout.tensor))
    }
    return sorted({0, max(world // 2 - 1, 0), world - 1} | parts)


def faults_of(ranks: Sequence[dict], shape: Shape, layout: ParallelSizes) -> list[str]:
    """Return what is wrong with the shards of the ranks in `ranks`; empty if they hold every parameter exactly once."""
    faults, parts = [], {}
    for rank in ranks:
        for row in rank["buffers"]:
            if row["faults"]:
                faults.append(
                    f"rank {rank['rank']}, {row['name']}: {row['faults']} parameters are not held exactly once"
                )
        held = sum(row["elements"] for row in rank["buffers"])
        if held != sum(rank["parameters"].values()):
            faults.append(f"rank {rank['rank']}: shards of {held:,} of {sum(rank['parameters'].values()):,} parameters")
        stage, expert = rank["groups"]["pipeline"][1], rank["groups"]["expert"][1]
        parts["experts", stage, expert] = rank["parameters"]["experts"]
        parts["rest", stage] = rank["parameters"]["rest"] - rank["tied"]
    whole = sum(count_parameters(shape).values())
    if layout.tensor == 1 and sum(parts.values()) != whole:
        faults.append(f"all parts of the model have {sum(parts.values()):,} parameters, and the model {whole:,}")
    return faults


def layout_lines(ranks: Sequence[dict], shape: Shape, layout: ParallelSizes, world: int) -> list[str]:
    """Return the layout of `world` ranks as lines; a fault begins with "WRONG"."""
    faults = faults_of(ranks, shape, layout)
    lines = [
        f"layout of {world:,} ranks, as Megatron and the optimizer build it (torch's fake process groups, no memory):"
    ]
    for rank in ranks:
        groups = ", ".join(f"{name} {place} of {size}" for name, (size, place) in rank["groups"].items() if size > 1)
        shards = "; ".join(
            f"{row['name']}: shard {row['shard']} of {row['shards']} with {row['shard_elements'][2]:,} elements"
            for row in rank["buffers"]
        )
        lines.append(f"  rank {rank['rank']:<6}{groups or 'alone'}; {shards}")
    for row in max((rank["buffers"] for rank in ranks), key=lambda rows: sum(row["elements"] for row in rows)):
        most, least, _ = row["shard_elements"]
        work = row["muon_flops"]
        lines.append(
            f"  {row['name']}: {row['elements']:,} elements in {row['buckets']} buckets, {row['padding'] / row['elements']:.1%} "
            f"of padding; fullest shard {most * row['shards'] / row['elements']:.2f} times the mean, emptiest "
            f"{least * row['shards'] / row['elements']:.2f}; "
            + (
                f"most of Muon's work {work[0] * row['shards'] / work[3]:.2f} times the mean"
                if work[3]
                else "no work of Muon"
            )
            + (f"; {row['cut']:,} elements of matrices are cut" if row["cut"] else "")
        )
    if faults:
        return [*lines, *(f"  WRONG: {fault}" for fault in faults)]
    whole = sum(count_parameters(shape).values())
    copies = "" if layout.tensor == 1 else " (the model's sum is not compared with tensor parallelism)"
    return [*lines, f"  complete: every one of {whole:,} parameters is in exactly one shard of each instance{copies}"]
