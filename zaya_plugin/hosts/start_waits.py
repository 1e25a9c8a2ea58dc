# SPDX-License-Identifier: Apache-2.0
"""The start of a rank, up to its training loop: a wait for other ranks is reported with their numbers, and a signal ends
the rank at once.

The training loop checks for signals between two steps, and saves before it ends. Before the loop there is nothing to
save, and the main thread may wait in C++ for a rank that never comes. Python runs no signal handler during such a wait,
so a thread of its own reads the signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import TextIO

from torch.distributed import DistError, PrefixStore, TCPStore

from zaya_plugin.ground.errors import RunEndedError, message
from zaya_plugin.ground.parent_death import END_SIGNALS, on_end_signals

SAY_SECONDS, REPEAT_SECONDS = 15.0, 60.0
LOOK_SECONDS = 5.0  # between two notes of a rank about where it is
# A rank whose main thread is in one of these files waits for other ranks.
WAITING_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/rendezvous.py")

_starts: list[Start] = []  # that are not over


class Start:
    """The start of this rank, until `over`. Make it in the main thread.

    console: gets the lines, of one rank for each wait. `zaya train` shows the console of the first and the last rank.
    """

    def __init__(self, rank: int, world_size: int, console: TextIO):
        self.rank, self.world_size, self.console = rank, world_size, console
        self.order = [0, world_size - 1, *range(1, world_size - 1)]  # the first of these that waits reports
        _starts.append(self)
        self.store: PrefixStore | None = None
        self._notes = 0
        self._over = threading.Event()
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        on_end_signals(_as_sigterm)
        threading.Thread(target=self._end_on_signal, args=(reader,), name="signals of the start", daemon=True).start()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a console that is gone
            print(
                f"zaya: {text}" if self.rank == 0 else f"zaya: rank {self.rank}: {text}", file=self.console, flush=True
            )

    def _end_on_signal(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            number = next((number for number in numbers if number in END_SIGNALS), None)
            if number is not None and not self._over.is_set():
                if self.rank:  # one line on the console is enough
                    self.console = sys.stderr
                self._say(f"{signal.Signals(number).name}: the start ends, before its first step")
                number = number if number == signal.SIGINT else signal.SIGTERM
                ctypes.CDLL(None).signal(number, None)  # SIG_DFL; Python's own function is for the main thread
                os.kill(os.getpid(), number)
        os.close(reader)

    def join(self, seconds: float) -> None:
        """Wait until all ranks have started. Raises RunEndedError after `seconds`.

        torch's own wait would be silent. Later it meets the same store.
        """
        if self.world_size == 1:
            return
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        deadline, say = time.monotonic() + seconds, time.monotonic() + SAY_SECONDS
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        while not serves and not _answers(host, port):
            say = self._wait(seconds, deadline, say)
        limit = datetime.timedelta(seconds=seconds)
        store = TCPStore(host, port, None, serves, limit, wait_for_workers=False, multi_tenant=True)
        self.store = PrefixStore(f"zaya_start_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        self.store.set(str(self.rank), self._note(0.0))
        self.store.add("joined", 1)
        while self.store.add("joined", 0) < self.world_size:
            say = self._wait(seconds, deadline, say)
        threading.Thread(target=self._watch, name="waits of the start", daemon=True).start()

    def _wait(self, seconds: float, deadline: float, say: float) -> float:
        """Wait a moment for the ranks that are absent; name them at `say`. Return when to do that again."""
        now = time.monotonic()
        if now > deadline:
            problem = f"{self._absent()} did not start within {seconds / 60:g} minutes"
            fix = "start all ranks with one MASTER_ADDR and MASTER_PORT, or unset the launcher's variables"
            raise RunEndedError(message("WORLD_SIZE", self.world_size, problem=problem, fix=fix))
        if now > say:
            say = now + REPEAT_SECONDS
            if self._reports():
                self._say(f"waits for {self._absent()}, of {self.world_size} ranks")
        time.sleep(0.1 if self.world_size < 64 else 1.0)
        return say

    def _reports(self) -> bool:
        """Return whether no rank before this one in the order has joined; without a store, whether it is the last rank
        or the first of its node.
        """
        if self.store is None:
            return self.rank == self.world_size - 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        return not any(self.store.check([str(rank)]) for rank in self.order[: self.order.index(self.rank)])

    def _absent(self) -> str:
        if self.store is None:
            return f"rank 0 at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return _listed([rank for rank in range(self.world_size) if not self.store.check([str(rank)])])

    # After all have joined

    def _note(self, waits: float) -> str:
        """Return where the main thread is, for the store. waits: seconds for which it has waited for other ranks."""
        self._notes += 1
        return json.dumps([waits, _place(), socket.gethostname(), self._notes])

    def _watch(self) -> None:
        """Note in the store where this rank is; where it waits, say for whom."""
        main, began, say = threading.main_thread().ident, time.monotonic(), 0.0
        look = LOOK_SECONDS if self.world_size < 256 else 12.0  # every rank that waits reads all notes
        last_notes: dict[int, tuple[int, float]] = {}  # rank -> its last note, and when that was new
        while not self._over.wait(look):
            now = time.monotonic()
            if not _waits(sys._current_frames().get(main)):
                began, last_notes = now, {}
            try:
                self.store.set(str(self.rank), self._note(now - began))
                if now == began:
                    continue
                notes = [json.loads(note) for note in self.store.multi_get([*map(str, range(self.world_size))])]
            except (DistError, RuntimeError):
                return self._say("waits for rank 0, whose store does not answer")
            for rank, (*_, number) in enumerate(notes):
                if last_notes.get(rank, (0, 0.0))[0] != number:
                    last_notes[rank] = number, now
            late = [rank for rank in range(self.world_size) if now - last_notes[rank][1] > 2.5 * look]
            late += [rank for rank, (waits, *_) in enumerate(notes) if not waits and rank not in late]
            first = next((rank for rank in self.order if rank not in late), self.rank)
            if now - began > SAY_SECONDS and now > say and first == self.rank:  # one of those that wait says it
                say = now + REPEAT_SECONDS
                for rank in late[:4]:
                    self._say(f"waits for rank {rank} on {notes[rank][2]}, which was last seen in {notes[rank][1]}")
                if not late:
                    self._say(f"all ranks wait for each other, this one in {_place()}")
        return None


def over() -> None:
    """End this rank's start, if it has one: from now on the training loop handles signals. Call it in the main thread."""
    while _starts:
        start = _starts.pop()
        start._over.set()
        signal.set_wakeup_fd(-1)
        os.close(start._writer)


def _as_sigterm(number: int, frame) -> None:
    """Megatron handles SIGTERM alone."""
    if number != signal.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


def _listed(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {text}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _waits(frame) -> bool:
    return frame is not None and frame.f_code.co_filename.endswith(WAITING_FILES)


def _place() -> str:
    """Return the innermost function of the main thread outside of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_back is not None and "torch/distributed" in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)})"
