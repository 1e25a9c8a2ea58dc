# SPDX-License-Identifier: Apache-2.0
"""The size of gradient buckets and the number of optimizer instances that a sweep of collectives recommends, and
`parallel.bucket_plan`, which applies them to a recipe. No torch import.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from zaya_plugin.config.schema import Recipe, with_values
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan.parallelism import GRADIENT_BYTES, WEIGHT_BYTES
from zaya_plugin.plan.recipe_plan import layout_of

KEY = "parallel.bucket_plan"
SCHEMA = "zaya bench collectives/1"
# A size is saturated from this share of the best rate on, and more instances have to be faster by as much: each of them
# stores the whole optimizer state, and larger buckets begin to be reduced later.
SATURATED = 0.9
MAX_BUCKET_ELEMENTS = 2**31 - 1  # the limit of parallel.ddp_bucket_size
KEYS = ("ddp_bucket_size", "num_distributed_optimizer_instances")

Rows = Sequence[Mapping]


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


def recommended(rows: Rows, node: int) -> list[dict]:
    """Return a recommendation for each measured number of neighbouring ranks that may share weights.

    rows: of the sweep. node: ranks of a node. For every number of instances whose groups were measured, the time of a
    bucket is that of its reduce-scatter, of the all-reduce of a shard between instances and of the all-gather of its
    bf16 weights. The bucket is the size at which the reduce-scatter is saturated; the fewest instances are taken whose
    time is within SATURATED of the least.
    """
    plans = []
    for world in sorted({row["gpus"] for row in rows if row["stride"] == 1 and row["gpus"] > 1}):
        options = {}  # instances -> seconds of a byte, size and whether it is the largest
        for instances in [count for count in range(1, world) if world % count == 0]:
            ranks = world // instances
            reduced, gathered = (rows_of(rows, name, ranks) for name in ("ReduceScatter", "AllGather"))
            # Within a node each device reaches each other one alike, so neighbours stand for devices with a distance.
            between = rows_of(rows, "AllReduce", instances, 1 if world <= node else ranks) if instances > 1 else ()
            size = saturation(reduced)
            if size and gathered and (between or instances == 1):
                seconds = seconds_of(reduced, size) + seconds_of(gathered, size * WEIGHT_BYTES / GRADIENT_BYTES)
                seconds += seconds_of(between, size / ranks) if between else 0.0
                options[instances] = (seconds / size, size, size == max(row["size"] for row in reduced))
        least = min((cost for cost, *_ in options.values()), default=0.0)
        for instances in [count for count, (cost, *_) in options.items() if SATURATED * cost <= least][:1]:
            _, size, still_rising = options[instances]
            plans.append(
                {
                    "ranks": world,
                    "bucket_bytes": size,
                    "ddp_bucket_size": min(size // GRADIENT_BYTES, MAX_BUCKET_ELEMENTS),
                    "num_distributed_optimizer_instances": instances,
                    "still_rising": still_rising,
                    "ms_per_gb_by_instances": {str(count): 1e12 * cost for count, (cost, *_) in options.items()},
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
        allowed = f"a record of the recipe's device ({'machine.name=' + name if name else 'set machine.name'})"
        raise mistake(KEY, file, problem=problem, allowed=allowed, fix=sweep)
    plan = next((plan for plan in record["bucket_plan"] if plan["ranks"] == ranks), None)
    if plan is None:
        problem = f"{ranks} ranks share the recipe's weights (data- and context-parallel), and the file is for "
        problem += ", ".join(str(plan["ranks"]) for plan in record["bucket_plan"]) or "no number"
        raise mistake(KEY, file, problem=problem, allowed=f"a sweep with groups of {ranks}", fix=sweep)
    in_bf16 = not recipe.optim.grad_reduce_in_fp32 and recipe.cluster.dtype == "bf16"
    values = (
        min(plan["bucket_bytes"] // (WEIGHT_BYTES if in_bf16 else GRADIENT_BYTES), MAX_BUCKET_ELEMENTS),
        plan["num_distributed_optimizer_instances"],
    )
    changed = [
        f"{key}={value}" + (f" in place of {before}" if (before := getattr(parallel, key)) != value else "")
        for key, value in zip(KEYS, values, strict=True)
    ]
    line = (
        f"{KEY}={file}: {', '.join(changed)}; reduce-scatters of {ranks // values[1]} ranks reach {SATURATED:.0%} of "
        f"their best rate at {plan['bucket_bytes'] / 2**20:,.4g} MiB on {device}"
        + ("; the rate still rises at the largest size that was measured" if plan["still_rising"] else "")
    )
    return with_values(recipe, {f"parallel.{key}": value for key, value in zip(KEYS, values, strict=True)}), line


def read(file: str) -> dict:
    """Return the record in `file`; raises ValueError if it is missing or another file."""
    problem, fix = "is not a record of `zaya bench collectives`", "zaya bench collectives --output <folder>"
    try:
        record = json.loads(Path(file).read_text())
        if record["schema"] == SCHEMA and all(plan["ranks"] for plan in record["bucket_plan"]):
            return record
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem += f" ({type(error).__name__}: {error})"
    raise mistake(KEY, file, problem=problem, allowed="its collectives.json", fix=fix)
