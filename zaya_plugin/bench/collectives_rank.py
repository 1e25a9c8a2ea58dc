# SPDX-License-Identifier: Apache-2.0
"""One rank of `zaya bench collectives`: `python -m zaya_plugin.bench.collectives_rank <recipe.yaml> <options as JSON>`,
started like a rank of training.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_plugin.bench import collectives
from zaya_plugin.bench.collectives import OPERATIONS, PRIMUS_COLUMNS, Partition
from zaya_plugin.bench.options import Sweep
from zaya_plugin.bench.results import BYTES, Column, Line, device_name, finish
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.whole_file import write_whole
from zaya_plugin.pictures.chart import bytes_text
from zaya_plugin.plan.bucket_plan import SATURATED, recommended, saturation

LARGEST = {"cpu": 4 * 2**20, "cuda": 8 * 2**30}  # bytes, without --max-bytes
COLUMNS = (
    Column("name", "collective"),
    Column("group", "group"),
    Column("size", "size", BYTES),
    Column("time", "us", ",.1f"),
    Column("algBw", "algBw", ".2f"),
    Column("busBw", "busBw", ".2f"),
    Column("share", "of link", ".0%"),
    Column("predicted_us", "predicted us", ",.1f"),
    Column("#wrong", "#wrong"),
)


def sizes(options: Sweep, device_type: str) -> list[int]:
    """Return the sizes of the sweep, powers of the factor from --min-bytes on; --max-bytes is the last."""
    most, size, result = options.most or LARGEST[device_type], options.least, []
    while size < most:
        result.append(size)
        size *= options.factor
    return [*result, most]


def chosen_partitions(options: Sweep, world: int, of_node: int) -> list[Partition]:
    """Return the groups to measure; raises ValueError for a number of ranks that forms none."""
    known = collectives.partitions(world, of_node)
    for ranks in options.groups:
        if all(partition.ranks != ranks for partition in known):
            problem = f"{world} ranks, {of_node} a node, form no such groups"
            allowed = ", ".join(str(ranks) for ranks in sorted({partition.ranks for partition in known}))
            raise mistake("--groups", ranks, problem=problem, allowed=allowed)
    return [partition for partition in known if not options.groups or partition.ranks in options.groups]


def sweep(options: Sweep, world: int, of_node: int, device, machine, say) -> list[dict]:
    """Return the rows of all groups; every rank calls it. machine: rates of this device's recipe, or None."""
    from torch import distributed

    rows, rank = [], distributed.get_rank()
    for partition in chosen_partitions(options, world, of_node):
        (mine,) = (group for group in partition.groups(world) if rank in group)
        group = distributed.new_group(mine, use_local_synchronization=True)
        for op in options.ops:
            operation = OPERATIONS[op]
            if partition.ranks == 1 and operation.in_place:
                continue  # nothing is moved
            say(f"{op}, {partition}")
            measured = collectives.measure(op, sizes(options, device.type), device, partition, group, say)
            rate = collectives.link_rate(machine, partition.ranks, partition.stride) if machine else 0.0
            for row in measured:
                row |= {"group": str(partition)}
                if rate and partition.ranks > 1:
                    seconds = collectives.predicted_seconds(machine, operation, partition, row["size"])
                    sent = operation.sent(partition.ranks) * row["size"]
                    row |= {"share": row["busBw"] / rate, "predicted_us": 1e6 * seconds}
                    row |= {"predicted_busBw": sent / seconds / 1e9}
            rows += measured
        distributed.destroy_process_group(group)
    return rows


def summary(rows: Sequence[dict]) -> list[dict]:
    """Return for each collective and group the best rate, the size at which it is saturated, and the time of the
    smallest size; `best_group` marks the number of neighbours of a collective with the highest rate.
    """
    result = []
    for name, group in dict.fromkeys((row["name"], row["group"]) for row in rows if row["gpus"] > 1):
        of_group = [row for row in rows if (row["name"], row["group"]) == (name, group)]
        best = max(of_group, key=lambda row: row["busBw"])
        entry = {"name": name, "group": group, "gpus": best["gpus"], "stride": best["stride"]}
        entry |= {"busBw": best["busBw"], "saturated_size": saturation(of_group), "latency_us": of_group[0]["time"]}
        result.append(entry)
    for entry in result:
        peers = [other["busBw"] for other in result if (other["name"], other["stride"]) == (entry["name"], 1)]
        entry["best_group"] = entry["stride"] == 1 and entry["busBw"] == max(peers)
    return result


def report(rows: list[dict], options: Sweep, world: int, of_node: int, device, machine) -> None:
    """Print and write the results of rank 0."""
    groups, plans = summary(rows), recommended(rows, of_node)
    most = max(row["gpus"] for row in rows if row["stride"] == 1)
    shown = [row for row in rows if row["gpus"] > 1 and (row["gpus"] == most or row["name"] == "ReduceScatter")]
    points: dict[str, tuple[list, list]] = {}
    for row in shown:
        x, y = points.setdefault(f"{row['name']}, {row['group']}", ([], []))
        x.append(row["size"])
        y.append(row["busBw"])
    lines = [Line(name, x, y) for name, (x, y) in points.items()]
    finish(
        "collectives",
        rows,
        COLUMNS,
        device=device,
        command=options.command,
        commit=options.commit,
        output=Path(options.output),
        title=f"Collectives, {world} ranks, {of_node} a node",
        lines=lines,
        x="bytes",
        y="busBw, GB/s",
        limit=(f"links of {machine.name}", collectives.link_rate(machine, of_node)) if machine else None,
        more={"world": world, "ranks_of_node": of_node, "groups": groups, "bucket_plan": plans},
    )
    print(f"\nSmallest size with {SATURATED:.0%} of the best rate (*: the best number of ranks):")
    for entry in groups:
        print(
            f"  {entry['name']:14}{entry['group']:24}{bytes_text(entry['saturated_size']):>10}"
            f"{entry['busBw']:9.2f} GB/s{' *' if entry['best_group'] else ''}"
        )
    for plan in plans:
        predicted = plan["predicted_bucket_bytes"]
        print(
            f"{plan['ranks']} data-parallel ranks: ddp_bucket_size={plan['ddp_bucket_size']} "
            f"({bytes_text(plan['bucket_bytes'])} of fp32 gradients"
            + (f"; {bytes_text(predicted)} by the prediction" if predicted else "")
            + f"), num_distributed_optimizer_instances={plan['num_distributed_optimizer_instances']}"
            + ("; the rate still rises at the largest size" if plan["still_rising"] else "")
        )
    if plans:
        print(f"apply it: parallel.bucket_plan={Path(options.output) / 'collectives.json'}")
    if options.table:
        write_table(Path(options.table), rows, options, world)


def write_table(path: Path, rows: Sequence[dict], options: Sweep, world: int) -> None:
    """Write Primus' columns, with its number of digits, as Markdown, CSV or JSON lines by the name of the file."""
    digits = {"eff_gbps": ".2f"} | {key: ".3f" for key in PRIMUS_COLUMNS if key.endswith("_ms")}
    cells = [[format(row[key], digits.get(key, "")) for key in PRIMUS_COLUMNS] for row in rows]
    text = io.StringIO()
    if path.suffix == ".jsonl":
        text.writelines(json.dumps(dict(zip(PRIMUS_COLUMNS, of_row, strict=True))) + "\n" for of_row in cells)
    elif path.suffix == ".csv":
        csv.writer(text, lineterminator="\n").writerows([PRIMUS_COLUMNS, *cells])
    else:
        now = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
        text.write(
            f"# RCCL Benchmark Report\n\n- Date: {now}\n- World Size: {world}\n- Ops: {', '.join(options.ops)}\n"
        )
        text.write(f"- Command: `{options.command}`\n- Git Commit: {options.commit}\n\n")
        table = [PRIMUS_COLUMNS, ["---"] * len(PRIMUS_COLUMNS), *cells]
        text.writelines(f"| {' | '.join(of_row)} |\n" for of_row in table)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.getvalue())


def main(argv: list[str]) -> int:
    """Run one rank; return the exit code."""
    import torch
    from torch import distributed

    from zaya_plugin.config.compose import load_recipe

    recipe, options = load_recipe(Path(argv[0])), Sweep(**json.loads(argv[1]))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = torch.device("cpu")
    if recipe.cluster.device != "cpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    machine = recipe.machine if recipe.machine.name else None
    if machine and (device.type == "cpu" or machine.name not in device_name(device)):
        machine = None  # the recipe's rates are another device's
    minutes = datetime.timedelta(minutes=recipe.cluster.distributed_timeout_minutes)
    distributed.init_process_group(recipe.cluster.distributed_backend, timeout=minutes)

    def say(text: str) -> None:
        if rank == 0:
            print(f"bench: {text}", flush=True)

    try:
        rows = sweep(options, world, of_node, device, machine, say)
        if rank == 0:
            report(rows, options, world, of_node, device, machine)
    except ValueError as error:
        print(f"zaya: {error}", file=sys.stderr)
        return 2
    finally:
        distributed.destroy_process_group()
    wrong = sum(row["#wrong"] > 0 for row in rows)
    if wrong and rank == 0:
        print(f"WRONG RESULTS: {wrong} of {len(rows)} rows; see column #wrong", file=sys.stderr)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
