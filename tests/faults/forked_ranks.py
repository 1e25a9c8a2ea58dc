# SPDX-License-Identifier: Apache-2.0
"""Whole `zaya` commands, each in a process of its own that is forked from one that has imported torch and Megatron
already.

A start from scratch costs ten seconds of imports; tests that start and kill dozens of runs cannot pay them. A forked
process is one rank that "an outer launcher has started" (RANK=0 of 1), so what it runs is the real command up to its
exit.

`python -m tests.faults.forked_ranks` runs jobs from JSON lines on stdin: {"argv": [...], "log": path, "kill": [point,
seconds] or null, "reads": path or null} and answers each with a line {"code": exit code}. SIGKILL comes this many
seconds after the job reached a point, so that a busy machine is no other test: an absolute path is a checkpoint
directory in which it has begun a save, another string a text that it has printed. A killed job's code is -9. The
answer's "spawned" are the processes that the job had started when it was killed, "left" those that did not end with it.
With "reads": path a job appends there what its training reads of a StreamDataset, a line "sample source position" each.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path


def main() -> int:
    import torch

    torch.set_num_threads(1)
    from zaya_plugin import patches

    patches.apply_torch()
    import megatron.training  # noqa: F401
    from megatron.core.tokenizers.text.libraries import huggingface_tokenizer  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    from zaya_plugin.commands import curriculum, train  # noqa: F401
    from zaya_plugin.data import sources  # noqa: F401
    from zaya_plugin.hosts import pretrain, worker  # noqa: F401
    from zaya_plugin.run import curriculum_run, launch  # noqa: F401
    from zaya_plugin.training import lifecycle, metrics  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(job["argv"], job["log"], job.get("kill"), job.get("reads"))), flush=True)
    return 0


def run(argv: list[str], log: str, kill: tuple[str, float] | None, reads: str | None) -> dict:
    """One command in a fork."""
    reached = None if kill is None else point(kill[0], log)
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

            if reads is not None:
                record_reads(reads)
            code = zaya(argv)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    spawned: list[str] = []
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status), "spawned": spawned, "left": left_in_group(pid)}
        if kill is not None and reached():
            time.sleep(kill[1])
            spawned = [name for number, name in group(pid).items() if number != pid]
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
            kill = None
        time.sleep(0.005)


def point(kill: str, log: str) -> Callable[[], bool]:
    """Whether the job that is started next has come to the point where it is to be killed."""
    if not kill.startswith("/"):
        before = printed(log).count(kill)
        return lambda: printed(log).count(kill) > before
    folder = Path(kill)
    known = {path.name: path.stat().st_mtime_ns for path in folder.glob("iter_*")}
    return lambda: any(known.get(path.name) != path.stat().st_mtime_ns for path in folder.glob("iter_*"))


def left_in_group(number: int, patience: float = 60) -> list[str]:
    """Processes of a group that still exist after `seconds`."""
    deadline = time.monotonic() + patience
    while (left := list(group(number).values())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def group(number: int) -> dict[int, str]:
    """Processes of a group: number and command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == number and fields[0] != "Z":
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:  # it ended meanwhile
            continue
    return found


def record_reads(path: str) -> None:
    """In this process StreamDataset says in a file what it is asked for."""
    from zaya_plugin.data.stream_dataset import StreamDataset

    plain = StreamDataset.__getitem__
    file = open(path, "a", buffering=1)

    def recorded(self, number):
        source, position = self.place(number)
        file.write(f"{number} {self.uses[source].prefix} {position}\n")
        return plain(self, number)

    StreamDataset.__getitem__ = recorded


def printed(log: str) -> str:
    """What is in `log` so far."""
    return Path(log).read_text(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
