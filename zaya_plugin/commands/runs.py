# SPDX-License-Identifier: Apache-2.0
"""`zaya runs plot`: look at runs by what they have written. It starts nothing and asks no process."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from zaya_plugin.commands.parser import Parser, option
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.whole_file import write_whole
from zaya_plugin.pictures.content import Page

PLOT = """\
Draws a run, or several over each other, from metrics.jsonl, recipe.yaml and the journal of `zaya aegis run`: loss,
learning rate, gradient norm, speed, router entropy, expert load, validation by domain, step times, checkpoints, restarts
and faults; for several runs also what differs between their recipes. The page is one file that loads nothing. It needs
neither torch nor a device, and the run may still train."""
PLOT_EXAMPLES = """\
examples:
  zaya runs plot runs/mine                               writes runs/mine/run.html
  zaya runs plot runs/mine --output mine.png             a picture for a message
  zaya runs plot runs/a runs/b --output compare.html     two runs over each other, and what differs between them
  zaya runs plot multirun/2026-11-27/18-00-00            all runs below a folder: writes runs.html in it

In the page: drag to zoom all panels, or press + and -; arrow keys move, 0 shows the whole run.
Requires `pip install 'zaya_plugin[pictures]'`.

Exit codes: 0; 2 a mistake on the command line, or a library is missing."""
LIBRARIES = {".html": "bokeh", ".png": "matplotlib"}  # what draws a picture, by its suffix
MOST_RUNS = 20


def plot() -> Parser:
    return Parser(
        "runs plot",
        _plot,
        PLOT,
        PLOT_EXAMPLES,
        option("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory, or a folder with runs"),
        option("--output", type=Path, metavar="FILE", help="a page (.html) or a picture (.png); default: RUN/run.html"),
    )


def _plot(options: argparse.Namespace) -> None:
    from zaya_plugin.runs.plot import picture
    from zaya_plugin.runs.run_data import read_all, read_run, run_folders

    places = list(dict.fromkeys(folder for place in options.runs for folder in run_folders(place) or [place]))
    if len(places) > MOST_RUNS:
        problem = f"{len(places)} runs are too many for one picture"
        raise mistake("RUN", problem=problem, allowed=f"at most {MOST_RUNS}", fix="name the runs to compare")
    runs = [read_run(place) for place in places]
    output = options.output or options.runs[0] / ("run.html" if places == options.runs[:1] else "runs.html")
    check_output(output)
    read_all(runs)
    write_picture(picture(runs), output)
    print(f"written: {output}")


def check_output(path: Path) -> None:
    """Check, before work begins, that a picture can be written to `path`.

    Raises:
        ValueError: its suffix is another, its folder does not exist, or the library that draws it is not installed.
    """
    if path.suffix not in LIBRARIES:
        problem, allowed = "must end in one of the kinds of pictures", ", ".join(LIBRARIES)
        raise mistake("--output", path, problem=problem, allowed=allowed, fix="--output run.html")
    if not path.absolute().parent.is_dir():
        raise mistake("--output", path, problem="its folder does not exist", fix=f"--output {path.name}")
    library = LIBRARIES[path.suffix]
    if find_spec(library) is None:
        problem = f"the package {library}, which draws it, is not installed"
        raise mistake("--output", path, problem=problem, fix="pip install 'zaya_plugin[pictures]'")


def write_picture(page: Page, path: Path) -> None:
    """Draw `page` as the suffix of `path` says, and write it. See `check_output`."""
    if path.suffix == ".png":
        from zaya_plugin.pictures.still import png as draw
    else:
        from zaya_plugin.pictures.page import html as draw
    write_whole(path, draw(page))
