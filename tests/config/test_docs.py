# SPDX-License-Identifier: Apache-2.0
"""Pages made of data are up to date (recipes, verification), and the `zaya train` lines of docs/recipes.md compose."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tools.keys_table import keys_table, with_table
from zaya_plugin.config.compose import compose
from zaya_plugin.config.train_help import GROUPS, options

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipes.md"
COMMANDS = re.findall(r"^(?:srun )?zaya train (experiment=.*)$", PAGE.read_text(), re.MULTILINE)


def test_the_table_of_keys_is_the_schemas():
    page = PAGE.read_text()
    assert with_table(page) == page, "run: python -m tools.keys_table docs/recipes.md"
    assert "| `optim.lr` | `0.0006` | highest learning rate | `--lr` | warns |\n" in keys_table()
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


@pytest.fixture
def verification():
    spec = importlib.util.spec_from_file_location("verification", ROOT / "tools" / "verification.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_evidence_is_made_of_its_data(verification):
    """Marks of age are not compared: commits that change neither page nor data change them too."""
    evidence, text = yaml.safe_load(verification.DATA.read_text()), verification.PAGE.read_text()
    assert verification.page(text, evidence, {}) == text.replace(verification.MARK, ""), (
        "run: python tools/verification.py"
    )
    assert len(evidence["claims"]) > 30 < len(evidence["runs"])
    row = evidence["claims"][0]
    for wrong, message in (
        ({**row, "where": "CPU"}, "its keys must be claim, device"),
        ({**row, "device": ""}, "no device"),
        ({**row, "covers": ["hip_ops"]}, "covers needs a commit"),
        ({**row, "commit": "bebc6f1", "covers": ["hip_ops/gone"]}, "hip_ops/gone, which does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            verification.tables({**evidence, "claims": [wrong]}, {})


def test_a_claim_that_is_older_than_its_code_is_marked(verification, tmp_path, monkeypatch):
    def commit(file: str, text: str) -> str:
        (tmp_path / file).write_text(text)
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", text], check=True)
        return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()

    def row(at: str) -> dict:
        return {"claim": "fast", "device": "CPU", "commit": at, "figure": "1", "covers": ["kernel.py"]}

    def older(at: str) -> dict:
        return verification.older_rows({"claims": [row(at)], "runs": []})

    monkeypatch.setattr(verification, "ROOT", tmp_path)
    (tmp_path / ".git-blame-ignore-revs").write_text("")
    assert older("1234567") == {"fast": None}, "there is no history yet"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    first = commit("kernel.py", "x = 1")
    commit("other.py", "y = 1")
    assert older(first) == {}
    second = commit("kernel.py", "x = 2")
    assert older(first) == {"fast": 1} and older(f"{first[:7]}; {second[:7]}") == {}
    third = commit("kernel.py", "x = 2  # two")
    assert older(second) == {"fast": 1}
    (tmp_path / ".git-blame-ignore-revs").write_text(f"# a comment\n{third}\n")
    assert older(second) == {} and older("1234567") == {"fast": None}
    evidence = {"claims": [row(first)], "runs": []}
    assert f"| {first}{verification.MARK} |" in verification.tables(evidence, older(first))
    assert verification.MARK not in verification.tables(evidence, {"fast": None})


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110
