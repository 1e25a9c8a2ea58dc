# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment of a start: exit code 130 and one line. Invalid bytes, and a current directory that was removed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import without_phases
from zaya_plugin import cli
from zaya_plugin.commands import process

# Sends itself SIGINT at the first audit event of a kind whose first argument ends in a text: an event and no time.
PROGRAM = """\
import os, signal, sys
kind, text = os.environ["AT"].split()
def hook(event, arguments):
    global kind
    if event == kind and str(arguments[0]).endswith(text):
        kind = ""
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
from zaya_plugin.cli import main
sys.exit(main())
"""
TRAIN = "train experiment=cpu_demo"
QUICK = [("import zaya_plugin.ground.errors", TRAIN), ("open train.yaml", TRAIN)]
SLOW = [
    *((f"import {name}", TRAIN) for name in ("tempfile", "hydra", "omegaconf", "antlr4", "zaya_plugin.run.launch")),
    *((f"open {name}", TRAIN) for name in ("cpu_demo.yaml", "zaya_tiny.yaml")),
    *(("subprocess.Popen python", TRAIN), ("import hydra", "curriculum experiment=cpu_demo")),
    *(("subprocess.Popen python", "doctor"), ("import numpy", "data prepare --input stdlib --output x")),
    *(
        ("import zaya_plugin.checkpoint.reading", command)
        for command in ("generate none --prompt x", "eval none", "checkpoint export x --output y")
    ),
    ("import locale", "--version"),
    ("import zaya_plugin.aegis.journal", "aegis status x"),
]


@pytest.mark.parametrize(("moment", "words"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_an_interrupt_during_a_start_is_one_line(tmp_path, environment, moment, words):
    program = tmp_path / "zaya"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), *words.split()],
        cwd=tmp_path,
        env={**environment, "AT": moment},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, without_phases(done.stderr)) == (130, "zaya: stopped by SIGINT\n")
    assert [path.name for path in tmp_path.iterdir()] == ["zaya"]


@pytest.mark.parametrize(
    "words", ["train experiment=cpu_demo", "doctor", "data prepare --input stdlib --output x", "checkpoint list x"]
)
def test_a_current_directory_that_was_removed_is_one_message(tmp_path, monkeypatch, capsys, words):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(words.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith("zaya: current directory") and "it was removed" in told and told.count("\n") == 1
    assert cli.main(["--help"]) == 0


def test_a_checkout_that_hides_the_installed_package_is_one_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "zaya_plugin").mkdir()
    (tmp_path / "zaya_plugin" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor"]) == 2
    problem = (
        f"zaya: current directory={tmp_path}: its zaya_plugin/ would be imported, and not the installed zaya_plugin."
    )
    printed = capsys.readouterr().err
    assert printed.startswith(problem) and printed.endswith(
        f"Fix: cd to another one, or `pip install -e {tmp_path}`.\n"
    )

    # In a checkout with a copy installed, `python -m zaya_plugin.cli` is of the checkout. -S: nothing is installed.
    program = "from zaya_plugin.commands import process; process.require_directory()"
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=root, capture_output=True, text=True)
    assert f"current directory={root}: its zaya_plugin/ would be imported" in done.stderr
    monkeypatch.chdir(root)  # which is installed as editable
    process.require_directory()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "experiment=cpu_demo", "run_dir=r\udcff"], "run_dir=r\\udcff: holds bytes that are not UTF-8"),
        (["export", "slurm", "experiment=cpu_demo", "name=\udcff"], "name=\\udcff: holds bytes that are not UTF-8"),
        pytest.param(
            ["generate", "model", "--prompt", "a\udcff"],
            "--prompt=a\\udcff: holds bytes that are not UTF-8",
            marks=pytest.mark.slow,  # imports torch
        ),
        (["checkpoint", "list", "r\udcff"], "RUN=r\\udcff: no such checkpoint: the path does not exist"),
        (["\udcff"], "zaya \\udcff: no such command"),
    ],
)
def test_words_that_are_not_utf_8_are_one_message(capfd, words, told):
    assert cli.main(words) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"zaya: {told}") and error.count("\n") == 1
