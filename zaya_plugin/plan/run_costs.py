# SPDX-License-Identifier: Apache-2.0
"""Time, device hours, checkpoints, storage and failures of a stage, from the prediction of its step. No torch import.

Failures are as frequent as device hours of public studies say: Kokolis et al. (arXiv 2410.21680) 7.9 hours at 1,024
GPUs of two A100 clusters, which is machine.device_hours_per_failure's default, and Llama 3 (arXiv 2407.21783) 419 in 54
days of 16,384 H100s. No rate of MI300Xs is published.
"""

from __future__ import annotations

from zaya_plugin.config.schedule import step_count, token_count
from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.errors import as_typed
from zaya_plugin.plan import checkpoint_plan
from zaya_plugin.plan.prediction import Prediction

RARE_FAILURE_HOURS = 54 * 24 * 16_384 / 419  # device hours between failures, Llama 3
# From a failure to the first step after it: Google's public figures for its TPUs, 13 s to detect it, 50 to schedule
# again, 5.4 to restore and 12.7 to the first step.
RESTART_SECONDS = 81.1


def stage_cost(step: Prediction, price: float | None = None) -> dict:
    """Return the cost of the stage of a predicted step. price: of a device hour.

    Returns:
        name, devices, steps, tokens, seq_length; saved_bytes of a checkpoint, and kept: checkpoints on the storage at
        the end. With a predicted step also: step, seconds; hours of training without failures; between, seconds between
        checkpoints; failures, the expected number at the rates of both studies; lost, hours that those of the first one
        cost (half an interval and a restart each) and for which training waits for saves; device_hours with them; cost.
    """
    recipe, world, checkpoint = step.recipe, step.world, step.recipe.checkpoint
    steps, tokens = step_count(recipe), token_count(recipe)
    plan, interval = checkpoint_plan.plan_of(recipe, world), checkpoint.save_interval or steps
    saves = steps // interval
    kept = min(saves, checkpoint.keep_last or saves)
    kept += steps // checkpoint.keep_every if checkpoint.keep_every and checkpoint.keep_last else 0
    cost = {"name": recipe.stage.name, "devices": world, "steps": steps, "tokens": tokens}
    cost |= {"seq_length": recipe.stage.seq_length, "saved_bytes": plan.total, "kept": kept}
    if not step.seconds:
        return cost
    between, hours = interval * step.seconds, step.seconds * tokens / step.tokens / 3600  # a ramp's steps are shorter
    failures = [hours * world / rate for rate in (recipe.machine.device_hours_per_failure, RARE_FAILURE_HOURS)]
    waits = saves * plan.costs[checkpoint.save]
    lost = (failures[0] * (between / 2 + RESTART_SECONDS) + waits) / 3600
    cost |= {"step": step.seconds, "hours": hours, "between": between, "failures": failures, "lost": lost}
    return cost | {"device_hours": (hours + lost) * world, "cost": price and price * (hours + lost) * world}


def five_lines(step: Prediction) -> list[str]:
    """Return parameters, tokens, and of a step whose time is predicted that time, the stage's, and the time between
    checkpoints: what a dry run and a start print. Where it is not, or the step does not fit, two lines, and why.
    """
    stage, interval = stage_cost(step), step.recipe.checkpoint.save_interval
    size = f"parameters   {step.parameters:,}, {step.active:,} of them active for a token, without embedding"
    length = f"tokens       {stage['tokens']:,} in {stage['steps']:,} steps"
    if not step.seconds or step.memory_share > 1:
        why = step.reason if step.layout.pipeline > 1 else "unknown device"
        why = "the step does not fit into memory" if step.memory_share > 1 else why
        return [size, f"{length}, a checkpoint every {interval or stage['steps']:,}; time not predicted: {why}"]
    return [
        size,
        length,
        f"step         {step.seconds:.3g} s. {step.error}",
        f"stage        {stage['device_hours'] / step.world / 24:,.3g} days, {stage['device_hours']:,.0f} GPU hours "
        "(prediction, with failures and saves)",
        f"saves        {stage['saved_bytes'] / 1e9:.1f} GB every {duration(stage['between'])} (prediction; "
        f"checkpoint.save_interval={as_typed(interval)})",
    ]
