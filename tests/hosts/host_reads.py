# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.hosts.host_reads RUN_DIR [override ...]`: a few steps on random tokens; RUN_DIR/host_reads.json then
says, for every step, where in the program the host read a tensor's value (aten::_local_scalar_dense) or waited for the
device, and how often.

On a GPU a read counts only of a tensor that lies there, and what torch.cuda.set_sync_debug_mode sees counts too.
"""

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.running import MICRO
from zaya_plugin.config.compose import compose
from zaya_plugin.hosts import worker

ROOT = Path(__file__).resolve().parents[2]
BETWEEN = (str(Path(torch.__file__).parent), str(ROOT / "patches"), str(Path(__file__)))
RECIPE = (
    *MICRO,
    "data.path=none",
    "nproc=1",
    "optim=muon",
    "optim.lr_warmup_iters=2",
    "optim.non_finite_gradients=skip",
    "stage.train_iters=8",
    "stage.eval_iters=0",
    "checkpoint.save_interval=null",
)


class Reads(TorchDispatchMode):
    """One Counter of places a step; the first begins with the first step."""

    def __init__(self, on_device: bool):
        super().__init__()
        self.on_device = on_device
        self.steps: list[Counter] = []
        self.rates: list[float] = []  # of each step's update

    def note(self, what: str = "") -> None:
        if not self.steps:
            return
        frames = [
            f for f in traceback.extract_stack() if not f.filename.startswith(BETWEEN) and "warnings" not in f.filename
        ]
        path = frames[-1].filename.split("site-packages/")[-1].removeprefix(f"{ROOT}/")
        self.steps[-1][f"{path}:{frames[-1].name}{what}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda == self.on_device:
            self.note()
        return func(*args, **(kwargs or {}))

    def begin_step(self, parts) -> None:
        self.steps.append(Counter())
        self.rates.append(next(group["lr"] for group in parts.optimizer.param_groups if group["default_config"]))

    def watch_device(self) -> None:
        """Count what torch knows to wait, and what it does not count as waiting since it was asked for."""
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: (
            self.note(" waits") if "synchronizing CUDA operation" in str(message) else None
        )
        for owner, name in (
            (torch.cuda, "synchronize"),
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
        ):
            setattr(owner, name, self._noted(getattr(owner, name), f" calls {name}"))

    def _noted(self, function, what):
        def call(*positional, **named):
            self.note(what)
            return function(*positional, **named)

        return call


def main(run_dir: str, *overrides: str) -> None:
    recipe = compose([*RECIPE, f"run_dir={run_dir}", *overrides])
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.environ.get("MASTER_PORT", "29517"),
    }
    worker.prepare(recipe)
    from zaya_plugin.bench.random_tokens import RandomTokens
    from zaya_plugin.hosts import pretrain
    from zaya_plugin.hosts.measured_steps import before_steps
    from zaya_plugin.training.lifecycle import Lifecycle
    from zaya_plugin.training.metrics import Reporter

    reads = Reads(on_device=recipe.cluster.device != "cpu")
    if reads.on_device:
        torch.cuda.set_device(0)
        reads.watch_device()
    with reads, before_steps(reads.begin_step):
        pretrain.run(recipe, RandomTokens(512), Lifecycle(recipe), Reporter(recipe, 0, 1))
    Path(run_dir, "host_reads.json").write_text(json.dumps(reads.steps, indent=1))
    Path(run_dir, "rates.json").write_text(json.dumps(reads.rates))


if __name__ == "__main__":
    main(*sys.argv[1:])
