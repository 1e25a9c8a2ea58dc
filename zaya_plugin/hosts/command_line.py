# SPDX-License-Identifier: Apache-2.0
"""Turn Megatron's arguments into words of its command line, by the parser of the installed Megatron.

A recipe's values are attributes of Megatron's namespace. An attribute may be set by a flag of another name or sense
(`apply_rope_fusion=False` is --no-rope-fusion). The words are taken from the parser and checked by parsing them again.

`zaya export megatron` runs this file as a program: `python -m zaya_plugin.hosts.command_line` reads the values as JSON
from stdin and prints the words as JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from megatron.training.arguments import add_megatron_arguments

from zaya_plugin import compat
from zaya_plugin.config.megatron_review import key_of
from zaya_plugin.ground.errors import message, mistake


def main() -> int:
    """Print the words for the values on stdin. For a mistake of the user print its message instead and return 2."""
    try:
        print(json.dumps(command_line(json.load(sys.stdin))))
    except ValueError as error:
        print(error)
        return 2
    return 0


def megatron_parser() -> argparse.ArgumentParser:
    """Return Megatron's own parser."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def command_line(values: Mapping[str, Any]) -> list[list[str]]:
    """Return one list of words an argument, sorted by name. A flag that has its default value gets no words.

    Raises:
        ValueError: Megatron does not know a name, or cannot express a value.
    """
    parser = megatron_parser()
    lines, missing = [], []
    for name, value in sorted(values.items()):
        actions = [action for action in parser._actions if action.dest == name]
        if not actions:
            missing.append(name)
            continue
        words = _words(actions, value)
        if words is None:
            raise mistake(
                key_of(name),
                value,
                problem="Megatron's command line cannot express this value",
                allowed=f"{actions[0].default!r} (the default)",
                fix=f"another value of {key_of(name)}",
            )
        if words:
            lines.append(words)
    if missing:
        problem = f"megatron.core {compat.core_version()} has no such argument"
        raise ValueError(
            "\n".join(
                message(key_of(name), values[name], problem=problem, fix=f"remove {key_of(name)}") for name in missing
            )
        )
    parsed = vars(parser.parse_args([word for words in lines for word in words]))
    for name, value in values.items():
        assert _plain(parsed[name]) == _plain(value), (name, parsed[name], value)
    return lines


def _words(actions: list[argparse.Action], value: Any) -> list[str] | None:
    """Return the words that give `value`; [] if none are needed, None if it cannot be expressed."""
    for action in actions:
        if value is None and action.default is None:
            return []
        option = _option(action)
        if isinstance(action, (argparse._StoreTrueAction, argparse._StoreFalseAction)):
            if action.const == value:
                return [option]
            if value in (True, False, None) and bool(action.default) == bool(value):
                return []
        elif isinstance(action, argparse.BooleanOptionalAction):
            return [option if value else _negative(action)]
        elif isinstance(value, (list, tuple)):
            return [option, *(str(item) for item in value)]
        elif value is not None and not isinstance(value, bool):
            return [option, str(value)]
    return None


def _option(action: argparse.Action) -> str:
    """Return the option that is spelled like the attribute, else the first one."""
    usual = "--" + action.dest.replace("_", "-")
    return usual if usual in action.option_strings else action.option_strings[0]


def _negative(action: argparse.BooleanOptionalAction) -> str:
    return next(option for option in action.option_strings if option.startswith("--no-"))


def _plain(value: Any) -> Any:
    """Return a list of one as its item and a flag that is off as None, which Megatron's validation treats alike."""
    if isinstance(value, (list, tuple)):
        return _plain(value[0]) if len(value) == 1 else [_plain(item) for item in value]
    return value or None


if __name__ == "__main__":
    sys.exit(main())
