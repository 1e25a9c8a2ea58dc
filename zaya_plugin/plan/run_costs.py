# SPDX-License-Identifier: Apache-2.0
"""Bytes, times and interval of checkpoints; and time, device hours, storage and failures of a stage, from the prediction
of its step. No torch import.

A run loses, for each failure, half an interval between checkpoints and a restart, and for each checkpoint the time that
training waits for it (its cost). The sum is smallest at an interval of sqrt(2 x cost x mean time between failures) (J. W.
Young, Communications of the ACM 17, 1974; J. T. Daly, Future Generation Computer Systems 22, 2006, has the same first
term). An interval shorter than the drain of a checkpoint would need a second save before the first is on disk.

Failures are as frequent as device hours of public studies say: Kokolis et al. (arXiv 2410.21680) 7.9 hours at 1,024
GPUs of two A100 clusters, which is machine.device_hours_per_failure's default, and Llama 3 (arXiv 2407.21783) 419 in 54
days of 16,384 H100s. No rate of MI300Xs is published.
"""

from dataclasses import dataclass
from math import ceil, sqrt

from zaya_plugin.config.schedule import step_count, token_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.errors import as_typed, without_advice
from zaya_plugin.plan.flops import Shape, training_flops
from zaya_plugin.plan.memory import FLOAT32_BYTES, Optimizer, optimizer_bytes, padded_parameters
from zaya_plugin.plan.parallelism import WEIGHT_BYTES, ParallelSizes, owned_parameters, trained_parameters
from zaya_plugin.plan.prediction import Prediction
from zaya_plugin.plan.recipe_plan import optimizer_of, sizes_of

# Seconds that an asynchronous save may cost (docs/verification.md); a copy that is not hidden adds to it.
ASYNC_COST_SECONDS = 0.05
RARE_FAILURE_HOURS = 54 * 24 * 16_384 / 419  # device hours between failures, Llama 3
# From a failure to the first step after it: Google's public figures for its TPUs, 13 s to detect it, 50 to schedule
# again, 5.4 to restore and 12.7 to the first step.
RESTART_SECONDS = 81.1


@dataclass(frozen=True)
class CheckpointPlan:
    """Bytes and seconds of a checkpoint.

    total: bytes of fp32 weights and optimizer state; the bf16 weights are derived from them on load. rank: of the
    fullest rank. least_step: a lower bound of a step, from its operations. hiding_tokens: tokens of a device and step
    with which a step is at least as long as the copy. failures: seconds between failures of the job.
    """

    total: float
    rank: float
    copy: float
    drain: float
    least_step: float
    hiding_tokens: float
    failures: float

    @property
    def costs(self) -> dict[str, float]:
        """Seconds that training waits for a save, by checkpoint.save."""
        return {"sync": self.copy + self.drain, "async": ASYNC_COST_SECONDS + max(0.0, self.copy - self.least_step)}

    def best_interval(self, cost: float) -> float:
        """Return the seconds between checkpoints with the least loss, by Young's formula."""
        return sqrt(2 * cost * self.failures)

    def lost_share(self, interval: float, save: str) -> float:
        """Return the share of a run's time that saves every `interval` seconds and failures cost. save: checkpoint.save"""
        return self.costs[save] / interval + (interval / 2 + RESTART_SECONDS) / self.failures


def rank_bytes(shape: Shape, layout: ParallelSizes, optimizer: Optimizer) -> float:
    """Return the bytes that the fullest rank saves. Shards hold whole matrices, so the fullest has more than the mean
    by the padding of its buffers (docs/another-part.md has the shards of ZAYA1-base).
    """
    trained, padded = trained_parameters(shape, layout), padded_parameters(shape, layout, optimizer.muon)
    of_element = FLOAT32_BYTES + (optimizer.momentum_bytes if optimizer.muon else 2 * FLOAT32_BYTES)
    experts = owned_parameters(shape, layout)["experts"] * of_element
    rest = optimizer_bytes(shape, layout, optimizer, WEIGHT_BYTES) - experts
    return experts * padded["experts"] / (trained["experts"] or 1) + rest * padded["rest"] / (trained["rest"] or 1)


def checkpoint_plan(recipe: Recipe, world: int) -> CheckpointPlan:
    """Return the plan of the checkpoints of a job of `world` devices."""
    shape, layout, _ = sizes_of(recipe, world)
    optimizer, machine, seq = optimizer_of(recipe), recipe.machine, recipe.stage.seq_length
    total = optimizer_bytes(shape, ParallelSizes(), optimizer, WEIGHT_BYTES)
    rank = rank_bytes(shape, layout, optimizer)
    copy = rank / (machine.host_link_gb_per_s * 1e9)
    of_token = training_flops(shape, 1, seq) / (machine.gemm_tflops * 1e12)
    return CheckpointPlan(
        total=total,
        rank=rank,
        copy=copy,
        drain=total / (machine.storage_gb_per_s * 1e9),
        least_step=recipe.stage.global_batch_size * seq / world * of_token,
        hiding_tokens=copy / of_token,
        failures=3600 * machine.device_hours_per_failure / world,
    )


def checkpoint_lines(recipe: Recipe, world: int) -> list[str]:
    """Return the plan for a dry run with `verbose`. Empty on a CPU, as the memory plan."""
    if recipe.cluster.device == "cpu":
        return []
    plan, machine = checkpoint_plan(recipe, world), recipe.machine
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length / world
    return [
        f"checkpoints  (prediction) {plan.total / 1e9:.1f} GB: fp32 weights and the optimizer's state",
        f"  {plan.rank / 1e9:8.2f} GB  of the fullest rank; {plan.rank * min(world, machine.devices_per_node) / 1e9:.1f} "
        "GB of host memory in a node for the buffers of asynchronous saves",
        f"  {plan.copy:8.3f} s   to copy them to the host at "
        f"machine.host_link_gb_per_s={machine.host_link_gb_per_s:g},",
        f"             hidden behind a step of {plan.hiding_tokens:,.0f} tokens a device or more (this recipe: "
        f"{tokens:,.0f})",
        f"  {plan.drain:8.1f} s   to write them at machine.storage_gb_per_s={machine.storage_gb_per_s:g}",
        f"  shortest sensible checkpoint.save_interval with a failure every {plan.failures / 3600:,.1f} h "
        f"(machine.device_hours_per_failure={machine.device_hours_per_failure:g});",
        f"  in steps at most, because a step takes {plan.least_step:.2f} s or more:",
        *(
            f"  {max(best, plan.drain):8.0f} s   {ceil(max(best, plan.drain) / plan.least_step):,} steps, {save}hronous: a "
            f"cost of {cost:.2f} s a save gives {best:.0f} s, the drain {plan.drain:.0f} s"
            for save, cost in plan.costs.items()
            for best in [plan.best_interval(cost)]
        ),
    ]


def stage_cost(step: Prediction, price: float | None = None) -> dict:
    """Return the cost of the stage of a predicted step. price: of a device hour.

    Returns:
        name, devices, steps, tokens, seq_length; saved_bytes of a checkpoint, and kept: checkpoints on the storage at
        the end. With a predicted step also: step, seconds; hours of training without failures; between, seconds between
        checkpoints; failures, the expected number at the rates of both studies; lost, hours that those of the first one
        and saves cost (`CheckpointPlan.lost_share`); device_hours with them; cost.
    """
    recipe, world, checkpoint = step.recipe, step.world, step.recipe.checkpoint
    steps, tokens, plan = step_count(recipe), token_count(recipe), checkpoint_plan(recipe, world)
    interval = checkpoint.save_interval or steps
    kept = min(steps // interval, checkpoint.keep_last or steps)
    kept += steps // checkpoint.keep_every if checkpoint.keep_every and checkpoint.keep_last else 0
    cost = {
        "name": recipe.stage.name,
        "devices": world,
        "steps": steps,
        "tokens": tokens,
        "seq_length": recipe.stage.seq_length,
        "saved_bytes": plan.total,
        "kept": kept,
    }
    if not step.seconds:
        return cost
    between, hours = interval * step.seconds, step.seconds * tokens / step.tokens / 3600  # a ramp's steps are shorter
    failures = [hours * world / rate for rate in (recipe.machine.device_hours_per_failure, RARE_FAILURE_HOURS)]
    lost = hours * plan.lost_share(between, checkpoint.save)
    return cost | {
        "step": step.seconds,
        "hours": hours,
        "between": between,
        "failures": failures,
        "lost": lost,
        "device_hours": (hours + lost) * world,
        "cost": price and price * (hours + lost) * world,
    }


def cost_lines(step: Prediction) -> list[str]:
    """Return parameters, tokens, and of a step whose time is predicted that time, the stage's, and the time between
    checkpoints: what a dry run and a start print. Of another step two lines, and why.
    """
    stage, interval = stage_cost(step), step.recipe.checkpoint.save_interval
    size = f"parameters   {step.parameters:,}, {step.active:,} of them active for a token, without embedding"
    length = f"tokens       {stage['tokens']:,} in {stage['steps']:,} steps"
    if not step.seconds:
        return [
            size,
            f"{length}, a checkpoint every {interval or stage['steps']:,}; time not predicted: {without_advice(step.reason)}",
        ]
    return [
        size,
        length,
        f"step         {step.seconds:.3g} s. PREDICTION, {step.error}",
        f"stage        {stage['device_hours'] / step.world / 24:,.3g} days, {stage['device_hours']:,.0f} GPU hours "
        "(prediction, with failures and saves)",
        f"saves        {stage['saved_bytes'] / 1e9:.1f} GB every {duration(stage['between'])} (prediction; "
        f"checkpoint.save_interval={as_typed(interval)})",
    ]
