# SPDX-License-Identifier: Apache-2.0
"""tools/bootstrap.sh with a fake interpreter that records its arguments instead of downloading 5 GB.

What the fake stands in for is pip and venv alone; the stamp, the marker, the lock and the healing are the real
script's.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

FAKE = """\
#!/bin/sh
# Both the base interpreter and, copied, that of the environment.
case "$*" in
    --version) echo "Python 3.12.1" ;;
    "-m venv "*)
        echo venv >>"{log}"
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "#!$3/bin/python" >"$3/bin/pip" ;;
    "-m pip install"*" -e "*)
        echo install >>"{log}"
        echo "Collecting numpy"; echo "  Downloading torch-2.13.0-cp312.whl (900.1 MB)"; echo "Installing collected packages: numpy, torch"
        if [ -e "{root}/slow" ]; then trap 'exit 1' INT; sleep 0.5; fi
        if [ -e "{root}/killed" ]; then rm "{root}/killed"; kill -9 $PPID; exit 137; fi
        if [ -e "{root}/disk-full" ]; then mkdir -p "${{0%/bin/*}}/lib/python3.12/site-packages/torch-2.dist-info"; exit 1; fi
        if [ -e "{root}/offline" ]; then exit 3; fi
        touch "${{0%/*}}/zaya" && chmod +x "${{0%/*}}/zaya" ;;
    *"import sys, pip"*) [ ! -e "{root}/unsupported" ] ;;
esac
"""


class Checkout:
    def __init__(self, root: Path):
        self.root, self.log, self.repo = root, root / "log", root / "a checkout"
        self.repo.mkdir()
        shutil.copytree(REPO / "tools", self.repo / "tools")
        for name in ("constraints.txt", "setup.py", "pyproject.toml"):
            shutil.copy(REPO / name, self.repo)
        python = root / "bin" / "python3.12"
        python.parent.mkdir()
        python.write_text(FAKE.format(log=self.log, root=root))
        python.chmod(0o755)
        self.env = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(root / "home"), "ZAYA_PYTHON_PREFIXES": ""}

    def start(self) -> subprocess.Popen:
        script = self.repo / "tools" / "bootstrap.sh"
        return subprocess.Popen([script], env=self.env, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def setup(self) -> tuple[int, list[str], str]:
        """Run the set-up; return its status, the recorded calls of the fake, and the printed text."""
        self.log.write_text("")
        process = self.start()
        printed = process.communicate()[1]
        return process.returncode, self.log.read_text().split(), printed


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_progress_is_printed_and_a_second_call_does_nothing(checkout):
    status, asked, printed = checkout.setup()
    assert (status, asked) == (0, ["venv", "install"])
    steps = [re.sub(r"[0-9]+ s", "n s", line) for line in printed.splitlines()[2:]]
    download = "set-up: n s: Downloading torch-2.13.0-cp312.whl (900.1 MB)"
    assert steps == [download, "set-up: n s: unpacking all packages", "set-up: done in n s"]
    assert checkout.setup() == (0, [], "")


@pytest.mark.parametrize(
    "name", ["constraints.txt", "setup.py", "pyproject.toml", "tools/bootstrap.sh", "tools/find_python.sh"]
)
def test_a_change_installs_into_the_same_environment(checkout, name):
    checkout.setup()
    with (checkout.repo / name).open("a") as file:
        file.write("\n# changed\n")
    assert checkout.setup()[:2] == (0, ["install"])
    assert checkout.setup()[:2] == (0, [])


def test_killed_install_starts_over(checkout):
    (checkout.root / "killed").touch()
    assert checkout.setup()[:2] == (-9, ["venv", "install"])
    half = checkout.repo / ".venv" / "lib" / "half"
    half.mkdir(parents=True)
    status, asked, printed = checkout.setup()
    assert (status, asked) == (0, ["venv", "install"])
    assert "interrupted" in printed
    assert not half.exists()


def test_failed_install_keeps_the_environment_and_its_status(checkout):
    (checkout.root / "offline").touch()
    status, asked, printed = checkout.setup()
    assert (status, asked) == (3, ["venv", "install"])
    assert "pip failed (exit status 3)" in printed
    (checkout.root / "offline").unlink()
    assert checkout.setup()[:2] == (0, ["install"])


def test_half_unpacked_package_starts_over(checkout):
    (checkout.root / "disk-full").touch()
    assert checkout.setup()[:2] == (1, ["venv", "install"])
    (checkout.root / "disk-full").unlink()
    assert checkout.setup()[:2] == (0, ["venv", "install"])


def test_interrupt_starts_over(checkout):
    """Ctrl-C reaches the whole process group; pip answers it with an ordinary exit status of 1."""
    (checkout.root / "slow").touch()
    checkout.log.touch()
    process = checkout.start()
    while "install" not in checkout.log.read_text():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate()
    assert process.returncode in (130, -signal.SIGINT)
    assert checkout.setup()[:2] == (0, ["venv", "install"])


def test_failed_upgrade_is_not_taken_for_done(checkout):
    checkout.setup()
    (checkout.root / "offline").touch()
    (checkout.repo / "constraints.txt").write_text("torch==0\n")
    assert checkout.setup()[:2] == (3, ["install"])
    assert checkout.setup()[:2] == (3, ["install"])


def test_removed_base_interpreter_heals(checkout):
    checkout.setup()
    python = checkout.repo / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(checkout.root / "gone")
    assert checkout.setup()[:2] == (0, ["venv", "install"])
    assert checkout.setup()[:2] == (0, [])


def test_missing_console_script_heals(checkout):
    checkout.setup()
    (checkout.repo / ".venv" / "bin" / "zaya").unlink()
    assert checkout.setup()[:2] == (0, ["install"])


def test_environment_of_another_python_starts_over(checkout):
    checkout.setup()
    (checkout.repo / ".venv" / ".zaya-installed").unlink()
    (checkout.root / "unsupported").touch()
    assert checkout.setup()[:2] == (0, ["venv", "install"])


def test_moved_checkout_starts_over(checkout):
    checkout.setup()
    checkout.repo = checkout.repo.rename(checkout.root / "moved")
    assert checkout.setup()[:2] == (0, ["venv", "install"])


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock(1) there is no lock")
def test_two_at_once_install_once(checkout):
    (checkout.root / "slow").touch()
    first, second = checkout.start(), checkout.start()
    first.communicate(), second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert checkout.log.read_text().split() == ["venv", "install"]


def test_no_python_means_no_environment(checkout):
    (checkout.root / "bin" / "python3.12").unlink()
    bare = checkout.root / "bare"
    bare.mkdir()
    for name in ("sh", "sed", "head", "tail", "sort", "dirname", "cat", "cksum", "mkdir", "flock"):
        if found := shutil.which(name):
            (bare / name).symlink_to(found)
    checkout.env["PATH"] = str(bare)
    checkout.log.touch()
    status, asked, printed = checkout.setup()
    assert (status, asked) == (1, [])
    assert "No usable Python is installed" in printed
    assert not (checkout.repo / ".venv").exists()
