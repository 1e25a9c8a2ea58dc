# SPDX-License-Identifier: Apache-2.0
"""`zaya train`: Hydra's application over the recipes, without its litter and its messages. No torch import."""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from zaya_plugin.commands.parser import DRY_RUN, VERBOSE, command, option
from zaya_plugin.commands.process import end_on_interrupt
from zaya_plugin.config.train_help import train_help
from zaya_plugin.ground import phases
from zaya_plugin.ground.errors import of_the_machine
from zaya_plugin.ground.exit_codes import ENDED_EARLY

REPORTS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # of Hydra


@command(
    "train",
    DRY_RUN,
    VERBOSE,
    option("--multirun", "-m", action="store_true", help="one run after the other, for key=value,value"),
    option("--cfg", "-c", choices=("job", "hydra", "all"), help="print the composed recipe, and stop"),
    option("--package", "-p", help="with --cfg: this group of keys alone"),
    option("--info", "-i", choices=REPORTS, help="Hydra's report on its composing; --info alone prints all"),
    option("--hydra-help", action="store_true", help="Hydra's own help"),
    bare={"--info": "all", "-i": "all"},
    imports_large_packages=True,
    recipe=True,
    whole_help=train_help,
)
def train(options: argparse.Namespace) -> int:
    """Starts the ranks of a recipe, or joins those of torchrun or srun. The exit code is the first one that is not 0."""
    phases.show(sys.stderr if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0" else None)
    phases.begin("composing the recipe")
    import hydra

    from zaya_plugin.config import compose

    overrides = [*options.overrides, *["dry_run=true"] * options.dry_run]
    compose.register()
    outcomes: list[int | Exception] = []
    folders: list[Path] = []  # of the jobs of a multirun

    def job(config) -> None:
        try:
            outcomes.append(_run_job(config, overrides, options.verbose, folders))
        except Exception as error:  # raised below: Hydra would add lines to the message
            outcomes.append(error)
        code = outcomes[-1]
        if isinstance(code, int) and (code > 128 or code == ENDED_EARLY):  # stopped by a signal: no further jobs
            raise SystemExit(code)

    primary = dict(config_path=f"pkg://{compose.RECIPES}", config_name=compose.PRIMARY, version_base="1.3")
    application = hydra.main(**primary)(job)
    if options.multirun:
        compose.check_sweep(overrides)
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises in place of printing and leaving
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(compose.readable_errors(overrides))
            words = compose.open_overrides(overrides)
            if options.multirun:  # Hydra always writes multirun.yaml
                words.append(f"hydra.sweep.dir={stack.enter_context(tempfile.TemporaryDirectory())}")
            sys.argv = ["zaya train", *words, *_flags(options)]
            application()
    except SystemExit as end:
        if not outcomes:
            raise
        return int(end.code)
    finally:
        sys.argv = arguments
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
        with contextlib.suppress(ValueError, OSError):  # the table hides no error of a run
            _print_runs(folders)
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    texts = [str(error) if isinstance(error, ValueError) else of_the_machine(error, ".") for error in errors]
    if None in texts:  # a bug, which needs its traceback
        raise errors[texts.index(None)]
    if errors:
        raise ValueError(compose.with_experiment("\n".join(dict.fromkeys(texts)), overrides)) from errors[0]
    return next((outcome for outcome in outcomes if outcome), 0)


def _flags(options: argparse.Namespace) -> list[str]:
    """Return the options that Hydra reads."""
    flags = [f"--{name.replace('_', '-')}" for name in ("multirun", "hydra_help") if getattr(options, name)]
    for name in ("cfg", "package", "info"):
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name}", value]
    return flags + ["--resolve"] * (options.cfg is not None)


def _print_runs(folders: list[Path]) -> None:
    """Print the runs of a multirun as `zaya runs list` does; those that were refused have written nothing."""
    from zaya_plugin.commands.runs import overview, print_table
    from zaya_plugin.runs.run_data import is_run

    if begun := [folder for folder in folders if is_run(folder)]:
        print_table(overview(begun, begun[0].parent))


def _run_job(config, overrides: list[str], verbose: bool, folders: list[Path]) -> int:
    """Run one job of `zaya train`; each job of a multirun runs in <run_dir>/<job number>, which is added to folders."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from zaya_plugin.config.compose import to_recipe
    from zaya_plugin.handover.published import with_published
    from zaya_plugin.run.launch import launch

    end_on_interrupt(during_imports=False)
    recipe = to_recipe(config, overrides)
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        recipe.run_dir = os.path.join(recipe.run_dir, str(hydra_config.job.num))
        words = " ".join(hydra_config.overrides.task)
        print(f"zaya: job {hydra_config.job.num}: {words} -> {recipe.run_dir}", flush=True)
        if not recipe.dry_run:
            folders.append(Path(recipe.run_dir))
    return launch(with_published(recipe, overrides, download=not recipe.dry_run), verbose)
