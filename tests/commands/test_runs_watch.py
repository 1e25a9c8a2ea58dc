# SPDX-License-Identifier: Apache-2.0
"""`zaya runs watch` in a pseudo-terminal, and its texts for windows of several sizes."""

import fcntl
import importlib.util
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.aegis.journals import ONE_CRASH, write
from tests.runs.test_run_data import ODD_LINES
from zaya_plugin import cli
from zaya_plugin.ground.lock import Lock
from zaya_plugin.runs.follow import Follower
from zaya_plugin.runs.run_data import read_run

MAIN = """
import sys
from zaya_plugin import cli
from zaya_plugin.commands import live
live.SECONDS = 0.05
sys.exit(cli.main(["runs", "watch", sys.argv[1]]))
"""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
SCREEN_ON, SCREEN_OFF, HOME = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H"


@pytest.fixture(autouse=True)
def plotille():
    if importlib.util.find_spec("plotille") is None:
        reason = "plotille is not installed: pip install 'zaya_plugin[terminal]'"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def line(step, **values):
    row = {"step": step, "loss": 2 + 8 / step, "lr": 1e-3, "grad_norm": 0.5, "step_s": 0.5, "tokens_per_s": 1e6}
    row |= {"mfu": 0.43, "expert_imbalance": 1.5, "expert_imbalance_worst_layer": 3.0, "eta_s": 120.0}
    return json.dumps(row | values) + "\n"


def make(folder, steps=50, recipe="stage: {train_iters: 60}\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe)
    text = "".join(map(line, range(1, steps + 1))) + json.dumps({"step": steps, "valid_loss": 2.5}) + "\n"
    (folder / "metrics.jsonl").write_text(text)
    (folder / "logs").mkdir(exist_ok=True)
    return folder


class Terminal:
    """The command in a pseudo-terminal; `text`: all that it has written."""

    def __init__(self, run, columns, rows, **variables):
        self.main, side = pty.openpty()
        self.size(columns, rows)
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        command = [sys.executable, "-c", MAIN, str(run)]
        environ = clean | {"TERM": "xterm-256color"} | variables
        streams = dict(stdin=side, stdout=side, stderr=side, start_new_session=True)
        self.process = subprocess.Popen(command, env=environ, **streams)
        os.close(side)
        self.text, self.seen = "", 0

    def size(self, columns, rows):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, part):
        """Read up to `part`, behind the part before."""
        deadline = time.monotonic() + 60
        while (at := self.text.find(part, self.seen)) < 0:
            assert time.monotonic() < deadline, (part, self.text[-2000:])
            try:
                self.text += os.read(self.main, 65536).decode(errors="ignore")
            except OSError:  # the command has ended
                raise AssertionError((part, self.text[-2000:])) from None
        self.seen = at + len(part)

    def frames(self):
        """The lines of each frame of the live screen, without control sequences."""
        live = self.text.partition(SCREEN_ON)[2].partition(SCREEN_OFF)[0]
        return [[CONTROL.sub("", one).rstrip() for one in frame.split("\r\n")] for frame in live.split(HOME)[1:]]


def test_a_small_window_a_resize_a_truncated_line_and_the_end(tmp_path):
    """From before the run's start to its end, which ends the command."""
    run = tmp_path / "mine"
    terminal = Terminal(run, 40, 10, NO_COLOR="1")
    terminal.read_until("the run has not begun")
    run.mkdir()
    with Lock.acquire([run / "run.lock"], ValueError):
        make(run)
        terminal.read_until("mine: running, step 50 of 60, 2 min 00 s")
        with open(run / "metrics.jsonl", "a") as file:
            file.write(line(51)[:25])
            file.flush()
            terminal.read_until("step 50 of 60")
            file.write(line(51)[25:])
        terminal.read_until("step 51 of 60")
        make(tmp_path / "resumed", 40)
        (tmp_path / "resumed" / "metrics.jsonl").replace(run / "metrics.jsonl")  # as sinks.JsonLines on a resume
        terminal.read_until("step 40 of 60")
        small = len(terminal.frames())
        terminal.size(100, 30)
        terminal.read_until("-|---------|")
        with open(run / "metrics.jsonl", "a") as file:
            file.write(line(60, eta_s=0.0))
        terminal.read_until("step 60 of 60")
    terminal.read_until(SCREEN_OFF)
    terminal.read_until("mine: finished, step 60 of 60\r\nloss 2.1333  validation 2.5000  lr 1.00e-03  grad 0.50")
    assert terminal.process.wait(60) == 0
    frames = terminal.frames()
    assert (
        max(map(len, frames[: small - 1])) == 10
        and max(len(one) for frame in frames[: small - 1] for one in frame) <= 40
    )
    assert "⠒" in "".join(frames[small - 2]) and "no checkpoint" in frames[small - 2]
    assert max(len(frame) for frame in frames) == 30 and not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.text)


def test_ctrl_c_gives_the_terminal_back(tmp_path):
    run = make(tmp_path / "mine")
    with Lock.acquire([run / "run.lock"], ValueError):
        terminal = Terminal(run, 60, 16)
        terminal.read_until("running, step 50")
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.read_until(SCREEN_OFF)
        terminal.read_until("worst layer 3.00x")
    assert terminal.process.wait(60) == 0 and "Traceback" not in terminal.text
    assert "\x1b[32mmine: running, step 50" in terminal.text, "in green"


def test_a_run_that_has_not_begun_is_no_success(tmp_path, capsys):
    assert cli.main(["runs", "watch", str(tmp_path / "mine"), "--once"]) == 1
    assert capsys.readouterr().out == "mine: the run has not begun\n"


def test_without_a_terminal_it_is_shown_once(tmp_path, capsys):
    run = write(make(tmp_path / "mine"), ONE_CRASH[:-1])
    os.utime(run / "aegis" / "journal.jsonl", (0, 0))
    (run / "checkpoints" / "iter_0000030").mkdir(parents=True)
    (run / "checkpoints" / "iter_0000030" / "manifest.json").write_text("{}")
    (run / "run.lock.1").write_text("")
    os.utime(run / "run.lock.1", (0, 0))
    assert cli.main(["runs", "watch", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine: crashed, step 50 of 60" and "checkpoint of step 30" in lines
    assert lines[-1] == "step 40: fault: sigkill on n2, restart"
    assert cli.main(["runs", "watch", str(tmp_path / "no" / "run")]) == 2


@pytest.mark.parametrize("size", [(40, 10), (20, 4), (200, 60), (30, 1)])
@pytest.mark.parametrize("rows", [[], [1], [1, 2], [float("nan"), float("inf")], [1, float("nan"), 3]])
def test_texts_fit_their_windows(tmp_path, size, rows):
    from zaya_plugin.commands.runs_watch import screen

    run = make(tmp_path / "mine", 0)
    (run / "metrics.jsonl").write_text("".join(line(step, loss=loss) for step, loss in enumerate(rows, 1)) or "{}\n")
    text = screen(read_run(run), *size).plain.splitlines()
    assert 0 < len(text) <= size[1] and max(map(len, text)) <= size[0] and text[0].startswith("mine: ")


def test_rows_of_impossible_steps_are_left_out_and_numbers_out_of_range_shown(tmp_path, capsys):
    run = make(tmp_path / "mine", 7)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(ODD_LINES)
    assert [*read_run(run).metrics.columns["step_s"][0]] == [*range(1, 10)]
    for words, shown in (
        (["watch", str(run), "--once"], "step 9 of 60\nloss inf "),
        (["list", str(tmp_path)], " 9/60 "),
    ):
        cli.main(["runs", *words])
        assert shown in capsys.readouterr().out


def test_a_long_file_is_read_from_its_end(tmp_path, monkeypatch):
    from zaya_plugin.runs import follow

    run = make(tmp_path / "mine", 2000)
    size = (run / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(follow, "MOST_BYTES", size // 2)
    steps = Follower(run / "metrics.jsonl").update().columns["loss"][0]
    assert steps[-1] == 2000 and 950 < steps[0] < 1050 and len(steps) == 2001 - steps[0]


def test_a_missing_library_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("zaya_plugin.ground.packages.find_spec", lambda name: None if name == "plotille" else name)
    assert cli.main(["runs", "watch", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "plotille" in error and "Fix: pip install 'zaya_plugin[terminal]'" in error
