# SPDX-License-Identifier: Apache-2.0
"""Megatron arguments by name -> words of its command line, by the parser of the Megatron that is installed.

A recipe's values are attributes of Megatron's namespace, and an attribute may be set by a flag of another name or sense
(`apply_rope_fusion=False` is --no-rope-fusion). The parser knows which, so it is asked, and what it says is checked by
parsing the words again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.training.arguments import add_megatron_arguments


def megatron_parser() -> argparse.ArgumentParser:
    """Megatron's own parser."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def command_line(values: Mapping[str, Any]) -> list[list[str]]:
    """One list of words an argument, by name; what the parser's defaults say already is said again, but for flags.

    Raises:
        ValueError: Megatron does not know a name, or has no word for a value.
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
            raise ValueError(
                f"{name}={value!r}: Megatron has no word on its command line for it (default: {actions[0].default!r})"
            )
        if words:
            lines.append(words)
    if missing:
        raise ValueError(f"no Megatron argument is called {', '.join(missing)} in the Megatron that is installed")
    parsed = vars(parser.parse_args([word for words in lines for word in words]))
    for name, value in values.items():
        assert _plain(parsed[name]) == _plain(value), (name, parsed[name], value)
    return lines


def _words(actions: list[argparse.Action], value: Any) -> list[str] | None:
    """Words that give `value`; [] if none are needed, None if there are none."""
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
    """The option that is spelled like the attribute, else the first long one."""
    usual = "--" + action.dest.replace("_", "-")
    return usual if usual in action.option_strings else action.option_strings[0]


def _negative(action: argparse.BooleanOptionalAction) -> str:
    return next(option for option in action.option_strings if option.startswith("--no-"))


def _plain(value: Any) -> Any:
    """Lists of one as their item, and a flag that is off as None: so Megatron's validation takes them."""
    if isinstance(value, (list, tuple)):
        return _plain(value[0]) if len(value) == 1 else [_plain(item) for item in value]
    return value or None
