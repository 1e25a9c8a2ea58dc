# SPDX-License-Identifier: Apache-2.0
"""The picture of one run or several: what metrics.jsonl, recipe.yaml and the journal of Aegis say about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.errors import as_typed
from zaya_plugin.pictures.content import (
    ALARM,
    BUCKETS,
    COLOURS,
    DASHES,
    LEAST_BUCKETS,
    NEUTRAL,
    Cells,
    Line,
    Page,
    Panel,
    Points,
    Table,
    heat,
    line,
)
from zaya_plugin.runs.run_data import CHECKPOINT, FAULT, RESTART, SKIPPED, SPIKE, RunData, differences, unique_names

STEP = "step"
JITTER_STEPS = 20  # the least number of steps in a window of the jitter
HEAT_MAPS = 4  # runs whose heat maps are drawn
MAX_MARK_LINES = 40  # through every panel
MAX_CHECKPOINTS = 1000  # drawn, evenly chosen
LOGARITHMIC_SPAN = 50  # of the largest and the least value
MARKS = {  # kind -> shape, colour, and whether a line through every panel marks it
    CHECKPOINT: ("dash", NEUTRAL, False),
    RESTART: ("diamond", COLOURS[0], True),
    FAULT: ("circle", ALARM, True),
    SPIKE: ("circle", COLOURS[3], False),
    SKIPPED: ("circle", COLOURS[4], False),
}


class Curve(NamedTuple):
    """A key of metrics.jsonl, drawn as a line. name: in the legend; dots: every value is a circle too."""

    key: str
    name: str = ""
    dash: str = "solid"
    dots: bool = False


class MetricPanel(NamedTuple):
    """A panel of curves. factor: of the values. may_be_logarithmic: where they span a factor of LOGARITHMIC_SPAN."""

    title: str
    unit: str
    curves: Sequence[Curve]
    note: str = ""
    factor: float = 1
    may_be_logarithmic: bool = False


PANELS = (
    MetricPanel(
        "Loss", "nats a token", [Curve("loss", "training"), Curve("valid_loss", "validation", "dashed", dots=True)]
    ),
    MetricPanel("Gradient norm", "norm", [Curve("grad_norm")], "Before clipping.", may_be_logarithmic=True),
    MetricPanel("Learning rate", "lr", [Curve("lr")], "Learning rate that the optimizer used in each step."),
    MetricPanel("Speed", "tokens/s", [Curve("tokens_per_s")], "Of the whole job, without validation and checkpoints."),
    MetricPanel("MFU", "%", [Curve("mfu")], "Model FLOP/s of a device divided by its peak FLOP/s.", 100),
    MetricPanel("Step time", "seconds", [Curve("step_s")], "Wall time of a step, without validation and checkpoints."),
    MetricPanel("Router entropy", "nats", [Curve("router_entropy")], "Mean over tokens and layers."),
    MetricPanel(
        "Expert imbalance",
        "x even load",
        [
            Curve("expert_imbalance", "mean of the layers"),
            Curve("expert_imbalance_worst_layer", "worst layer", "dotted"),
        ],
        "The busiest expert's load as a multiple of an even load: 1 is balanced.",
    ),
)
WHY_MISSING = {
    "mfu": "the recipe has no cluster.peak_tflops",
    "valid_loss": "no validation so far",
    "expert_load": "a row has it every logger.expert_load_interval steps",
}


def picture(runs: Sequence[RunData]) -> Page:
    """Return the picture of one run or several."""
    names = unique_names([*runs])
    panels, notes = step_panels(runs, names)
    several = len(runs) > 1
    return Page(
        title=names[0] if not several else f"{len(runs)} runs",
        lead=_lead(runs[0]) if not several else [", ".join(names)],
        figures=() if several else [(name, *row) for name, row in facts(runs[0]).items()],
        groups=[(name, _colour(number)) for number, name in enumerate(names)] if several else (),
        panels=panels,
        overview=_tables(runs, names) if several else (),
        notes=notes,
    )


def step_panels(runs: Sequence[RunData], names: Sequence[str]) -> tuple[list[Panel], list[str]]:
    """Return the panels over steps, and sentences about them, one for each panel that no run has the numbers of."""
    panels, missing = [], []
    for panel, key in (*_metric_panels(runs, names), _domains(runs, names), _jitter(runs, names)):
        if panel.layers:
            panels.append(panel)
        else:
            missing.append(_left_out(panel.title, key))
    marks = _marks(runs, names)
    lines = [(mark.step, MARKS[mark.kind][1]) for run in runs for mark in run.marks if MARKS[mark.kind][2]]
    for panel in panels:
        panel.marks = lines if len(runs) == 1 and len(lines) <= MAX_MARK_LINES else ()
    panels += _heat_maps(runs, names)
    if not any(run.metrics.busiest for run in runs):
        missing.append(_left_out("Expert load", "expert_load"))
    strides = [layer.stride for panel in panels for layer in panel.layers if isinstance(layer, Line)]
    notes = []
    if (stride := max(strides, default=1)) > 1:
        notes = [
            f"A point of a line is the mean of up to {stride:,} steps; its band reaches from the lowest to the highest."
        ]
    return [*([marks] if marks.layers else []), *panels], notes + missing


def _left_out(title: str, key: str) -> str:
    why = f" ({WHY_MISSING[key]})" if key in WHY_MISSING else ""
    return f"{title} is left out: metrics.jsonl has no {key}{why}."


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _lines(
    runs: Sequence[RunData], names: Sequence[str], title: str, curves: Sequence[Curve], factor: float = 1
) -> tuple[list[Line], list[tuple[str, str, str]]]:
    """Return the lines of some curves, and their legend."""
    import numpy

    lines, legend = [], []
    buckets = max(LEAST_BUCKETS, BUCKETS // (len(runs) * len(curves)))
    for number, (key, name, dash, dots) in enumerate(curves):
        for group, run in enumerate(runs):
            if key not in run.metrics.columns:
                continue
            steps, values = run.metrics.columns[key]
            # The colour of several runs is the run's; the lines of one run differ in colour and dash.
            colour = _colour(group if len(runs) > 1 else number)
            label = " ".join(filter(None, (names[group] if len(runs) > 1 else "", name))) or title.lower()
            lines.append(
                line(label, steps, numpy.asarray(values) * factor, colour, buckets, dash=dash, group=group, dots=dots)
            )
            if name and not any(row[0] == name for row in legend):
                legend.append((name, colour if len(runs) == 1 else NEUTRAL, dash))
    return lines, legend if len(curves) > 1 else []


def _metric_panels(runs: Sequence[RunData], names: Sequence[str]) -> Iterable[tuple[Panel, str]]:
    for title, unit, curves, note, factor, may_be_logarithmic in PANELS:
        lines, legend = _lines(runs, names, title, curves, factor)
        logarithmic = may_be_logarithmic and _spans_decades(lines)
        panel = Panel(title, STEP, [*lines], unit, note, logarithmic=logarithmic, key=legend)
        yield panel, curves[0].key


def _domains(runs: Sequence[RunData], names: Sequence[str]) -> tuple[Panel, str]:
    keys = dict.fromkeys(key for run in runs for key in run.metrics.columns if key.startswith("validation/"))
    curves = [Curve(key, key.split("/")[1], DASHES[number % len(DASHES)], dots=True) for number, key in enumerate(keys)]
    lines, legend = _lines(runs, names, "", curves) if curves else ([], [])
    panel = Panel("Validation loss by domain", STEP, [*lines], "nats a token", key=legend)
    return panel, "validation/<domain>/loss"


def _jitter(runs: Sequence[RunData], names: Sequence[str]) -> tuple[Panel, str]:
    lines = []
    for group, run in enumerate(runs):
        steps, values = run.metrics.columns.get("step_s", ((), ()))
        if len(steps) >= JITTER_STEPS:
            ends, shares = jitter(steps, values)
            name = names[group] if len(runs) > 1 else "spread"
            lines.append(line(name, ends, shares, _colour(group), group=group, dots=len(ends) == 1))
    note = f"(p95 - p5) / median of the step times in windows of at least {JITTER_STEPS} steps."
    return Panel("Step-time jitter", STEP, lines, "%", note), f"step_s of {JITTER_STEPS} steps"


def jitter(steps: Any, seconds: Any) -> tuple[Any, Any]:
    """Return steps, and 100 (p95 - p5) / median of the step times of windows that end there."""
    import numpy

    width = max(JITTER_STEPS, len(steps) // LEAST_BUCKETS)
    count = len(steps) // width
    windows = numpy.asarray(seconds)[len(steps) - count * width :].reshape(count, width)
    with numpy.errstate(invalid="ignore", divide="ignore"):  # steps of no time, or of a time that is no number
        low, middle, high = numpy.percentile(windows, (5, 50, 95), axis=1)
        shares = 100 * (high - low) / middle
    return numpy.asarray(steps)[len(steps) - count * width + width - 1 :: width], shares


def _spans_decades(lines: Sequence[Line]) -> bool:
    """Return whether all values are positive and their largest is LOGARITHMIC_SPAN times their least."""
    import numpy

    values = numpy.concatenate([numpy.asarray(one.high)[numpy.isfinite(one.high)] for one in lines] or [[]])
    return bool(values.size) and 0 < values.min() < values.max() / LOGARITHMIC_SPAN


def _marks(runs: Sequence[RunData], names: Sequence[str]) -> Panel:
    layers, rows, legend = [], [], []
    for run, name in zip(runs, names, strict=True):
        for kind, (shape, colour, _) in MARKS.items():
            marks = [mark for mark in run.marks if mark.kind == kind]
            if kind == CHECKPOINT:
                marks = marks[:: len(marks) // MAX_CHECKPOINTS + 1]
            if marks:
                row = f"{kind}s" if len(runs) == 1 else name
                if row not in rows:
                    rows.append(row)
                if len(runs) > 1 and kind not in [known for known, _, _ in legend]:
                    legend.append((kind, colour, "solid"))
                layers.append(
                    Points(
                        row, [mark.step for mark in marks], [mark.text for mark in marks], [colour] * len(marks), shape
                    )
                )
    return Panel("Checkpoints, restarts and faults", STEP, layers, rows=rows, key=legend, wide=True)


def _heat_maps(runs: Sequence[RunData], names: Sequence[str]) -> Iterable[Panel]:
    import numpy

    for run, name in [*zip(runs, names, strict=True)][:HEAT_MAPS]:
        if not (busiest := run.metrics.busiest):
            continue
        of = f": {name}" if len(runs) > 1 else ""
        layers = len(busiest[-1][1])
        rows = [(step, load) for step, load in busiest if len(load) == layers]
        cells = heat([step for step, _ in rows], [load for _, load in rows], "x even load")
        note = "The busiest expert of each layer, as a multiple of an even load: 1 is balanced."
        yield Panel(f"Expert load over layers and steps{of}", STEP, [cells], "layer", note)
        table = numpy.asarray(run.metrics.expert_load, dtype=float)
        cells = Cells((0.5, table.shape[1] + 0.5), table * table.shape[1], "x even load")
        note = f"Each expert's share of its layer's tokens at step {busiest[-1][0]:,}, as a multiple of an even share."
        yield Panel(f"Load of every expert{of}", "expert", [cells], "layer", note, zooms=False)


def _median(run: RunData, key: str) -> float | None:
    import numpy

    _, values = run.metrics.columns.get(key, ((), ()))
    return float(numpy.median(values)) if len(values) else None


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _count(number: float | None) -> str:
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number is not None and number >= size:
            return f"{number / size:.1f} {name}"
    return _shown(number, ",.0f")


def facts(run: RunData) -> dict[str, tuple[str, str]]:
    """Return the figures of a run: name -> value, and what it is."""
    last, columns = run.last, run.metrics.columns
    seconds = sum(columns["step_s"][1]) if "step_s" in columns else None
    valid = columns.get("valid_loss")
    share, step = _median(run, "mfu"), last.get("step", 0)
    events = [mark.kind for mark in run.marks]
    kinds = [f"{events.count(kind)} {kind}{'s' * (events.count(kind) != 1)}" for kind in MARKS if kind in events]
    return {
        "state": (run.state, ", ".join(kinds)),
        "step": (f"{step:,}", f"of {run.last_step:,}" if run.last_step else ""),
        "loss": (_shown(last.get("loss"), ".4f"), "training, nats a token, last step"),
        "validation loss": (_shown(valid and valid[1][-1], ".4f"), f"at step {valid[0][-1]:,}" if valid else ""),
        "tokens": (_count(last.get("total_tokens")), "read so far, with earlier stages"),
        "tokens/s": (_shown(_median(run, "tokens_per_s"), ",.0f"), "median, whole job"),
        "MFU": (_shown(share and 100 * share, ".1f", " %"), "median" if share else "no peak rate in the recipe"),
        "step time": (_shown(_median(run, "step_s"), ".3g", " s"), "median"),
        "training time": (duration(seconds), "sum of the steps"),
    }


def _lead(run: RunData) -> list[str]:
    names = [run.settings.get(key) for key in ("name", "model.name", "stage.name", "optim.name", "cluster.name")]
    titles = ("recipe", "model", "stage", "optimizer", "cluster")
    parts = [f"{title} {name}" for title, name in zip(titles, names, strict=True) if name is not None]
    return [", ".join(parts)] if parts else []


def _tables(runs: Sequence[RunData], names: Sequence[str]) -> list[Table]:
    rows = [(name, *(value for value, _ in facts(run).values())) for run, name in zip(runs, names, strict=True)]
    differing = [(key, *map(as_typed, values)) for key, values in differences([*runs]).items()]
    note = "" if differing else "The recipes are equal but for run_dir."
    return [
        Table("Runs", ("run", *facts(runs[0])), rows),
        Table("What differs between the recipes", ("key", *names), differing, note),
    ]
