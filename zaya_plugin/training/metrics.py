# SPDX-License-Identifier: Apache-2.0
"""The numbers of every step, computed once and written to the console, metrics.jsonl, the trackers and TensorBoard."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import message
from zaya_plugin.optim.balancing import RouterStatistics
from zaya_plugin.training.sinks import (
    Background,
    Guarded,
    JsonLines,
    TensorBoard,
    Tracker,
    TrackioRun,
    WandbRun,
    unless_set,
)


@dataclass(frozen=True)
class Step:
    """One optimizer step. Its tensors are on the host.

    loss: mean nats a token over the global batch.
    lr: of the update of this step; parameters with a multiplier have a multiple of it.
    seconds: wall time without validation and checkpoints.
    tokens: of the global batch.
    flops: of the whole job.
    memory_gib: as `memory_gib()` returns it.
    is_warm: False for the first steps of a start, which compile kernels and capture graphs.
    loss_spike: robust z score of the loss, of a step that the loss guard calls a spike; else None.
    """

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
    is_warm: bool = True
    loss_spike: float | None = None


class Reporter:
    """Computes and writes the row of every step. Every rank has a Reporter; only the last rank, which has the loss,
    writes.

    Args:
        recipe: the logger, cluster and model groups are read.
        rank: of this process.
        world_size: number of processes.
        out: receives the console lines (Megatron's own output goes to a log file).
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
        self.validated: tuple[float, int] | None = None  # loss and tokens of the last validation
        self.lineage: dict[str, Any] | None = None
        self.at = (0, 0)  # the last reported step, and the last step of the run

    def start(self, run_id: str, resumed_at: int, lineage: dict[str, Any] | None = None) -> None:
        """Open the sinks and print the first line.

        resumed_at: 0 for a new run. lineage: see `zaya_plugin.training.lifecycle.Lifecycle`.
        """
        if not self.reports:
            return
        self.lineage = lineage
        logger, run_dir = self.recipe.logger, Path(self.recipe.run_dir)
        self._add_sink("metrics.jsonl", lambda: JsonLines(run_dir / "metrics.jsonl", resumed_at))
        if logger.tensorboard:
            self._add_sink("TensorBoard", lambda: TensorBoard(run_dir / "tensorboard", resumed_at))
        if logger.wandb and "disabled" not in (logger.wandb_mode, os.environ.get("WANDB_MODE")):
            self._add_tracker("W&B", "wandb", lambda: self._open_wandb(run_id, run_dir))
        if logger.trackio:
            self._add_tracker("trackio", "trackio", lambda: self._open_trackio(run_id))
        self.print(
            f"{self.recipe.name}: {self.recipe.model.name} on {self.recipe.cluster.name}, stage "
            f"{self.recipe.stage.name}, "
            f"{self.world_size} rank{'s' if self.world_size > 1 else ''}, "
            + (
                f"continuing after step {resumed_at}"
                if resumed_at
                else f"from the published weights {lineage['published']}"
                if lineage and "published" in lineage
                else f"taking over from stage {lineage['stage']} after {lineage['steps']} steps"
                if lineage
                else "from the start"
            )
        )

    def step(self, step: Step) -> None:
        """Report one step. Every rank calls it."""
        if not self.reports:
            return
        row = self._row(step)
        self.seconds += step.seconds
        self.at = step.step, step.last_step
        if step.loss is not None:
            self.losses.append(step.loss)
        if step.statistics is not None and step.step % self.recipe.logger.expert_load_interval == 0:
            row["expert_load"] = [[round(share, 5) for share in layer] for layer in step.statistics.load.tolist()]
        self._log(row)
        if step.step % self.recipe.logger.log_interval == 0 or step.step == step.last_step:
            self.print(step_line({**row, "last_step": step.last_step}))

    def validation(self, step: int, loss: float, tokens: int, domains: Mapping[str, float] | None = None) -> None:
        """Report a validation loss (mean nats a token) of `tokens` tokens, and that of each of its `domains`."""
        if self.reports:
            domains = domains or {}
            self.validated = (loss, tokens)
            row = {"step": step, "valid_loss": loss, "valid_tokens": tokens}
            self._log(row | {f"validation/{name}/loss": value for name, value in domains.items()})
            parts = ", ".join(f"{name} {value:.4f}" for name, value in domains.items())
            text = f"step {step}: validation loss {loss:.4f} of {tokens:,} tokens"
            self.print(text + (f" ({parts})" if parts else ""))

    def samples(self, step: int, prompts: list[str], texts: list[str]) -> None:
        """Report what the model writes after each of the prompts."""
        if self.reports:
            pairs = [*zip(prompts, texts, strict=True)]
            self._log({"step": step, "samples": [{"prompt": prompt, "text": text} for prompt, text in pairs]})
            self.print("\n".join(f"step {step}: {prompt!r} -> {text!r}" for prompt, text in pairs))

    def close(self) -> None:
        """Close the sinks, which may not have been opened, and print the summary."""
        for sink in self.sinks:
            sink.close()
        self.sinks.clear()
        if self.losses:
            self.print(summary(self.losses, self.validated, self.seconds, self.recipe.run_dir, self.at))
            self.losses = []

    def _row(self, step: Step) -> dict[str, Any]:
        # The first steps of a start compile and allocate, so the mean, from which the ETA is computed, leaves them out.
        if step.is_warm:
            self.mean_seconds = self.mean_seconds or step.seconds
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
            "eta_s": self.mean_seconds and self.mean_seconds * (step.last_step - step.step),
        }
        if step.loss_spike is not None:
            row["loss_spike"] = step.loss_spike
        if step.statistics is not None:
            imbalance, entropy = step.statistics.imbalance, step.statistics.load_entropy
            row["expert_imbalance"] = imbalance.mean().item()
            row["expert_imbalance_worst_layer"] = imbalance.max().item()
            row["load_entropy"] = entropy.mean().item()
            row["load_entropy_worst_layer"] = entropy.min().item()
            row["router_entropy"] = step.statistics.entropy.mean().item()
        return row

    def _add_sink(self, name: str, open_sink: Callable[[], Any]) -> None:
        self.sinks.append(Guarded(name, open_sink, self.print))

    def _add_tracker(self, name: str, package: str, open_run: Callable[[], Tracker]) -> None:
        """Add a tracker in a thread of its own. package: its module, and its key of `logger`."""

        def open_or_explain() -> Tracker | None:
            try:
                run = open_run()
            except ImportError:
                problem = f"the package {package} is not installed, so {name} is disabled"
                fix = f"pip install {package}, or logger.{package}=false"
                self.print(message(f"logger.{package}", True, problem=problem, fix=fix))
                return None
            self.print(f"{name}: {run.where}")
            return run

        tracker = Background(name, open_or_explain, self.print)
        self._add_sink(name, lambda: tracker)
        if not tracker.opened.wait(tracker.START_SECONDS):
            self.print(f"{name}: no answer yet; the run does not wait for it")

    def _open_wandb(self, run_id: str, run_dir: Path) -> WandbRun:
        logger = self.recipe.logger
        return WandbRun(
            project=unless_set("WANDB_PROJECT", logger.wandb_project),
            entity=unless_set("WANDB_ENTITY", logger.wandb_entity),
            name=unless_set("WANDB_NAME", logger.wandb_name or self.recipe.name),
            mode=logger.wandb_mode,
            run_id=run_id,
            directory=unless_set("WANDB_DIR", run_dir),
            config=self._config(),
            group=unless_set("WANDB_RUN_GROUP", logger.wandb_group),
            say=self.print,
        )

    def _open_trackio(self, run_id: str) -> TrackioRun:
        logger = self.recipe.logger
        name, config = logger.wandb_name or self.recipe.name, self._config()
        return TrackioRun(
            project=logger.wandb_project, name=name, run_id=run_id, config=config, group=logger.wandb_group
        )

    def _config(self) -> dict[str, Any]:
        return {**asdict(self.recipe), "lineage": self.lineage}

    def note(self, lines: list[str]) -> None:
        """Print console lines about the run."""
        if self.reports:
            self.print("\n".join(lines))

    def _log(self, row: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.log(row)

    def print(self, text: str) -> None:
        """Print a line, on any rank: rank 0, which completes checkpoints, may be another than the one that reports."""
        # A console that is full, closed or without a character is no reason to end a run.
        with contextlib.suppress(OSError, ValueError):
            self.out.write(text + "\n")
            self.out.flush()


def memory_gib() -> float:
    """Return this rank's peak memory in GiB: allocated on the device, or resident on the host if there is no device."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def step_line(row: dict[str, Any], width: int | None = None) -> str:
    """Return the console line of a metrics row.

    Fields that do not fit `width` columns (default: the terminal's) are omitted, the least important first. Units:
    tokens/s of the whole job, GiB of one rank.
    """
    width = width or shutil.get_terminal_size((120, 24)).columns
    last = str(row["last_step"])
    # (importance, text): printed in this order; the largest number is omitted first.
    parts = [
        (0, f"step {row['step']:>{len(last)}}/{last}"),
        (0, f"loss {row['loss']:.4f}" if row["loss"] is not None else "loss -"),
        (1, f"lr {row['lr']:.2e}" if row["lr"] is not None else None),
        (1, f"grad {row['grad_norm']:.2f}" if row["grad_norm"] is not None else None),
        (0, f"{_short(row['tokens_per_s'])} tok/s"),
        (
            2,
            f"mfu {100 * row['mfu']:.1f}%"
            if row.get("mfu") is not None
            else f"{_short(row['tflops_per_device'] * 1e12)}F/s",
        ),
        (3, f"load {row['expert_imbalance']:.2f}x" if row.get("expert_imbalance") is not None else None),
        (4, f"H {row['router_entropy']:.2f}" if row.get("router_entropy") is not None else None),
        (5, f"{row['memory_gib']:.1f} GiB"),
        (2, f"eta {_clock(row['eta_s'])}" if row["eta_s"] is not None else None),
        (0, "SKIPPED" if row["skipped"] else None),
    ]
    parts = [part for part in parts if part[1]]
    while len(parts) > 1 and len("  ".join(text for _, text in parts)) > width - 1:
        parts.remove(max(parts, key=lambda part: part[0]))
    return "  ".join(text for _, text in parts)


def summary(
    losses: list[float], validated: tuple[float, int] | None, seconds: float, run_dir: str, at: tuple[int, int] = (0, 0)
) -> str:
    """Return the last lines of a run: its loss curve as blocks, the last validation loss with its number of tokens, and
    the paths of its results.

    at: the last step and that of the whole run; where they differ, the line begins with them.
    """
    text = f"{len(losses)} steps in {_clock(seconds)}  loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}"
    if at[0] < at[1]:
        text = f"ended at step {at[0]} of {at[1]}: {text}"
    if validated is not None:
        text += f"  validation {validated[0]:.3f} of {validated[1]:,} tokens"
    try:
        entries = [entry for entry in os.scandir(run_dir) if not entry.name.startswith((".", "run.lock"))]
        names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    except OSError as error:
        return f"{text}\n{run_dir} cannot be read ({error.strerror})"
    return f"{text}\neverything is in {run_dir}: {', '.join(names)}"


def sparkline(values: list[float], width: int = 40) -> str:
    """Draw `values` as at most `width` blocks of eight heights, each the mean of a stretch; x for a mean that is not
    finite.
    """
    width = min(width, len(values))
    means = []
    for i in range(width):
        stretch = values[i * len(values) // width : (i + 1) * len(values) // width]
        means.append(sum(stretch) / len(stretch))
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(
        "▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] if math.isfinite(mean) else "x" for mean in means
    )


def _short(value: float) -> str:
    """Return `value` with three digits and a metric prefix."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    """Return `seconds` as h:mm:ss or m:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
