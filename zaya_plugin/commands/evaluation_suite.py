# SPDX-License-Identifier: Apache-2.0
"""A suite of benchmarks for `zaya eval --suite`: a group of lm-evaluation-harness with published figures, run task by task
and continued after an interruption.
"""

import json
import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from zaya_plugin.ground.columns import aligned
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.whole_file import write_whole

SUITES = Path(__file__).resolve().parents[1] / "inference" / "suites"
RUNS_CODE = "HF_ALLOW_CODE_EVAL"  # Hugging Face's variable, which its metric for code reads too
Figures = dict[str, float]


def read_suite(name: str) -> dict[str, Any]:
    """Return the suite's metadata: benchmarks, models, notes. Raises ValueError for an unknown name."""
    names = sorted(file.stem for file in SUITES.glob("*.yaml"))
    if name not in names:
        raise mistake("--suite", name, problem="no such suite", allowed=", ".join(names), fix=f"--suite {names[0]}")
    return yaml.safe_load((SUITES / f"{name}.yaml").read_text())["metadata"]


def run_suite(
    suite: Mapping[str, Any],
    source: Mapping[str, Any],
    output: Path,
    exists: Callable[[str], bool],
    score: Callable[[str, int], Figures],
    say: Callable[[str], None],
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Run the benchmarks that `output` does not hold, and write it after each of them.

    Args:
        source: what the figures depend on: model, step, suite, options. output: a JSON file of this function, or none
        yet. exists: whether a task is available. score: task and number of examples -> its figures by metric. A task
        that raises is left out, and tried again the next time.

    Returns: figures by task, and by task why it was left out.

    Raises:
        ValueError: `output` is not a file of this function, or holds results of another source.
    """
    results = _finished(output, source)
    left_out = {}
    for row in suite["benchmarks"]:
        task = row["task"]
        if task is None or task in results:
            if task is not None:
                say(f"{task}: from {output}")
        elif not exists(task):
            left_out[task] = "no such task there"
        elif row.get("runs_code") and os.environ.get(RUNS_CODE) != "1":
            left_out[task] = f"it runs code that the model wrote, for which {RUNS_CODE}=1 must be set"
        else:
            try:
                results[task] = score(task, row["shots"])
            except Exception as error:  # a missing package, a download, memory: other tasks are not affected
                left_out[task] = textwrap.shorten(f"{type(error).__name__}: {error}", 400)
                say(f"{task}: {left_out[task]}")
                continue
            write_whole(output, json.dumps({**source, "results": results}, indent=1) + "\n")
    return results, left_out


def _finished(output: Path, source: Mapping[str, Any]) -> dict[str, Figures]:
    if not output.is_file():
        return {}
    try:
        record = json.loads(output.read_text())
        different = [f"{key}={record.get(key)}" for key, value in source.items() if record.get(key) != value]
        results = dict(record["results"])
    except (ValueError, AttributeError, KeyError, TypeError):
        different, results = ["no results of a suite"], {}
    if different:
        raise mistake(
            "--output",
            output,
            problem=f"holds {', '.join(different)}",
            allowed="results of the same model and options",
            fix="--output FILE",
        )
    return results


def suite_table(
    suite: Mapping[str, Any], source: Mapping[str, Any], results: Mapping[str, Figures], left_out: Mapping[str, str]
) -> str:
    """Return the table in per cent, published figures in the columns behind the model's, and below it the options
    --limit and --tasks-dir and what differs in the settings. `source` is that of `run_suite`.
    """
    published = suite["models"]
    rows = [["kind", "benchmark", "shots", "metric", Path(source["model"]).name, "+-", *published]]
    notes = []
    if source["limit"] is not None:
        notes.append(f"--limit {source['limit']}: figures are of the first {source['limit']} documents of each task")
    if source["tasks_dir"] is not None:
        notes.append(f"--tasks-dir {source['tasks_dir']}: tasks are those of that folder, not lm_eval's")
    for row in suite["benchmarks"]:
        task, known = row["task"], row.get("published", {})
        metric, value, error = _figure(results.get(task, {}), row)
        shots = "" if task is None else str(row["shots"])
        rows.append(
            [row["kind"], row["title"], shots, metric, value, error, *(_text(known.get(name)) for name in published)]
        )
        if task is None:
            notes.append(f"{row['title']}: not run, the suite has no task for it")
        elif task in left_out:
            notes.append(f"{row['title']}: left out, {left_out[task]}")
        if "differs" in row:
            notes.append(f"{row['title']}: {row['differs']}")
    return "\n".join([aligned(rows, right=range(4, len(rows[0]))), "", *notes, *suite["notes"]])


def _figure(figures: Figures, row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the metric with its filter, its value and its standard error as text. Without a filter in the row the
    task's first one counts.
    """
    metric, scale = row.get("metric", ""), row.get("scale", 100)
    start = f"{metric} ({row.get('filter', '')}"
    name = next((name for name in figures if name.startswith(start) or (name == metric and "filter" not in row)), None)
    if name is None:
        return metric, "-", ""
    error = figures.get(name.replace(metric, f"{metric}_stderr", 1))
    return name, _text(scale * figures[name]), "" if error is None else _text(scale * error)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
