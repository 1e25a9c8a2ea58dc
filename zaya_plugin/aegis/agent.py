# SPDX-License-Identifier: Apache-2.0
"""The agent of a node: starts and ends the ranks of an attempt, watches them, and reports to the decider.

While the decider is gone the ranks train on and the agent connects again. When the agent itself is killed its ranks end
with it; the agent that `zaya aegis run` then starts kills those that are left, and joins with nothing running.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin.aegis import link
from zaya_plugin.aegis.collectors.node_collectors import NodeCollectors
from zaya_plugin.aegis.collectors.rank_files import read_beats
from zaya_plugin.aegis.collectors.runner import dropped_evidence
from zaya_plugin.aegis.diagnose.evidence import Evidence, print_line
from zaya_plugin.aegis.diagnose.rules import KERNEL, Reader, Rules
from zaya_plugin.aegis.protocol import (
    BEAT_SECONDS,
    Beat,
    BeatAnswer,
    BeatRequest,
    Dump,
    Dumped,
    Ended,
    EndSignal,
    EvidenceBatch,
    FindPort,
    FreePort,
    Join,
    Leave,
    RankExit,
    Save,
    Start,
    Started,
    Stop,
    SurvivorsEnded,
    message_of,
    to_json,
)
from zaya_plugin.aegis.ranks import Ranks, runnable
from zaya_plugin.aegis.settings import Settings, is_train
from zaya_plugin.ground import processes
from zaya_plugin.ground.parent_death import COPY_SECONDS, adopt_orphans, die_with_parent

POLL_SECONDS = 0.1  # exit codes and logs
START_BEAT_SECONDS = 0.5  # until all ranks train, so that the time of the first step is known
CONNECT_SECONDS = 0.5  # between two tries to reach the decider
ACCEPT_SECONDS = 2.0  # for the host of the decider to accept a connection
ALONE_SECONDS = 900.0  # without ranks and without a decider: a whole job must not wait for nothing
MAX_EVIDENCE = 10_000  # pieces that are kept while the decider is gone
EVIDENCE_BYTES = 2**18  # in one message, and of one piece
WRONG_COMMAND = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR)


class ClockOffset:
    """How far the decider's clock is ahead of this node's, from the answers to heartbeats.

    offset: seconds to add to a time of this node. trip: seconds of the answer that it was measured with.
    """

    def __init__(self) -> None:
        self.offset, self.trip = 0.0, float("inf")

    def measure(self, now: float, sent: float, theirs: float) -> None:
        """Measure the offset with one answer, which arrived `now`; the quickest answer is the most accurate."""
        trip = now - sent
        if trip < 0:  # this clock was set back in between
            return
        offset = theirs + trip / 2 - now
        if trip <= self.trip or abs(offset - self.offset) > trip + self.trip:  # further off: a clock was set
            self.trip, self.offset = trip, offset
        self.trip *= 1.05  # clocks drift: an old measurement gives way to a slightly worse new one


class Agent:
    """The loop of one node; `run` returns the exit code that the decider names."""

    def __init__(self, settings: Settings, secret: bytes, folder: Path):
        self.settings, self.secret, self.folder = settings, secret, folder
        self.rules = Rules.load(settings.rules)
        self.link: link.Link | None = None
        self.generation = 0
        self.ranks = Ranks(settings, secret, folder, self.rules, self.report)
        self.kill_at: float | None = None  # of the ranks of an attempt that ends
        self.ended: Ended | None = None  # the result of the last stop, until the decider starts another attempt
        self.signals: list[int] = []  # the first one, and those after it
        self._signal_times: dict[int, float] = {}  # when each arrived, without its copies
        self.code: int | None = None
        self.clock = ClockOffset()
        self._next_beat = self._next_try = 0.0
        self._last_line = ""
        self._evidence: list[Evidence] = []
        self._dropped = 0  # pieces beyond MAX_EVIDENCE
        self._connected = time.monotonic()  # or with ranks that run
        self._passed = 0  # signals that were passed on
        self._kernel = Reader(self.rules, KERNEL, settings.node)
        self._survivors: list[int] = []
        self.collectors = NodeCollectors(settings)

    def run(self) -> int:
        """Work until the decider ends the run."""
        adopt_orphans()
        self.ranks.follow_logs()
        self.ranks.kill()  # those of an agent that was killed before
        wake = processes.wake_on_signals(self._on_signal)
        try:
            while self.code is None:
                self._step(wake)
        finally:
            signal.set_wakeup_fd(-1)
            self.collectors.close()
            self.ranks.kill()
            if self.link is not None:
                self.link.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.code

    def _step(self, wake: int) -> None:
        now = time.monotonic()
        if self.link is not None or self.ranks.running:
            self._connected = now
        elif now - self._connected > ALONE_SECONDS:
            self._print(f"no rank runs, and the decider is gone for {ALONE_SECONDS:.0f} s: leaves")
            self.code = 1
        if self.link is None and now >= self._next_try:
            self._connect()
            self._next_try = time.monotonic() + CONNECT_SECONDS
        reads: list[Any] = [wake] + ([self.link] if self.link else [])
        writes = [self.link] if self.link and self.link.wants_write else []
        readable, _, _ = select.select(reads, writes, [], POLL_SECONDS)
        if wake in readable:
            os.read(wake, 4096)
        self._pass_on_signals()
        try:
            if self.link is not None:
                self.link.flush()
                if self.link in readable:
                    for body in self.link.receive():
                        self._obey(message_of(body))
                if self.link is not None and self.link.late:
                    raise link.LinkError("does not answer as a decider")
        except (link.LinkError, KeyError, TypeError, ValueError) as error:  # of another version
            self._print(f"the decider {self.link.peer}: {error}; the ranks train on, connecting again")
            self.link.close()
            self.link = None
        self._poll()
        if self.kill_at is not None:
            self._continue_stop()
        self._collect()
        self._beat_if_due()

    # The decider

    def _connect(self) -> None:
        try:
            sock = socket.create_connection((self.settings.host, self.settings.port), timeout=ACCEPT_SECONDS)
        except OSError as error:
            self._print(f"waits for the decider at {self.settings.host}:{self.settings.port} ({error.strerror})")
            return
        address = sock.getsockname()[0]
        if address.startswith("127.") and not self.settings.host.startswith(("127.", "localhost")):
            address = self.settings.host  # this is its host, and the others reach it under that name
        self.link = link.Link(sock, self.secret, server=False)
        self._last_line = ""
        codes = {process.rank: process.code for process in self.ranks.processes if process.code is not None}
        running = [process.rank for process in self.ranks.running]
        self._send(Join(self.generation, self.settings.node, address, os.getpid(), running, codes))
        if self.signals:
            self._send(EndSignal(self.generation, self.signals[0], 1))
        if self.ended is not None:
            self._send(self.ended)
        self._next_beat = 0.0

    def _send(self, message: Any) -> None:
        if self.link is not None:
            try:
                self.link.send(to_json(message))
            except link.LinkError:
                pass  # `receive` raises it again

    def _print(self, text: str) -> None:
        if text != self._last_line:
            print_line(f"{self.settings.node}: {text}")
        self._last_line = text

    def _obey(self, message: Any) -> None:
        match message:
            case BeatAnswer():
                self.clock.measure(time.time(), message.echo, message.time)
            case BeatRequest():
                self._next_beat = 0.0
            case FindPort():
                self._send(FreePort(message.generation, link.free_port()))
            case Start() if message.generation > self.generation:
                self._start(message)
            case Dump() if message.generation == self.generation:
                self._dump()
            case Stop() if message.generation >= self.generation:
                self._stop(message)
            case Save() if message.generation == self.generation:
                self.ranks.signal(signal.SIGTERM)
            case Leave():
                self.code = message.code

    def _beat_if_due(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        ranks = read_beats(self.folder)
        starts = len(ranks) < len(self.ranks.running) or any(beat.get("phase") != "train" for beat in ranks.values())
        self._next_beat = time.monotonic() + (START_BEAT_SECONDS if starts else BEAT_SECONDS)
        self._send(Beat(self.generation, time.time(), ranks))

    def _on_signal(self, number: int) -> None:
        """Add a signal, once: its copies arrive later where the node is busy."""
        now = time.monotonic()
        if not self.signals or now - self._signal_times.setdefault(number, now) > COPY_SECONDS:
            self.signals.append(number)
            self._signal_times[number] = now

    def _pass_on_signals(self) -> None:
        """Report a signal to the decider. The first one asks the ranks to save and leave, the second one kills them."""
        while self._passed < len(self.signals):
            number, self._passed = self.signals[self._passed], self._passed + 1
            self._send(EndSignal(self.generation, number, self._passed))
            if self._passed == 1:
                if self.ranks.running:
                    self._print(
                        f"{signal.Signals(number).name}: the ranks save and leave; "
                        f"sent again after {COPY_SECONDS:g} s, it ends them at once"
                    )
                self.ranks.signal(signal.SIGTERM)
            else:
                self.ranks.kill()
            if self._passed > 2 or self.link is None and not self.ranks.running:
                self.code = 128 + number

    # The ranks

    def _start(self, message: Start) -> None:
        if self.ranks.processes:
            self.ranks.kill()
        self.generation, self.kill_at, self.ended = message.generation, None, None
        try:
            self.ranks.start(message)
        except OSError as error:
            self._cannot_start(runnable(message.command), self.ranks.numbers(message)[0], error)
        per_rank = self.settings.start_per == "rank" and is_train(self.settings.command)
        self.collectors.watch(self.folder, self.ranks.numbers(message) if per_rank else ())
        self._print(f"attempt {self.generation}: {len(self.ranks.processes)} started")
        self._send(Started(self.generation))

    def _cannot_start(self, command: list[str], rank: int, error: OSError) -> None:
        """Report why the ranks were not started. A command that is absent is the user's mistake; a full disk is not."""
        now, text = time.time(), f"{command[0]} cannot be started: {error}"
        wrong = error.filename == command[0] and error.errno in WRONG_COMMAND
        code = (127 if isinstance(error, FileNotFoundError) else 126) if wrong else 1
        for evidence in [] if wrong else Reader(self.rules, "rank", self.settings.node).read(text, now):
            self.report(evidence)
        self.report(Evidence(now, self.settings.node, "exit", text, rank, None, {"exit_code": code}))
        self._send_exit(rank, code, now)

    def _poll(self) -> None:
        """Report the evidence in new lines of the logs, and the ranks that have ended."""
        for process in self.ranks.poll():
            now = time.time()
            self._beat()  # with its last step
            if process.code and self.kill_at is None:
                rank = process.rank if self.settings.start_per == "rank" else None
                beat = read_beats(self.folder).get(rank)  # a valid one has a step
                step = {} if beat is None else {"step": beat["step"]}
                self.report(self.rules.exit_evidence(process.code, now, self.settings.node, rank, **step))
            self._send_exit(process.rank, process.code, now)

    def _send_exit(self, rank: int, code: int, at: float) -> None:
        self._send_evidence()
        self._send(RankExit(self.generation, rank, code, at + self.clock.offset))

    def report(self, evidence: Evidence) -> None:
        """Add evidence to the next message."""
        pid = evidence.values.get("pid")
        if evidence.rank is None and pid is not None and evidence.source != KERNEL:  # a container has pids of its own
            beats = read_beats(self.folder).items()
            evidence = replace(evidence, rank=next((rank for rank, beat in beats if beat.get("pid") == pid), None))
        self._evidence.append(evidence)
        self._dropped += max(0, len(self._evidence) - MAX_EVIDENCE)
        del self._evidence[:-MAX_EVIDENCE]

    def _send_evidence(self) -> None:
        if self._dropped and self.link is not None:
            which = "from the time without the decider"
            self._evidence.append(dropped_evidence(time.time(), self.settings.node, self._dropped, which))
            self._dropped = 0
        while self._evidence and self.link is not None:
            rows, size = [], 0
            while self._evidence and size < EVIDENCE_BYTES:
                evidence = self._evidence.pop(0)
                row = replace(evidence, time=evidence.time + self.clock.offset).to_json()
                if (length := len(json.dumps(row))) > EVIDENCE_BYTES:
                    row, length = {name: value for name, value in row.items() if name != "values"}, 0
                rows.append(row)
                size += length
            self._send(EvidenceBatch(self.generation, rows))

    def _collect(self) -> None:
        for item in self.collectors.drain():
            if item.rule is None and item.source == KERNEL:
                for evidence in self._kernel.read(item.text, item.time):
                    self.report(evidence)
            elif item.rule is not None:
                self.report(item)
        self._send_evidence()
        if self._survivors and not any(processes.state(pid) for pid in self._survivors):
            self._survivors = []
            self._send(SurvivorsEnded(self.generation))

    # The end of an attempt

    def _stop(self, message: Stop) -> None:
        kill_at = time.monotonic() + message.grace
        if self.ended is not None and self.ended.generation == message.generation:
            self._send(self.ended)
        elif self.kill_at is not None:
            self.kill_at = min(self.kill_at, kill_at)
        else:
            self.generation, self.kill_at = message.generation, kill_at
            if message.grace:
                self.ranks.signal(signal.SIGTERM)

    def _continue_stop(self) -> None:
        if self.ranks.running and time.monotonic() < self.kill_at:
            return
        survivors = self.ranks.kill(self._beat_if_due)
        self._poll()
        while any(process.ended is not None for process in self.ranks.running):  # until their last lines are read
            time.sleep(processes.POLL)
            self._poll()
        for pid in survivors:
            text = f"process {pid} is in state {processes.state(pid)} and survives SIGKILL"
            rank = next((process.rank for process in self.ranks.processes if process.popen.pid == pid), None)
            self.report(Evidence(time.time(), self.settings.node, "agent", text, rank, "unkillable", {"pid": pid}))
        self._send_evidence()
        self.ended, self._survivors, self.kill_at = Ended(self.generation, survivors), survivors, None
        self._send(self.ended)

    def _dump(self) -> None:
        """Ask the ranks for their stacks and collectives; the answers are evidence."""
        logs = self.settings.folder / f"attempt_{self.generation}"
        self.ranks.dump(logs, self.collectors.flight_recorder, self._beat_if_due)
        self._collect()
        self._send(Dumped(self.generation))


def node_folder(settings: Settings, secret: bytes) -> Path:
    """Return this node's folder for heartbeats, made for this user alone."""
    path = Path(tempfile.gettempdir()) / f"zaya_aegis_{link.fingerprint(secret)}_{settings.node}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} belongs to another user, or others can write in it")
    return path


def main() -> int:
    """Run the agent with the settings on stdin."""
    die_with_parent(signal.SIGKILL)
    settings = Settings.from_json(sys.stdin.read())
    secret = link.read_secret(settings.secret_file)
    try:
        return Agent(settings, secret, node_folder(settings, secret)).run()
    except Exception:  # any exit code would be taken for the run's
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()


if __name__ == "__main__":
    sys.exit(main())
