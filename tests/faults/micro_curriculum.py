# SPDX-License-Identifier: Apache-2.0
"""A curriculum as small as all its parts allow, and the process that runs its commands (tests.faults.forked_ranks)."""

import json
import subprocess
import sys
from pathlib import Path

SMALL = (
    *(
        "model.num_layers=2",
        "model.num_experts=4",
        "model.hidden_size=64",
        "model.kv_channels=8",
        "model.moe_ffn_hidden_size=48",
    ),
    *("model.router_hidden_size=16", "stage.seq_length=16", "stage.micro_batch_size=1", "stage.global_batch_size=2"),
    *(
        "stage.eval_iters=0",
        "stage.eval_at_start=false",
        "optim.lr_warmup_iters=0",
        "optim.lr_warmup_init=0",
        "optim.lr=1e-3",
        "optim.min_lr=1e-4",
    ),
    *("checkpoint.keep_last=0", "logger.wandb=false", "logger.tensorboard=false", "cluster.threads_per_rank=1"),
    *("parallel.context_parallel_size=1", "checkpoint.save_interval=2"),
)


class Ranks:
    """The process of tests.faults.forked_ranks. spawned: what the job that was killed last had started."""

    def __init__(self, log: Path):
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults.forked_ranks"]
        self.log = log
        self.errors = open(log, "a")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def run(self, *argv: str, kill: tuple[str, float] | None = None, reads: Path | None = None) -> int:
        """Exit code of a command; kill and reads: see tests.faults.forked_ranks."""
        job = {"argv": argv, "log": str(self.log), "kill": kill, "reads": str(reads) if reads else None}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        self.spawned = done["spawned"]
        assert not done["left"], "processes that outlive their rank hold half a gigabyte each"
        return done["code"]

    def finish(self, *argv: str, reads: Path | None = None) -> None:
        """Runs a command that has to succeed."""
        code = self.run(*argv, reads=reads)
        assert code == 0, self.log.read_text()[-6000:]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.errors.close()
