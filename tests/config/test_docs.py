# SPDX-License-Identifier: Apache-2.0
"""Pages made of data are up to date (recipes, verification), and the `zaya train` lines of docs/recipes.md compose."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml

from zaya_plugin.config.compose import compose
from zaya_plugin.config.keys_table import keys_table, with_table
from zaya_plugin.config.train_help import GROUPS, options

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
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


def test_the_page_of_evidence_is_made_of_its_data():
    spec = importlib.util.spec_from_file_location("verification", ROOT / "tools" / "verification.py")
    verification = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(verification)
    evidence = yaml.safe_load((ROOT / "docs" / "evidence.yaml").read_text())
    page = (ROOT / "docs" / "verification.md").read_text()
    assert verification.page(page, evidence) == page, "run: python tools/verification.py"
    assert len(evidence["claims"]) > 30 < len(evidence["runs"])
    row = evidence["claims"][0]
    for wrong, message in (
        ({**row, "where": "CPU"}, "Allowed: the keys claim, device"),
        ({**row, "device": ""}, "no device"),
    ):
        with pytest.raises(ValueError, match=message):
            verification.tables({**evidence, "claims": [wrong]})


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
