# SPDX-License-Identifier: Apache-2.0
"""What a run reports: every step's numbers, computed once and given to the console, metrics.jsonl, W&B and TensorBoard."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from zaya_plugin.config.schema import Recipe
from zaya_plugin.optim.balancing import RouterStatistics
from zaya_plugin.training.console import step_line, summary
from zaya_plugin.training.sinks import Guarded, JsonLines, TensorBoard, WandbRun


@dataclass(frozen=True)
class Step:
    """One optimizer step as the loop saw it. loss: mean nats a token over the global batch; seconds: wall time without
    validation and checkpoints; flops: of the whole job; tokens: of the global batch; memory_gib: as of `memory_gib()`. Tensors
    lie on the host: nothing here waits for a device."""

    step: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    seconds: float
    tokens: int
    flops: float
    skipped: bool
    consumed_samples: int
    last_step: int
    memory_gib: float
    statistics: RouterStatistics | None


class Reporter:
    """Turns steps into rows. Every rank has one; the last rank, which holds the loss, writes.

    Args:
        recipe: the logger, cluster and model groups are read.
        rank, world_size: of this process.
        out: where console lines go (Megatron's own printing is sent to a log file).
    """

    def __init__(self, recipe: Recipe, rank: int, world_size: int, out: TextIO = sys.stdout):
        self.recipe = recipe
        self.world_size = world_size
        self.reports = rank == world_size - 1
        self.out = out
        self.sinks: list[Guarded] = []
        self.mean_seconds: float | None = None
        self.seconds = 0.0
        self.losses: list[float] = []
        self.validation_losses: list[float] = []
        self.lineage: dict[str, Any] | None = None

    def start(self, tensorboard, run_id: str, resumed_at: int, lineage: dict[str, Any] | None = None) -> None:
        """Open the sinks. `tensorboard`: Megatron's SummaryWriter or None; `resumed_at`: 0 for a new run; `lineage`: see
        `zaya_plugin.training.lifecycle.Lifecycle`."""
        if not self.reports:
            return
        self.lineage = lineage
        logger, run_dir = self.recipe.logger, Path(self.recipe.run_dir)
        self.sinks.append(Guarded("metrics.jsonl", JsonLines(run_dir / "metrics.jsonl", resumed_at)))
        if tensorboard is not None and logger.tensorboard:
            self.sinks.append(Guarded("TensorBoard", TensorBoard(tensorboard)))
        if logger.wandb and logger.wandb_mode != "disabled":
            self._open_wandb(run_id, run_dir)
        self._print(
            f"{self.recipe.name}: {self.recipe.model.name} on {self.recipe.cluster.name}, stage {self.recipe.stage.name}, "
            f"{self.world_size} rank{'s' if self.world_size > 1 else ''}, "
            + (
                f"continuing after step {resumed_at}"
                if resumed_at
                else f"taking over from stage {lineage['stage']} after {lineage['steps']} steps"
                if lineage
                else "from the start"
            )
        )

    def step(self, step: Step) -> None:
        """Report one step; called on every rank."""
        if not self.reports:
            return
        row = self._row(step)
        self.seconds += step.seconds
        if step.loss is not None:
            self.losses.append(step.loss)
        if step.statistics is not None and step.step % self.recipe.logger.expert_load_interval == 0:
            row["expert_load"] = [[round(share, 5) for share in layer] for layer in step.statistics.load.tolist()]
        self._log(row)
        if step.step % self.recipe.logger.log_interval == 0 or step.step == step.last_step:
            self._print(step_line({**row, "last_step": step.last_step}))

    def validation(self, step: int, loss: float, domains: Mapping[str, float] | None = None) -> None:
        """Report a validation loss (mean nats a token), and that of each of its `domains`."""
        if self.reports:
            domains = domains or {}
            self.validation_losses.append(loss)
            self._log(
                {
                    "step": step,
                    "valid_loss": loss,
                    **{f"validation/{name}/loss": value for name, value in domains.items()},
                }
            )
            parts = ", ".join(f"{name} {value:.4f}" for name, value in domains.items())
            self._print(f"step {step}: validation loss {loss:.4f}" + (f" ({parts})" if parts else ""))

    def checkpoint(self, step: int) -> None:
        """Report a finished checkpoint."""
        if self.reports:
            self._print(f"step {step}: checkpoint saved")

    def close(self) -> None:
        """Flush and close everything; safe to call when nothing was opened."""
        for sink in self.sinks:
            sink.close()
        self.sinks.clear()
        if self.losses:
            self._print(summary(self.losses, self.validation_losses, self.seconds, self.recipe.run_dir))
            self.losses = []

    def _row(self, step: Step) -> dict[str, Any]:
        # The first step holds compilation and allocation; it would spoil the mean that the ETA is made of.
        if self.mean_seconds is None or step.step <= 2:
            self.mean_seconds = step.seconds
        self.mean_seconds += 0.1 * (step.seconds - self.mean_seconds)
        tflops = step.flops / step.seconds / self.world_size / 1e12
        peak, reachable = self.recipe.cluster.peak_tflops, self.recipe.cluster.reachable_tflops
        row: dict[str, Any] = {
            "step": step.step,
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            "step_s": step.seconds,
            "tokens_per_s": step.tokens / step.seconds,
            "tflops_per_device": tflops,
            "mfu": tflops / peak if peak else None,
            "share_of_reachable": tflops / reachable if reachable else None,
            "memory_gib": step.memory_gib,
            "consumed_samples": step.consumed_samples,
            "total_tokens": (self.lineage or {}).get("tokens", 0)
            + step.consumed_samples * self.recipe.stage.seq_length,
            "skipped": int(step.skipped),
            "eta_s": self.mean_seconds * (step.last_step - step.step),
        }
        if step.statistics is not None:
            imbalance, entropy = step.statistics.imbalance, step.statistics.load_entropy
            row["expert_imbalance"] = imbalance.mean().item()
            row["expert_imbalance_worst_layer"] = imbalance.max().item()
            row["load_entropy"] = entropy.mean().item()
            row["load_entropy_worst_layer"] = entropy.min().item()
            row["router_entropy"] = step.statistics.entropy.mean().item()
        return row

    def _open_wandb(self, run_id: str, run_dir: Path) -> None:
        from dataclasses import asdict

        logger = self.recipe.logger
        try:
            run = WandbRun(
                project=logger.wandb_project,
                entity=logger.wandb_entity,
                name=logger.wandb_name or self.recipe.name,
                mode=logger.wandb_mode,
                run_id=run_id,
                directory=run_dir,
                config={**asdict(self.recipe), "lineage": self.lineage},
                group=logger.wandb_group,
            )
        except ImportError:
            self._print("logger.wandb is on but the package wandb is not installed; going on without it")
            return
        self.sinks.append(Guarded("W&B", run))
        self._print(f"W&B: {run.where}")

    def note(self, lines: list[str]) -> None:
        """Console lines about the run itself."""
        if self.reports:
            self._print("\n".join(lines))

    def _log(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.log(row)

    def _print(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def memory_gib() -> float:
    """Highest memory of this rank so far: of the device, or resident on the host where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
