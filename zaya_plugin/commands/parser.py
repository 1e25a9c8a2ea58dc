# SPDX-License-Identifier: Apache-2.0
"""The parser of every command, and `command`, which makes a function one. A mistake is one message with what to type
instead; the words of a recipe, with --config-dir, are read in one way wherever a command takes one.
"""

import argparse
import functools
import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zaya_plugin.commands.table import RENAMED
from zaya_plugin.config.config_dir import OPTIONS, with_search_path
from zaya_plugin.config.paths import expanded_words
from zaya_plugin.config.words import check_flag, check_override, say_repeated
from zaya_plugin.ground.errors import mistake, nearest_name
from zaya_plugin.ground.option_numbers import MOST_STEPS, whole_number

Option = tuple[tuple[str, ...], str, dict[str, Any]]


def option(*names: str, group: str = "", **settings: Any) -> Option:
    """Return a row of a Parser: the arguments of argparse's add_argument. group: heading of the row in the help."""
    return names, group, settings


class Parser(argparse.ArgumentParser):
    """The options of `zaya <command>`.

    run: carries out the command: takes the options and returns the exit code, None for 0.
    options: rows of `option`. recipe: whether the words of a recipe are taken, as options.overrides.
    datasets: help of datasets that may be given in place of a recipe, as options.datasets.
    bare: option -> its value where none follows it behind a "=".
    word_option: what a word too many was probably meant to follow, as in `zaya generate runs/mine 'Once upon'`.
    behind_dashes: metavar of the words behind `--`, which become options.behind_dashes.
    whole_help: returns a help in place of argparse's.
    imports_large_packages: `run` does, and then calls `process.end_on_interrupt` itself.
    """

    def __init__(
        self,
        command: str,
        run: Callable[[argparse.Namespace], int | None],
        description: str,
        examples: str,
        *options: Option,
        recipe: bool = False,
        datasets: str = "",
        word_option: str = "",
        behind_dashes: str = "",
        bare: Mapping[str, object] | None = None,
        imports_large_packages: bool = False,
        whole_help: Callable[[], str] | None = None,
    ):
        super().__init__(
            f"zaya {command}",
            usage=f"zaya {command} [options] -- {behind_dashes} ..." if behind_dashes else None,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.run, self.word_option, self.behind_dashes = run, word_option, behind_dashes
        self.format_help = whole_help or self.format_help
        self.imports_large_packages, self.bare = imports_large_packages, dict(bare or {})
        self.takes_recipe, self.takes_datasets = recipe or bool(datasets), bool(datasets)
        groups: dict[str, Any] = {"": self}
        for names, group, settings in options:
            if group not in groups:
                groups[group] = self.add_argument_group(group)
            groups[group].add_argument(*names, **settings)
        if self.takes_recipe:
            keys = "experiment=<name>, <group>=<option> and recipe keys; `zaya train --help` lists them"
            self.add_argument(
                "overrides",
                nargs="+" if datasets else "*",
                metavar="DATASET | key=value" if datasets else "key=value",
                help=f"{datasets}; or a recipe: {keys}" if datasets else keys,
            )
            self.add_argument(
                *OPTIONS, metavar="DIR", help="folder with your own recipes, as my_recipes/experiment/mine.yaml"
            )

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options of `words`; raises ValueError for a mistake."""
        end = words.index("--") if self.behind_dashes and "--" in words else len(words)
        typed, behind = expanded_words(words[:end]), list(words[end + 1 :])
        for word in typed:
            name, equals, value = word.partition("=")
            if present := RENAMED.get(f"{self.prog} {name}"):
                raise mistake(
                    name,
                    problem="has another name now",
                    fix=f"{present}{equals}{value}" if present == "--output" else present,
                )
        words = [f"{word}={self.bare[word]}" if word in self.bare else word for word in typed]
        if self.takes_recipe and (any(map(_is_override, words)) or not self.takes_datasets):
            words = with_search_path(words)
            for position, word in enumerate(words):
                check_flag(word, words[position + 1 :], self._long_options())
        options = self.parse_intermixed_args(words)
        options.command, options.behind_dashes = shlex.join([*self.prog.split(), *typed]), behind
        if self.takes_datasets and not any(map(_is_override, options.overrides)):
            options.datasets, options.overrides = options.overrides, []
            if options.config_dir is not None:
                raise mistake(
                    "--config-dir", options.config_dir, problem="requires a recipe", fix=f"{self.prog} DATASET"
                )
        elif self.takes_recipe:
            options.datasets = []
            for word in options.overrides:
                check_override(word)
            say_repeated(options.overrides)
        return options

    def _long_options(self) -> list[str]:
        return sorted(name for name in self._option_string_actions if name.startswith("--"))

    def error(self, message: str) -> None:
        """Raise a mistake in place of printing the usage."""
        fix = f"{self.prog} --help"
        if unknown := re.fullmatch(r"unrecognized arguments: (\S+)( .*)?", message, re.DOTALL):
            name, equals, value = unknown[1].partition("=")
            if not name.startswith("-"):
                word = message.partition(": ")[2]
                raise mistake(
                    word, problem="one word too many", fix=f"{self.word_option} {word!r}" if self.word_option else fix
                )
            known = self._long_options()
            close = nearest_name(name, known)
            raise mistake(
                name,
                problem="no such option",
                allowed=", ".join(known),
                fix=f"{close}{equals}{value}" if close else fix,
            )
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            raise mistake(missing[1].removesuffix(", key=value"), problem="was not given", fix=fix)
        if wrong := re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL):
            raise mistake(wrong[1], problem=wrong[2], fix=fix)
        raise mistake(self.prog, problem=message, fix=fix)


def command(name: str, *options: Option, **settings: Any) -> Callable[[Callable], Callable[[], Parser]]:
    """Make a function the command `zaya <name>`: its module then has a function that returns the Parser under its name.

    The function takes the options and returns the exit code, None for 0. Its docstring is the help: the paragraphs
    before "examples:" stand above the options, the others below. options, settings: those of Parser.
    """

    def decorate(run: Callable[[argparse.Namespace], int | None]) -> Callable[[], Parser]:
        description, heading, examples = (inspect.getdoc(run) or "").partition("examples:\n")
        return functools.partial(Parser, name, run, description.strip(), heading + examples, *options, **settings)

    return decorate


# Rows that several commands share.
STEP = option("--step", type=whole_number(0, MOST_STEPS), help="this checkpoint; default: the newest")
TOKENIZER = option("--tokenizer", metavar="DIR", help="directory with tokenizer.json, for data without manifest")
QUIET = option("--quiet", action="store_true", help="no summary; problems are still reported")
DRY_RUN = option("--dry-run", action="store_true", help="print whether and what would run, and stop")
VERBOSE = option("--verbose", action="store_true", help="with --dry-run: everything")


def _is_override(word: str) -> bool:
    return re.match(r"[~+]*[\w./@]+=", word) is not None and not os.path.exists(word)
