# SPDX-License-Identifier: Apache-2.0
"""Checks of the words of a command that takes a recipe, and messages about words that cannot be part of one."""

import re
import sys
from collections.abc import Collection, Sequence

from zaya_plugin.config.messages import OTHER_NAMES, TO_CONTINUE, groups, nearest, schema
from zaya_plugin.config.train_help import GROUPS, options
from zaya_plugin.ground.errors import check_utf8, mistake, nearest_name

# Values of a group that Hydra does not read as a name.
NO_NAME = re.compile(r"|null|true|false|[+-]?[\d._]+(e[+-]?\d+)?|\[.*", re.IGNORECASE | re.DOTALL)


def check_flag(word: str, following: Sequence[str], flags: Collection[str]) -> None:
    """Raise ValueError if a word with dashes is not one of the command's options `flags`:
    `--experiment cpu_demo`, `--lr=1`.
    """
    option, equals, value = word.partition("=")
    if not word.startswith("--") or option in flags:
        return
    name = option.lstrip("-").replace("-", "_")
    default = TO_CONTINUE if name == "resume" else "<value>"
    value = (value if equals else next(iter(following), default)).lstrip("-")
    if name in schema() or name in groups() or name in GROUPS:
        raise mistake(word, problem="keys of recipes have no dashes", allowed="key=value", fix=f"{name}={value}")
    key = nearest(name)
    is_key = key is not None and (key.rpartition(".")[2] == name or name in OTHER_NAMES)
    fix = f"{key}={value}" if is_key else nearest_name(option, flags) or "--help"
    raise mistake(word, problem="no such option", allowed=f"key=value, {', '.join(sorted(flags))}", fix=fix)


def check_override(word: str) -> None:
    """Raise ValueError if a word is not `key=value`, or names a recipe that does not exist in its group."""
    key, equals, value = word.partition("=")
    check_utf8(word)
    if not equals and not word.startswith("~"):
        homes = [group for group in GROUPS if word in options(group)]
        close = nearest_name(word, options("experiment"))
        fix = (
            f"{homes[0]}={word}" if homes else f"experiment={close}" if close else f"{nearest(word) or '<key>'}=<value>"
        )
        raise mistake(
            word, problem="is not key=value", allowed=f"experiment={_listed('experiment')}, or a key", fix=fix
        )
    if not key.lstrip("+~"):
        raise mistake(word, problem="has no key before the =", allowed="key=value", fix=f"<key>{word.lstrip('+~')}")
    group = key.lstrip("+")
    if group in GROUPS and NO_NAME.fullmatch(value):
        fix = f"{group}={options(group)[0]}"
        raise mistake(group, value, problem="no such recipe", allowed=_listed(group), fix=fix)


def say_repeated(overrides: list[str]) -> None:
    """Print each key that the words of a command give twice with other values: the last one counts, so that a script's
    words can be followed by its user's.
    """
    values: dict[str, str] = {}
    for item in overrides:
        key, _, value = item.lstrip("+~").partition("=")
        if values.setdefault(key, value) != value:
            print(f"zaya: {key}={value}: was given before as {values[key]}; the last value counts", file=sys.stderr)
            values[key] = value


def _listed(group: str) -> str:
    return ", ".join(options(group))
