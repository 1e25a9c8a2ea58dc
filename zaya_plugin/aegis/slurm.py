# SPDX-License-Identifier: Apache-2.0
"""What a supervised run asks of SLURM: start the job again, without the nodes that failed, and keep others off them.

Every call is a list of words with a deadline; SLURM's controller may be busy or gone, and the run goes on without it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from zaya_plugin.aegis.evidence import printable
from zaya_plugin.config.whole_file import write_whole

CALL_SECONDS = 10.0
AGAIN_SECONDS = 20.0  # SLURM ends the job's processes 30 s (KillWait) after a requeue
FAILING = "failing_nodes.txt"


def call(*words: str, seconds: float = CALL_SECONDS) -> tuple[bool, str]:
    """Run a command of SLURM; return whether it succeeded, and what it said."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
        )
    except FileNotFoundError:
        return False, f"{words[0]} is not on the path"
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{words[0]} did not answer ({type(error).__name__})"
    return done.returncode == 0, printable(done.stdout)


def job() -> str | None:
    """Return the id of the job that this process belongs to."""
    return os.environ.get("SLURM_JOB_ID")


def requeue(job_id: str, nodes_out: Iterable[str] = ()) -> tuple[bool, str]:
    """Start the job again, at once and without `nodes_out`; return whether SLURM took it, and what it said.

    SLURM lets a requeued job wait for two minutes; the user may set its start to now, and its list of excluded nodes,
    while it waits. Both need no rights of an operator. This process is ended by the requeue, after SLURM's KillWait.
    """
    taken, said = call("scontrol", "requeue", job_id)
    if not taken:
        return False, said
    deadline = time.monotonic() + AGAIN_SECONDS
    wanted = ["StartTime=now"]
    if nodes_out := sorted(nodes_out):
        wanted.insert(0, f"ExcNodeList={','.join(nodes_out)}")
    while wanted and time.monotonic() < deadline:
        done, said = call("scontrol", "update", f"JobId={job_id}", wanted[0])
        if done:
            wanted.pop(0)
        else:  # its processes are still being ended
            time.sleep(0.5)
    return True, f"not done: {' '.join(wanted)}: {said}" if wanted else ""


class Drains:
    """Asks SLURM to keep jobs off nodes, beside the work of this process. Without an operator's rights it is refused,
    once, and then no more asked; --exclude and failing_nodes.txt do not need it.
    """

    def __init__(self) -> None:
        self.refused = False
        self._calls: list[tuple[float, subprocess.Popen]] = []

    def start(self, node: str, reason: str) -> None:
        """Ask for one node."""
        if self.refused:
            return
        words = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._calls.append((time.monotonic() + CALL_SECONDS, subprocess.Popen(words, **pipes)))
        except OSError:
            self.refused = True

    def poll(self) -> None:
        """Take note of calls that have ended, and end those that are late."""
        for entry in list(self._calls):
            deadline, process = entry
            if process.poll() is not None:
                self.refused |= process.returncode != 0
                self._calls.remove(entry)
            elif time.monotonic() > deadline:
                process.kill()


def write_failing(folder: Path, nodes: Iterable[str]) -> None:
    """Write failing_nodes.txt, one node a line, as AMD's tools do; `sbatch --exclude=$(paste -sd, FILE)` reads it."""
    write_whole(folder / FAILING, "".join(f"{node}\n" for node in sorted(nodes)))
