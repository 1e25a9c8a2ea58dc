# SPDX-License-Identifier: Apache-2.0
"""Predicts a recipe's step on a number of devices: time by part, communication, memory, size and operations.

A prediction starts from the speeds of the parts of a measured step (zaya_plugin.plan.step_source), of the user's own
record or of the fit that is part of the package. The same share of the roofline is assumed for the other recipe's work
on the other machine. Core attention is another library's kernel on another vendor's device, so it takes the machine's
own rate where the recipe gives one. Collectives take the rates of the recipe's machine keys, and are hidden under the
passes that they overlap with, whose kernels they slow down. The same recipe on the same device gives the record's own
parts; on several devices, communication and its cost for the kernels come from the formulas, not from the record. The
host's time between kernels is not predicted. No torch import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import message
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.expected_step import COPY_ENGINES, communication
from zaya_plugin.plan.flops import Shape, active_parameters, count_parameters, training_flops
from zaya_plugin.plan.memory import MemoryPlan, Recompute, tokens_of_rank
from zaya_plugin.plan.parallelism import Batch, ParallelSizes
from zaya_plugin.plan.product_rate import processor_of, rates_of_parts
from zaya_plugin.plan.recipe_plan import GIB
from zaya_plugin.plan.step_source import PARTS_WITHOUT_COLLECTIVES, Source, fitted
from zaya_plugin.plan.step_work import Work, work_of

SCHEMA = "zaya plan run/1"
# Sequence length at which core attention on Hopper reaches half of its final rate: cuDNN's kernels take 1.12 ms for
# 4 x 4,096 tokens, forward and backward, and 14.0 for 1 x 32,768 (one H100).
HALF_RATE_LENGTH = 1350
WITHIN = {"H200": 3, "H100": 8}  # per cent; docs/plan.md compares every record
PRIMUS_ERRORS = "+7.2, +5.3 and -9.2 %"  # Primus' projections of an MI325X against measured steps


@dataclass(frozen=True)
class Prediction:
    """A recipe on a number of devices and its step, without the host's time between kernels.

    Attributes:
        asked: the recipe as composed. recipe: with the recomputation for `auto`.
        parameters, active: of the model; active: of one token, without the embedding.
        tokens, flops: of a step of all devices, forward and backward.
        memory: of the fullest rank; None on a CPU, which the plan does not cover.
        source: the speeds from which the prediction starts.
        reason: why the time is not predicted, or None. Without a time, the attributes that follow are empty.
        gemm, copy: rates of a large matrix product and of a copy, FLOP/s and bytes/s.
        parts: rows with part, title, ms, tflop, gb and roofline.
        communication: by collective, "ms" in total and "exposed_ms".
    """

    asked: Recipe
    recipe: Recipe
    world: int
    shape: Shape
    layout: ParallelSizes
    batch: Batch
    parameters: int
    active: int
    tokens: int
    flops: float
    memory: MemoryPlan | None
    source: Source
    reason: str | None = None
    gemm: float = 0.0
    copy: float = 0.0
    parts: Sequence[dict] = ()
    communication: Mapping[str, dict] = field(default_factory=dict)

    @property
    def exposed(self) -> float:
        """Seconds of collectives that nothing hides."""
        return sum(link["exposed_ms"] for link in self.communication.values()) / 1e3

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, None where they are not predicted."""
        return None if self.reason else sum(row["ms"] for row in self.parts) / 1e3 + self.exposed

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second and device, None where they are not predicted."""
        return self.tokens / self.seconds / self.world if self.seconds else None

    @property
    def tflops(self) -> float:
        """TFLOP/s of a device, 0 where they are not predicted."""
        return self.flops / self.seconds / self.world / 1e12 if self.seconds else 0.0

    @property
    def memory_share(self) -> float:
        """Share of the device's memory that the plan takes; 0 on a CPU, and where cluster.memory_gib is null."""
        return recipe_plan.memory_share(self.memory, self.recipe.cluster.memory_gib) if self.memory else 0.0

    @property
    def sources(self) -> str:
        """Sources of the machine's rates."""
        return self.recipe.machine.sources if self.recipe.machine.name else "rates of the record's device; no links"

    @property
    def without_record(self) -> list[str]:
        """Settings that no committed record of benchmarks/results has, so that their error is unknown."""
        layout = self.layout
        parts = {
            f"{self.world} devices": self.world > 4,
            "tensor parallelism": layout.tensor > 1,
            "expert parallelism": layout.expert > 1,
            "context parallelism of current code": layout.context > 1,
            f"optim.name={self.recipe.optim.name}": self.recipe.optim.name != "muon",
        }
        return [part for part, is_used in parts.items() if is_used]

    @property
    def error(self) -> str:
        """How far such predictions have been off."""
        name = self.recipe.machine.name or self.source.device
        known = any(device in self.source.device for device in WITHIN)
        device = next((device for device in WITHIN if known and device in name), None)
        if device:
            bound = WITHIN[device] if self.world <= 2 else max(WITHIN.values())
            text = f"within {bound} % of {device}s' committed records, but for those that docs/plan.md names"
            return text + (f"; no record has {', '.join(self.without_record)}" if self.without_record else "")
        return (
            f"PREDICTION, not measured on {name}. Such projections are off by several per cent or more: Primus states "
            f"{PRIMUS_ERRORS} for its own of an MI325X"
        )

    def record(self) -> dict:
        """Return the prediction as JSON values."""
        step = {"tokens": self.tokens, "micro_batches": self.batch.micro_batches, "tflop": self.flops / 1e12}
        step |= {"parameters": self.parameters, "active_parameters": self.active}
        if self.seconds:
            step |= {
                "ms": 1e3 * self.seconds,
                "computing_ms": 1e3 * (self.seconds - self.exposed),
                "exposed_communication_ms": 1e3 * self.exposed,
                "tokens_per_s_per_device": self.tokens_per_second,
                "tflops_per_device": self.tflops,
                "share_of_gemm": 1e12 * self.tflops / self.gemm,
            }
        memory = self.memory.components if self.memory else {}
        return {
            "schema": SCHEMA,
            "prediction": True,
            "from": dict(self.source.what),
            "on": {
                "cluster": self.recipe.cluster.name,
                "devices": self.world,
                "gemm_tflops": self.gemm / 1e12,
                "copy_tb_per_s": self.copy / 1e12,
                "sources": self.sources,
            },
            "not_predicted": self.reason,
            "error": self.error,
            "step": {**step, "planned_gib": self.memory and self.memory.total / GIB},
            "memory_gib": {name: size / GIB for name, size in memory.items()},
            "parts": self.parts,
            "communication": self.communication,
            "idle_of_the_record_ms": 1e3 * self.source.idle,
        }


def predict(recipe: Recipe, world: int, source: Source | None = None, vocabulary: int | None = None) -> Prediction:
    """Predict the step of `recipe` on `world` devices of its cluster.

    source: the speeds of a record, in place of the package's fit. vocabulary: rows of the embedding, where the recipe's
    data is not available; default the record's.

    Raises ValueError where the step does not fit with any recomputation (recompute_granularity=auto).
    """
    source = source or fitted()
    vocabulary = vocabulary or source.vocabulary
    resolved, _ = recipe_plan.with_recompute(recipe, world, vocabulary)
    shape = recipe_plan.shape_of(resolved, vocabulary)
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length
    step = Prediction(
        asked=recipe,
        recipe=resolved,
        world=world,
        shape=shape,
        layout=recipe_plan.layout_of(resolved, world),
        batch=recipe_plan.batch_of(resolved, world),
        parameters=sum(count_parameters(shape).values()),
        active=active_parameters(shape),
        tokens=tokens,
        flops=training_flops(shape, tokens, recipe.stage.seq_length),
        memory=None if recipe.cluster.device == "cpu" else recipe_plan.plan_of(resolved, world, vocabulary),
        source=source,
        reason=obstacle(source, resolved),
    )
    return step if step.reason else _timed(step, vocabulary)


def obstacle(source: Source, recipe: Recipe) -> str | None:
    """Return why the time of a step cannot be predicted, or None."""
    name, stages = recipe.machine.name, recipe.parallel.pipeline_model_parallel_size
    fix = "measure one (zaya bench step), and give its step.json: zaya plan run --from step.json"
    if recipe.cluster.device == "cpu":
        return "no rates of a CPU are known: choose the cluster recipe of a device, such as cluster=h200_8"
    if recipe.optim.lora.rank is not None:
        return message(
            "optim.lora.rank", recipe.optim.lora.rank, problem="no step with adapters was measured", allowed="null"
        )
    if source.gemm is None and processor_of(name) is None:
        return f"machine.name={name or 'null'} is not a device with known rates: {fix}"
    if stages > 1:
        problem = "the idle time of a pipeline does not follow from rates"
        return message("parallel.pipeline_model_parallel_size", stages, problem=problem, allowed="1")
    if source.recompute not in (recipe_plan.recompute_of(recipe), Recompute()):
        problem, allowed = "the record's parts include what was recomputed", "the record's recomputation"
        key, value = "parallel.recompute_granularity", recipe.parallel.recompute_granularity
        return message(key, value, problem=problem, allowed=allowed, fix="a record without recomputation")
    return None


def _timed(step: Prediction, vocabulary: int | None) -> Prediction:
    """Return the step with its rates, and the time of its parts and collectives."""
    recipe, source, machine, batch = step.recipe, step.source, step.recipe.machine, step.batch
    same = not machine.name or machine.name in source.device
    gemm, copy = source.gemm, source.copy
    if not same or gemm is None:
        gemm, copy = machine.gemm_tflops * 1e12, machine.copy_tb_per_s * 1e12
    work = work_of(recipe, step.world, vocabulary, source.optimizer)
    tiles = rates_of_parts(source.device if same else machine.name, step.shape, step.layout, batch)
    layers = batch.micro_batches * step.shape.num_layers
    rows, forward, backward = [], 0.0, 0.0
    for part, speed in source.parts.items():
        done, roofline = work.get(part, Work()), None
        seconds = speed.layer_token_seconds * layers * tokens_of_rank(step.layout, batch)
        if speed.share:
            share = source.attention.get(recipe.cluster.core_attention) if part == "attention" else None
            seconds = done.seconds(gemm * tiles.get(part, 1.0), copy) / (share or speed.share)
            if part == "attention":
                if not same and machine.attention_tflops:
                    seconds = done.flops / (machine.attention_tflops * 1e12)
                seconds *= length_factor(batch.seq_length) / length_factor(source.attention_length)
            roofline = done.seconds(gemm, copy) / seconds if seconds else None
        rows.append(_row(part, speed.title, seconds, done, roofline))
        if part not in PARTS_WITHOUT_COLLECTIVES:
            forward += seconds * speed.forward
            backward += seconds * (1 - speed.forward)
    recomputed = recipe_plan.recompute_of(recipe)
    if recomputed not in (source.recompute, Recompute()):
        added = recipe_plan.added_seconds(step.shape, step.layout, batch, recomputed, machine)
        rows.append(_row("recomputation", "recomputation", added))
        backward += added
    passes = forward / batch.micro_batches, backward / batch.micro_batches
    links = communication(recipe, step.shape, step.layout, batch, *passes) if machine.name and step.world > 1 else {}
    copied = "parameters" if copies_parameters(recipe, step.world) else None
    hidden = sum(link["ms"] - link["exposed_ms"] for name, link in links.items() if name != copied)
    if hidden:
        rows.append(_row("slowed", "slowed by collectives", source.slowed * hidden / 1e3))
    if source.gap and recipe_plan.has_graph(recipe):
        rows.append(_row("gaps", "between kernels", source.gap * layers))
    return replace(step, gemm=gemm, copy=copy, parts=rows, communication=links)


def _row(part: str, title: str, seconds: float, done: Work | None = None, roofline: float | None = None) -> dict:
    done = done or Work()
    amounts = {"tflop": done.flops / 1e12, "gb": done.bytes / 1e9, "roofline": roofline}
    return {"part": part, "title": title, "ms": 1e3 * seconds, **amounts}


def length_factor(tokens: int | None) -> float:
    """Return the time of an operation of core attention in sequences of `tokens`, relative to very long ones."""
    return 1 + HALF_RATE_LENGTH / tokens if tokens else 1.0


def copies_parameters(recipe: Recipe, world: int) -> bool:
    """Return whether parameters are gathered by copy engines, which do not slow down kernels."""
    policy = (COPY_ENGINES | recipe.cluster.environment)["NCCL_CTA_POLICY"]
    return (
        recipe.machine.copy_engines
        and recipe.parallel.nccl_ub
        and policy == COPY_ENGINES["NCCL_CTA_POLICY"]
        and world <= recipe.machine.devices_per_node
    )
