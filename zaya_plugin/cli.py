# SPDX-License-Identifier: Apache-2.0
"""The console script `zaya`: train, measure, prepare data, look at the installation.

Everything is imported where it is needed; neither `--help` nor composing a recipe imports torch. What a user can mend
leaves as one message on stderr and exit code 2; ZAYA_TRACEBACK=1 (or Hydra's HYDRA_FULL_ERROR=1) shows the traceback.
"""

from __future__ import annotations

import os
import sys
import tempfile

from zaya_plugin import __version__

USAGE = """\
zaya: ZAYA1 pretraining as a Megatron-core plugin

  zaya train experiment=cpu_demo    train a small ZAYA on this machine's CPU
  zaya train --help                 recipes, keys and examples
  zaya bench --help                 how fast a recipe trains, and where the time goes
  zaya curriculum --help            the stages of a curriculum, one after the other
  zaya slurm --help                 a batch script for SLURM
  zaya export --help                the same recipes for Megatron-LM's pretrain_gpt.py and for Primus
  zaya data prepare --help          make a corpus from text, JSON lines or Python's standard library
  zaya data --help                  pack, inspect and further commands on corpora
  zaya doctor                       what is installed, which devices there are, which patches apply
  zaya --version
"""

USER_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except ValueError as error:
        if _traceback_wanted():
            raise
        rank = os.environ.get("RANK", "0")
        print(f"zaya: {error}" if rank == "0" else f"zaya: rank {rank}: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `zaya train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else USER_ERROR
    if argv[0] in ("-V", "--version"):
        print(f"zaya_plugin {__version__}")
        return 0
    if argv[0] == "train":
        return train(argv[1:])
    if argv[0] in ("curriculum", "slurm"):
        from zaya_plugin.run import commands

        return getattr(commands, argv[0])(argv[1:])
    if argv[0] == "bench":
        from zaya_plugin.bench.command import main as bench

        return bench(argv[1:])
    if argv[0] == "data":
        return data(argv[1:])
    if argv[0] == "export":
        from zaya_plugin.run.export import main as export

        return export(argv[1:])
    if argv[0] == "doctor":
        from zaya_plugin.doctor import main as doctor

        return doctor(argv[1:])
    # each line of the usage is a command
    allowed = dict.fromkeys(line.split()[1] for line in USAGE.splitlines() if line.startswith("  zaya "))
    raise ValueError(f"zaya {argv[0]}: no such command. Allowed: {', '.join(allowed)}, --help. Fix: zaya --help")


# What `zaya data` can do; each is a module zaya_plugin.corpus.<name> with a main().
DATA_COMMANDS = {
    "prepare": "make a dataset from text, JSON lines or Python's standard library",
    "pack": "whole documents into bins of one length, with long chains of thought trimmed",
    "inspect": "decoded samples with source, length and loss mask",
    "bundle": "many small datasets into one, and the random reads of a planned run",
    "warm": "read into the page cache what a run needs next",
    "mixture": "tokens and epochs of each source that a blend draws, over one stage or several",
}


def data(argv: list[str]) -> int:
    """`zaya data COMMAND ...`."""
    import importlib

    if not argv or argv[0] in ("-h", "--help"):
        print("zaya data: corpora for training\n")
        for name, purpose in DATA_COMMANDS.items():
            print(f"  zaya data {name:8} {purpose}")
        print("\nzaya data COMMAND --help says more.")
        return 0 if argv else USER_ERROR
    if argv[0] not in DATA_COMMANDS:
        allowed = ", ".join(f"zaya data {name}" for name in DATA_COMMANDS)
        raise ValueError(f"zaya data {argv[0]}: allowed: {allowed}; see zaya data --help")
    return importlib.import_module(f"zaya_plugin.corpus.{argv[0]}").main(argv[1:]) or 0


def train(argv: list[str]) -> int:
    """`zaya train`: Hydra's command line (overrides, --cfg, --info, --config-dir, -m) over the recipes."""
    argv = ["dry_run=true" if item == "--dry-run" else item for item in argv]
    if any(flag in argv for flag in ("-h", "--help")):
        from zaya_plugin.config.train_help import train_help

        print(train_help(), end="")
        return 0
    import hydra

    from zaya_plugin.config import compose

    compose.register()
    traceback_wanted = _traceback_wanted()
    outcomes: list[int | ValueError] = []

    def job(config) -> None:
        # A job's failure is kept, not raised: Hydra would add lines of its own to the message.
        try:
            outcomes.append(_run_job(config))
        except ValueError as error:
            if traceback_wanted:
                raise
            outcomes.append(error)
        except BrokenPipeError:  # `zaya train dry_run=true | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            outcomes.append(0)
        if isinstance(outcomes[-1], int) and outcomes[-1] > 128:  # stopped by a signal: no further jobs
            raise SystemExit(outcomes[-1])

    application = hydra.main(config_path=f"pkg://{compose.RECIPES}", config_name=compose.PRIMARY, version_base="1.3")(
        job
    )
    # Hydra's parser takes overrides only where they stand together.
    overrides = [item for item in argv if not item.startswith("-") and ("=" in item or item.startswith("~"))]
    rest = [item for item in argv if item not in overrides]
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and leaving
    try:
        with tempfile.TemporaryDirectory() as sweep, compose.readable_errors():
            sys.argv = ["zaya train", *compose.open_overrides(overrides)]
            if "-m" in rest or "--multirun" in rest:  # Hydra insists on writing multirun.yaml somewhere
                sys.argv.append(f"hydra.sweep.dir={sweep}")
            sys.argv += rest
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
    errors = [str(outcome) for outcome in outcomes if isinstance(outcome, ValueError)]
    if errors and not any(item.startswith("experiment=") for item in overrides):
        from zaya_plugin.config.train_help import options

        errors.append(f"No experiment was chosen: experiment=<name>, of {', '.join(options('experiment'))}")
    if errors:
        raise ValueError("\n".join(dict.fromkeys(errors)))
    return next((outcome for outcome in outcomes if outcome), 0)


def _traceback_wanted() -> bool:
    return bool(os.environ.get("ZAYA_TRACEBACK")) or os.environ.get("HYDRA_FULL_ERROR") == "1"


def _run_job(config) -> int:
    """One job of `zaya train`; each job of a multirun has a directory of its own, <run_dir>/<job number>."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from zaya_plugin.config.compose import to_recipe
    from zaya_plugin.run.launch import launch

    recipe = to_recipe(config)
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        recipe.run_dir = os.path.join(recipe.run_dir, str(hydra_config.job.num))
        print(
            f"zaya: job {hydra_config.job.num}: {' '.join(hydra_config.overrides.task)} -> {recipe.run_dir}", flush=True
        )
    return launch(recipe)


if __name__ == "__main__":
    sys.exit(main())
