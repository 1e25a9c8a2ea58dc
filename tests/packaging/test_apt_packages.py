# SPDX-License-Identifier: Apache-2.0
"""tools/apt_packages.sh and .ci/run with dpkg-query, apt-get, id and make replaced by programs that write down their
arguments.
"""

import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


class Debian:
    def __init__(self, root: Path):
        self.root, self.log = root, root / "log"
        self.log.touch()
        self.list = root / "packages.txt"
        self.list.write_text("# a comment\nclang-19\n\nlld-19  # the linker\n")
        self.program("dpkg-query", f'grep -qx "$3" {root}/installed && printf "install ok installed"')
        self.program("id", "echo 0")
        self.program("apt-get", f'echo "$*" >>{self.log}; [ ! -e {root}/apt-fails ]')

    def program(self, name: str, body: str) -> None:
        file = self.root / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def run(self, *installed: str, option: str = "--install", ci: str = "") -> tuple[int, list[str], str]:
        (self.root / "installed").write_text("".join(f"{name}\n" for name in installed))
        env = {"PATH": f"{self.root / 'bin'}:/usr/bin:/bin", "CI": ci}
        command = [REPO / "tools" / "apt_packages.sh", *([option] if option else []), self.list]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, self.log.read_text().splitlines(), done.stderr


@pytest.fixture
def debian(tmp_path) -> Debian:
    return Debian(tmp_path)


def test_all_there(debian):
    assert debian.run("clang-19", "lld-19", ci="true") == (0, [], "")


def test_empty_list(debian):
    debian.list.write_text("# nothing\n")
    assert debian.run(ci="true") == (0, [], "")


def test_without_the_option_nothing_is_installed(debian):
    status, asked, printed = debian.run("clang-19", option="")
    assert (status, asked) == (0, [])
    assert printed.count("\n") == 1
    assert "are skipped: lld-19." in printed and "`make tools` installs them" in printed
    assert debian.run("clang-19", option="", ci="true")[:2] == (0, ["install -y -qq --no-install-recommends lld-19"])


def test_root_installs_only_what_is_missing(debian):
    status, asked, printed = debian.run("clang-19")
    assert (status, asked) == (0, ["install -y -qq --no-install-recommends lld-19"])
    assert printed == "set-up: installing Debian packages (a download of about 200 MB): lld-19\n"


def test_not_root_names_them_in_one_line(debian):
    debian.program("id", "echo 1000")
    status, asked, printed = debian.run()
    assert (status, asked) == (1, [])
    assert printed.count("\n") == 1
    assert "sudo apt-get install clang-19 lld-19" in printed
    assert debian.run(option="", ci="true")[0] == 1


def test_stale_lists_are_updated_and_a_failure_counts(debian):
    (debian.root / "apt-fails").touch()
    status, asked, printed = debian.run()
    assert status == 1
    assert [line.split()[0] for line in asked] == ["install", "update"]
    assert "could not install: clang-19 lld-19" in printed


@pytest.mark.parametrize("failing, status", [("none", 0), ("demo", 2), ("lint", 2), ("test", 2)])
def test_ci_run_is_three_commands_and_ends_at_the_first_that_fails(debian, failing, status):
    debian.program("make", f'echo "$* CI=$CI $PWD" >>{debian.log}; [ "$*" != {failing} ] || exit 2')
    env = {"PATH": f"{debian.root / 'bin'}:/usr/bin:/bin"}
    assert subprocess.run([REPO / ".ci" / "run"], env=env, cwd=debian.root).returncode == status
    commands = ["demo", "lint", "test"]
    commands = commands[: commands.index(failing) + 1 if failing in commands else None]
    assert debian.log.read_text().splitlines() == [f"{name} CI=true {REPO}" for name in commands]
