# SPDX-License-Identifier: Apache-2.0
"""`--config-dir DIR`: a folder of the user's recipes, for all commands that compose one. Without Hydra."""

import os
from collections.abc import Iterable

from zaya_plugin.ground.errors import mistake

OPTIONS = ("--config-dir", "-cd")  # Hydra's names


def with_search_path(words: Iterable[str]) -> list[str]:
    """Return the words of a command in which `--config-dir DIR`, `--config-dir=DIR` and `-cd DIR` are overrides: DIR
    may hold a "=", and is then no override itself.
    """
    result, rest = [], iter(words)
    for word in rest:
        name, equals, folder = word.partition("=")
        result.append(search_path(folder if equals else next(rest, "")) if name in OPTIONS else word)
    return result


def search_path(folder: str) -> str:
    """Return the override that adds the recipes of `folder`. Raises ValueError if it does not exist."""
    if not os.path.isdir(folder):
        raise mistake(
            OPTIONS[0],
            folder,
            problem="no such directory",
            allowed="a folder with recipes, such as my_recipes/experiment/mine.yaml",
            fix="--config-dir my_recipes",
        )
    quoted = os.path.abspath(folder).replace("'", "\\'")
    return f"hydra.searchpath=['file://{quoted}']"
