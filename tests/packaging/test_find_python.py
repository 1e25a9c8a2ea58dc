# SPDX-License-Identifier: Apache-2.0
"""tools/find_python.sh on machines made up of a PATH, a HOME and fake interpreters, and once on the real one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
# sed, sort; on some machines also a python3, so the fakes come first and tests allow for it
BARE_PATH = "/usr/bin:/bin"


class Machine:
    """A root folder with its own copy of tools/, an empty home, and no system prefixes."""

    def __init__(self, root: Path):
        self.root, self.home, self.bin = root, root / "home", root / "bin"
        for folder in (self.home, self.bin, root / "repo"):
            folder.mkdir()
        shutil.copytree(TOOLS, root / "repo" / "tools")
        # A PATH of its own: what the script calls and nothing else, so that no interpreter of the real machine shows.
        for name in ("sh", "sed", "head", "tail", "sort", "dirname"):
            (self.bin / name).symlink_to(shutil.which(name, path=BARE_PATH))
        self.env = {"HOME": str(self.home), "PATH": str(self.bin), "ZAYA_PYTHON_PREFIXES": str(root / "prefix")}

    def python(self, path: str, version: str, probe: str = "exit 0") -> str:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Python {version}"; else {probe}; fi\n')
        file.chmod(0o755)
        return str(file)

    def find(self, **env: str) -> subprocess.CompletedProcess:
        script = self.root / "repo" / "tools" / "find_python.sh"
        return subprocess.run([str(script)], env=self.env | env, capture_output=True, text=True, cwd=self.root)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "bin/python3.12",
        "bin/python3",
        "bin/python",
        "home/.pyenv/versions/3.12.1/bin/python3.12",
        "home/.local/share/uv/python/cpython-3.12.9-linux-x86_64-gnu/bin/python3.12",
        "prefix/bin/python3.12",
        "prefix/python312/bin/python3.12",
        "prefix/python/3.12.4/bin/python3.12",
    ],
)
def test_every_place_is_searched(machine, path):
    machine.python("bin/python2", "2.7.18")
    expected = machine.python(path, "3.12.1")
    assert machine.find().stdout == expected + "\n"


def test_old_default_and_dead_shim_do_not_hide_pyenv(machine):
    machine.python("bin/python3", "3.11.7")
    shim = machine.bin / "python3.12"  # what pyenv leaves on PATH for versions that are installed and not selected
    shim.write_text('#!/bin/sh\necho "pyenv: python3.12: command not found" >&2\nexit 127\n')
    shim.chmod(0o755)
    expected = machine.python("elsewhere/versions/3.12.1/bin/python3.12", "3.12.1")
    assert machine.find(PYENV_ROOT=str(machine.root / "elsewhere")).stdout == expected + "\n"


def test_312_anywhere_beats_313_on_path(machine):
    machine.python("bin/python3.13", "3.13.0")
    expected = machine.python("home/.pyenv/versions/3.12.1/bin/python3.12", "3.12.1")
    assert machine.find().stdout == expected + "\n"


def test_313_where_no_312(machine):
    machine.python("bin/python3", "3.14.0")
    expected = machine.python("home/.pyenv/versions/3.13.0/bin/python3.13", "3.13.0")
    assert machine.find().stdout == expected + "\n"


def test_unusable_312_is_passed_over(machine):
    machine.python("bin/python3.12", "3.12.4", probe="echo 'has no venv module that works'; exit 1")
    expected = machine.python("bin/python3.13", "3.13.0")
    assert machine.find().stdout == expected + "\n"


def test_own_environment_is_no_candidate(machine):
    machine.python("repo/.venv/bin/python3.12", "3.12.1")
    expected = machine.python("bin/python3.13", "3.13.0")
    path = f"{machine.root}/repo/.venv/bin:{machine.bin}"
    assert machine.find(PATH=path).stdout == expected + "\n"


def test_places_with_spaces(machine):
    expected = machine.python("my pythons/versions/3.12.1/bin/python3.12", "3.12.1")
    assert machine.find(PYENV_ROOT=str(machine.root / "my pythons")).stdout == expected + "\n"


def test_message_names_what_was_tried_and_what_to_install(machine):
    old = machine.python("bin/python3", "3.11.7")
    new = machine.python("bin/python", "3.14.0")
    bare = machine.python(
        "home/.pyenv/versions/3.12.4/bin/python3.12", "3.12.4", probe="echo 'has no venv module that works'; exit 1"
    )
    result = machine.find()
    assert (result.returncode, result.stdout) == (1, "")
    for line in (
        f"  {old}: Python 3.11.7",
        f"  {new}: Python 3.14.0",
        f"  {bare}: Python 3.12.4, but it has no venv module that works",
    ):
        assert result.stderr.splitlines().count(line) == 1
    assert "CPython 3.12 or 3.13" in result.stderr
    assert "astral.sh/uv/install.sh | sh && ~/.local/bin/uv python install 3.12\n" in result.stderr, (
        "this machine has no tool"
    )
    assert "ZAYA_PYTHON=" in result.stderr


@pytest.mark.parametrize(
    ("tools", "line"),
    [
        ({"uv": "exit 0", "apt-cache": "exit 0"}, "uv python install 3.12"),
        ({"pyenv": "exit 0"}, "pyenv install 3.12"),
        ({"brew": "exit 0"}, "brew install python@3.12"),
        ({"apt-cache": "exit 0"}, "sudo apt-get install python3.12 python3.12-venv"),
        ({"apt-cache": "exit 0", "id": "echo 0"}, "apt-get install python3.12 python3.12-venv"),
        ({"apt-cache": '[ "$2" = python3.13 ]'}, "sudo apt-get install python3.13 python3.13-venv"),
        ({"dnf": "exit 0"}, "sudo dnf install python3.12"),
        (
            {"apt-cache": "exit 1", "dnf": "exit 1"},
            "curl -LsSf https://astral.sh/uv/install.sh | sh && ~/.local/bin/uv python install 3.12",
        ),
    ],
)
def test_the_command_to_type_is_that_of_this_machine(machine, tools, line):
    for name, body in tools.items():
        (machine.bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (machine.bin / name).chmod(0o755)
    assert f"\n  {line}\nor name" in machine.find().stderr


def test_message_where_there_is_nothing(machine):
    result = machine.find()
    assert result.returncode == 1
    assert "  no python, python3, python3.12 or python3.13\n" in result.stderr


def test_explicit_choice(machine):
    machine.python("bin/python3.12", "3.12.1")
    chosen = machine.python("mine/python", "3.13.2")
    assert machine.find(ZAYA_PYTHON=chosen).stdout == chosen + "\n"
    old = machine.python("mine/old", "3.10.2")
    refused = machine.find(ZAYA_PYTHON=old)
    assert refused.returncode == 1
    assert f"ZAYA_PYTHON={old} cannot be used" in refused.stderr
    assert "Python 3.10.2" in refused.stderr


@pytest.mark.skipif(
    sys.version_info[:2] not in {(3, 12), (3, 13)}, reason="runs in an environment that the set-up did not make"
)
def test_probe_accepts_the_real_interpreter(machine):
    real = os.path.realpath(sys.executable)
    assert machine.find(ZAYA_PYTHON=real).stdout == real + "\n"
