# SPDX-License-Identifier: Apache-2.0
"""Checks the layout of a large run, from what zaya_plugin.hosts.rank_layout has built of its ranks. No
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
