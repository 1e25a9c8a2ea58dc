# SPDX-License-Identifier: Apache-2.0
"""Commands that read or write whole datasets and logs show how far they are, in a terminal and nowhere else."""

import fcntl
import os
import pty
import re
import shutil
import struct
import termios

import pytest

from tests.aegis.journals import ONE_CRASH, write
from zaya_plugin import cli


def stderr_of(monkeypatch, *words) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        code = cli.main([str(word) for word in words])
        terminal.flush()
        os.set_blocking(ours, False)
        text = os.read(ours, 65536).decode(errors="ignore")
    os.close(ours)
    assert code == 0, text
    return text


@pytest.mark.parametrize(
    ("title", "unit", "words"),
    [
        ("out", "B", "data check {prepared}"),
        ("pack", " documents", "data pack {prepared} --sequence-length 128 --output {output}"),
        ("read", "B", "data warm {prepared}"),
        ("copy", " tokens", "data bundle {prepared} {other} --output {output}"),
        ("journal", "B", "aegis report {run}"),
        ("logs", "B", "aegis explain {logs}"),
    ],
)
def test_a_bar_with_an_end(tmp_path, prepared, monkeypatch, capsys, title, unit, words):
    places = {"prepared": prepared, "output": tmp_path / "out", "run": write(tmp_path / "run", ONE_CRASH)}
    places["logs"] = tmp_path / "logs"
    places["logs"].mkdir()
    (places["logs"] / "rank0.log").write_text("RuntimeError: x\n" * 100)
    places["other"] = shutil.copytree(prepared, tmp_path / "other")
    words = words.format(**places).split()
    shown = stderr_of(monkeypatch, *words)
    assert re.search(rf"{title}: +0%\|", shown) and f"{unit}" in shown, shown
