# SPDX-License-Identifier: Apache-2.0
"""The process of `zaya aegis run` on a node: it holds the locks against a second supervisor and the decider's socket,
starts the agent, and on the first node the decider, and restarts either if it is killed.

    python -m zaya_plugin.aegis.keeper FILE [SOCKET]

FILE (the settings) and SOCKET (the decider's, on the first node) are numbers of open files, inherited from
`zaya aegis run`, which becomes this program.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import NoReturn

from zaya_plugin.aegis import link
from zaya_plugin.aegis.diagnose.evidence import print_line, printable
from zaya_plugin.aegis.settings import Settings
from zaya_plugin.ground import processes
from zaya_plugin.ground.errors import mistake, of_the_machine
from zaya_plugin.ground.exit_codes import INTERRUPTED, STOPPED, USER_ERROR
from zaya_plugin.ground.lock import Held, Lock

QUICK_SECONDS, QUICK_DEATHS = 60.0, 5  # an agent that dies so often in so long is not started again
LOCK_SECONDS = 120.0  # for the end of a supervisor on another host
LAST_SECONDS = 5.0  # for the decider to leave after the agent


class Keeper:
    """Starts the agent, and on the first node (with a socket) the decider; restarts either if it is killed."""

    def __init__(self, settings: Settings, listening: socket.socket | None):
        self.settings, self.listening = settings, listening
        self.agent = self.decider = None
        self.deaths: list[float] = []
        self.next_start = 0.0  # of the decider
        self.signals: list[int] = []

    def run(self) -> int:
        """Return the exit code of the run."""
        wake = processes.wake_on_signals(self._pass_on)
        while True:
            if self.listening is not None and (self.decider is None or self.decider.poll() is not None):
                self._start_decider()
            if self.agent is None or self.agent.poll() is not None:
                code = None if self.agent is None else self.agent.returncode
                if code is not None and code >= 0:
                    return self._leave(code)
                if code is not None and not self._may_restart(code):
                    return self._leave(128 - code)
                self.agent = self._start("agent")
            select.select([wake], [], [], 1.0)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)

    def _start(self, module: str, *files: int) -> subprocess.Popen:
        command, settings = [*_program(module), *map(str, files)], self.settings.to_file()
        try:
            return subprocess.Popen(command, stdin=settings, start_new_session=True, pass_fds=files)
        finally:
            os.close(settings)

    def _start_decider(self) -> None:
        if self.decider is not None and self.decider.returncode == 0 or time.monotonic() < self.next_start:
            return
        if self.decider is not None:
            print_line(f"the decider has ended with code {self.decider.returncode}; it starts again from its journal")
        self.next_start = time.monotonic() + 1.0
        self.decider = self._start("decider", self.listening.fileno())

    def _may_restart(self, code: int) -> bool:
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < QUICK_SECONDS] + [now]
        name = signal.Signals(-code).name
        if self.signals or len(self.deaths) >= QUICK_DEATHS:
            return False
        print_line(f"the agent was ended by {name}; it starts again")
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
    """Return the lock of the journal's writer, on all nodes that share the folder. Waits for one on another host, which
    may be leaving.
    """
    return _lock(settings, "lock", patience=LOCK_SECONDS)


def _lock(settings: Settings, name: str, where: str = "", patience: float = 0.0) -> Lock:
    def refused(held: Held) -> ValueError:
        problem = f"`zaya aegis run` supervises this run already{'' if held.is_far else where}: {held}"
        fix = f"end that one first, or another --output{held.wait}"
        return mistake("--output", settings.folder, problem=problem, allowed="one at a time", fix=fix)

    def waits(held: Held) -> None:
        print_line(f"{settings.folder}: a supervisor on {printable(held.host)} has this run; waits for its end")

    lock = Lock.acquire([settings.folder / name], refused, launch="zaya aegis run", patience=patience, waits=waits)
    lock.lost = lambda: os.kill(os.getpid(), signal.SIGTERM)  # another one runs, after this host was silent
    return lock


def listen(settings: Settings) -> socket.socket | None:
    """Return the decider's socket if its address is this machine's, and no other agent of the machine has it.

    It is kept by this process: agents that connect while the decider starts again wait in its queue.
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


def _program(module: str) -> list[str]:
    return [sys.executable, "-m", f"zaya_plugin.aegis.{module}"]


def become_keeper(settings: Settings, listening: socket.socket | None) -> NoReturn:
    """Replace this process by the keeper. Its command line shows neither the hook nor the command, and the memory of
    what composed the recipe is free.
    """
    file = settings.to_file()
    os.set_inheritable(file, True)
    words = [*_program("keeper"), str(file)]
    if listening is not None:
        listening.set_inheritable(True)
        words.append(str(listening.fileno()))
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until `main` can answer it
    os.execv(sys.executable, words)


def main() -> int:
    """Run the keeper and return the exit code of the run."""
    with open(int(sys.argv[1])) as file:
        settings = Settings.from_json(file.read())
    listening = socket.socket(fileno=int(sys.argv[2])) if sys.argv[2:] else None
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with contextlib.ExitStack() as locks:
            locks.enter_context(node_lock(settings))
            if listening is not None:
                locks.enter_context(journal_lock(settings))
            return Keeper(settings, listening).run()
    except ValueError as error:  # a second supervisor
        print(f"zaya: {error}", file=sys.stderr)
        return USER_ERROR
    except OSError as error:
        if (text := of_the_machine(error, settings.folder, offline=True)) is None:
            raise
        print(f"zaya: {text}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
