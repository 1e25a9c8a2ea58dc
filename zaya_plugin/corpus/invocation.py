# SPDX-License-Identifier: Apache-2.0
"""Parse and run the `zaya data` commands: types of options, recipes on the command line, errors as one message."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

from zaya_plugin.config.config_dir import OPTIONS, search_path
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.ground.errors import message, of_the_machine
from zaya_plugin.ground.option_numbers import number, real, whole

DATA_EXTRA = ("tokenizers", "zstandard", "pyarrow")  # of pyproject.toml
USER_ERROR = 2  # as of every command of zaya


def command_parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser whose help keeps the lines of its description and examples."""
    return argparse.ArgumentParser(
        f"zaya data {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def size_up_to(most: int) -> Callable[[str], int]:
    """Return a type for argparse: a size whose amount is held in memory."""
    return number(_bytes, f"a size from 1 to {most // 10**6}M bytes", lambda value: 0 < value <= most)


def _bytes(text: str) -> int:
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    return int(real(text[:-1]) * factor) if factor > 1 else whole(text)


# Types for argparse: bytes from 4000000, 4M or 1.5G (powers of ten); a share.
size = number(_bytes, "a size: a number of bytes, or one with K, M, G or T, such as 4M", lambda value: value > 0)
fraction = number(real, "a fraction from 0 (no split) to below 1", lambda value: 0 <= value < 1)


def add_recipe_options(parser: argparse.ArgumentParser, datasets: str = "") -> None:
    """Add the arguments that `is_recipe` and `recipe_of` read. datasets: help of datasets in place of a recipe, if
    allowed.
    """
    recipe = "a recipe as for zaya train: experiment=NAME [key=value ...]"
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="DATASET | KEY=VALUE" if datasets else "KEY=VALUE",
        help=f"{datasets}; or {recipe}" if datasets else recipe,
    )
    parser.add_argument(*OPTIONS, metavar="DIR", help="further recipes, as for zaya train")


def is_recipe(args: argparse.Namespace) -> bool:
    """Return whether the positional arguments are overrides of a recipe."""
    return any(re.match(r"[~+]*[\w./@]+=", source) and not os.path.exists(source) for source in args.sources)


def recipe_of(args: argparse.Namespace):
    """Return the Recipe of the command line, composed as `zaya train` does, with its place in the data."""
    # Here, so that the commands without a recipe start without Hydra.
    from zaya_plugin.config.compose import compose
    from zaya_plugin.handover.data_places import with_consumed

    folder = [] if args.config_dir is None else [search_path(args.config_dir)]
    return with_consumed(compose([*args.sources, *folder]))


def command(
    name: str,
    parser: Callable[[], argparse.ArgumentParser],
    action: Callable[[argparse.Namespace, Workspace | None], None],
) -> Callable[[list[str] | None], int]:
    """Return the `main` of a command: it parses its arguments and returns the status of `run_command`.

    Args:
        action: takes the arguments and the workspace of --output, None without this option.
    """

    def main(argv: list[str] | None = None) -> int:
        args = parser().parse_args(argv)
        workspace = Workspace(args.output, args.overwrite) if getattr(args, "output", None) else None
        return run_command(name, lambda: action(args, workspace), workspace)

    return main


def run_command(name: str, action: Callable[[], None], workspace: Workspace | None) -> int:
    """Run an action; return 0 done, 2 failed with a message on stderr, 130 interrupted.

    Args:
        workspace: where the action builds a dataset that the same command continues after a failure.
    """

    def kept() -> str:
        if workspace is None or not os.path.isfile(workspace.plan_file):
            return ""
        untouched = f"; {workspace.output} was not touched"
        if not workspace.has_work():
            return f"{untouched}, and the same command starts anew"
        return f"{untouched}, finished work is kept in {workspace.partial}, and the same command continues from there"

    try:
        action()
        return 0
    except ValueError as error:
        text = str(error)
    except BrokenProcessPool:
        killed = "a worker process was killed, most often because memory ran out"
        text = message("--workers", problem=killed + kept(), fix="fewer --workers or a smaller --max-document-bytes")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("zaya_plugin"):
            raise
        package = error.name.partition(".")[0]
        fix = f"pip install {package}" + (", or pip install 'zaya_plugin[data]'" if package in DATA_EXTRA else "")
        text = message(
            f"zaya data {name}",
            problem=f"needs the package {package}, which is not installed{kept()}",
            fix="use the environment that you train in" if package in ("torch", "megatron") else fix,
        )
    except BrokenPipeError:  # `zaya data inspect ... | head`
        raise
    except (OSError, MemoryError) as error:
        text = of_the_machine(error, workspace.partial if workspace else ".", offline=True)
        text = text or message(f"zaya data {name}", problem=str(error))
        text += kept().replace("; ", " ", 1) + "." * bool(kept())
    except KeyboardInterrupt:
        print(f"interrupted{kept()}", file=sys.stderr)
        return 130
    print(f"zaya data {name}: error: {text}", file=sys.stderr)
    return USER_ERROR
