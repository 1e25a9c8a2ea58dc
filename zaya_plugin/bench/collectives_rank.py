# SPDX-License-Identifier: Apache-2.0
"""The work of a rank of `zaya bench collectives` (zaya_plugin.bench.rank), and its tables."""

import datetime
import json
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, groupby, takewhile
from pathlib import Path

from zaya_plugin.bench import collectives
from zaya_plugin.bench.collectives import OPERATIONS, PRIMUS_COLUMNS, Partition
from zaya_plugin.bench.results import BYTES, Column, Line, any_wrong, device_name, finish, rank_device, table
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.whole_file import write_whole
from zaya_plugin.pictures.chart import bytes_text
from zaya_plugin.plan.bucket_plan import SATURATED, recommended, saturation
from zaya_plugin.plan.expected_step import link_rate

LARGEST = {"cpu": 4 * 2**20, "cuda": 8 * 2**30}  # bytes, without --max-bytes
TRAINS = False
COLUMNS = (
    Column("name", "collective"),
    Column("group", "group"),
    Column("size", "size", BYTES),
    Column("time", "us", ",.1f"),
    Column("algBw", "algBw", ".2f"),
    Column("busBw", "busBw", ".2f"),
    Column("share", "of link", ".0%"),
    Column("#wrong", "#wrong"),
)
SUMMARY = (
    Column("name", "collective"),
    Column("group", "group"),
    Column("saturated_size", "size", BYTES),
    Column("busBw", "busBw", ".2f"),
    Column("best_group", ""),
)


def sizes(options: Namespace, device_type: str) -> list[int]:
    """Return the sizes of the sweep, powers of the factor from --min-bytes on; --max-bytes is the last."""
    most = options.most or LARGEST[device_type]
    powers = takewhile(lambda size: size < most, (options.least * options.factor**step for step in count()))
    return [*powers, most]


def measure(
    options: Namespace, recipe, rank: int, world: int, console, say: Callable[[str], None]
) -> Callable[[], int]:
    """Measure all groups. options: of the command line."""
    from torch import distributed

    of_node, device = int(os.environ.get("LOCAL_WORLD_SIZE", world)), rank_device(recipe)
    minutes = datetime.timedelta(minutes=recipe.cluster.distributed_timeout_minutes)
    distributed.init_process_group(recipe.cluster.distributed_backend, timeout=minutes)
    name = recipe.machine.name  # the recipe's rates may be another device's
    machine = recipe.machine if device.type != "cpu" and name and name in device_name(device) else None
    rows = sweep(options, world, of_node, device, machine, say)
    return partial(report, rows, options, world, of_node, device, machine)


def sweep(options: Namespace, world: int, of_node: int, device, machine, say) -> list[dict]:
    """Return the rows of all groups; every rank calls it. machine: rates of this device's recipe, or None.

    Raises:
        ValueError: no groups have the numbers of ranks of --group.
    """
    from torch import distributed

    rows, known = [], collectives.partitions(world, of_node)
    if unknown := {*(options.group or ())} - {partition.ranks for partition in known}:
        allowed = ", ".join(str(ranks) for ranks in sorted({partition.ranks for partition in known}))
        problem = f"{world} ranks, {of_node} a node, form no such groups"
        raise mistake("--group", min(unknown), problem=problem, allowed=allowed)
    for partition in known:
        if options.group and partition.ranks not in options.group:
            continue
        limit = link_rate(machine, partition.ranks, partition.stride) if machine and partition.ranks > 1 else None
        group = distributed.new_group(partition.group_of(distributed.get_rank()), use_local_synchronization=True)
        for op in options.op or OPERATIONS:
            if partition.ranks == 1 and OPERATIONS[op].in_place:
                continue  # nothing is moved
            say(f"{op}, {partition}")
            measured = collectives.measure(op, sizes(options, device.type), device, partition, group, say)
            rows += [{**row, "group": str(partition), "share": limit and row["busBw"] / limit} for row in measured]
        distributed.destroy_process_group(group)
    return rows


def summary(rows: Sequence[dict]) -> list[dict]:
    """Return for each collective and group the best rate, and the size at which it is saturated; the number of
    neighbours with the highest rate of a collective is marked.
    """
    best: dict[str, float] = {}
    for row in rows:
        if row["stride"] == 1:
            best[row["name"]] = max(best.get(row["name"], 0.0), row["busBw"])
    groups = groupby((row for row in rows if row["gpus"] > 1), lambda row: (row["name"], row["group"], row["stride"]))
    results = []
    for (name, group, stride), of_rows in groups:
        of_group = list(of_rows)
        rate = max(row["busBw"] for row in of_group)
        is_best = "*" if rate == best[name] and stride == 1 else ""
        size = saturation(of_group)
        results.append({"name": name, "group": group, "saturated_size": size, "busBw": rate, "best_group": is_best})
    return results


def picture(rows: Sequence[dict], device: str, of_node: int) -> dict:
    """Return title and lines: a line for each collective, of the largest group of neighbours that was measured."""
    most = max(row["gpus"] for row in rows if row["stride"] == 1)
    of_most = [row for row in rows if (row["gpus"], row["stride"]) == (most, 1)]
    lines = []
    for name, of_rows in groupby(of_most, lambda row: row["name"]):
        sizes, rates = zip(*((row["size"], row["busBw"]) for row in of_rows), strict=True)
        lines.append(Line(name, sizes, rates))
    place = "one node" if most <= of_node else f"{most // of_node} nodes"
    return {"title": f"Collectives of {Partition(most)} on {place}, {device}", "lines": lines}


def report(rows: list[dict], options: Namespace, world: int, of_node: int, device, machine) -> int:
    """Print and write the results; return 1 where one is wrong."""
    groups, plans = summary(rows), recommended(rows, of_node)
    finish(
        "collectives",
        options,
        device,
        rows,
        COLUMNS,
        **picture(rows, device_name(device), of_node),
        x="bytes",
        y="busBw, GB/s",
        limit=(f"links of {machine.name}", link_rate(machine, of_node)) if machine else None,
        more={"world": world, "ranks_of_node": of_node, "groups": groups, "bucket_plan": plans},
    )
    print(f"\nSmallest size with {SATURATED:.0%} of the best rate (*: the best number of ranks):")
    print(table(groups, SUMMARY))
    for plan in plans:
        print(
            f"{plan['ranks']} data-parallel ranks: ddp_bucket_size={plan['ddp_bucket_size']} "
            f"({bytes_text(plan['bucket_bytes'])} of fp32 gradients), "
            f"num_distributed_optimizer_instances={plan['num_distributed_optimizer_instances']}"
            + ("; the rate still rises at the largest size" if plan["still_rising"] else "")
        )
    if plans:
        print(f"apply it: parallel.bucket_plan={options.output / 'collectives.json'}")
    if options.table:
        write_table(Path(options.table), rows, options, world)
    return any_wrong(rows, "#wrong")


def write_table(path: Path, rows: Sequence[dict], options: Namespace, world: int) -> None:
    """Write Primus' columns, with its number of digits: JSON lines or CSV by the name of the file, else Markdown."""
    digits = {"eff_gbps": ".2f"} | {key: ".3f" for key in PRIMUS_COLUMNS if key.endswith("_ms")}
    cells = [[format(row[key], digits.get(key, "")) for key in PRIMUS_COLUMNS] for row in rows]
    lines = [f"| {' | '.join(of_row)} |" for of_row in (PRIMUS_COLUMNS, ["---"] * len(PRIMUS_COLUMNS), *cells)]
    lines = [f"# RCCL Benchmark Report\n\n- World Size: {world}\n- Command: `{options.command}`\n", *lines]
    if path.suffix == ".jsonl":
        lines = [json.dumps(dict(zip(PRIMUS_COLUMNS, of_row, strict=True))) for of_row in cells]
    elif path.suffix == ".csv":
        lines = [",".join(of_row) for of_row in (PRIMUS_COLUMNS, *cells)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n".join(lines) + "\n")
