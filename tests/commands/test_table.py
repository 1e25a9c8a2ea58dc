# SPDX-License-Identifier: Apache-2.0
"""The table of commands: each one has a help with an example that can be typed, and old names print the present ones."""

import re
import shlex

import pytest

from zaya_plugin import cli
from zaya_plugin.commands.table import COMMANDS, RENAMED, below, overview, parser_of

LEAVES = [command for command, (function, _) in COMMANDS.items() if function]


def examples(text: str) -> list[str]:
    """Return the command lines in a help, without remarks, redirections and those with an ellipsis."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    commands = [re.split(r"\s{2,}|\s[>|&]+\s", line.strip())[0] for line in lines if line.startswith("  zaya ")]
    return [command for command in commands if "..." not in command and "<" not in command]


def test_the_first_page_shows_every_command_and_the_names_below_it():
    page = overview()
    tops = [command for command in COMMANDS if " " not in command]
    assert len(tops) == 13 and all(f"\n  zaya {command} " in page for command in tops)
    assert all(", ".join(below(command)) in page for command in tops if below(command))
    assert len(page.splitlines()) <= 40 and max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("command", LEAVES)
def test_every_help_has_an_example_that_is_read_and_explains_each_option(command, capsys, tmp_path, monkeypatch):
    """An option is a line that begins with its name; the explanation follows on that line or the next."""
    parser = parser_of(command)
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--help"])
    done = capsys.readouterr()
    assert (end.value.code, done.err) == (0, "")
    lines = [*done.out.splitlines(), ""]
    for line, following in zip(lines, lines[1:], strict=False):
        if line.startswith("  -"):
            assert re.split(r"\s{2,}", line.strip())[1:] or following.startswith(" " * 10), line
    own = [line for line in examples(done.out) if line.startswith(f"zaya {command} ")]
    assert own, "an example to type"
    (tmp_path / "my_recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    for line in own:
        options = parser.read(shlex.split(line, comments=True)[1 + len(command.split()) :])
        assert options.command.startswith(f"zaya {command}")


@pytest.mark.parametrize("command", LEAVES)
def test_the_first_recipe_of_a_help_composes(command):
    from zaya_plugin.config.compose import compose
    from zaya_plugin.run.stages import compose_curriculum

    parser = parser_of(command)
    if not parser.takes_recipe:
        return
    lines = [line for line in examples(parser.format_help()) if "experiment=" in line and "my_recipes" not in line]
    options = parser.read(shlex.split(lines[0])[1 + len(command.split()) :])
    whole = command == "curriculum" or getattr(options, "curriculum", False)
    (compose_curriculum if whole else compose)([*options.overrides, "data.path=nowhere"])


@pytest.mark.parametrize(
    ("words", "code"),
    [(["aegis", "explain", "--rule", "ring_timeout"], 0), (["aegis", "explain"], 0), (["checkpoint", "list", "x"], 2)],
)
def test_quick_examples_run(words, code, capsys):
    assert cli.main(words) == code


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("convert export runs/a --output b", "zaya checkpoint export runs/a --output b"),
        ("slurm --curriculum experiment=a -- --x", "zaya export slurm --curriculum experiment=a -- --x"),
        ("aegis lab --list", "make lab, in a checkout of the repository"),
        ("aegis --explain logs", "zaya aegis explain logs."),
        ("aegis preflight --output x", "zaya verify --nodes."),
        ("train --version", "zaya --version."),
        ("checkpoint warm runs/a", "zaya checkpoint verify runs/a."),
        ("eval runs/a --data --out=b.json", "--output=b.json"),
        ("aegis report runs/a --html b.html", "--output"),
        ("aegis run --dir runs/a -- true", "--output"),
        ("checkpoint roundtrip x --folder y", "TMPDIR=DIR in front of the command"),
        ("train experiment=cpu_demo --shell-completion install=bash", "zaya --completion bash"),
    ],
)
def test_an_old_name_prints_the_present_one(words, fix, capsys):
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert "has another name now" in error and fix in error and error.count("\n") == 1


def test_no_old_name_is_a_present_one():
    assert not {name.removeprefix("zaya ") for name in RENAMED} & {*COMMANDS}


def test_options_of_one_meaning_have_one_name():
    names = {name for command in LEAVES for name in parser_of(command)._option_string_actions}
    assert not names & {"--out", "--html", "--dir", "--folder", "--explain"}
    assert {"--json", "--output", "--dry-run"} < names
