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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import message
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.expected_step import COPY_ENGINES, communication
from zaya_plugin.plan.flops import Shape, active_parameters, count_parameters, training_flops
from zaya_plugin.plan.memory import MemoryPlan, Recompute, tokens_of_rank
from zaya_plugin.plan.parallelism import Batch, ParallelSizes
from zaya_plugin.plan.products import processor_of, rates_of_parts
from zaya_plugin.plan.step_source import PARTS_WITHOUT_COLLECTIVES, Source, fitted
from zaya_plugin.plan.step_work import Work, work_of

SCHEMA = "zaya plan run/1"
# Sequence length at which core attention on Hopper reaches half of its final rate: cuDNN's kernels take 1.12 ms for
# 4 x 4,096 tokens, forward and backward, and 14.0 for 1 x 32,768 (one H100).
HALF_RATE_LENGTH = 1350
WITHIN = {"H200": 3, "H100": 8}  # per cent; docs/plan.md compares every record
NO_WORK = Work()
UNRECORDED = ("context", "expert", "tensor")  # parallelism that no record of the current code has, on any device
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
    def unrecorded(self) -> list[str]:
        """Kinds of parallelism of the layout that no committed record of the current code has."""
        return [f"{kind} parallelism" for kind in UNRECORDED if getattr(self.layout, kind) > 1]

    @property
    def error(self) -> str:
        """How far such predictions have been off, and which settings no committed record of benchmarks/results has."""
        name, optimizer = self.recipe.machine.name or self.source.device, self.recipe.optim.name
        known = any(device in self.source.device for device in WITHIN)
        device = next((device for device in WITHIN if known and device in name), None)
        if not device:
            return (
                f"not measured on {name}. Such projections are off by several per cent or more: Primus "
                f"states {PRIMUS_ERRORS} for its own of an MI325X"
            )
        bound = WITHIN[device] if self.world <= 2 else max(WITHIN.values())
        unknown = {f"{self.world} devices": self.world > 4, f"optim.name={optimizer}": optimizer != "muon"}
        used = ", ".join([*(setting for setting, is_used in unknown.items() if is_used), *self.unrecorded])
        text = f"within {bound} % of {device}s' committed records, but for those that docs/plan.md names"
        return f"{text}; no record of the current code has {used}" if used else text

    def record(self) -> dict:
        """Return the prediction as JSON values."""
        time = self.seconds and {
            "ms": 1e3 * self.seconds,
            "computing_ms": 1e3 * (self.seconds - self.exposed),
            "exposed_communication_ms": 1e3 * self.exposed,
            "tokens_per_s_per_device": self.tokens_per_second,
            "tflops_per_device": self.tflops,
            "share_of_gemm": 1e12 * self.tflops / self.gemm,
        }
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
            "step": {
                "tokens": self.tokens,
                "micro_batches": self.batch.micro_batches,
                "tflop": self.flops / 1e12,
                "parameters": self.parameters,
                "active_parameters": self.active,
                **(time or {}),
                "planned_gib": self.memory and self.memory.total / recipe_plan.GIB,
            },
            "memory_gib": {
                name: size / recipe_plan.GIB for name, size in (self.memory.components if self.memory else {}).items()
            },
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
    shape, layout, batch = recipe_plan.sizes_of(resolved, world, vocabulary)
    memory = (
        None if recipe.cluster.device == "cpu" else recipe_plan.plan_of(resolved, world, vocabulary, source.optimizer)
    )
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length
    step = Prediction(
        asked=recipe,
        recipe=resolved,
        world=world,
        shape=shape,
        layout=layout,
        batch=batch,
        parameters=sum(count_parameters(shape).values()),
        active=active_parameters(shape),
        tokens=tokens,
        flops=training_flops(shape, tokens, recipe.stage.seq_length),
        memory=memory,
        source=source,
        reason=obstacle(source, resolved, memory),
    )
    return step if step.reason else _timed(step, vocabulary)


def obstacle(source: Source, recipe: Recipe, memory: MemoryPlan | None = None) -> str | None:
    """Return why the time of a step cannot be predicted, or None. memory: its plan, if it is known."""
    name, parallel, gib = recipe.machine.name, recipe.parallel, recipe.cluster.memory_gib
    stages, own = parallel.pipeline_model_parallel_size, recipe_plan.recompute_of(recipe)
    share = recipe_plan.memory_share(memory, gib) if memory else 0.0
    reasons = {
        message(
            "cluster.device",
            "cpu",
            problem="no rates of a CPU are known",
            fix="cluster=h200_8, or the recipe of another device",
        ): recipe.cluster.device == "cpu",
        message(
            "optim.lora.rank", recipe.optim.lora.rank, problem="no step with adapters was measured", allowed="null"
        ): recipe.optim.lora.rank is not None,
        message(
            "machine.name",
            name,
            problem="is not a device with known rates",
            fix="measure one (zaya bench step), and give its step.json: zaya plan run --from step.json",
        ): source.gemm is None and processor_of(name) is None,
        message(
            "parallel.pipeline_model_parallel_size",
            stages,
            problem="the idle time of a pipeline does not follow from rates",
            allowed="1",
        ): stages > 1,
        message(
            "parallel.recompute_granularity",
            parallel.recompute_granularity,
            problem="the record's parts include what was recomputed",
            allowed="the record's recomputation",
            fix="a record without recomputation",
        ): source.recompute not in (own, Recompute()),
        f"the step does not fit into memory, {share:.0%} of cluster.memory_gib={gib}": share > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _timed(step: Prediction, vocabulary: int | None) -> Prediction:
    """Return the step with its rates, and the time of its parts and collectives."""
    recipe, source, machine, batch = step.recipe, step.source, step.recipe.machine, step.batch
    same = not machine.name or machine.name in source.device
    own_rates = machine.gemm_tflops * 1e12, machine.copy_tb_per_s * 1e12
    gemm, copy = (source.gemm, source.copy) if same and source.gemm else own_rates
    work = work_of(recipe, step.world, vocabulary, source.optimizer)
    tiles = rates_of_parts(source.device if same else machine.name, step.shape, step.layout, batch)
    layers = batch.micro_batches * step.shape.num_layers
    rows, forward, backward = [], 0.0, 0.0
    for part, speed in source.parts.items():
        done, share = work.get(part, NO_WORK), speed.share
        passes, bound = speed.layer_pass_seconds * layers, done
        if speed.weight_share:
            passes, bound = done.weights / copy / speed.weight_share, replace(done, bytes=done.bytes - done.weights)
        seconds = speed.layer_token_seconds * layers * tokens_of_rank(step.layout, batch)
        if part == "attention" and share:
            share = source.attention.get(recipe.cluster.core_attention, share)
            if not same and machine.attention_tflops:
                share, passes = done.seconds(gemm, copy) * machine.attention_tflops * 1e12 / done.flops, 0.0
            share *= length_factor(source.attention_length) / length_factor(batch.seq_length)
        if share:
            seconds = bound.seconds(gemm * tiles.get(part, 1.0), copy) / share + passes
        rows.append(
            _row(part, speed.title, seconds, done, done.seconds(gemm, copy) / seconds if share and seconds else None)
        )
        if part not in PARTS_WITHOUT_COLLECTIVES:
            forward += seconds * speed.forward
            backward += seconds * (1 - speed.forward)
    recomputed = recipe_plan.recompute_of(recipe)
    if recomputed not in (source.recompute, Recompute()):
        backward += (added := recipe_plan.added_seconds(step.shape, step.layout, batch, recomputed, machine))
        rows.append(_row("recomputation", "recomputation", added))
    links = {}
    if machine.name and step.world > 1:
        passes = forward / batch.micro_batches, backward / batch.micro_batches
        links = communication(recipe, step.shape, step.layout, batch, *passes)
    copied = "parameters" if copies_parameters(recipe, step.world) else None
    if hidden := sum(link["ms"] - link["exposed_ms"] for name, link in links.items() if name != copied):
        rows.append(_row("slowed", "slowed by collectives", source.slowed * hidden / 1e3))
    if source.gap and recipe_plan.has_graph(recipe):
        rows.append(_row("gaps", "gaps between kernels", source.gap * layers))
    return replace(step, gemm=gemm, copy=copy, parts=rows, communication=links)


def _row(part: str, title: str, seconds: float, done: Work = NO_WORK, roofline: float | None = None) -> dict:
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
