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

from collections.abc import Mapping
from dataclasses import dataclass, field

from zaya_plugin.config.schema import MachineConfig, Recipe
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.expected_step import COPY_ENGINES, Overlap, communication, limit
from zaya_plugin.plan.flops import Shape, active_parameters, count_parameters, training_flops
from zaya_plugin.plan.memory import MemoryPlan, Recompute, tokens_of_rank
from zaya_plugin.plan.parallelism import Batch
from zaya_plugin.plan.product_rate import processor_of, rates_of_parts
from zaya_plugin.plan.recipe_work import work_of
from zaya_plugin.plan.step_source import PARTS_WITHOUT_COLLECTIVES, Source, fitted, source_of
from zaya_plugin.plan.step_work import Work

SCHEMA = "zaya plan run/1"
# Sequence length at which core attention on Hopper reaches half of its final rate: cuDNN's kernels take 1.12 ms for
# 4 x 4,096 tokens, forward and backward, and 14.0 for 1 x 32,768 (one H100).
HALF_RATE_LENGTH = 1350
WITHIN = {"H200": 3, "H100": 8}  # per cent; docs/plan.md compares every record
PRIMUS_ERRORS = "+7.2, +5.3 and -9.2 %"  # Primus' projections of an MI325X against measured steps
NO_WORK = {"tflop": 0.0, "gb": 0.0, "roofline": None}


@dataclass(frozen=True)
class Prediction:
    """A step of a recipe. Times are seconds, without the host's between kernels.

    Attributes:
        devices, cluster: the number of devices and the recipe's cluster.
        parameters, active: of the model; active: of one token, without the embedding.
        tokens, flops: of a step of all devices, forward and backward.
        micro_batches: of a rank and step.
        memory: of the fullest rank; None on a CPU, which the plan does not cover.
        reason: why the time is not predicted, or None. Without a time, the attributes that follow are empty.
        computing, exposed: of kernels, and of communication that nothing hides.
        parts: rows with part, title, ms, tflop, gb and roofline.
        communication: by collective, "ms" in total and "exposed_ms".
        source: what the prediction starts from. sources: of the machine's rates. gemm, copy: those rates.
        error: how far such predictions have been off.
    """

    devices: int
    cluster: str
    parameters: int
    active: int
    tokens: int
    flops: float
    micro_batches: int
    memory: MemoryPlan | None
    reason: str | None = None
    computing: float = 0.0
    exposed: float = 0.0
    parts: list[dict] = field(default_factory=list)
    communication: Mapping[str, dict] = field(default_factory=dict)
    source: Mapping[str, object] = field(default_factory=dict)
    sources: str = ""
    gemm: float = 0.0
    copy: float = 0.0
    error: str = ""
    idle: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, None where they are not predicted."""
        return None if self.reason else self.computing + self.exposed

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second and device."""
        return self.tokens / self.seconds / self.devices if self.seconds else None

    def record(self) -> dict:
        """Return the prediction as JSON values."""
        seconds = self.seconds
        step = {"tokens": self.tokens, "micro_batches": self.micro_batches}
        step |= {"parameters": self.parameters, "active_parameters": self.active, "tflop": self.flops / 1e12}
        if seconds:
            rate = self.flops / seconds / self.devices
            step |= {
                "ms": 1e3 * seconds,
                "computing_ms": 1e3 * self.computing,
                "exposed_communication_ms": 1e3 * self.exposed,
                "tokens_per_s_per_device": self.tokens_per_second,
                "tflops_per_device": rate / 1e12,
                "share_of_gemm": rate / self.gemm,
            }
        if self.memory:
            step["planned_gib"] = self.memory.total / recipe_plan.GIB
        return {
            "schema": SCHEMA,
            "prediction": True,
            "from": dict(self.source),
            "on": {
                "cluster": self.cluster,
                "devices": self.devices,
                "gemm_tflops": self.gemm / 1e12,
                "copy_tb_per_s": self.copy / 1e12,
                "sources": self.sources,
            },
            "not_predicted": self.reason,
            "error": self.error,
            "step": step,
            "memory_gib": {name: size / recipe_plan.GIB for name, size in self.memory.components.items()}
            if self.memory
            else {},
            "parts": self.parts,
            "communication": self.communication,
            "idle_of_the_record_ms": 1e3 * self.idle,
        }


def predict(recipe: Recipe, world: int, record: dict | None = None, vocabulary: int | None = None) -> Prediction:
    """Predict the step of `recipe` on `world` devices of its cluster.

    record: of `zaya bench step` (step_source.load), in place of the package's fit. vocabulary: rows of the embedding,
    where the recipe's data is not available; default the record's.

    Raises ValueError where the step does not fit with any recomputation (recompute_granularity=auto).
    """
    vocabulary = vocabulary or (record and record["model"]["vocab_size"])
    source = source_of(record, links=bool(recipe.machine.name)) if record else fitted()
    return predict_from(source, recipe, world, vocabulary)


def predict_from(source: Source, recipe: Recipe, world: int, vocabulary: int | None = None) -> Prediction:
    """Predict as `predict` does, from the speeds in `source`."""
    recipe, _ = recipe_plan.with_recompute(recipe, world, vocabulary)
    shape, batch = recipe_plan.shape_of(recipe, vocabulary), recipe_plan.batch_of(recipe, world)
    tokens = recipe.stage.global_batch_size * recipe.stage.seq_length
    plan = None if recipe.cluster.device == "cpu" else recipe_plan.plan_of(recipe, world, vocabulary)
    common = {
        "devices": world,
        "cluster": recipe.cluster.name,
        "parameters": sum(count_parameters(shape).values()),
        "active": active_parameters(shape),
        "tokens": tokens,
        "flops": training_flops(shape, tokens, recipe.stage.seq_length),
        "micro_batches": batch.micro_batches,
        "memory": plan,
    }
    if reason := obstacle(source, recipe):
        return Prediction(**common, reason=reason)
    return _timed(source, recipe, world, shape, batch, common, vocabulary)


def obstacle(source: Source, recipe: Recipe) -> str | None:
    """Return why the time of a step cannot be predicted, or None."""
    machine, stages = recipe.machine, recipe.parallel.pipeline_model_parallel_size
    fix = "measure one (zaya bench step), and give its step.json: zaya plan run --from step.json"
    if recipe.cluster.device == "cpu":
        return f"no rates of a CPU are known: {fix}"
    if source.gemm is None and processor_of(machine.name) is None:
        return f"machine.name={machine.name or 'null'} is not a device with known rates: {fix}"
    if stages > 1:
        problem = "the idle time of a pipeline does not follow from rates"
        key = "parallel.pipeline_model_parallel_size"
        return str(mistake(key, stages, problem=problem, allowed="1", fix=f"{key}=1"))
    if source.recompute not in (recipe_plan.recompute_of(recipe), Recompute()):
        return str(
            mistake(
                "parallel.recompute_granularity",
                recipe.parallel.recompute_granularity,
                problem="the record's parts include what was recomputed",
                allowed="the record's recomputation",
                fix="a record without recomputation",
            )
        )
    return None


def _timed(
    source: Source, recipe: Recipe, world: int, shape: Shape, batch: Batch, common: dict, vocabulary: int | None
) -> Prediction:
    machine = recipe.machine if recipe.machine.name else None
    same = machine is None or machine.name in source.device
    gemm, copy = source.gemm, source.copy
    if machine and (not same or gemm is None):
        gemm, copy = machine.gemm_tflops * 1e12, machine.copy_tb_per_s * 1e12
    assert gemm and copy
    layout = recipe_plan.layout_of(recipe, world)
    work = work_of(recipe, world, vocabulary, source.optimizer)
    tiles = rates_of_parts(source.device if same else machine.name, shape, layout, batch)
    layer_tokens = batch.micro_batches * tokens_of_rank(layout, batch) * shape.num_layers
    rows, passes = [], [0.0, 0.0]
    for part, speed in source.parts.items():
        done, roofline = work.get(part, Work()), None
        seconds = speed.layer_token_seconds * layer_tokens
        if speed.share:
            fastest = limit(done, gemm * tiles.get(part, 1.0), copy)
            seconds = fastest / speed.share
            if part == "attention":
                seconds *= speed.share / source.attention.get(recipe.cluster.core_attention, speed.share)
                if not same and machine.attention_tflops:
                    seconds = done.flops / (machine.attention_tflops * 1e12)
                seconds *= length_factor(recipe.stage.seq_length) / length_factor(source.attention_length)
            roofline = limit(done, gemm, copy) / seconds if seconds else None
        rows.append(_row(part, speed.title, seconds, done, roofline))
        if part not in PARTS_WITHOUT_COLLECTIVES:
            passes = [passes[0] + seconds * speed.forward, passes[1] + seconds * (1 - speed.forward)]
    if recomputed := recipe_plan.recompute_of(recipe):
        if recomputed != source.recompute and (
            added := recipe_plan.added_seconds(shape, layout, batch, recomputed, recipe.machine)
        ):
            rows.append(_row("recomputation", "recomputation", added))
            passes[1] += added
    links = {}
    if machine:
        forward, backward = (seconds / batch.micro_batches for seconds in passes)
        parallel = recipe.parallel
        overlap = Overlap(parallel.overlap_grad_reduce, parallel.overlap_param_gather, parallel.ddp_bucket_size)
        muon = recipe.optim.name == "muon"
        links = communication(shape, layout, batch, machine, overlap, forward, backward, muon)
    copied = {"parameters"} if copies_parameters(recipe, world, machine) else set()
    hidden = sum(link["ms"] - link["exposed_ms"] for name, link in links.items() if name not in copied)
    if hidden:
        rows.append(_row("slowed", "slowed by collectives", source.slowed * hidden / 1e3))
    if source.gap and recipe_plan.has_graph(recipe):
        rows.append(_row("gaps", "between kernels", source.gap * batch.micro_batches * shape.num_layers))
    return Prediction(
        **common,
        computing=sum(row["ms"] for row in rows) / 1e3,
        exposed=sum(link["exposed_ms"] for link in links.values()) / 1e3,
        parts=rows,
        communication=links,
        source=source.what,
        sources=machine.sources if machine else "rates of the record's own device; no links",
        gemm=gemm,
        copy=copy,
        error=stated_error(source, machine),
        idle=source.idle,
    )


def _row(part: str, title: str, seconds: float, done: Work | None = None, roofline: float | None = None) -> dict:
    amounts = {"tflop": done.flops / 1e12, "gb": done.bytes / 1e9, "roofline": roofline} if done else NO_WORK
    return {"part": part, "title": title, "ms": 1e3 * seconds, **amounts}


def length_factor(tokens: int | None) -> float:
    """Return the time of an operation of core attention in sequences of `tokens`, relative to very long ones."""
    return 1 + HALF_RATE_LENGTH / tokens if tokens else 1.0


def stated_error(source: Source, machine: MachineConfig | None) -> str:
    """Return how far such a prediction has been off, for its reader."""
    name = machine.name if machine and machine.name else source.device
    for device, within in WITHIN.items():
        if device in name and any(known in source.device for known in WITHIN):
            return f"within {within} % of {device}s' committed records, but for those that docs/plan.md names"
    return (
        f"PREDICTION, not measured on {name}. Such projections are off by several per cent or more: Primus states "
        f"{PRIMUS_ERRORS} for its own of an MI325X"
    )


def copies_parameters(recipe: Recipe, world: int, machine: MachineConfig | None) -> bool:
    """Return whether parameters are gathered by copy engines, which do not slow down kernels."""
    policy = (COPY_ENGINES | recipe.cluster.environment)["NCCL_CTA_POLICY"]
    return (
        bool(machine)
        and machine.copy_engines
        and recipe.parallel.nccl_ub
        and policy == COPY_ENGINES["NCCL_CTA_POLICY"]
        and world <= machine.devices_per_node
    )
