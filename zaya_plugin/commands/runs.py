# SPDX-License-Identifier: Apache-2.0
"""`zaya runs plot`: look at runs by what they have written. It starts nothing and asks no process."""

import argparse
from pathlib import Path

from zaya_plugin.commands.parser import command, option
from zaya_plugin.ground.errors import mistake
from zaya_plugin.pictures.files import check_picture, write_picture

MOST_RUNS = 20


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
    from zaya_plugin.runs.plot import picture
    from zaya_plugin.runs.run_data import read_all, read_run, run_folders

    places = list(dict.fromkeys(folder for place in options.runs for folder in run_folders(place) or [place]))
    if len(places) > MOST_RUNS:
        problem = f"{len(places)} runs are too many for one picture"
        raise mistake("RUN", problem=problem, allowed=f"at most {MOST_RUNS}", fix="name the runs to compare")
    runs = [read_run(place) for place in places]
    output = options.output or options.runs[0] / ("run.html" if places == options.runs[:1] else "runs.html")
    check_picture(output)
    read_all(runs)
    write_picture(picture(runs), output)
    print(f"written: {output}")
