# SPDX-License-Identifier: Apache-2.0
"""The commands `zaya data ...` have in common: their parser, and how the same command continues after a failure."""

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from zaya_plugin.commands.parser import Option, Parser
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.ground.errors import message, of_the_machine

DATA_EXTRA = ("tokenizers", "zstandard", "pyarrow")  # of pyproject.toml
Action = Callable[[argparse.Namespace, Workspace | None], None]


def data_parser(name: str, action: Action, description: str, examples: str, *rows: Option, **more: Any) -> Parser:
    """Return the parser of `zaya data <name>`. action: takes the options and the workspace of --output,
    None without.
    """
    return Parser(f"data {name}", lambda options: _run(name, action, options), description, examples, *rows, **more)


def recipe_of(options: argparse.Namespace):
    """Return the Recipe of the command line, composed as `zaya train` does, with its place in the data; None for
    datasets.
    """
    if options.datasets:
        return None
    # In the function, so that the commands without a recipe start without Hydra.
    from zaya_plugin.config.compose import compose
    from zaya_plugin.handover.data_places import with_consumed

    return with_consumed(compose(options.overrides))


def _run(name: str, action: Action, options: argparse.Namespace) -> None:
    output = getattr(options, "output", None)
    workspace = Workspace(output, options.overwrite) if output else None
    try:
        action(options, workspace)
    except BrokenProcessPool:
        problem = "a worker process was killed, most often because memory ran out" + _kept(workspace)
        fix = "fewer --workers or a smaller --max-document-bytes"
        raise ValueError(message("--workers", problem=problem, fix=fix)) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("zaya_plugin"):
            raise
        package = error.name.partition(".")[0]
        fix = f"pip install {package}" + (", or pip install 'zaya_plugin[data]'" if package in DATA_EXTRA else "")
        fix = "use the environment that you train in" if package in ("torch", "megatron") else fix
        problem = f"requires the package {package}, which is not installed{_kept(workspace)}"
        raise ValueError(message(f"zaya data {name}", problem=problem, fix=fix)) from error
    except BrokenPipeError:  # `zaya data inspect ... | head`
        raise
    except (OSError, MemoryError) as error:
        text = of_the_machine(error, workspace.partial if workspace else ".", offline=True)
        kept = _kept(workspace)
        text = text or message(f"zaya data {name}", problem=str(error))
        raise ValueError(text + kept.replace("; ", " ", 1) + "." * bool(kept)) from error
    except KeyboardInterrupt:
        print(f"interrupted{_kept(workspace)}", file=sys.stderr)
        raise


def _kept(workspace: Workspace | None) -> str:
    """Return the end of a message: the state of an unfinished dataset, and how the same command continues."""
    if workspace is None or not os.path.isfile(workspace.plan_file):
        return ""
    untouched = f"; {workspace.output} was not touched"
    if not workspace.has_work():
        return f"{untouched}, and the same command starts from the beginning"
    return f"{untouched}, finished work is kept in {workspace.partial}, and the same command continues from there"
