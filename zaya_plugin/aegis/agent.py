# SPDX-License-Identifier: Apache-2.0
"""The agent of a node: starts and ends the ranks of an attempt, watches them, and reports to the decision maker.

When the decision maker is gone the ranks train on and the agent connects again. When the agent itself is killed its
ranks end with it; the agent that `zaya aegis run` then starts kills those that are left, and joins with nothing running.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin.aegis import link
from zaya_plugin.aegis.clock_offset import ClockOffset
from zaya_plugin.aegis.collectors.of_node import NodeCollectors
from zaya_plugin.aegis.collectors.progress import read_beats
from zaya_plugin.aegis.dumps import ask_for_dumps
from zaya_plugin.aegis.evidence import Evidence, say
from zaya_plugin.aegis.exit_codes import meaning
from zaya_plugin.aegis.ranks import Process, Ranks, runnable
from zaya_plugin.aegis.rules import Reader, Rules
from zaya_plugin.aegis.settings import Settings, is_train
from zaya_plugin.ground import processes
from zaya_plugin.ground.parent_death import COPY_SECONDS, adopt_orphans, die_with_parent, on_end_signals

POLL_SECONDS = 0.1  # exit codes and logs
BEAT_SECONDS = 2.0
START_BEAT_SECONDS = 0.5  # until all ranks train, so that the time of the first step is known
CONNECT_SECONDS = 0.5  # between two tries to reach the decision maker
ALONE_SECONDS = 900.0  # without ranks and without a decision maker: a whole job must not wait for nothing
UNKILLABLE_SECONDS = 5.0
EVIDENCE = 10_000  # lines that are kept while the decision maker is gone
EVIDENCE_BYTES = 2**18  # in one message, and of one line
WRONG_COMMAND = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR)


class Agent:
    """The loop of one node; `run` returns the exit code that the decision maker names."""

    def __init__(self, settings: Settings, secret: bytes, folder: Path):
        self.settings, self.secret, self.folder = settings, secret, folder
        self.rules = Rules.load(settings.rules)
        self.link: link.Link | None = None
        self.generation = 0
        self.ranks = Ranks(settings, secret, folder, self.rules, self._tell)
        self.stopping: dict[str, Any] | None = None  # how far a stop is
        self.over: dict[str, Any] | None = None  # the last stop's result, until the decision maker has started anew
        self.signals: list[int] = []  # the first one, and those that came again
        self._signal_times: dict[int, float] = {}  # when each came, without its copies
        self.code: int | None = None
        self.clock = ClockOffset()
        self._next_beat = self._next_try = 0.0
        self._said = ""
        self._evidence: list[Evidence] = []
        self._alone = time.monotonic()
        self._passed = 0  # signals that were passed on
        self._kernel = Reader(self.rules, "kernel", settings.node)
        self._survivors: list[int] = []
        self.collectors = NodeCollectors(
            settings.node,
            storage=[path for path in (settings.folder, settings.checkpoints) if path is not None],
            checkpoints=settings.checkpoints,
            kernel=settings.kernel_log,
            interfaces=settings.links,
        )

    def run(self) -> int:
        """Work until the decision maker ends the run."""
        adopt_orphans()
        self.ranks.follow_logs()
        processes.kill_all(processes.ranks_mark(self.folder), UNKILLABLE_SECONDS)  # of an agent that was killed here
        wake, sleep = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(sleep, False)
        signal.set_wakeup_fd(sleep)
        on_end_signals(lambda number, frame: self._note_signal(number))
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes the loop
        try:
            while self.code is None:
                self._step(wake)
        finally:
            signal.set_wakeup_fd(-1)
            self.collectors.close()
            processes.kill_all(processes.ranks_mark(self.folder), UNKILLABLE_SECONDS)
            if self.link is not None:
                self.link.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.code

    def _step(self, wake: int) -> None:
        now = time.monotonic()
        if self.link is not None or self.ranks.running:
            self._alone = now
        elif now - self._alone > ALONE_SECONDS:
            self._say(f"nothing runs here, and the decision maker is gone for {ALONE_SECONDS:.0f} s: leaves")
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
                    for message in self.link.receive():
                        self._obey(message)
                if self.link is not None and self.link.late:
                    raise link.LinkError("does not answer as a decision maker")
        except (link.LinkError, KeyError, TypeError, ValueError) as error:  # of another version
            self._say(f"the decision maker {self.link.peer}: {error}; ranks go on, connecting again")
            self.link.close()
            self.link = None
        self._poll()
        if self.stopping is not None:
            self._go_on_stopping()
        self._collect()
        self._beat_if_due()

    # The decision maker

    def _connect(self) -> None:
        try:
            sock = link.connect(self.settings.host, self.settings.port)
        except OSError as error:
            self._say(f"waits for the decision maker at {self.settings.host}:{self.settings.port} ({error.strerror})")
            return
        address = sock.getsockname()[0]
        if address.startswith("127.") and not self.settings.host.startswith(("127.", "localhost")):
            address = self.settings.host  # this is its host, and the others reach it under that name
        self.link = link.Link(sock, self.secret, server=False)
        self._said = ""
        self._send(
            "join",
            node=self.settings.node,
            address=address,
            pid=os.getpid(),
            generation=self.generation,
            codes={process.rank: process.code for process in self.ranks.processes if process.code is not None},
            running=[process.rank for process in self.ranks.processes if process.code is None],
            over=self.over,
            asked=self.signals[:1],
        )
        self._next_beat = 0.0

    def _send(self, kind: str, **values: Any) -> None:
        if self.link is not None:
            try:
                self.link.send({"kind": kind, **values})
            except link.LinkError:
                pass  # `receive` says so

    def _say(self, text: str) -> None:
        if text != self._said:
            say(f"{self.settings.node}: {text}")
        self._said = text

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "beat":
            self.clock.measure(time.time(), message["echo"], message["time"])
        elif kind == "ask":
            self._next_beat = 0.0
        elif kind == "port":
            self._send("port", generation=message["generation"], port=link.free_port())
        elif kind == "start" and message["generation"] > self.generation:
            self._start(message)
        elif kind == "dump" and message["generation"] == self.generation:
            self._dump()
        elif kind == "stop" and message["generation"] >= self.generation:
            self._stop(message)
        elif kind == "save" and message["generation"] == self.generation:
            self.ranks.signal(signal.SIGTERM)
        elif kind == "end":
            self.code = message["code"]

    def _beat_if_due(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        ranks = read_beats(self.folder)
        starts = len(ranks) < len(self.ranks.running) or any(beat.get("phase") != "train" for beat in ranks.values())
        self._next_beat = time.monotonic() + (START_BEAT_SECONDS if starts else BEAT_SECONDS)
        self._send("beat", time=time.time(), offset=self.clock.offset, generation=self.generation, ranks=ranks)

    def _note_signal(self, number: int) -> None:
        """Note a signal, once: its copies come later where the node is busy."""
        now = time.monotonic()
        if not self.signals or now - self._signal_times.setdefault(number, now) > COPY_SECONDS:
            self.signals.append(number)
            self._signal_times[number] = now

    def _pass_on_signals(self) -> None:
        """The first signal asks the ranks to save and leave; when it comes again they are killed. The decision maker is
        told.
        """
        while self._passed < len(self.signals):
            number, self._passed = self.signals[self._passed], self._passed + 1
            self._send("asked", number=number, times=self._passed)
            if self._passed == 1:
                if self.ranks.running:
                    self._say(
                        f"{signal.Signals(number).name}: the ranks save and leave; sent again after {COPY_SECONDS:g} s, "
                        "it ends them at once"
                    )
                self.ranks.signal(signal.SIGTERM)
            else:
                processes.kill_all(processes.ranks_mark(self.folder), UNKILLABLE_SECONDS)
            if self._passed > 2 or self.link is None and not self.ranks.running:
                self.code = 128 + number

    # The ranks

    def _start(self, message: dict[str, Any]) -> None:
        if self.ranks.processes:
            processes.kill_all(processes.ranks_mark(self.folder), UNKILLABLE_SECONDS)
        self.generation, self.stopping, self.over = message["generation"], None, None
        try:
            self.ranks.start(message)
        except OSError as error:
            self._cannot_start(runnable(message["command"]), self.ranks.numbers(message)[0], error)
        per_rank = self.settings.each == "rank" and is_train(self.settings.command)
        self.collectors.watch(self.folder, self.ranks.numbers(message) if per_rank else ())
        self._say(f"attempt {self.generation}: {len(self.ranks.processes)} started")
        pids = [process.popen.pid for process in self.ranks.processes]
        self._send("started", generation=self.generation, pids=pids)

    def _cannot_start(self, command: list[str], rank: int, error: OSError) -> None:
        """Tell why the ranks were not started. A command that is absent is the user's mistake; a full disk is not."""
        now, text = time.time(), f"{command[0]} cannot be started: {error}"
        wrong = error.filename == command[0] and error.errno in WRONG_COMMAND
        code = (127 if isinstance(error, FileNotFoundError) else 126) if wrong else 1
        for evidence in [] if wrong else Reader(self.rules, "rank", self.settings.node).read(text, now):
            self._tell(evidence)
        self._tell(Evidence(now, self.settings.node, "exit", text, rank, None, {"exit_code": code}))
        self._send_evidence()
        self._send_exit(rank, code, now)

    def _poll(self) -> None:
        """Take what the ranks wrote, and take note of those that have ended."""
        for process in self.ranks.poll():
            self._has_ended(process)

    def _has_ended(self, process: Process) -> None:
        now = time.time()
        self._beat()  # with its last step
        if process.code and self.stopping is None:
            beat = read_beats(self.folder).get(process.rank, {}) if self.settings.each == "rank" else {}
            values = {"exit_code": process.code} | ({"step": beat["step"]} if "step" in beat else {})
            text = f"ended with exit code {process.code}: {meaning(process.code).text}"
            rank = process.rank if self.settings.each == "rank" else None
            self._tell(Evidence(now, self.settings.node, "exit", text, rank, None, values))
            self._send_evidence()
        self._send_exit(process.rank, process.code, now)

    def _send_exit(self, rank: int, code: int, at: float) -> None:
        self._send("exit", generation=self.generation, rank=rank, code=code, time=at, offset=self.clock.offset)

    def _tell(self, evidence: Evidence) -> None:
        pid = evidence.values.get("pid")
        if evidence.rank is None and pid is not None and evidence.source != "kernel":  # a container has pids of its own
            beats = read_beats(self.folder).items()
            evidence = replace(evidence, rank=next((rank for rank, beat in beats if beat.get("pid") == pid), None))
        self._evidence.append(evidence)
        del self._evidence[:-EVIDENCE]

    def _send_evidence(self) -> None:
        while self._evidence and self.link is not None:
            rows, size = [], 0
            while self._evidence and size < EVIDENCE_BYTES:
                row = self._evidence.pop(0).to_json()
                if (length := len(json.dumps(row))) > EVIDENCE_BYTES:
                    row, length = {name: value for name, value in row.items() if name != "values"}, 0
                rows, size = [*rows, row], size + length
            self._send("evidence", generation=self.generation, offset=self.clock.offset, rows=rows)

    def _collect(self) -> None:
        for item in self.collectors.drain():
            if item.rule is None and item.source == "kernel":
                for evidence in self._kernel.read(item.text, item.time):
                    self._tell(evidence)
            elif item.rule is not None:
                self._tell(item)
        self._send_evidence()
        if self._survivors and not any(processes.state(pid) for pid in self._survivors):
            self._survivors = []
            self._send("free")

    # The end of an attempt

    def _stop(self, message: dict[str, Any]) -> None:
        if self.over is not None and self.over["generation"] == message["generation"]:
            self._send("ended", **self.over)
            return
        if self.stopping is not None:
            self.stopping["until"] = min(self.stopping["until"], time.monotonic() + message["grace"])
            return
        self.generation = message["generation"]
        self.stopping = {"since": time.monotonic(), "until": time.monotonic() + message["grace"]}
        if message["grace"]:
            self.ranks.signal(signal.SIGTERM)
        if message.get("dump"):
            self._dump()

    def _go_on_stopping(self) -> None:
        if self.ranks.running and time.monotonic() < self.stopping["until"]:
            return
        left = processes.kill_all(processes.ranks_mark(self.folder), UNKILLABLE_SECONDS, self._beat_if_due)
        self._poll()
        while any(process.ended is not None for process in self.ranks.running):  # until their last lines are read
            time.sleep(processes.POLL)
            self._poll()
        for pid in left:
            text = f"process {pid} is in state {processes.state(pid)} and survives SIGKILL"
            rank = next((process.rank for process in self.ranks.processes if process.popen.pid == pid), None)
            self._tell(Evidence(time.time(), self.settings.node, "agent", text, rank, "unkillable", {"pid": pid}))
        self._send_evidence()
        seconds = time.monotonic() - self.stopping["since"]
        self.over = {"generation": self.generation, "seconds": seconds, "survivors": left}
        self._survivors = left
        self.stopping = None
        self._send("ended", **self.over)

    def _dump(self) -> None:
        """Ask the ranks where they wait; the answers are evidence."""
        logs = self.settings.folder / f"attempt_{self.generation}"
        asked = ask_for_dumps(self.folder, logs, self.collectors.flight_recorder, self._beat_if_due)
        self._collect()
        self._send("dumped", generation=self.generation, ranks=asked)


def node_folder(settings: Settings, secret: bytes) -> Path:
    """Return this node's folder for heartbeats, made for this user alone."""
    path = Path(tempfile.gettempdir()) / f"zaya_aegis_{link.fingerprint(secret)}_{settings.node}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} belongs to another user, or others can write there")
    return path


def main(argv: list[str]) -> int:
    """Run the agent with the settings in argv[0], and the file of the secret in argv[1]."""
    die_with_parent(signal.SIGKILL)
    settings, secret = Settings.from_word(argv[0]), link.read_secret(Path(argv[1]))
    try:
        return Agent(settings, secret, node_folder(settings, secret)).run()
    except Exception:  # any exit code would be taken for the run's
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
