# SPDX-License-Identifier: Apache-2.0
"""The parts of `zaya aegis run` on a node: the locks against a second supervisor, the decision maker's socket, and the
agent and the decision maker themselves, which are started again when they are killed.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zaya_plugin.aegis import link
from zaya_plugin.aegis.evidence import printable, say
from zaya_plugin.aegis.settings import Settings
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.lock import Held, Lock
from zaya_plugin.ground.parent_death import on_end_signals

QUICK_SECONDS, QUICK_DEATHS = 60.0, 5  # an agent that dies so often in so long is not started again
LOCK_SECONDS = 120.0  # for the end of a supervisor on another host
LAST_SECONDS = 5.0  # for the decision maker to leave after the agent


class Keeper:
    """Starts the agent, and here or not the decision maker; both again when they are killed."""

    def __init__(self, settings: Settings, secret: Path, listening: socket.socket | None):
        self.settings, self.secret, self.listening = settings, secret, listening
        self.agent = self.decider = None
        self.deaths: list[float] = []
        self.again = 0.0  # when the decision maker may start
        self.signals: list[int] = []

    def run(self) -> int:
        """Return the exit code of the run."""
        wake, sleep = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(sleep, False)
        signal.set_wakeup_fd(sleep, warn_on_full_buffer=False)
        on_end_signals(lambda number, frame: self._pass_on(number))
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while True:
            if self.listening is not None and (self.decider is None or self.decider.poll() is not None):
                self._start_decider()
            if self.agent is None or self.agent.poll() is not None:
                code = None if self.agent is None else self.agent.returncode
                if code is not None and code >= 0:
                    return self._leave(code)
                if code is not None and not self._may_start_again(code):
                    return self._leave(128 - code)
                self.agent = self._start("agent")
            select.select([wake], [], [], 1.0)
            try:
                os.read(wake, 4096)
            except BlockingIOError:
                pass

    def _start(self, module: str, *words: str, files: Sequence[int] = ()) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            f"zaya_plugin.aegis.{module}",
            self.settings.to_word(),
            str(self.secret),
            *words,
        ]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=files)

    def _start_decider(self) -> None:
        if self.decider is not None and self.decider.returncode == 0 or time.monotonic() < self.again:
            return
        if self.decider is not None:
            text = f"the decision maker has ended with code {self.decider.returncode}; it starts again from its journal"
            say(text)
        self.again = time.monotonic() + 1.0
        self.decider = self._start("decider", str(self.listening.fileno()), files=[self.listening.fileno()])

    def _may_start_again(self, code: int) -> bool:
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < QUICK_SECONDS] + [now]
        name = signal.Signals(-code).name
        if self.signals or len(self.deaths) >= QUICK_DEATHS:
            return False
        say(f"the agent was ended by {name}; it starts again")
        return True

    def _pass_on(self, number: int) -> None:
        self.signals.append(number)
        if self.agent is not None and self.agent.poll() is None:
            self.agent.send_signal(number)

    def _leave(self, code: int) -> int:
        if self.decider is not None:
            try:
                self.decider.wait(LAST_SECONDS)
            except subprocess.TimeoutExpired:
                self.decider.kill()
        return code


def node_lock(settings: Settings) -> Lock:
    """Return a lock that this process alone has on this node. A second agent would end the ranks of the first one."""
    return _lock(settings, f"node.{settings.node}.lock", where=f", on this node ({settings.node})")


def journal_lock(settings: Settings) -> Lock:
    """Return the lock of the journal's writer, on all nodes that share the folder. Waits for one on another host, which may
    be leaving.
    """
    return _lock(settings, "lock", patience=LOCK_SECONDS)


def _lock(settings: Settings, name: str, where: str = "", patience: float = 0.0) -> Lock:
    def refused(held: Held) -> ValueError:
        problem = f"`zaya aegis run` supervises this run already{where}: {held}"
        fix = f"end that one first, or another --dir{held.wait}"
        return mistake("--dir", settings.folder, problem=problem, allowed="one at a time", fix=fix)

    def waits(held: Held) -> None:
        say(f"{settings.folder}: a supervisor on {printable(held.host)} has this run; waits for its end")

    lock = Lock.acquire([settings.folder / name], refused, launch="zaya aegis run", patience=patience, waits=waits)
    lock.lost = lambda: os.kill(os.getpid(), signal.SIGTERM)  # another one runs, after this host was silent
    return lock


def listen(settings: Settings) -> socket.socket | None:
    """Return the decision maker's socket if it belongs to this machine, and no other agent here has taken it.

    It is kept by this process: agents that connect while the decision maker starts again wait in its queue.
    """
    try:
        return link.listen(settings.host, settings.port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        raise mistake(
            "--decider",
            f"{settings.host}:{settings.port}",
            problem=f"cannot be used ({error.strerror or error})",
            allowed="a host name that resolves, and a free port",
        ) from None
