# SPDX-License-Identifier: Apache-2.0
"""A parser of options whose mistakes are one line with what to type instead."""

import argparse
import re
from collections.abc import Iterator

from zaya_plugin.ground.errors import mistake, nearest_name


class OptionParser(argparse.ArgumentParser):
    """argparse's parser; a mistake raises ValueError and names the option that was probably meant.

    word_option: what a word too many was probably meant to follow, as in `zaya generate runs/mine 'Once upon'`.
    """

    def __init__(self, *positional, word_option: str = "", **named):
        super().__init__(*positional, **named)
        self.word_option = word_option

    def error(self, message: str) -> None:
        """Raise a mistake in place of printing the usage."""
        fix = f"{self.prog} --help"
        if unknown := re.fullmatch(r"unrecognized arguments: (\S+)( .*)?", message, re.DOTALL):
            option, equals, value = unknown[1].partition("=")
            if not option.startswith("-"):
                word = message.partition(": ")[2]
                fix = f"{self.word_option} {word!r}" if self.word_option else fix
                raise mistake(word, problem="one word too many", fix=fix)
            known = sorted({*_long_options(self)})
            close = nearest_name(option, known)
            fix = f"{close}{equals}{value}" if close else fix
            raise mistake(option, problem="no such option", allowed=", ".join(known), fix=fix)
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            raise mistake(missing[1], problem="was not given", fix=fix)
        raise mistake(self.prog, problem=message, fix=fix)


def _long_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the long options of a parser and of the commands below it."""
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _long_options(below)
