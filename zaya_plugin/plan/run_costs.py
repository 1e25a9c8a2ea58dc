# SPDX-License-Identifier: Apache-2.0
"""Time, device hours, checkpoints, storage and failures of a stage, from the prediction of its step. No torch import.

Failures are as frequent as device hours of public studies say: Kokolis et al. (arXiv 2410.21680) 7.9 hours at 1,024
GPUs of two A100 clusters, which is machine.device_hours_per_failure's default, and Llama 3 (arXiv 2407.21783) 419 in 54
days of 16,384 H100s. No rate of MI300Xs is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zaya_plugin.config.schedule import step_count, token_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.errors import as_typed
from zaya_plugin.plan import checkpoint_plan
from zaya_plugin.plan.prediction import Prediction

RARE_FAILURE_HOURS = 54 * 24 * 16_384 / 419  # device hours between failures, Llama 3
# From a failure to the first step after it: Google's public figures for its TPUs, 13 s to detect it, 50 to schedule
# again, 5.4 to restore and 12.7 to the first step.
RESTART_SECONDS = 81.1


@dataclass(frozen=True)
class StageCost:
    """A stage on `devices` devices. Without a predicted step, hours and what follows from them are None.

    Attributes:
        step: seconds. hours: of training, without failures. saved_bytes: of a checkpoint; kept: checkpoints on the
            storage at the end. between: seconds between checkpoints.
        failures: expected number, at the rates of both studies. lost: hours that those of the first one cost: half an
            interval and a restart each, and the time for which training waits for saves.
    """

    name: str
    devices: int
    steps: int
    tokens: int
    seq_length: int
    step: float | None
    hours: float | None
    saved_bytes: float
    kept: int
    between: float | None
    failures: tuple[float, float] | None
    lost: float | None

    @property
    def device_hours(self) -> float | None:
        """Device hours, with what failures and saves cost."""
        return (self.hours + self.lost) * self.devices if self.hours is not None and self.lost is not None else None


def stage_cost(recipe: Recipe, world: int, step: Prediction) -> StageCost:
    """Return the cost of a recipe's stage on `world` devices. step: its prediction."""
    steps, tokens, checkpoint = step_count(recipe), token_count(recipe), recipe.checkpoint
    plan, interval = checkpoint_plan.plan_of(recipe, world), checkpoint.save_interval or steps
    saves = steps // interval
    kept = min(saves, checkpoint.keep_last) if checkpoint.keep_last else saves
    kept += steps // checkpoint.keep_every if checkpoint.keep_every and checkpoint.keep_last else 0
    hours = between = failures = lost = None
    if step.seconds:
        between = interval * step.seconds
        hours = step.seconds * tokens / step.tokens / 3600  # a batch ramp's first steps are shorter
        often = recipe.machine.device_hours_per_failure
        failures = hours * world / often, hours * world / RARE_FAILURE_HOURS
        lost = (failures[0] * (between / 2 + RESTART_SECONDS) + saves * plan.costs[checkpoint.save]) / 3600
    return StageCost(
        recipe.stage.name,
        world,
        steps,
        tokens,
        recipe.stage.seq_length,
        step.seconds,
        hours,
        plan.total,
        kept,
        between,
        failures,
        lost,
    )


def five_lines(recipe: Recipe, world: int, step: Prediction) -> list[str]:
    """Return parameters, tokens, and of a step whose time is predicted that time, the stage's, and the time between
    checkpoints: what a dry run and a start print. Where it is not, two lines, and why.
    """
    stage, interval = stage_cost(recipe, world, step), recipe.checkpoint.save_interval
    size = f"parameters   {step.parameters:,}, {step.active:,} of them active for a token, without embedding"
    length = f"tokens       {stage.tokens:,} in {stage.steps:,} steps"
    if stage.device_hours is None:
        why = step.reason if recipe.parallel.pipeline_model_parallel_size > 1 else "unknown device"
        return [size, f"{length}, a checkpoint every {interval or stage.steps:,}; time not predicted: {why}"]
    return [
        size,
        length,
        f"step         {stage.step:.3g} s. {step.error}",
        f"stage        {stage.device_hours / world / 24:,.3g} days, {stage.device_hours:,.0f} GPU hours (prediction, with "
        "failures and saves)",
        f"saves        {stage.saved_bytes / 1e9:.1f} GB every {duration(stage.between)} (prediction; "
        f"checkpoint.save_interval={as_typed(interval)})",
    ]


def cost_lines(stages: Sequence[StageCost], price: float | None) -> list[str]:
    """Return a table of the stages and, of several, their sum. price: of a device hour."""
    head = f"{'stage':16}{'tokens':>9}{'context':>9}{'steps':>9}{'s a step':>10}{'days':>8}{'GPU hours':>12}"
    lines = [head + (f"{'cost':>14}" if price else "") + f"{'failures':>15}{'days lost':>11}{'checkpoints':>20}"]
    for stage in stages:
        row = f"{stage.name[:15]:16}{_short(stage.tokens):>9}{stage.seq_length:>9,}{stage.steps:>9,}"
        saved = f"{stage.saved_bytes / 1e9:.1f} GB x {stage.kept}"
        if stage.hours is None:
            lines.append(f"{row}   time not predicted; checkpoints {saved}")
            continue
        row += f"{stage.step:10.3f}{(stage.hours + stage.lost) / 24:8.1f}{stage.device_hours:12,.0f}"
        row += f"{price * stage.device_hours:14,.0f}" if price else ""
        few = f"{stage.failures[1]:,.1f} to {stage.failures[0]:,.1f}"
        lines.append(f"{row}{few:>15}{stage.lost / 24:11.2f}{saved:>20}")
    known = [stage for stage in stages if stage.hours is not None]
    if len(known) > 1:
        hours = sum(stage.device_hours for stage in known)
        row = f"{'sum':16}{_short(sum(stage.tokens for stage in known)):>9}{'':28}"
        row += f"{sum(stage.hours + stage.lost for stage in known) / 24:8.1f}{hours:12,.0f}"
        lines.append(row + (f"{price * hours:14,.0f}" if price else ""))
    if known:
        longest = max(stage.between for stage in known)
        lines += [
            "days and GPU hours include the time lost to failures and saves. Failures: arXiv 2407.21783 (Llama 3, H100) "
            "to machine.device_hours_per_failure (default: arXiv 2410.21680, A100); no rate of MI300Xs is published. Each "
            f"loses half of the time between checkpoints (up to {longest / 3600:.2g} h) and {RESTART_SECONDS:.0f} s.",
            f"storage: {sum(stage.saved_bytes * stage.kept for stage in stages) / 1e12:.2f} TB of checkpoints at the end, "
            "and one more while it is written",
        ]
    return lines


def _short(number: float) -> str:
    limit, unit = next((row for row in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= row[0]), (1, ""))
    return f"{number / limit:.4g}{unit}"
