# SPDX-License-Identifier: Apache-2.0
"""`zaya bench expect`: predicts a step on another machine, of another size or batch from a measured step. The result is
marked as a prediction.

The roofline of a part is the larger of its operations over the matrix-product rate and its bytes over the copy rate.
The matrix-product rate is the machine's, times what whole tiles of the part's largest product leave of it
(zaya_plugin.plan.product_rate).
Each part of the record took longer than its roofline; the same ratio is assumed for the other recipe's work on the
other machine. Core attention is another library's kernel on another vendor's device, so it takes the machine's own rate
where the recipe gives one. Collectives take the rates of the recipe's machine keys, and are hidden under the passes
that they overlap with, whose kernels they slow down. The host's own time (idle) is not predicted. The same recipe on
the same device gives the record's own parts; on several devices, communication and its cost for the kernels come from
the formulas, not from the record.
"""

from __future__ import annotations

import functools
import json
from dataclasses import fields, is_dataclass
from pathlib import Path

from zaya_plugin.bench import step_record
from zaya_plugin.config import train_help
from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import MachineConfig, Recipe
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.expected_step import Overlap, accumulated, communication, limit
from zaya_plugin.plan.flops import Shape, count_parameters, training_flops
from zaya_plugin.plan.memory import Recompute, tokens_of_rank
from zaya_plugin.plan.parallelism import ParallelSizes
from zaya_plugin.plan.product_rate import rates_of_parts
from zaya_plugin.plan.products import muon_matrices
from zaya_plugin.plan.step_work import OptimizerShare, Rank, Work, step_work
from zaya_plugin.run.rank_plan import COPY_ENGINES

SCHEMA = "zaya bench expect/1"
NOT_CARRIED = ("communication", "idle")
# Kernels that run during a collective take longer, since it uses processors and memory bandwidth: this share of the
# collective's expected time. Measured in two steps on four H200s, of one and of four micro-batches (docs/log.md); the
# same value is assumed for other devices.
SLOWED = 0.26
PARTS_WITHOUT_COLLECTIVES = ("optimizer", "gradients")  # parts during which no collective runs


def load(path: Path) -> dict:
    """Return the record in a step.json; raises ValueError for any other file."""
    try:
        record = json.loads(path.read_text())
        usable = record["schema"] == step_record.SCHEMA and record["parts"] and record["traced"]["source"] == "kernels"
    except (OSError, KeyError, TypeError, ValueError) as error:
        problem = f"not a step.json of `zaya bench step` ({type(error).__name__}: {error})"
        raise mistake(str(path), problem=problem) from error
    if not usable:
        problem = "not a step.json of `zaya bench step` on an accelerator with the traced step's parts"
        raise mistake(str(path), problem=problem)
    return record


def recorded_recipe(record: dict) -> Recipe:
    """Return the recipe that ran. Keys that are newer than the record have their defaults; removed keys are ignored.

    The machine's rates are those of today's recipe of the same cluster, if there is one.
    """

    def filled(target, values: dict):
        for name in values.keys() & {item.name for item in fields(target)}:
            value = getattr(target, name)
            setattr(target, name, filled(value, values[name]) if is_dataclass(value) else values[name])
        return target

    recipe = filled(Recipe(), record["recipe"])
    recipe.nproc = record["world_size"]
    if recipe.cluster.name in train_help.options("cluster"):
        recipe.machine = compose([f"cluster={recipe.cluster.name}", "data.path=none"]).machine
    return recipe


def expect(record: dict, recipe: Recipe, world: int) -> dict:
    """Predict the step of `recipe` on `world` devices of its cluster.

    Raises:
        ValueError: pipeline parallelism, whose idle time does not follow from rates; a record with another
            recomputation.
    """
    before, measured = recorded_recipe(record), record["rates"]
    if recipe.parallel.pipeline_model_parallel_size > 1:
        raise mistake(
            "parallel.pipeline_model_parallel_size",
            recipe.parallel.pipeline_model_parallel_size,
            problem="the idle time of a pipeline does not follow from rates",
            allowed="1",
            fix="parallel.pipeline_model_parallel_size=1",
        )
    machine = recipe.machine if recipe.machine.name else None
    speeds = measured["gemm_tflops"] * 1e12, measured["copy_tb_per_s"] * 1e12
    same = machine is None or machine.name in record["device"]
    rates = speeds if same else (machine.gemm_tflops * 1e12, machine.copy_tb_per_s * 1e12)
    vocabulary = record["model"]["vocab_size"]
    recipe, _ = recipe_plan.with_recompute(recipe, world, vocabulary)
    recompute, recomputed = recipe_plan.recompute_of(recipe), recipe_plan.recompute_of(before)
    if recomputed not in (recompute, Recompute()):
        raise mistake(
            "parallel.recompute_granularity",
            recipe.parallel.recompute_granularity,
            problem="the record's parts include what was recomputed",
            allowed=f"as in the record ({before.parallel.recompute_granularity})",
            fix="a record without recomputation",
        )
    shape = recipe_plan.shape_of(recipe, vocabulary)
    written = frozenset(record.get("written_first", ()))  # older records have no such key; all gradients were zeroed
    old = work_of(before, record["world_size"], vocabulary, record["step"]["optimizer"], written)
    new = work_of(recipe, world, vocabulary, record["step"]["optimizer"])
    batch, layout = recipe_plan.batch_of(recipe, world), recipe_plan.layout_of(recipe, world)
    old_batch = recipe_plan.batch_of(before, record["world_size"])
    tokens = batch.micro_batches * tokens_of_rank(layout, batch)
    old_layout = recipe_plan.layout_of(before, record["world_size"])
    old_tokens = old_batch.micro_batches * tokens_of_rank(old_layout, old_batch)
    device = record["device"] if same else machine.name
    scale = rates_of_parts(device, shape, layout, batch)
    old_scale = rates_of_parts(record["device"], recipe_plan.shape_of(before, vocabulary), old_layout, old_batch)
    alone = 1.0
    if machine and (hidden := hidden_behind_kernels(record)):
        alone -= (
            SLOWED
            * hidden
            / sum(row["ms"] for row in record["parts"] if row["part"] not in (*NOT_CARRIED, *PARTS_WITHOUT_COLLECTIVES))
        )
    parts, passes, no_work = [], [0.0, 0.0], {"tflop": 0.0, "gb": 0.0, "roofline": None}
    for row in record["parts"]:
        if row["part"] in NOT_CARRIED:
            continue
        roofline = row["roofline"]
        if row["part"] in old:
            fastest = limit(new[row["part"]], rates[0] * scale.get(row["part"], 1.0), rates[1])
            factor = fastest / limit(old[row["part"]], speeds[0] * old_scale.get(row["part"], 1.0), speeds[1])
            if row["part"] == "attention" and not same and machine.attention_tflops:
                seconds = new[row["part"]].flops / (machine.attention_tflops * 1e12)
                # The factor below that takes the record's collectives out is for times of the record.
                factor, roofline = 1e3 * seconds / row["ms"] / alone, fastest / seconds
        else:  # a part without work of its own is proportional to tokens and layers
            factor = tokens * shape.num_layers / (old_tokens * before.model.num_layers)
        if row["part"] not in PARTS_WITHOUT_COLLECTIVES:
            factor *= alone
        done = new.get(row["part"], Work())
        parts.append(
            {
                "part": row["part"],
                "title": row["title"],
                "ms": row["ms"] * factor,
                "tflop": done.flops / 1e12,
                "gb": done.bytes / 1e9,
                "roofline": roofline,
            }
        )
        if row["part"] not in PARTS_WITHOUT_COLLECTIVES:
            passes = [passes[0] + row["forward_ms"] * factor, passes[1] + row["backward_ms"] * factor]
    if recompute != recomputed:
        recompute_seconds = recipe_plan.added_seconds(shape, layout, batch, recompute, recipe.machine)
        parts.append({"part": "recomputation", "title": "recomputation", "ms": 1e3 * recompute_seconds, **no_work})
        passes[1] += 1e3 * recompute_seconds
    forward, backward = (seconds / batch.micro_batches for seconds in passes)
    overlap = Overlap(
        recipe.parallel.overlap_grad_reduce, recipe.parallel.overlap_param_gather, recipe.parallel.ddp_bucket_size
    )
    muon = recipe.optim.name == "muon"
    links = (
        communication(shape, layout, batch, machine, overlap, forward / 1e3, backward / 1e3, muon) if machine else {}
    )
    exposed = sum(link["exposed_ms"] for link in links.values())
    copied = {"parameters"} if copies_parameters(recipe, world, machine) else set()
    if slowed := SLOWED * sum(link["ms"] - link["exposed_ms"] for name, link in links.items() if name not in copied):
        parts.append({"part": "slowed", "title": "slowed by collectives", "ms": slowed, **no_work})
    plan = recipe_plan.plan_of(recipe, world, vocabulary)
    computing = sum(row["ms"] for row in parts)
    ms = computing + exposed
    all_tokens = recipe.stage.global_batch_size * recipe.stage.seq_length
    flops = training_flops(shape, all_tokens, recipe.stage.seq_length)
    idle = next((row["ms"] for row in record["parts"] if row["part"] == "idle"), 0.0)
    return {
        "schema": SCHEMA,
        "prediction": True,
        "from": {name: record[name] for name in ("device", "date", "commit", "command", "world_size")},
        "on": {
            "cluster": recipe.cluster.name,
            "devices": world,
            "gemm_tflops": rates[0] / 1e12,
            "copy_tb_per_s": rates[1] / 1e12,
            "sources": machine.sources if machine else "rates of the record's own device; no links",
        },
        "step": {
            "ms": ms,
            "computing_ms": computing,
            "exposed_communication_ms": exposed,
            "tokens": all_tokens,
            "micro_batches": batch.micro_batches,
            "tokens_per_s_per_device": 1e3 * all_tokens / ms / world,
            "tflops_per_device": flops / (ms / 1e3) / world / 1e12,
            "share_of_gemm": flops / (ms / 1e3) / world / rates[0],
            "planned_gib": plan.total / 2**30,
        },
        "parts": parts,
        "communication": links,
        "idle_of_the_record_ms": idle,
    }


def hidden_behind_kernels(record: dict) -> float:
    """Return milliseconds of the record's collectives that ran during kernels on the same processors; copy engines are
    not among them.
    """
    rows = [kernel for row in record["parts"] if row["part"] == "communication" for kernel in row["longest"]]
    copies = sum(kernel["ms"] for kernel in rows if kernel["name"].startswith("Memcpy"))
    return max(record.get("hidden_communication_ms", 0.0) - copies, 0.0)


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


def work_of(
    recipe: Recipe,
    world: int,
    vocabulary: int,
    optimizer: bool = True,
    written: frozenset[str] = frozenset({"experts"}),
) -> dict[str, Work]:
    """Return the work of one rank by part, from the recipe alone; zaya_plugin.bench.step_record.work_of reads the model
    that ran.

    written: the parts whose gradients the first micro-batch writes (zaya_plugin.optim.gradient_buffers).
    """
    shape, layout, batch = (
        recipe_plan.shape_of(recipe, vocabulary),
        recipe_plan.layout_of(recipe, world),
        recipe_plan.batch_of(recipe, world),
    )
    rank = Rank(
        layers=shape.num_layers,
        tokens=batch.micro_batches * tokens_of_rank(layout, batch),
        micro_batches=batch.micro_batches,
        experts=shape.num_experts // layout.expert,
        activation_bytes=batch.dtype_bytes,
        stream_bytes=batch.stream_bytes,
        accumulated=accumulated(shape, layout),
        written=written,
        tensor=layout.tensor,
    )
    return step_work(
        shape, recipe.stage.seq_length, rank, optimizer_share(shape, layout, recipe) if optimizer else None
    )


def optimizer_share(shape: Shape, layout: ParallelSizes, recipe: Recipe) -> OptimizerShare:
    """Return the share of the busiest rank; matrices are never cut, so it has at least one of the largest ones."""
    from hip_ops.ops.newton_schulz.plan import newton_schulz_flops
    from zaya_plugin.optim.muon import DTYPES

    momentum = 2 if recipe.optim.muon_momentum_dtype == "bf16" else 4
    ranks = layout.expert_shards, layout.shards
    parts = count_parameters(shape)
    everything = sum(parts.values()) - parts["experts"]
    if recipe.optim.name != "muon":
        return OptimizerShare(0.0, parts["experts"] / layout.expert / ranks[0] + everything / ranks[1], momentum)
    of_experts, of_the_rest = muon_matrices(shape, recipe.optim.muon_split_gate_up)
    experts = shape.num_layers * shape.num_experts / layout.expert
    elements = sum(m * n for m, n in of_the_rest) * shape.num_layers
    flops = functools.partial(newton_schulz_flops, steps=recipe.optim.muon_steps, dtype=DTYPES[recipe.optim.muon_dtype])
    operations = (
        max(experts * sum(flops(*size) for size in of_experts) / ranks[0], flops(*of_experts[0]) * (ranks[0] > 1))
        + shape.num_layers * sum(flops(*size) for size in of_the_rest) / ranks[1]
    )
    gate_up = 2.0 * shape.moe_ffn_hidden_size * shape.hidden_size
    muon = max(parts["experts"] / layout.expert / ranks[0], gate_up * (ranks[0] > 1)) + elements / ranks[1]
    return OptimizerShare(muon, (everything - elements) / ranks[1], momentum, operations)


def text(result: dict) -> str:
    """Return the prediction as a table."""
    step, on = result["step"], result["on"]
    lines = [
        "",
        f"PREDICTION, not measured on {on['cluster']}: from {result['from']['device']}, commit "
        f"{result['from']['commit']}",
        f"{on['devices']} devices, {on['gemm_tflops']:.4g} TFLOP/s in a matrix product, {on['copy_tb_per_s']:.3g} TB/s "
        f"in a copy ({on['sources']})",
        f"a step of {step['tokens']} tokens in {step['micro_batches']} "
        f"micro-batch{'es' if step['micro_batches'] > 1 else ''} a rank: {step['ms']:.1f} ms, "
        f"{step['tokens_per_s_per_device']:,.0f} tokens/s a device, {step['tflops_per_device']:.4g} TFLOP/s, "
        f"{step['share_of_gemm']:.1%} of the GEMM rate; "
        f"memory plan {step['planned_gib']:.1f} GiB",
        f"  {'part':22}{'ms':>9}{'share':>8}{'TFLOP':>10}{'GB':>10}{'roofline':>9}",
    ]
    for row in result["parts"]:
        roofline = "" if row["roofline"] is None else f"{row['roofline']:.0%}"
        lines.append(
            "  "
            f"{row['title']:22}{row['ms']:9.2f}{row['ms'] / step['ms']:8.1%}"
            f"{row['tflop']:10.3g}{row['gb']:10.3g}{roofline:>9}"
        )
    for name, link in result["communication"].items():
        lines.append(
            f"  {'exposed ' + name:22}{link['exposed_ms']:9.2f}{link['exposed_ms'] / step['ms']:8.1%}   of "
            f"{link['ms']:.1f} ms"
        )
    lines.append(
        f"Not included: the record's idle time, {result['idle_of_the_record_ms']:.1f} ms of its traced step, which is "
        "its host's."
    )
    return "\n".join(lines)
