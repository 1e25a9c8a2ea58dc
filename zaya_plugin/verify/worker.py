# SPDX-License-Identifier: Apache-2.0
"""Runs lines in a process of their own, so that a crash or a hang of one is that line's result and not the command's
end.

    python -m zaya_plugin.verify.worker <cpu or auto> <folder>

It reads lines (line.Line) as JSON from stdin and writes one JSON object a line of text to stdout: {"ready": ...} once,
{"say": text} while it works, {"outcome": ...}. Everything that a line prints goes to stderr, the log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from zaya_plugin.ground.parent_death import die_with_parent
from zaya_plugin.verify import expected, guard
from zaya_plugin.verify.line import Line, Outcome, Setting

STARTS = 2  # that may fail; then no further line is tried
MARK = "ZAYA_VERIFY_WORKER"  # in the environment of the worker and of everything that it starts, for `guard`
READY_S = 300  # torch's import from a cold network file system, and the start of the devices
LOG_LINES = 30
# A launcher's variables would make the ranks that a line starts join that launcher.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorkerEnded(RuntimeError):
    """The process has ended, or was killed at its time limit. text: what is known about it."""


class Worker:
    """A process that runs lines; it is started again after it has ended.

    device: "cpu" or "auto". tick: called about once a second, and with every text that a line says.
    """

    def __init__(self, device: str, folder: Path, tick: Callable[[str | None], None] = lambda text: None):
        self.device, self.folder, self.tick = device, folder, tick
        self.log = folder / "worker.log"
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.guard: subprocess.Popen | None = None
        self.process: subprocess.Popen | None = None
        self.text = b""
        self.machine: dict = {}
        self.failed_starts = 0

    def run(self, line: Line) -> Outcome:
        """Return the outcome of `line`; a process that ends or takes too long is "wrong"."""
        if self.failed_starts == STARTS:
            return Outcome("skipped", f"no process of torch could be started, {STARTS} times")
        try:
            if self.process is None:
                self.failed_starts += 1
                self._start()
                self.failed_starts = 0
            self.process.stdin.write(json.dumps(asdict(line)).encode() + b"\n")
            outcome = Outcome(**self._read("outcome", line.limit_s))
        except (WorkerEnded, OSError) as error:
            self.close()
            return Outcome("wrong", str(error) or type(error).__name__, traceback=self._end_of_log())
        if outcome.traceback:  # after a failed kernel every later call of the process fails
            self.close()
        return outcome

    def close(self) -> None:
        """End the process and everything that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # also on a system without /proc
        if self.guard is not None:
            self.guard.stdin.close()
            if self.guard.wait():  # it was killed
                guard.end_marked(f"{MARK}={self.mark}")
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
            self.process.stdin.close()
            self.process.stdout.close()
        self.guard, self.process, self.text = None, None, b""

    def _start(self) -> None:
        self.guard = subprocess.Popen(
            [sys.executable, "-m", guard.__name__, f"{MARK}={self.mark}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zaya_plugin.verify.worker", self.device, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env={**environment(os.environ, self.device), MARK: self.mark},
                start_new_session=True,  # a terminal's Ctrl-C reaches only the command
                preexec_fn=die_with_parent,
            )
        self.machine = self._read("ready", READY_S)

    def _read(self, kind: str, limit_s: float) -> dict:
        """Return the next message of `kind`; raises WorkerEnded."""
        deadline = time.monotonic() + limit_s
        while True:
            while b"\n" in self.text:
                first, self.text = self.text.split(b"\n", 1)
                message = json.loads(first)
                if kind in message:
                    return message[kind]
                self.tick(message.get("say"))
            if time.monotonic() > deadline:
                os.kill(self.process.pid, signal.SIGUSR1)  # prints where it is to the log
                time.sleep(0.5)
                raise WorkerEnded(f"not done in {limit_s} s; the process was killed")
            if not select.select([self.process.stdout], [], [], min(1.0, limit_s))[0]:
                self.tick(None)
                continue
            read = os.read(self.process.stdout.fileno(), 2**16)
            if not read:
                code = self.process.wait()
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise WorkerEnded(f"the process {how}")
            self.text += read

    def _end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]) if self.log.exists() else ""


def environment(environ: Mapping[str, str], device: str) -> dict[str, str]:
    """Return `environ` for the process: without an outer launcher's variables, and on a CPU without devices."""
    kept = {name: value for name, value in environ.items() if name not in LAUNCHERS and not name.startswith("SLURM_")}
    if device == "cpu":
        kept |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return kept


def examine(line: Line, setting: Setting) -> Outcome:
    """Return the outcome of `line` in this process; an exception is "wrong", with its traceback."""
    module, _, function = line.function.partition(":")
    further = () if line.argument is None else (line.argument,)
    try:
        return getattr(importlib.import_module(module), function)(setting, *further)
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        reason = f"{type(error).__name__}: {first[0] if first else ''}"
        return Outcome("wrong", reason, traceback=traceback.format_exc())


def setting_of(device: str, folder: Path, say: Callable[[str], None]) -> Setting:
    """Return the setting of this machine. device: "cpu" or "auto"."""
    import platform

    import torch

    devices = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if not devices:
        return Setting("cpu", 0, f"CPU {platform.processor() or platform.machine()}", folder, say, device)
    properties = torch.cuda.get_device_properties(0)
    architecture = getattr(properties, "gcnArchName", "")  # of ROCm
    name = expected.named(
        properties.name, architecture, properties.multi_processor_count, properties.total_memory / 2**30
    )
    return Setting("cuda", devices, name, folder, say, device)


def main(argv: list[str]) -> int:
    faulthandler.register(signal.SIGUSR1)
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**message) -> None:
        channel.write(json.dumps(message, default=str) + "\n")

    setting = setting_of(argv[0], Path(argv[1]), lambda text: send(say=text))
    send(ready={"device": setting.device, "devices": setting.devices, "name": setting.name})
    for text in sys.stdin:
        line = Line(**json.loads(text))
        print(f"== {line.name}", file=sys.stderr, flush=True)
        send(outcome=asdict(examine(line, setting)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
