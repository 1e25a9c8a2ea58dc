# SPDX-License-Identifier: Apache-2.0
"""The size of gradient buckets and the number of optimizer instances that a sweep of collectives recommends, and
`parallel.bucket_plan`, which applies them to a recipe. No torch import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan.parallelism import GRADIENT_BYTES
from zaya_plugin.plan.recipe_plan import layout_of

KEY = "parallel.bucket_plan"
SCHEMA = "zaya bench collectives/1"
# A size is saturated from this share of the best rate on, and more instances have to be faster by as much: each of them
# stores the whole optimizer state, and larger buckets begin to be reduced later.
SATURATED = 0.9
MOST_ELEMENTS = 2**31 - 1  # the limit of parallel.ddp_bucket_size
WEIGHT_BYTES = 2  # of a gathered parameter, bf16
KEYS = ("ddp_bucket_size", "num_distributed_optimizer_instances")

Rows = Sequence[Mapping[str, Any]]


def saturation(rows: Rows) -> int | None:
    """Return the smallest size whose busBw is SATURATED of the best one; None without rows."""
    rates = {row["size"]: row["busBw"] for row in rows}
    return min((size for size in rates if rates[size] >= SATURATED * max(rates.values())), default=None)


def seconds_of(rows: Rows, size: float) -> float:
    """Return the time of a call of `size` bytes at the rate of the next larger size, or of the largest."""
    row = min(rows, key=lambda row: (row["size"] < size, abs(row["size"] - size)))
    return row["time"] / 1e6 * size / row["size"]


def rows_of(rows: Rows, name: str, ranks: int, stride: int = 1) -> Rows:
    return [row for row in rows if (row["name"], row["gpus"], row["stride"]) == (name, ranks, stride)]


def recommended(rows: Rows, node: int) -> list[dict[str, Any]]:
    """Return a recommendation for each measured number of neighbouring ranks that may share weights.

    rows: of the sweep. node: ranks of a node. For every number of instances whose groups were measured, the time of a
    bucket is that of its reduce-scatter, of the all-reduce of a shard between instances and of the all-gather of its
    bf16 weights. The bucket is the size at which the reduce-scatter is saturated; the fewest instances are taken whose
    time is within SATURATED of the least.
    """
    plans = []
    for world in sorted({row["gpus"] for row in rows if row["stride"] == 1 and row["gpus"] > 1}):
        options = {}
        for instances in range(1, world):
            ranks, left = divmod(world, instances)
            reduced, gathered = (rows_of(rows, name, ranks) for name in ("ReduceScatter", "AllGather"))
            # Within a node each device reaches each other one alike, so neighbours stand for devices with a distance.
            between = rows_of(rows, "AllReduce", instances, 1 if world <= node else ranks)
            size = saturation(reduced)
            if left or size is None or not gathered or instances > 1 and not between:
                continue
            seconds = seconds_of(reduced, size) + seconds_of(gathered, size * WEIGHT_BYTES / GRADIENT_BYTES)
            if instances > 1:
                seconds += seconds_of(between, size / ranks)
            options[instances] = (1e9 * seconds / size, size, reduced)
        if not options:
            continue
        least = min(cost for cost, *_ in options.values())
        instances = min(count for count, (cost, *_) in options.items() if SATURATED * cost <= least)
        _, size, reduced = options[instances]
        plans.append(
            {
                "ranks": world,
                "bucket_bytes": size,
                "ddp_bucket_size": min(size // GRADIENT_BYTES, MOST_ELEMENTS),
                "num_distributed_optimizer_instances": instances,
                "still_rising": size == max(row["size"] for row in reduced),
                "ms_per_gb": {str(count): 1e3 * cost for count, (cost, *_) in options.items()},
            }
        )
    return plans


def with_bucket_plan(recipe: Recipe, world_size: int) -> tuple[Recipe, str | None]:
    """Return `recipe` with the values of parallel.bucket_plan, and a line with the reasons; without that key the
    unchanged recipe and None.

    Raises:
        ValueError: the file is missing, is no record of `zaya bench collectives`, is of another device, or has no
            recommendation for the recipe's data-parallel group.
    """
    file, parallel = recipe.parallel.bucket_plan, recipe.parallel
    if file is None:
        return recipe, None
    record, ranks = read(file), layout_of(recipe, world_size).replicas
    sweep = f"zaya bench collectives cluster={recipe.cluster.name} --output <folder>, on the devices of the run"
    device, name = record["device"], "CPU" if recipe.cluster.device == "cpu" else recipe.machine.name
    if name is None or name not in device:
        problem = f"was measured on {device}" + (", and machine.name is null" if name is None else "")
        raise mistake(
            KEY,
            file,
            problem=problem,
            allowed=f"a record of the recipe's device ({'machine.name=' + name if name else 'set machine.name'})",
            fix=sweep,
        )
    plan = next((plan for plan in record["bucket_plan"] if plan["ranks"] == ranks), None)
    if plan is None:
        known = ", ".join(str(plan["ranks"]) for plan in record["bucket_plan"]) or "no number"
        problem = f"{ranks} ranks share the recipe's weights (data- and context-parallel), and the file is for {known}"
        raise mistake(KEY, file, problem=problem, allowed=f"a sweep with groups of {ranks}", fix=sweep)
    in_fp32 = recipe.optim.grad_reduce_in_fp32 or recipe.cluster.dtype == "fp32"
    element = GRADIENT_BYTES if in_fp32 else WEIGHT_BYTES
    values = (min(plan["bucket_bytes"] // element, MOST_ELEMENTS), plan["num_distributed_optimizer_instances"])
    changed = [
        f"{key}={value}" + (f" in place of {before}" if (before := getattr(parallel, key)) != value else "")
        for key, value in zip(KEYS, values, strict=True)
    ]
    line = (
        f"{KEY}={file}: {', '.join(changed)}; reduce-scatters of {ranks // values[1]} ranks reach {SATURATED:.0%} of "
        f"their best rate at {plan['bucket_bytes'] / 2**20:,.4g} MiB on {device}"
    )
    line += "; the rate still rises at the largest size that was measured" if plan["still_rising"] else ""
    return replace(recipe, parallel=replace(parallel, **dict(zip(KEYS, values, strict=True)))), line


def read(file: str) -> dict[str, Any]:
    """Return the record in `file`; raises ValueError if it is missing or another file."""
    problem = "is not a record of `zaya bench collectives`"
    try:
        record = json.loads(Path(file).read_text())
        if record["schema"] == SCHEMA and all(plan["ranks"] for plan in record["bucket_plan"]):
            return record
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError):
        pass
    raise mistake(
        KEY, file, problem=problem, allowed="its collectives.json", fix="zaya bench collectives --output <folder>"
    )
