# SPDX-License-Identifier: Apache-2.0
"""`zaya eval`: tasks and suites of lm-evaluation-harness, and perplexity by domain. Loads torch only when it runs."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

from zaya_plugin import __version__
from zaya_plugin.commands.evaluation_suite import RUNS_CODE, read_suite, run_suite, suite_table
from zaya_plugin.commands.generate import MODEL, ROUTED
from zaya_plugin.commands.parser import command, option
from zaya_plugin.commands.process import prepare_torch
from zaya_plugin.data.prepared import locate
from zaya_plugin.ground.columns import aligned
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import MOST_AMOUNT, whole_number
from zaya_plugin.ground.whole_file import check_folder, write_whole
from zaya_plugin.inference.opening import Opened, find_model, open_model


@command(
    "eval",
    *MODEL,
    option("--tasks", metavar="NAME,NAME", help="tasks of lm-evaluation-harness"),
    option("--suite", metavar="NAME", help="benchmarks next to published figures: zaya1"),
    option(
        "--tasks-dir",
        metavar="DIR",
        help="a folder with local copies of the suite's tasks; without it they are those of lm_eval, from the Hub",
    ),
    option("--include", metavar="DIR", help="a folder with further tasks' .yaml files"),
    option(
        "--num-fewshot",
        type=whole_number(0, 1000),
        metavar="N",
        help="examples before each question; default: the task's",
    ),
    option("--data", nargs="*", metavar="PATH", help="prepared datasets; without one those of the recipe"),
    option(
        "--limit",
        type=whole_number(1, MOST_AMOUNT),
        metavar="N",
        help="sequences of a dataset at most, spread evenly over it; the first documents of a task",
    ),
    ROUTED,
    option("--batch-size", type=whole_number(1, 65_536), default=8, help="sequences computed at once; default: 8"),
    option(
        "--output", type=Path, metavar="FILE", help="write the results as JSON; default for --suite: SUITE-MODEL.json"
    ),
    option("--wandb", metavar="PROJECT", help="log the results to a new run of this W&B project"),
    imports_large_packages=True,
)
def evaluate(options: argparse.Namespace) -> None:
    """Measures a model: --tasks runs tasks of lm-evaluation-harness, --suite benchmarks of the ZAYA1 reports next to
    published figures, --data computes the perplexity of prepared datasets.

    --tasks requires the package lm_eval (pip install 'zaya_plugin[eval]'). A task is a name of that package, or of a
    .yaml file in the folder --include. Tasks on the Hugging Face Hub download their data.

    --suite writes its results to --output after each task; the same command continues with the tasks that are left.

    --data reads each dataset's held-out part (all of it without one) in sequences of the run's length, documents one
    after another, or as the run packed them; of chats the tokens of answers count. Without a path it reads the
    validation data of the run's recipe.yaml, by domain.

    examples:
      zaya eval runs/mine --data                                       the run's validation data
      zaya eval exports/mine --data data/web data/code --output perplexity.json
      zaya eval runs/mine --tasks my_task --include my/tasks --limit 100
      zaya eval exports/mine --suite zaya1 --tasks-dir my/copies --limit 100
      zaya eval Zyphra/ZAYA1-base --tasks hellaswag,arc_easy --batch-size 16 --wandb zaya-evals

    Exit codes: 0, 2 a mistake on the command line or in the files.
    """
    if options.tasks is None and options.data is None and options.suite is None:
        raise mistake(
            "zaya eval",
            problem="none of --tasks, --suite and --data was given",
            fix=f"zaya eval {options.model} --data",
        )
    for name, needed in (("include", "tasks"), ("num_fewshot", "tasks"), ("tasks_dir", "suite")):
        if getattr(options, needed) is None and (value := getattr(options, name)) is not None:
            key = f"--{name.replace('_', '-')}"
            raise mistake(key, value, problem=f"requires --{needed}", fix=f"leave {key} out")
    if options.suite is not None and (options.tasks is not None or options.data is not None):
        raise mistake(
            "--suite",
            options.suite,
            problem="is evaluated alone, without --tasks and --data",
            fix=f"zaya eval {options.model} --suite {options.suite}",
        )
    check_folder(options.output, "--output")
    if options.suite is not None and options.output is not None and options.output.suffix != ".json":
        raise mistake(
            "--output",
            options.output,
            problem="must end in .json: the table is written to a .txt of the same name",
            fix=f"--output {options.output.with_suffix('.json')}",
        )
    for key, folder in (("--include", options.include), ("--tasks-dir", options.tasks_dir)):
        if folder is not None and not Path(folder).is_dir():
            raise mistake(key, folder, problem="must be a folder", allowed="a folder with tasks' .yaml files")
    suite = None if options.suite is None else read_suite(options.suite)
    runs_tasks = options.tasks is not None or suite is not None
    if runs_tasks and importlib.util.find_spec("lm_eval") is None:
        raise mistake(
            "--tasks" if suite is None else "--suite",
            options.tasks or options.suite,
            problem="lm-evaluation-harness is not installed",
            allowed="--data without that package",
            fix="pip install 'zaya_plugin[eval]', or pip install lm_eval",
        )
    paths = {} if options.data is None else _datasets(options)
    if options.routed_experts is not None and (options.tasks is not None or len(paths) != 1):
        raise mistake("--routed-experts", options.routed_experts, problem="is of one dataset", fix="--data PATH alone")
    model = find_model(options)
    prepare_torch()
    opened = open_model(options, model, needs_tokenizer=runs_tasks)
    if runs_tasks and not opened.stop:
        raise mistake("--tokenizer", opened.home, problem="names no end token, which tasks need")
    if suite is not None:
        _run_suite(options, suite, opened)
        return
    results: dict[str, dict[str, float]] = {}
    if options.tasks is not None:
        from zaya_plugin.inference.harness import scores, task_manager

        names = [name.strip() for name in options.tasks.split(",")]
        manager = task_manager(options.include)
        results |= scores(opened, manager, names, options.num_fewshot, options.batch_size, options.limit)
    for name, path in paths.items():
        from zaya_plugin.inference.perplexity import perplexity

        results[name] = perplexity(opened, name, path, options.batch_size, options.limit, options.routed_experts)
    print(table(results))
    record = {"model": opened.name, "step": opened.step, "zaya_plugin": __version__, "results": results}
    if options.output is not None:
        try:
            options.output.write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            raise mistake("--output", options.output, problem=f"cannot be written ({error.strerror})") from error
    if options.wandb is not None:
        _log(options.wandb, opened, record)


def _run_suite(options: argparse.Namespace, suite: dict, opened: Opened) -> None:
    """Run what is left of a suite; print its table, and write and log it."""
    from zaya_plugin.inference.harness import scores, task_manager

    manager = task_manager(options.tasks_dir, defaults=options.tasks_dir is None)
    runs_code = os.environ.get(RUNS_CODE) == "1"

    def exists(task: str) -> bool:
        return bool(manager.match_tasks([task])) and opened.decoder is not None  # loads the model: no task's mistake

    def score(task: str, shots: int) -> dict[str, float]:
        return scores(opened, manager, [task], shots, options.batch_size, options.limit, runs_code)[task]

    output = options.output or Path(f"{options.suite}-{Path(opened.name).name}.json")
    source = {
        "model": opened.name,
        "step": opened.step,
        "suite": options.suite,
        "limit": options.limit,
        "tasks_dir": None if options.tasks_dir is None else os.path.realpath(options.tasks_dir),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "tokenizer": os.path.realpath(opened.home),
        "lm_eval": importlib.metadata.version("lm_eval"),
    }
    results, left_out = run_suite(suite, source, output, exists, score, lambda text: print(text, file=sys.stderr))
    text = suite_table(suite, source, results, left_out)
    print(text)
    write_whole(output.with_suffix(".txt"), text + "\n")
    if options.wandb is not None:
        _log(options.wandb, opened, {**source, "zaya_plugin": __version__, "results": results})


def _datasets(options: argparse.Namespace) -> dict[str, str]:
    """Return the datasets of --data by name."""
    from zaya_plugin.data.blend import domain_names

    paths = options.data or _of_recipe(Path(options.model))
    for path in paths:
        locate(path)
    return dict(zip(domain_names(paths), paths, strict=True))


def _of_recipe(start: Path) -> list[str]:
    """Return the validation data of a run: its domains, else the one dataset, and each source of the blend that holds
    out a part.
    """
    from zaya_plugin.config.compose import load_recipe
    from zaya_plugin.config.entries import parse_blend
    from zaya_plugin.config.run_directory import RECIPE

    file = next(
        (folder / RECIPE for folder in (start, *start.absolute().parents[:2]) if (folder / RECIPE).is_file()), None
    )
    if file is None:
        raise mistake("--data", problem=f"{start} has no {RECIPE}", fix="--data PATH")
    data = load_recipe(file).data
    if data.valid_blend:
        return [entry.path for entry in parse_blend(data.valid_blend, "data.valid_blend", weighted=True)]
    if data.valid_path:
        return [data.valid_path]
    trained = [entry.path for entry in parse_blend(data.blend, "data.blend", weighted=True)] or [data.path]
    held_out = [path for path in trained if "valid" in locate(path)[1]]
    if not held_out:
        raise mistake("--data", problem=f"the data of {file} holds out no part", fix="--data PATH")
    return held_out


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the text to print: a figure a line, with its standard error."""
    rows = [
        (name, key, f"{value:,}" if isinstance(value, int) else f"{value:.4f}", _error(values.get(f"{key}_stderr")))
        for name, values in results.items()
        for key, value in values.items()
        if not key.endswith("_stderr")
    ]
    return aligned(rows, right=(2,)) if rows else ""


def _error(error: object) -> str:
    return f"+- {error:.4f}" if isinstance(error, float) else ""


def _log(project: str, opened: Opened, record: dict) -> None:
    from zaya_plugin.training.sinks import WandbRun

    source = {key: value for key, value in record.items() if key != "results"}
    run_id = getattr(opened.arguments, "zaya", {}).get("run_id")
    name = Path(opened.name).name
    sink = WandbRun(
        project=project,
        entity=None,
        name=f"eval {name}",
        mode="auto",
        run_id=None,
        directory=Path("."),
        config=source,
        group=run_id,
        say=lambda text: print(text, file=sys.stderr),
    )
    sink.log(
        {"step": opened.step or 0}
        | {f"eval/{n}/{k}": v for n, values in record["results"].items() for k, v in values.items()}
    )
    sink.close()
    print(f"W&B: {sink.where}", file=sys.stderr)
