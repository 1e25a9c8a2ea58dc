# SPDX-License-Identifier: Apache-2.0
"""The parts of `zaya aegis run` on a node: the locks against a second supervisor, the decision maker's socket, and the
agent and the decision maker themselves, which are started again when they are killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from zaya_plugin.aegis import link
from zaya_plugin.aegis.evidence import printable, say
from zaya_plugin.aegis.settings import Settings
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.parent_death import on_end_signals

QUICK_SECONDS, QUICK_DEATHS = 60.0, 5  # an agent that dies so often in so long is not started again
LOCK_SECONDS = 120.0  # for the lock of a host that is lost
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


def node_lock(settings: Settings, secret: bytes) -> socket.socket:
    """Return a lock that this process alone has on this node. A second agent would end the ranks of the first one."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(
            f"\0zaya_aegis_{link.fingerprint(secret + settings.node.encode())}"
        )  # of no file: ends with the process
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise _second(settings, f"on this node ({settings.node})") from None
    return lock


def journal_lock(settings: Settings) -> IO[str]:
    """Return the lock of the journal's writer, on all nodes that share the folder. That of a host that is lost lasts until
    the file server gives it up, so this waits.
    """
    lock = open(settings.folder / "lock", "a+")
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            host = printable(lock.read(100)) or "another host"
            if host == socket.gethostname() or time.monotonic() > deadline:
                raise _second(settings, f"on {host}") from None
            say(f"{settings.folder}: a supervisor on {host} has this run; waits for its end")
            time.sleep(LOCK_SECONDS / 10)
        except OSError:  # a file system without locks
            break
    lock.truncate(0)
    lock.write(socket.gethostname())
    lock.flush()
    return lock


def _second(settings: Settings, where: str) -> ValueError:
    problem = f"`zaya aegis run` supervises this run already, {where}"
    return mistake(
        "--output",
        settings.folder,
        problem=problem,
        allowed="one at a time",
        fix="end that one first, or another --output",
    )


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
