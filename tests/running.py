# SPDX-License-Identifier: Apache-2.0
"""Running `zaya` as a user does, for the tests that need whole runs: real ranks, real files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin.aegis.collectors.rank_files import read_beats

# A ZAYA as small as all its parts allow: 4 layers, 16 experts and the skip class, 8 query and 2 key/value heads.
MICRO = (
    "experiment=cpu_demo",
    "optim=adamw",
    "model.hidden_size=64",
    "model.kv_channels=8",
    "model.moe_ffn_hidden_size=48",
    "model.router_hidden_size=16",
    "stage.seq_length=32",
    "stage.micro_batch_size=2",
    "stage.global_batch_size=8",
    "stage.train_iters=20",
    "stage.eval_interval=10",
    "stage.eval_iters=2",
    "optim.lr_warmup_iters=2",
    "checkpoint.save_interval=10",
    "checkpoint.keep_last=0",
    "logger.wandb=false",
    "logger.tensorboard=false",
    "logger.expert_load_interval=1",
)


# What a start is doing, by zaya_plugin/ground/phases.py: lines that only a slow or busy machine prints.
PHASES = re.compile(
    r"^zaya: (loading torch|composing the recipe|importing Megatron|connecting \d+ ranks|setting up Megatron|building "
    r"the model|opening the data|loading the checkpoint|first step; it|checking directories|starting [^\n]*: importing|"
    r"Megatron checks the recipe)[^\n]*\n",
    re.MULTILINE,
)


def without_phases(text: str) -> str:
    """Return the messages of a command without the lines about its phases."""
    return PHASES.sub("", text)


@dataclass
class Run:
    """What a finished `zaya` left behind."""

    code: int
    output: str
    run_dir: Path

    def steps(self) -> dict[int, dict]:
        """Rows of the training steps by step."""
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row for row in rows if "loss" in row}

    def validation(self) -> dict[int, float]:
        """Validation losses by step; of two at one step the later."""
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}


def command(*arguments: str) -> list[str]:
    """`zaya` of the interpreter that runs the tests."""
    return [sys.executable, "-m", "zaya_plugin.cli", *arguments]


def zaya(*arguments: str, timeout: float = 800, **environment: str) -> subprocess.CompletedProcess:
    """Run `zaya`; stdout and stderr are one text."""
    done = subprocess.run(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    done.stdout = without_phases(done.stdout)
    return done


def train(run_dir: Path, data: Path, *overrides: str, recipe=MICRO, check: bool = True) -> Run:
    """`zaya train` to its end; with `check` it has to succeed."""
    done = zaya("train", *recipe, f"run_dir={run_dir}", f"data.path={data}", *overrides)
    if check:
        assert done.returncode == 0, done.stdout
    return Run(done.returncode, done.stdout, Path(run_dir))


def train_and_signal(run_dir: Path, data: Path, number: int, at_step: int, *overrides: str, recipe=MICRO) -> Run:
    """`zaya train`, sent signal `number` once metrics.jsonl holds step `at_step`. SIGKILL hits the ranks too."""
    process = subprocess.Popen(
        command("train", *recipe, f"run_dir={run_dir}", f"data.path={data}", *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics, deadline = Path(run_dir) / "metrics.jsonl", time.monotonic() + 250
    while not (metrics.is_file() and f'"step": {at_step},' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)
    if number == signal.SIGKILL:
        for pid in descendants(process.pid):
            os.kill(pid, number)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    return Run(process.returncode, output, Path(run_dir))


def kill_supervised_rank(supervisor: subprocess.Popen, temporary: Path, rank: int, at_step: int, log: Path) -> None:
    """Send SIGKILL to a rank of `zaya aegis run` once it tells `at_step`. temporary: the supervisor's TMPDIR."""
    deadline, beat = time.monotonic() + 300, {}
    while beat.get("step", 0) < at_step:
        assert supervisor.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.02)
        beats = (read_beats(folder) for folder in temporary.glob("zaya_aegis_*"))
        beat = next((found[rank] for found in beats if rank in found), {})
    os.kill(beat["pid"], signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, deepest first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found[::-1]
