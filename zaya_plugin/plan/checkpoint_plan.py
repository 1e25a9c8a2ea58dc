# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's bytes and times, and the shortest interval between checkpoints that pays. No torch import.

A run loses, for each failure, half an interval and the drain of the newest checkpoint, and for each checkpoint the time
that training waits for it (its cost). The sum is smallest at an interval of sqrt(2 x cost x mean time between failures)
(J. W. Young, Communications of the ACM 17, 1974; J. T. Daly, Future Generation Computer Systems 22, 2006, has the same
first term). An interval shorter than the drain would need a second save before the first is on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from zaya_plugin.config.schema import MachineConfig, Recipe
from zaya_plugin.plan.flops import Shape, training_flops
from zaya_plugin.plan.memory import FLOAT32_BYTES, Optimizer, optimizer_bytes, padded_parameters
from zaya_plugin.plan.parallelism import ParallelSizes, trained_parameters
from zaya_plugin.plan.recipe_plan import layout_of, optimizer_of, shape_of

ASYNC_COST_SECONDS = (
    0.05  # seconds that an asynchronous save may cost (docs/verification.md); a copy that is not hidden adds to it
)
MODEL_WEIGHT_BYTES = 2  # bytes of the model's own weights with which optimizer_bytes counts the fp32 weights too


@dataclass(frozen=True)
class CheckpointPlan:
    """Bytes and seconds of a checkpoint.

    total: bytes of fp32 weights and optimizer state; the bf16 weights are derived from them on load. rank: of the
    fullest rank. node: of the copies in a node's memory. least_step: a lower bound of a step, from its operations.
    hiding_tokens: tokens of a device and step with which a step is at least as long as the copy. failures: seconds
    between failures of the job.
    """

    total: float
    rank: float
    node: float
    copy: float
    drain: float
    least_step: float
    hiding_tokens: float
    failures: float

    @property
    def costs(self) -> dict[str, float]:
        """Seconds that training waits for a save, by checkpoint.save."""
        return {"sync": self.copy + self.drain, "async": ASYNC_COST_SECONDS + max(0.0, self.copy - self.least_step)}

    def interval(self, cost: float) -> float:
        """Return the shortest sensible interval, in seconds."""
        return max(best_interval(cost, self.failures), self.drain)

    def lost_share(self, interval: float, cost: float) -> float:
        """Return the share of a run's time that saves and half an interval for each failure cost."""
        return cost / interval + interval / (2 * self.failures)


def best_interval(cost: float, failures: float) -> float:
    """Return the interval with the least loss, by Young's formula; all in seconds."""
    return sqrt(2 * cost * failures)


def rank_bytes(shape: Shape, layout: ParallelSizes, optimizer: Optimizer) -> float:
    """Return the bytes that the fullest rank saves. Shards hold whole matrices, so the fullest has more than the mean
    by the padding of its buffers (docs/optimizer.md has the shards of ZAYA1-base).
    """
    local, padded = trained_parameters(shape, layout), padded_parameters(shape, layout, optimizer.muon)
    experts = local["experts"] / layout.expert_shards
    experts *= FLOAT32_BYTES + (
        optimizer.momentum_bytes if optimizer.muon and shape.lora_rank is None else 2 * FLOAT32_BYTES
    )
    rest = optimizer_bytes(shape, layout, optimizer, MODEL_WEIGHT_BYTES) - experts
    return experts * padded["experts"] / (local["experts"] or 1) + rest * padded["rest"] / (local["rest"] or 1)


def checkpoint_plan(
    shape: Shape,
    layout: ParallelSizes,
    optimizer: Optimizer,
    machine: MachineConfig,
    ranks: int,
    tokens: float,
    seq: int,
) -> CheckpointPlan:
    """Return the plan of a job of `ranks` devices. tokens: of one device and step; seq: of a sequence."""
    total = optimizer_bytes(shape, ParallelSizes(), optimizer, MODEL_WEIGHT_BYTES)
    rank = rank_bytes(shape, layout, optimizer)
    copy = rank / (machine.host_link_gb_per_s * 1e9)
    of_token = training_flops(shape, 1, seq) / (machine.gemm_tflops * 1e12)
    return CheckpointPlan(
        total=total,
        rank=rank,
        node=rank * min(ranks, machine.devices_per_node),
        copy=copy,
        drain=total / (machine.storage_gb_per_s * 1e9),
        least_step=tokens * of_token,
        hiding_tokens=copy / of_token,
        failures=3600 * machine.device_hours_per_failure / ranks,
    )


def plan_of(recipe: Recipe, world_size: int) -> CheckpointPlan:
    """Return the recipe's plan."""
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length / world_size
    return checkpoint_plan(
        shape_of(recipe),
        layout_of(recipe, world_size),
        optimizer_of(recipe),
        recipe.machine,
        world_size,
        tokens,
        recipe.stage.seq_length,
    )


def lines(recipe: Recipe, world_size: int) -> list[str]:
    """Return the plan for a dry run with `verbose`. Empty on a CPU, as the memory plan."""
    if recipe.cluster.device == "cpu":
        return []
    plan, machine = plan_of(recipe, world_size), recipe.machine
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length / world_size
    report = [
        f"checkpoints  (prediction) {plan.total / 1e9:.1f} GB: fp32 weights and the optimizer's state",
        f"  {plan.rank / 1e9:8.2f} GB  of the fullest rank; {plan.node / 1e9:.1f} GB of host memory in a node for the "
        "buffers of asynchronous saves",
        f"  {plan.copy:8.3f} s   to copy them to the host at "
        f"machine.host_link_gb_per_s={machine.host_link_gb_per_s:g},",
        f"             hidden behind a step of {plan.hiding_tokens:,.0f} tokens a device or more (this recipe: "
        f"{tokens:,.0f})",
        f"  {plan.drain:8.1f} s   to write them at machine.storage_gb_per_s={machine.storage_gb_per_s:g}",
        f"  shortest sensible checkpoint.save_interval with a failure every {plan.failures / 3600:,.1f} h "
        f"(machine.device_hours_per_failure={machine.device_hours_per_failure:g});",
        f"  in steps at most, because a step takes {plan.least_step:.2f} s or more:",
    ]
    for way, cost in plan.costs.items():
        seconds = plan.interval(cost)
        report.append(
            f"  {seconds:8.0f} s   {ceil(seconds / plan.least_step):,} steps, {way}hronous: a cost of {cost:.2f} s a save "
            f"gives {best_interval(cost, plan.failures):.0f} s, the drain {plan.drain:.0f} s"
        )
    return report
