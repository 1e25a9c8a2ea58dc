# SPDX-License-Identifier: Apache-2.0
"""docs/recipes.md: its table is the schema's, and its `zaya train` lines compose."""

import re
import shlex
from pathlib import Path

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.keys_table import keys_table, with_table
from zaya_plugin.config.train_help import GROUPS, options

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
COMMANDS = re.findall(r"^(?:srun )?zaya train (experiment=.*)$", PAGE.read_text(), re.MULTILINE)


def test_the_table_of_keys_is_the_schemas():
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python -m zaya_plugin.config.keys_table docs/recipes.md"
    assert "| `optim.lr` | `0.0006` | highest learning rate | `--lr` |\n" in keys_table()
    assert "| `data.path` | must be given |" in keys_table()


def test_every_option_of_every_group_is_named():
    page = PAGE.read_text()
    for group in GROUPS:
        for option in options(group):
            assert f"`{option}`" in page, f"{group}={option}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_the_page_composes(command):
    words = [word for word in shlex.split(command, comments=True) if "=" in word and not word.startswith("-")]
    if "-m" in command.split() or "--config-dir" in command.split():
        words = [word for word in words if "," not in word and "mine" not in word]
    compose(words)


def test_the_page_has_commands():
    assert len(COMMANDS) >= 6
