# SPDX-License-Identifier: Apache-2.0
"""`zaya runs plot|list`: runs by what they have written, as pictures and as a table. They start nothing, ask no process,
and import neither torch nor Hydra.
"""

import argparse
import json
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_plugin.commands.parser import command, option
from zaya_plugin.ground.columns import aligned
from zaya_plugin.ground.errors import as_typed, mistake
from zaya_plugin.ground.progress import bar
from zaya_plugin.pictures.files import check_picture, write_picture
from zaya_plugin.runs.run_data import RunData, differences, read_all, read_run, run_folders

MOST_RUNS = 20  # of one picture
COLUMNS = ("name", "state", "step", "loss", "tokens/s", "differs in")
DESCENDING = ("step", "tokens/s")  # of --sort
LEAST_WIDTH = 24  # of the last column


@command(
    "runs plot",
    option("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory, or a folder with runs"),
    option("--output", type=Path, metavar="FILE", help="a page (.html) or a picture (.png); default: RUN/run.html"),
)
def plot(options: argparse.Namespace) -> None:
    """Draws a run, or several over each other, from metrics.jsonl, recipe.yaml and the journal of `zaya aegis run`:
    loss, learning rate, gradient norm, speed, router entropy, expert load, validation by domain, step times,
    checkpoints, restarts and faults; for several runs also what differs between their recipes. The page is one file
    that loads nothing. It needs neither torch nor a device, and the run may still train.

    examples:
      zaya runs plot runs/mine                               writes runs/mine/run.html
      zaya runs plot runs/mine --output mine.png             a picture for a message
      zaya runs plot runs/a runs/b --output compare.html     two runs over each other, and what differs between them
      zaya runs plot multirun/2026-11-27/18-00-00            all runs below a folder: writes runs.html in it

    In the page: drag to zoom all panels, or press + and -; arrow keys move, 0 shows the whole run.
    Requires `pip install 'zaya_plugin[pictures]'`.

    Exit codes: 0; 2 a mistake on the command line, or a library is missing.
    """
    from zaya_plugin.runs.plot import picture  # with a library of pictures

    places = list(dict.fromkeys(folder for place in options.runs for folder in run_folders(place) or [place]))
    if len(places) > MOST_RUNS:
        raise mistake(
            "RUN",
            problem=f"{len(places)} runs are too many for one picture",
            allowed=f"at most {MOST_RUNS}",
            fix="name the runs to compare",
        )
    runs = [read_run(place) for place in places]
    output = options.output or options.runs[0] / ("run.html" if places == options.runs[:1] else "runs.html")
    check_picture(output)
    read_all(runs)
    write_picture(picture(runs), output)
    print(f"written: {output}")


@command(
    "runs list",
    option("folder", nargs="?", type=Path, default=Path("runs"), metavar="DIR", help="default: runs"),
    option("--sort", choices=COLUMNS[:-1], default="name", help="loss: lowest first; step, tokens/s: highest first"),
    option("--json", action="store_true", help="print a list with an object a run"),
)
def list_(options: argparse.Namespace) -> None:
    """Prints the runs below DIR as a table: name, state, step, loss and tokens/s of the last step, and the recipe keys
    in which they differ. It reads metrics.jsonl from its end, recipe.yaml, the lock of a run and the journal of `zaya
    aegis run`, so it takes no time with long runs and works while they train. Nothing is written.

    States: running; finished; stopped (a signal ended it, and its last step is saved); failed (it ended by itself, with
    later steps than its newest checkpoint); crashed (its processes are gone, and run.lock files are left); ended early
    (by Aegis); empty. "aegis" behind a state: `zaya aegis run` supervises it, or did.

    examples:
      zaya runs list                                       the runs below runs/
      zaya runs list multirun/2026-11-27 --sort loss       of a sweep, the lowest loss first
      zaya runs list runs --json | jq '.[] | select(.state == "running") | .run'

    Exit codes: 0, 2 a mistake on the command line.
    """
    if not (places := run_folders(options.folder)):
        raise mistake(
            "DIR",
            options.folder,
            problem="holds no run" if options.folder.is_dir() else "does not exist",
            allowed="a folder with runs below it",
        )
    rows = overview(places, options.folder, options.sort)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows)


def overview(places: Sequence[Path], folder: Path, sort: str = "name") -> list[dict[str, Any]]:
    """Return a row for each run in `places`, named by its path below `folder`. Numbers are None where there is none
    that is finite; `differs` has the keys whose values differ between the runs, with this run's values.
    """
    rows, runs = [], []
    with bar("reading", len(places), " runs") as shown:
        for place in places:
            runs.append(read_run(place))
            rows.append(_row(runs[-1], folder))
            shown.update()
    changed = differences(runs)
    for number, row in enumerate(rows):
        row["differs"] = {key: values[number] for key, values in changed.items()}
    if sort != "name":  # their order is that of the names
        sign = -1 if sort in DESCENDING else 1
        rows.sort(key=lambda row: (row[sort] is None, row[sort] if sort == "state" else sign * (row[sort] or 0)))
    return rows


def _row(data: RunData, folder: Path) -> dict[str, Any]:
    """Return the row of `overview` but for what differs."""
    row = {
        "run": str(data.place),
        "name": str(data.place.relative_to(folder)) if data.place != folder else data.name,
        "state": data.state,
        "supervised": data.journal is not None,
        "step": data.last.get("step", 0),
        "last_step": data.last_step,
    }
    for column, key in (("loss", "loss"), ("tokens/s", "tokens_per_s")):
        value = data.last.get(key)
        row[column] = value if value is not None and math.isfinite(value) else None
    return row


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of `overview`, no wider than the terminal where its width allows. A key that differs is shown
    without its group where no other one ends alike.
    """
    lines, ends = [COLUMNS], Counter(key.rpartition(".")[2] for key in rows[0]["differs"])
    for row in rows:
        last = row["last_step"]
        lines.append(
            (
                row["name"],
                row["state"] + ", aegis" * row["supervised"],
                f"{row['step']:,}" + (f"/{last:,}" if last else ""),
                "-" if row["loss"] is None else f"{row['loss']:.4f}",
                "-" if row["tokens/s"] is None else f"{row['tokens/s']:,.0f}",
                " ".join(
                    f"{end if ends[end := key.rpartition('.')[2]] == 1 and end != 'name' else key}={as_typed(value)}"
                    for key, value in row["differs"].items()
                ),
            )
        )
    left = aligned([line[:-1] for line in lines], right=(2, 3, 4)).splitlines()
    room = max(LEAST_WIDTH, shutil.get_terminal_size((200, 24)).columns - max(map(len, left)) - 2)
    texts = [text if len(text) <= room else f"{text[: room - 3]}..." for *_, text in lines]
    print(aligned([*zip(left, texts, strict=True)]))
