# SPDX-License-Identifier: Apache-2.0
"""Whole `zaya` commands, each in a process of its own that is forked from one that has imported torch and Megatron already.

A start from scratch costs ten seconds of imports; tests that start and kill dozens of runs cannot pay them. A forked process
is one rank that "an outer launcher has started" (RANK=0 of 1), so what it runs is the real command up to its exit.

`python -m tests.faults.forked_ranks` runs jobs from JSON lines on stdin: {"argv": [...], "log": path,
"kill": [lines, seconds] or null} and answers each with a line {"code": exit code}. SIGKILL comes so many seconds after the job has
written so many lines (of its own, not of time, so that a busy machine is no other test); a killed job's code is -9.
"""

import json
import os
import signal
import socket
import sys
import time


def main() -> int:
    import torch

    torch.set_num_threads(1)
    from zaya_plugin import patches

    patches.apply_torch()
    import megatron.training  # noqa: F401

    from zaya_plugin.training import adapter, datasets, lifecycle, metrics  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(job["argv"], job["log"], job.get("kill"))), flush=True)
    return 0


def run(argv: list[str], log: str, kill: tuple[int, float] | None) -> dict:
    """One command in a fork."""
    before = lines_of(log)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port))
            os.setpgid(0, 0)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            from zaya_plugin.cli import main as zaya

            code = zaya(argv)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status)}
        if kill is not None and lines_of(log) - before >= kill[0]:
            time.sleep(kill[1])
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            kill = None
        time.sleep(0.005)


def lines_of(log: str) -> int:
    """Lines in `log` so far."""
    with open(log, "rb") as file:
        return file.read().count(b"\n")


if __name__ == "__main__":
    sys.exit(main())
