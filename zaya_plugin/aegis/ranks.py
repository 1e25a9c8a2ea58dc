# SPDX-License-Identifier: Apache-2.0
"""The processes of an attempt on this node: their start, their logs, their stacks, and their ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from zaya_plugin.aegis import link
from zaya_plugin.aegis.collectors import tail
from zaya_plugin.aegis.collectors.rank_files import FlightRecorder, read_beats
from zaya_plugin.aegis.collectors.tail import Tail, stamp
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.diagnose.rules import Reader, Rules
from zaya_plugin.aegis.protocol import Start
from zaya_plugin.aegis.settings import Settings
from zaya_plugin.checkpoint.run_lock import AEGIS_GENERATION, AEGIS_RUN
from zaya_plugin.ground import processes
from zaya_plugin.ground.errors import STACKS_SIGNAL
from zaya_plugin.ground.parent_death import GRACE, LAUNCHER_PID, PR_SET_PDEATHSIG

LOG_SECONDS = 0.1  # between two reads of the logs
LOG_BYTES = 2**20  # of a line without its end that are kept
LAST_LOG_SECONDS = 2.0  # for the last lines of a process that has ended
DUMP_SECONDS = 2.0  # for stacks and flight recorders
UNKILLABLE_SECONDS = 5.0  # after SIGKILL; a process that then still exists survives it
LIBC = ctypes.CDLL(None)
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
OUTER = (
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)


@dataclass
class Process:
    """One started command. rank: of the process, or of the node. log: its output.

    ended: the time of its end. whole: whether its log was read to the end after that. code: once both are known.
    """

    rank: int
    popen: subprocess.Popen
    log: Tail
    reader: Reader
    part: bytes = b""
    ended: float | None = None
    whole: bool = False
    code: int | None = None


class Ranks:
    """The processes of one attempt. report: called with each evidence in their logs."""

    def __init__(
        self, settings: Settings, secret: bytes, folder: Path, rules: Rules, report: Callable[[Evidence], None]
    ):
        self.settings, self.secret, self.folder, self.rules, self.report = settings, secret, folder, rules, report
        self.processes: list[Process] = []
        self._logs: queue.Queue[tuple[Process, bytes, bool]] = queue.Queue(maxsize=16)  # bytes, and whether the last
        self._read_now = threading.Event()

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes if process.code is None]

    def signal(self, number: int) -> None:
        processes.send([process.popen.pid for process in self.running], number)

    def kill(self, between: Callable[[], None] = lambda: None) -> list[int]:
        """Kill all processes of this folder's ranks, and return those that survive. between: called again and again."""
        return processes.kill_all(processes.ranks_mark(self.folder), UNKILLABLE_SECONDS, between)

    def start(self, message: Start) -> None:
        """Start the command for each rank, or once. Raises OSError; those that were started then run."""
        self.processes = []
        processes.OWN_CHILDREN.clear()
        for path in self.folder.iterdir():  # heartbeats of the attempt before
            path.unlink()
        logs = self.settings.folder / f"attempt_{message.generation}"
        logs.mkdir(parents=True, exist_ok=True)
        command = runnable(message.command)
        for local, number in enumerate(self.numbers(message)):
            log = logs / f"{self.settings.start_per}{number}.log"
            with open(log, "ab+") as out:
                popen = subprocess.Popen(
                    command,
                    env=self.environment(message, local, number),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=end_with_agent,
                )
                output = Tail(log, os.dup(out.fileno()))  # read on where a rotation of logs renames the file
            processes.OWN_CHILDREN.add(popen.pid)
            rank = number if self.settings.start_per == "rank" else None
            reader = Reader(self.rules, "rank", self.settings.node, rank)
            self.processes.append(Process(number, popen, output, reader))

    def numbers(self, message: Start) -> list[int]:
        """Return the numbers of this node's processes: of its ranks, or of the node."""
        if self.settings.start_per == "node":
            return [message.node_rank]
        return [*range(message.first_rank, message.first_rank + self.settings.ranks_per_node)]

    def environment(self, message: Start, local: int, number: int) -> dict[str, str]:
        local_ranks = self.settings.ranks_per_node
        variables = {name: value for name, value in os.environ.items() if name not in OUTER}
        variables |= {
            "MASTER_ADDR": message.address,
            "MASTER_PORT": str(message.port),
            processes.AEGIS_FOLDER: str(self.folder),
            AEGIS_GENERATION: str(message.generation),
            AEGIS_RUN: link.fingerprint(self.secret),
            "TORCH_FR_BUFFER_SIZE": variables.get("TORCH_FR_BUFFER_SIZE", "2000"),
            GRACE: variables.get(GRACE, "inf"),
        }
        if self.settings.start_per == "rank":
            world = message.nodes * local_ranks
            variables |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)}
            variables |= {"LOCAL_WORLD_SIZE": str(local_ranks), LAUNCHER_PID: str(os.getpid())}
        else:
            variables |= {"NNODES": str(message.nodes), "NODE_RANK": str(number), "GPUS_PER_NODE": str(local_ranks)}
        if message.turn:
            for name in VISIBLE:
                visible = [item for item in variables.get(name, "").split(",") if item]
                devices = visible or [str(device) for device in range(local_ranks)]
                turn = message.turn % len(devices)
                variables[name] = ",".join(devices[turn:] + devices[:turn])
        return variables

    def follow_logs(self) -> None:
        """Begin to read the logs, in a thread: a hung file server cannot delay heartbeats."""
        threading.Thread(target=self._read_logs, name="logs", daemon=True).start()

    def poll(self) -> list[Process]:
        """Report the evidence in new lines, and return the processes whose ends are new."""
        self._take_logs()
        ended = []
        for process in self.running:
            now = time.monotonic()
            if process.ended is None and process.popen.poll() is not None:
                process.ended = now
                self._read_now.set()
            if process.ended is not None and (process.whole or now - process.ended > LAST_LOG_SECONDS):
                process.code = process.popen.returncode
                ended.append(process)
        processes.reap()
        return ended

    def _read_logs(self) -> None:
        while True:
            full = False
            for process in [process for process in self.processes if not process.log.closed]:
                ended, data = process.ended is not None, b""
                with contextlib.suppress(OSError):  # its disk fails
                    data = process.log.read()
                full |= len(data) >= tail.AT_ONCE
                last = ended and len(data) < tail.AT_ONCE
                if last:
                    process.log.close()
                if data or last:
                    self._logs.put((process, data, last))
            if not full:
                self._read_now.wait(LOG_SECONDS)
                self._read_now.clear()

    def _take_logs(self) -> None:
        """Report the evidence in new lines, a part at a time."""
        for _ in range(self._logs.maxsize):
            try:
                process, data, last = self._logs.get_nowait()
            except queue.Empty:
                return
            if not any(process is item for item in self.processes):  # of the attempt before
                continue
            process.whole |= last
            if process.rank == 0 and data:
                _show(data)
            lines = (process.part + data).split(b"\n")
            process.part = b"" if last else lines.pop()[-LOG_BYTES:]
            now = time.time()
            for line in lines:
                if evidence := process.reader.read(line, now):
                    at = stamp(line[:200].decode(errors="replace"), now)
                    for item in evidence:
                        self.report(replace(item, time=at))

    def dump(self, logs: Path, recorder: FlightRecorder, while_waiting: Callable[[], None]) -> None:
        """Ask the ranks for stacks and flight recorders, and keep them with the logs.

        Only a process that names itself in a heartbeat knows the signal: it would end others, such as a shell around
        the rank. while_waiting: called again and again.
        """
        # A number in a file may be another process's by now.
        ours = set(processes.started_with(processes.ranks_mark(self.folder)))
        asked = {rank: beat["pid"] for rank, beat in read_beats(self.folder).items() if beat.get("pid") in ours}
        before = {rank: self._dump_times(rank) for rank in asked}
        recorder.ask()
        processes.send(list(asked.values()), STACKS_SIGNAL)
        deadline = time.monotonic() + DUMP_SECONDS
        while time.monotonic() < deadline:
            if all(new > old for rank in asked for new, old in zip(self._dump_times(rank), before[rank], strict=True)):
                break
            while_waiting()
            time.sleep(0.05)
        for path in self.folder.glob("rank*"):
            if path.suffix != ".json" or ".flight" in path.name or ".guard" in path.name:
                with contextlib.suppress(OSError):  # the disk of the logs may be what fails
                    shutil.copyfile(path, logs / path.name)
        time.sleep(1.5 * recorder.interval)  # until the dumps are read

    def _dump_times(self, rank: int) -> tuple[int, int]:
        """Return when the stacks and the flight recorder of a rank were written last."""
        paths = (self.folder / f"rank{rank}.stacks", self.folder / f"rank{rank}.flight.json")
        stacks, recorder = (path.stat().st_mtime_ns if path.exists() else -1 for path in paths)
        return stacks, recorder


def end_with_agent() -> None:
    """In a process that was just forked: end with the agent. The agent has threads, so nothing may be loaded."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def runnable(command: list[str]) -> list[str]:
    """Return the words to start: `zaya` is that of this Python, also where no such program is on the path."""
    return [sys.executable, "-m", "zaya_plugin.cli", *command[1:]] if command[0] == "zaya" else command


def _show(data: bytes) -> None:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    except (OSError, ValueError):  # the terminal is gone; the log has it all
        pass
