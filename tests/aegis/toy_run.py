# SPDX-License-Identifier: Apache-2.0
"""Supervised runs of a small program in place of the training: real agents, a real decider, no torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.aegis.journals import lines
from zaya_plugin.aegis import link
from zaya_plugin.ground import processes

PATIENCE = 180.0  # seconds of a test on a busy machine; the product's own times are asserted from the journal
# A rank: steps of 20 ms with heartbeats; it saves every 10 steps and continues from there, as a training does. What it
# does at which step comes from a file, so that a test can break the first attempt alone.
RANK = """
import json, os, signal, subprocess, sys, time
home, steps = sys.argv[1], int(sys.argv[2])
rank, folder = int(os.environ["RANK"]), os.environ["ZAYA_AEGIS_DIR"]
attempt = int(os.environ["ZAYA_AEGIS_GENERATION"])
plan = json.load(open(home + "/plan.json"))
state = f"{home}/state{rank}"
step = int(open(state).read()) if os.path.exists(state) else 0
ended = []
signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
file = os.open(f"{folder}/rank{rank}.json", os.O_CREAT | os.O_WRONLY, 0o600)
while (step < steps or os.path.exists(home + "/goes_on")) and not ended:
    time.sleep(0.02)
    step += 1
    row = {"pid": os.getpid(), "phase": "train", "step": step, "time": time.time(), "step_seconds": 0.02, "loss": 1.0}
    os.pwrite(file, (json.dumps(row).ljust(255) + "\\n").encode(), 0)
    for at, who, when, what, value in plan:
        if (at, who) == (step, rank) and when in (0, attempt):
            if what == "exit":
                print("the rank leaves with", value, flush=True)
                sys.exit(value)
            if what == "kill":
                os.kill(os.getpid(), value)
            if what == "print":
                print(value, flush=True)
            if what == "spawn":  # a grandchild that ignores SIGTERM
                code = "import os,signal,sys,time; signal.signal(15, signal.SIG_IGN); "
                code += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
                subprocess.Popen([sys.executable, "-c", code, value], start_new_session=True)
    if step % 10 == 0:
        open(state + ".new", "w").write(str(step))
        os.replace(state + ".new", state)
print("rank", rank, "leaves at step", step, {name: os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK")}, flush=True)
sys.exit(75 if ended else 0)
"""

# A launcher of another program, as primus-cli or `zaya curriculum`: started once on a node, it starts the ranks by itself.
LAUNCHER = """
import os, subprocess, sys
here, node = int(os.environ["GPUS_PER_NODE"]), int(os.environ["NODE_RANK"])
world = str(here * int(os.environ["NNODES"]))
ranks = []
for local in range(here):
    named = {"RANK": str(node * here + local), "LOCAL_RANK": str(local), "WORLD_SIZE": world}
    ranks.append(subprocess.Popen(sys.argv[1:], env={**os.environ, **named}))
for local, rank in enumerate(ranks):
    if code := rank.wait():  # as torchrun says it
        print(f"failed (exitcode: {code}) local_rank: {local} (pid: {rank.pid}) of binary: python", flush=True)
sys.exit(1 if any(rank.returncode for rank in ranks) else 0)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class ToyRun:
    """One supervised run below `home`, of several "nodes" on this machine; ends all of it at the end of a `with`.

    steps: of the run; None: its ranks go on until `release`, so that a slow machine does not end it too early.
    """

    def __init__(
        self, home: Path, plan: list = (), steps: int | None = 40, ranks: int = 2, options: tuple[str, ...] = ()
    ):
        self.home, self.steps, self.ranks, self.options = home, steps or 0, ranks, options
        self.folder = home / "aegis"
        self.port = free_port()
        self.nodes: dict[str, subprocess.Popen] = {}
        (home / "plan.json").write_text(json.dumps(list(plan)))
        (home / "kernel").touch()
        if steps is None:
            (home / "goes_on").touch()
        self.environment = {**os.environ, "XDG_STATE_HOME": str(home / "state_home"), "TMPDIR": str(home)}

    def __enter__(self) -> ToyRun:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.nodes.values():
            process.kill()
            process.wait()
        for folder in self.home.glob("zaya_aegis_*"):
            processes.kill_all(processes.ranks_mark(folder), 2.0)

    def start(self, *names: str, nodes: int = 1, spares: int = 0, out: int | None = None) -> ToyRun:
        """Start `zaya aegis run` for these nodes; the first one of all gets the decider. out: an open file."""
        for name in names:
            if self.nodes:
                self.wait_for(lambda: self.rows("decider"))
            command = [sys.executable, "-m", "zaya_plugin.cli", "aegis", "run", "--node", name, "--nodes", str(nodes)]
            command += ["--spares", str(spares), "--decider", f"127.0.0.1:{self.port}", "--output", str(self.folder)]
            command += [
                "--ranks-per-node",
                str(self.ranks),
                "--start",
                "rank",
                "--kernel-log",
                str(self.home / "kernel"),
            ]
            launcher = [sys.executable, "-c", LAUNCHER] if "node" in self.options else []
            command += [*self.options, "--", *launcher, sys.executable, "-c", RANK, str(self.home), str(self.steps)]
            with open(self.home / f"{name}.out", "ab") as told:
                self.nodes[name] = subprocess.Popen(
                    command,
                    stdout=told if out is None else out,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    start_new_session=True,
                )
        return self

    def release(self) -> None:
        """Let the ranks of a run without a number of steps end."""
        (self.home / "goes_on").unlink()

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of the journal."""
        path = self.folder / "journal.jsonl"
        return lines(path, kind) if path.exists() else []

    def wait_for(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Wait until `condition` is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.02)
        return value

    def step_of(self, node: str, rank: int) -> int:
        """The last step of a rank."""
        return (self.beat(node, rank) or {}).get("step", 0)

    def beat(self, node: str, rank: int) -> dict[str, Any] | None:
        for path in self.home.glob(f"zaya_aegis_*_{node}/rank{rank}.json"):
            try:
                return json.loads(path.read_text())
            except (OSError, ValueError):
                pass
        return None

    def end(self, name: str | None = None, seconds: float = PATIENCE) -> int:
        """Wait for the end of a node's command, of the first one's by default; return its exit code."""
        name = name or next(iter(self.nodes))
        try:
            return self.nodes[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.told()) from None

    def told(self) -> str:
        """All that was printed, for a failing test."""
        texts = [path.read_text(errors="replace") for path in sorted(self.home.glob("*.out"))]
        return "\n".join([*texts, *(json.dumps(row)[:300] for row in self.rows())])

    def child(self, name: str, module: str) -> int:
        """The process id of a node's agent or decider."""
        return self.wait_for(lambda: self._child(name, module))

    def _child(self, name: str, module: str) -> int | None:
        parent = self.nodes[name].pid
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            if f"zaya_plugin.aegis.{module}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        return None


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def secret() -> bytes:
    return b"s" * link.SECRET_BYTES
