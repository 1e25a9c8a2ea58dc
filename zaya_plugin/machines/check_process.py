# SPDX-License-Identifier: Apache-2.0
"""Runs checks in a process of their own, so that a crash or a hang of one is that check's result and not the command's
end.

    python -m zaya_plugin.machines.check_process <cpu or auto> <folder> <storage> <file descriptor>

It receives checks (checks.Check) from a connection and sends messages: ("ready", the machine) once, ("progress", text)
while a check runs, ("outcome", fields of an Outcome). Everything that a check prints goes to the log.
"""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zaya_plugin.bench.results import CPU_NAME, device_name
from zaya_plugin.ground import processes
from zaya_plugin.ground.parent_death import die_with_parent
from zaya_plugin.machines.checks import NEEDS, PACKAGE, Check, Outcome, Setting, end_of

MAX_FAILED_STARTS = 2  # then no further check is tried
MARK = "ZAYA_CHECKS"  # in the environment of the process and of everything that it starts, for its guard
READY_S = 300  # torch's import from a cold network file system, and the start of the devices
# A launcher's variables would make the ranks that a check starts join that launcher.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessEnded(RuntimeError):
    """The process has ended, or was killed at its time limit."""


class CheckProcess:
    """A process that runs checks; it is started again after it has ended.

    device: "cpu" or "auto". storage: Setting.storage. tick: called about once a second, and with every text of a
    check's progress.
    """

    def __init__(
        self, device: str, folder: Path, storage: Path, tick: Callable[[str | None], None] = lambda text: None
    ):
        self.device, self.folder, self.storage, self.tick = device, folder, storage, tick
        self.log = folder / "checks.log"
        self.log.touch()
        self.mark = f"{MARK}={os.getpid()}-{time.time_ns()}"
        self.guard: subprocess.Popen | None = None
        self.process: subprocess.Popen | None = None
        self.machine: dict[str, Any] = {}
        self.failed_starts = 0

    def run(self, check: Check) -> Outcome:
        """Return the outcome of `check`; a process that ends or takes too long is "wrong"."""
        if self.failed_starts == MAX_FAILED_STARTS:
            return Outcome("skipped", f"no process of torch could be started, {MAX_FAILED_STARTS} times")
        try:
            if self.process is None:
                self.failed_starts += 1
                self._start()
                self.failed_starts = 0
            self.channel.send(check)
            outcome = Outcome(**self._receive("outcome", check.limit_s))
        except (ProcessEnded, OSError) as error:
            self.close()
            return Outcome(
                "wrong", str(error) or type(error).__name__, traceback=end_of(self.log.read_text(errors="replace"))
            )
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
                processes.kill_all(self.mark, processes.GUARD_SECONDS)
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
            self.channel.close()
        self.guard, self.process = None, None

    def _start(self) -> None:
        self.guard = processes.start_guard(self.mark)
        self.channel, other_end = multiprocessing.Pipe()
        words = [self.device, str(self.folder), str(self.storage), str(other_end.fileno())]
        with open(self.log, "ab") as log, other_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{PACKAGE}check_process", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[other_end.fileno()],
                env=environment(os.environ, self.device) | dict([self.mark.split("=")]),
                start_new_session=True,  # a terminal's Ctrl-C reaches only the command
                preexec_fn=die_with_parent,
            )
        self.machine = self._receive("ready", READY_S)

    def _receive(self, kind: str, limit_s: float) -> dict[str, Any]:
        """Return the next message of `kind`; raises ProcessEnded."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if not self.channel.poll(min(1.0, limit_s)):
                self.tick(None)
                continue
            try:
                message, content = self.channel.recv()
            except (EOFError, ConnectionError):
                code = self.process.wait()
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise ProcessEnded(f"the process {how}") from None
            if message == kind:
                return content
            self.tick(content)
        os.kill(self.process.pid, signal.SIGUSR1)  # prints where it is to the log
        time.sleep(0.5)
        raise ProcessEnded(f"not done in {limit_s} s; the process was killed")


def environment(environ: Mapping[str, str], device: str) -> dict[str, str]:
    """Return `environ` for the process: without an outer launcher's variables, and on a CPU without devices."""
    kept = {name: value for name, value in environ.items() if name not in LAUNCHERS and not name.startswith("SLURM_")}
    if device == "cpu":
        kept |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return kept


def run_all(
    commands: Sequence[Sequence[str]],
    logs: Sequence[Path],
    seconds: float,
    together: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[int | None]:
    """Run commands at the same time; return their exit codes, None for those that were killed: after `seconds`, or,
    with `together`, when another one has failed.
    """
    started: list[subprocess.Popen] = []
    deadline = time.monotonic() + seconds
    try:
        for words, log in zip(commands, logs, strict=True):
            with open(log, "ab") as out:
                pipes = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
                started.append(subprocess.Popen(words, **pipes, start_new_session=True, preexec_fn=die_with_parent))
        while None in (codes := [process.poll() for process in started]) and time.monotonic() < deadline:
            if together and any(codes):
                break
            time.sleep(0.05)
        return codes
    finally:
        for process in started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def examine(check: Check, setting: Setting) -> Outcome:
    """Return the outcome of `check` in this process; an exception is "wrong", with its traceback."""
    name = check.function if "." in check.function else PACKAGE + check.function
    further = () if check.argument is None else (check.argument,)
    try:
        if check.needs and (missing := NEEDS[check.needs](setting)):
            return Outcome("skipped", missing)
        return pkgutil.resolve_name(name)(setting, *further)
    except Exception as error:
        first = str(error).strip().splitlines()[:1]
        reason = f"{type(error).__name__}: {first[0] if first else ''}"
        return Outcome("wrong", reason, traceback=traceback.format_exc())


def setting_of(device: str, folder: Path, say: Callable[[str], None], storage: Path) -> Setting:
    """Return the setting of this machine; without a torch that can be imported, that of its CPU. device: "cpu" or
    "auto".
    """
    try:
        import torch

        devices = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    except Exception:  # the checks that need torch name the error
        devices = 0
    if not devices:
        return Setting("cpu", 0, CPU_NAME, folder, say, device, storage)
    return Setting("cuda", devices, device_name(torch.device("cuda", 0)), folder, say, device, storage)


def main(argv: list[str]) -> int:
    faulthandler.register(signal.SIGUSR1)
    channel = Connection(int(argv[3]))
    setting = setting_of(argv[0], Path(argv[1]), lambda text: channel.send(("progress", text)), Path(argv[2]))
    channel.send(("ready", {"device": setting.device, "devices": setting.devices, "name": setting.name}))
    with contextlib.suppress(EOFError):
        while check := channel.recv():
            print(f"== {check.name}", file=sys.stderr, flush=True)
            outcome = json.dumps(asdict(examine(check, setting)), default=str)
            channel.send(("outcome", json.loads(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
