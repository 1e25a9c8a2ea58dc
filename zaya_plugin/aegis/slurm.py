# SPDX-License-Identifier: Apache-2.0
"""The requests of a supervised run to SLURM: start the job again without the nodes that failed, and keep others off.

Every call is a list of words with a deadline; SLURM's controller may be busy or down, and the run continues without it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from zaya_plugin.aegis.diagnose.evidence import printable
from zaya_plugin.ground.whole_file import write_whole

CALL_SECONDS = 10.0
HELPER = (
    "sbatch",
    "--job-name=aegis-requeue",
    "--ntasks=1",
    "--time=5",
    "--chdir=/",
    "--output=/dev/null",
    "--no-requeue",
)
# SLURM sets the start of a requeued job two minutes ahead when the job's last process has ended, which can be a moment
# after the job is PENDING. So the start is set again for ten seconds; then this job gives its node back.
START_NOW = """sh -c 'left=10
for second in $(seq 240); do
    case "$(scontrol --oneliner show job $0)" in
        *JobState=PENDING*) scontrol update JobId=$0 StartTime=now; left=$((left - 1)); [ $left = 0 ] && exit ;;
    esac
    sleep 1
done'"""
FAILING = "failing_nodes.txt"


def call(*words: str, seconds: float = CALL_SECONDS) -> tuple[bool, str]:
    """Run a command of SLURM; return whether it succeeded, and its output."""
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


def start_of_job() -> str:
    """Return a name for this start of the job; SLURM gives each requeue a new number."""
    return f"{job()}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def requeue(job_id: str, nodes_out: Iterable[str] = ()) -> tuple[bool, str]:
    """Start the job again, soon and without `nodes_out`; return whether SLURM accepts it, and its other answers.

    SLURM lets a requeued job wait for two minutes from the end of its last process on; only after that end may the user
    set its start to now. This process does not live that long, so a job of its own does it. If SLURM refuses that
    job the two minutes pass. The list of excluded nodes is kept. None of it needs the rights of an operator.
    """
    taken, answer = call("scontrol", "requeue", job_id)
    if not taken:
        return False, answer
    wrong, options = [], {name: os.environ.get(f"SLURM_JOB_{name.upper()}") for name in ("partition", "account", "qos")}
    if out := ",".join(sorted(nodes_out)):
        done, answer = call("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={out}")
        wrong += [] if done else [f"the nodes are not excluded: {answer}"]
        options["exclude"] = out
    words = [f"--{name}={value}" for name, value in options.items() if value]
    done, answer = call(*HELPER, *words, f"--wrap={START_NOW} {job_id}")
    wrong += [] if done else [f"it waits for two minutes: {answer}"]
    return True, "; ".join(wrong)


class Drains:
    """Asks SLURM to keep jobs off nodes, without a wait of this process. Without an operator's rights it is refused,
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
        """Remove calls that have ended, and end those that are late."""
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
