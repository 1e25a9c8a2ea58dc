# SPDX-License-Identifier: Apache-2.0
"""Ranks that start at once: processes that have imported everything and fork the ranks of one job after the other. A job
is a JSON file; its "program" is the module whose main() runs it, layout_run by default.

Importing torch, Megatron and transformers is most of the time of a short run. A process that has asked CUDA's driver
for anything must not fork ranks that use a GPU: is_available() is therefore answered by NVML, one fork tries a GPU out,
and where that fails the ranks start as fresh interpreters.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Without a compiler process for each core and rank.
GPU = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
TOO_LONG = 124  # exit code of ranks that were ended after their time


class RankServers:
    """`count` such processes with `environment` besides this one's; `run` may be called from as many threads."""

    def __init__(self, count: int = 1, environment: Mapping[str, str] = CPU):
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.rank_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **environment},
            )
            for _ in range(count)
        ]
        self.free: queue.Queue[subprocess.Popen] = queue.Queue()
        for process in self.processes:
            self.free.put(process)

    def run(self, ranks: int, job: Path, seconds: float = 800) -> None:
        """Runs the job on `ranks` processes; waits for a free server. Fails with the end of each rank's stderr."""
        server = self.free.get()
        try:
            server.stdin.write(f"{ranks} {seconds} {job}\n")
            server.stdin.flush()
            code = server.stdout.readline().strip()
        finally:
            self.free.put(server)
        if code != "0":
            said = "\n".join(log.read_text()[-3000:] for log in sorted(job.parent.glob(f"{job.name}.rank*.stderr")))
            raise AssertionError(f"{job.stem} ended with {code or 'its server'}:\n{said}")

    def close(self) -> None:
        """End the servers once they are free."""
        for process in self.processes:
            process.stdin.close()
            process.wait(timeout=60)


def serve() -> None:
    """Reads lines `<ranks> <seconds> <job.json>` and answers each with an exit code."""
    from tests.distributed import layout_run  # noqa: F401  applies the patches of torch
    from zaya_plugin import patches

    patches.apply()
    import megatron.core.tokenizers.text  # noqa: F401  imports transformers
    from transformers import AutoTokenizer  # noqa: F401

    import zaya_plugin.hosts.pretrain  # noqa: F401
    from zaya_plugin.config.compose import compose
    from zaya_plugin.patches.registry import has_accelerator

    compose(["experiment=cpu_demo"])
    fork = not has_accelerator() or _wait({_start(_use_gpu, {}, os.devnull): 0}, 60) == 0
    for line in sys.stdin:
        ranks, seconds, job = line.strip().split(" ", 2)
        print(_run_ranks(int(ranks), float(seconds), job, fork), flush=True)


def _run_ranks(ranks: int, seconds: float, job: str, fork: bool) -> int:
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    main = _forked_rank if fork else _fresh_rank
    pids = {}
    for rank in range(ranks):
        environment = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pids[_start(lambda: main(job), environment, f"{job}.rank{rank}.stderr")] = rank
    return _wait(pids, seconds)


def _free_port() -> int:
    """Below those that Linux hands out by itself: one of them could be taken, by other ranks, before rank 0
    listens.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def _start(main, environment: dict[str, str], stderr: str) -> int:
    """The process id of a fork that runs main()."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ.update(environment)
        with open(stderr, "w") as log:
            os.dup2(log.fileno(), 2)
        os.dup2(2, 1)  # the server's stdout is for its answers
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _program(job: str) -> str:
    return json.loads(Path(job).read_text()).get("program", "tests.distributed.layout_run")


def _forked_rank(job: str) -> None:
    importlib.import_module(_program(job)).main(job)


def _fresh_rank(job: str) -> None:
    os.execv(sys.executable, [sys.executable, "-m", _program(job), job])


def _use_gpu() -> None:
    import torch

    torch.ones(1, device="cuda").item()


def _wait(pids: dict[int, int], seconds: float) -> int:
    """The exit code of the first that fails, when all have ended; the others would wait for it for ever, and are
    killed.
    """
    worst, deadline = 0, time.monotonic() + seconds
    running = set(pids)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            code = TOO_LONG
        else:
            time.sleep(0.02)
            continue
        if code and not worst:
            worst = code
            deadline = math.inf
            for other in running:
                os.kill(other, signal.SIGKILL)
    return worst


if __name__ == "__main__":
    serve()
