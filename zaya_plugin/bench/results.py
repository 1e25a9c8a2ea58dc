# SPDX-License-Identifier: Apache-2.0
"""Prints the rows of a measurement as a table and writes them as one JSON file and a picture. No torch import."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_plugin import __version__
from zaya_plugin.ground.columns import aligned
from zaya_plugin.ground.errors import free_memory, mistake
from zaya_plugin.ground.whole_file import write_whole
from zaya_plugin.pictures.chart import Line, bytes_text, save_of_record
from zaya_plugin.plan.known_machine import full_device_name

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe

BYTES = "bytes"
CPU_NAME = f"CPU {platform.processor() or platform.machine()}"


@dataclass(frozen=True)
class Column:
    """A column of the table: key of the rows, title, and form: a format spec, or BYTES for a binary prefix."""

    key: str
    title: str
    form: str = ""

    def cell(self, row: dict) -> str:
        """Return the row's value as text, "" where it has none."""
        value = row.get(self.key)
        if value is None:
            return ""
        return bytes_text(value) if self.form == BYTES else format(value, self.form)


WRONG = Column("wrong", "wrong")  # elements of a result


def any_wrong(rows: Sequence[dict], key: str = WRONG.key) -> int:
    """Return the exit code of a measurement: 1 where a result is wrong, with a line about it. key: of the number of
    wrong elements.
    """
    if wrong := [row for row in rows if row[key]]:
        print(f"WRONG RESULTS: {len(wrong)} of {len(rows)} rows; see column {key}", file=sys.stderr)
    return int(bool(wrong))


def table(rows: Sequence[dict], columns: Sequence[Column]) -> str:
    """Return the rows under the titles, without columns that no row has; text to the left, numbers to the right."""
    columns = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    lines = [[column.title for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    numbers = [at for at, column in enumerate(columns) if not any(isinstance(row.get(column.key), str) for row in rows)]
    return aligned(lines, numbers)


def finish(
    kind: str,
    options,
    device,
    rows: list[dict],
    columns: Sequence[Column],
    *,
    title: str,
    lines: Sequence[Line],
    x: str,
    y: str,
    limit: tuple[str, float] | None = None,
    more: dict | None = None,
) -> None:
    """Print `rows` as a table, and write <kind>.json and <kind>.png into options.output.

    The record holds its picture, so `python -m zaya_plugin.pictures.chart` can draw it elsewhere.

    Args:
        kind: the word behind `zaya bench`. options: output, a folder; command and commit as typed, None: the commit
            of this checkout. device: torch.device that was measured.
        rows: of the table and of the record; where they have a ceiling, each carries its own share of it under a
            column's key.
        title, lines, x, y: the picture and its axes. limit: name and height of its dashed line, the ceiling.
        more: further keys of the record.
    """
    print(f"{title}\n\n{table(rows, columns)}")
    if limit is not None:
        print(f"ceiling: {limit[0]}, {limit[1]:.4g} ({y})")
    record = {
        "schema": f"zaya bench {kind}/1",
        **surroundings(device, options.command, options.commit),
        **(more or {}),
        "rows": rows,
        "picture": {"title": title, "lines": [asdict(line) for line in lines], "x": x, "y": y, "limit": limit},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{kind}.json"
    write(path, record)
    try:
        print(f"written: {path}, {save_of_record(path)}", flush=True)
    except ImportError as error:
        print(
            f"written: {path}. No picture ({error}): pip install 'zaya_plugin[pictures]', then python -m "
            f"zaya_plugin.pictures.chart {path}",
            flush=True,
        )


def only_device(kind: str = "auto"):
    """Return the torch.device that one process measures: the first accelerator, or the CPU where there is none. kind:
    "auto", or a recipe's cluster.device.
    """
    import torch

    if kind != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", 0)
    if kind == "cuda":
        raise mistake("cluster.device", kind, problem="torch finds no accelerator", fix="cluster=cpu")
    return torch.device("cpu")


def rank_device(recipe: Recipe):
    """Return the torch.device of this rank, which becomes the current one."""
    import torch

    if recipe.cluster.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def dtype_of(recipe: Recipe):
    """Return the dtype of the recipe's products."""
    import torch

    return torch.bfloat16 if recipe.cluster.dtype == "bf16" else torch.float32


def free_bytes(device) -> int:
    """Return the free memory of a device."""
    import torch

    return free_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def device_name(device) -> str:
    """Return the name of `device` (torch.device) with which plan/known_machine.py finds its recipe."""
    import torch

    if device.type == "cpu":
        return CPU_NAME
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "")  # of ROCm
    return full_device_name(
        properties.name, architecture, properties.multi_processor_count, properties.total_memory / 2**30
    )


def surroundings(device, command: str, commit_name: str | None) -> dict:
    """Return device, date, command, commit and versions. commit_name: from the command line."""
    import torch

    from zaya_plugin.compat import distribution_version

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
    }
    packages = ("megatron-core", "triton", "transformers")
    versions |= {package: distribution_version(package) for package in packages}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        "device": device_name(device),
        "date": now,
        "command": command,
        "commit": commit_name or commit(),
        "versions": {"zaya_plugin": __version__, **versions},
    }


def commit() -> str | None:
    """Return the checkout's commit, with -dirty if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return answer.stdout.strip() or None


def write(path: Path, record: dict) -> None:
    """Write `record` as JSON, atomically."""
    write_whole(path, json.dumps(record, indent=1) + "\n")
