# SPDX-License-Identifier: Apache-2.0
"""`zaya runs watch`: a run in the terminal while it trains. It starts nothing, asks no process and imports no torch."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import printable
from zaya_plugin.commands import live
from zaya_plugin.commands.parser import command, option
from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.packages import require_packages
from zaya_plugin.runs.follow import Follower
from zaya_plugin.runs.run_data import CHECKPOINT, Metrics, RunData, is_run, read_run

COLOURS = {"running": "green", "finished": "green", "failed": "red", "crashed": "red"}
LABEL_WIDTH = 13  # plotille's, of the vertical axis
LEAST_ROWS, LEAST_ROWS_WITH_AXIS = 3, 10  # of a curve, and of one with a horizontal axis
EVENTS = 3  # shown, where there is room

NUMBERS = {  # key of metrics.jsonl -> how its last value is shown
    "loss": "loss {:.4f}",
    "valid_loss": "validation {:.4f}",
    "lr": "lr {:.2e}",
    "grad_norm": "grad {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "expert_imbalance": "load {:.2f}x",
    "expert_imbalance_worst_layer": "worst layer {:.2f}x",
    "router_entropy": "router entropy {:.2f}",
    "memory_gib": "{:.1f} GiB",
}


@command(
    "runs watch",
    option("run", type=Path, metavar="RUN", help="a run's directory"),
    option("--once", action="store_true", help="print one picture and end"),
)
def watch(options: argparse.Namespace) -> int:
    """Shows a run in the terminal, every two seconds until it ends: the curve of the loss with its validations (o),
    learning rate, gradient norm, tokens/s, MFU, load of the experts, the last checkpoint, restarts and faults. It reads
    what the run writes, so it works over SSH and on any machine that sees the folder; it may begin before the run does.

    examples:
      zaya runs watch runs/mine           until the run ends or Ctrl-C
      zaya runs watch runs/mine --once    one picture, for a script; so also without a terminal

    Requires `pip install 'zaya_plugin[terminal]'`. NO_COLOR=1 leaves out colours.

    Exit codes: 0; 1 the run has failed or crashed, or has not begun; 2 a mistake on the command line.
    """
    require_packages("terminal", "rich", "plotille")
    if not options.run.absolute().parent.is_dir():
        raise mistake("RUN", options.run, problem="its folder does not exist", allowed="the folder of a run")
    follower, state = Follower(options.run / "metrics.jsonl"), "empty"

    def render(width: int, height: int) -> tuple[Any, bool]:
        nonlocal state
        if not is_run(options.run):
            return f"{printable(options.run.absolute().name)}: the run has not begun", False
        data = read_run(options.run)
        data.metrics, state = follower.update(), data.state
        return screen(data, width, height), state not in ("running", "empty")

    live.show_live(render, options.once)
    return int(state in ("failed", "crashed", "empty"))


def screen(data: RunData, width: int, height: int):
    """Return the text of a run for a window, as rich.text.Text: at most `height` lines of `width` columns, of which the
    curve takes what the numbers leave.
    """
    from rich.text import Text

    step, last = data.last.get("step", 0), data.last_step
    end = f", {duration(eta)} to go" if (eta := data.last.get("eta_s")) and data.state == "running" else ""
    title = f"{printable(data.name)}: {data.state}, step {step:,}" + (f" of {last:,}" if last else "") + end
    columns = data.metrics.columns
    values = [form.format(columns[key][1][-1]) for key, form in NUMBERS.items() if key in columns]
    numbers = _wrapped(values, width) if values else ["no step so far"]
    checkpoints = [mark for mark in data.marks if mark.kind == CHECKPOINT]
    events = [mark for mark in data.marks if mark.kind != CHECKPOINT]
    below = [printable(checkpoints[-1].text) if checkpoints else "no checkpoint"]
    if events:
        below.append(f"{len(events)} restarts, faults and spikes; the last ones:")
        below += [printable(f"step {mark.step:,}: {mark.kind}: {mark.text}") for mark in events[-EVENTS:]]
    room = height - 1 - len(numbers) - len(below)
    if room < LEAST_ROWS:  # the newest event alone
        below = [below[0], *below[-1:][: len(events)]]
        room = height - 1 - len(numbers) - len(below)
    lines = [title, *numbers, *(curve(data.metrics, width, room) if room >= LEAST_ROWS else []), *below]
    text = Text("\n".join(line[:width] for line in lines[:height]))
    text.stylize(COLOURS.get(data.state, "yellow"), 0, min(len(title), width))
    return text


def curve(metrics: Metrics, width: int, height: int) -> list[str]:
    """Return the curve of the loss in `height` lines of `width` columns; [] before two steps."""
    import plotille

    losses = _means(*metrics.columns.get("loss", ((), ())), 2 * width)
    if len(losses) < 2 or width < 2 * LABEL_WIDTH:
        return []
    has_axis = height >= LEAST_ROWS_WITH_AXIS
    figure = plotille.Figure()
    figure.width, figure.height = width - LABEL_WIDTH - 1, height - 1 - 2 * has_axis
    figure.with_colors = figure.origin = False
    figure.x_label, figure.y_ticks_fkt = "", lambda low, high: f"{low:.4f}"
    figure.x_ticks_fkt = lambda low, high: f"{low:,.0f}"
    first, last = losses[0][0], losses[-1][0]
    figure.set_x_limits(first, last + (last - first) / figure.width)  # it leaves out what lies on the limit
    figure.plot(*zip(*losses, strict=True))
    if validations := _means(*metrics.columns.get("valid_loss", ((), ())), width):
        figure.scatter(*zip(*validations, strict=True), marker="o")
    lines = figure.show().splitlines()[1:]
    return lines if has_axis else lines[:-2]


def _means(steps: Sequence[int], values: Sequence[float], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points: means of stretches of equally many rows, without values that are not finite."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    size = -(-len(points) // most)
    parts = (points[at : at + size] for at in range(0, len(points), size or 1))
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += f"  {part}"
    return lines
