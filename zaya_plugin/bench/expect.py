# SPDX-License-Identifier: Apache-2.0
"""`zaya bench expect`: a measured step carried over to another machine, size or batch. A prediction, and marked as one.

Each part of the record took a certain time where its roofline, the larger of operations over the matrix-product rate and bytes over the copy rate, allows
less; the same share of the other machine's roofline is assumed for the other recipe's work. Collectives take the rates of the recipe's `machine` and are
hidden under the passes that they overlap with, whose kernels they slow down. What the host does (idle) is not carried over. Same recipe on the same
device: the record's own parts; on several, their communication and what it costs the kernels are the formulas', not the record's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe
    from zaya_plugin.plan.flops import Shape
    from zaya_plugin.plan.machines import Machine
    from zaya_plugin.plan.parallelism import Layout
    from zaya_plugin.plan.step_work import OptimizerShare, Work

SCHEMA = "zaya bench expect/1"
NOT_CARRIED = ("communication", "idle")
# Of the time that a collective runs beside kernels, what these take longer: it has some of the processors, and of the memory's rate. From two steps on four
# H200s, of one and of four micro-batches, as a share of the time that this module expects a collective to take (docs/log.md); other devices are assumed to be alike.
SLOWED = 0.26
NOT_BESIDE = ("optimizer", "gradients")  # parts at which no collective runs


def main(argv: list[str]) -> int:
    """`zaya bench expect STEP_JSON [key=value ...] [--output FILE]`."""
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.run.commands import option, overrides_of

    argv, output = option(argv, "--output")
    if not argv or "=" in argv[0] or argv[0].startswith("-"):
        raise ValueError("zaya bench expect: the first word is the step.json of a run of `zaya bench step`")
    record = load(Path(argv[0]))
    recipe = recorded_recipe(record)
    if argv[1:]:
        words = argv[1:] if any(word.startswith("data.path=") for word in argv[1:]) else [*argv[1:], "data.path=none"]
        recipe = compose(overrides_of(words, "bench expect"))
    world = recipe.nproc or recipe.cluster.num_nodes * recipe.cluster.gpus_per_node
    validate(recipe, world)
    found = expect(record, recipe, world)
    print(text(found))
    if output:
        Path(output).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def load(path: Path) -> dict:
    from zaya_plugin.bench import record as step_record

    try:
        record = json.loads(path.read_text())
        usable = record["schema"] == step_record.SCHEMA and record["parts"] and record["traced"]["source"] == "kernels"
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a step.json of `zaya bench step` ({type(error).__name__}: {error})") from error
    if not usable:
        raise ValueError(f"{path}: not a step.json of `zaya bench step` on an accelerator with the traced step's parts")
    return record


def recorded_recipe(record: dict) -> Recipe:
    """Return the recipe that ran. Keys that are new since then have their defaults, and removed keys are left out.

    The rates of the machine are those of today's recipe of the same cluster, if there is one.
    """
    from dataclasses import fields, is_dataclass

    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.schema import Recipe
    from zaya_plugin.config.train_help import options

    def filled(target, values: dict):
        for each in fields(target):
            if each.name in values:
                value = getattr(target, each.name)
                setattr(
                    target, each.name, filled(value, values[each.name]) if is_dataclass(value) else values[each.name]
                )
        return target

    recipe = filled(Recipe(), record["recipe"])
    recipe.nproc = record["world_size"]
    if recipe.cluster.name in options("cluster"):
        recipe.machine = compose([f"cluster={recipe.cluster.name}", "data.path=none"]).machine
    return recipe


def expect(record: dict, recipe: Recipe, world: int) -> dict:
    """The step of `recipe` on `world` devices of its cluster.

    Raises:
        ValueError: pipeline parallelism, whose waiting is not a matter of rates; another recomputation than a record's with one.
    """
    from zaya_plugin.plan import recipe_plan
    from zaya_plugin.plan.expected_step import Overlap, communication, limit
    from zaya_plugin.plan.flops import training_flops
    from zaya_plugin.plan.memory import Recompute, tokens_of_rank
    from zaya_plugin.plan.recompute import added_seconds
    from zaya_plugin.plan.step_work import Work

    before, measured = recorded_recipe(record), record["rates"]
    if recipe.parallel.pipeline_model_parallel_size > 1:
        raise ValueError(
            f"parallel.pipeline_model_parallel_size = {recipe.parallel.pipeline_model_parallel_size}: allowed in zaya bench expect: 1"
        )
    machine = recipe_plan.machine_of(recipe) if recipe.machine.name else None
    here = measured["gemm_tflops"] * 1e12, measured["copy_tb_per_s"] * 1e12
    same = machine is None or machine.name in record["device"]
    rates = here if same else (machine.gemm, machine.copy)
    vocabulary = record["model"]["vocab_size"]
    recipe, _ = recipe_plan.with_recompute(recipe, world, vocabulary)
    recompute, recomputed = recipe_plan.recompute_of(recipe), recipe_plan.recompute_of(before)
    if recomputed not in (recompute, Recompute()):
        raise ValueError(
            f"parallel.recompute_granularity = {recipe.parallel.recompute_granularity}: allowed here: as in the record "
            f"({before.parallel.recompute_granularity}), whose parts hold what was recomputed"
        )
    shape = recipe_plan.shape_of(recipe, vocabulary)
    written = frozenset(record.get("written_first", ()))  # an older record has no such line: all was zeroed
    old = work_of(before, record["world_size"], vocabulary, record["step"]["optimizer"], written)
    new = work_of(recipe, world, vocabulary, record["step"]["optimizer"])
    batch, layout = recipe_plan.batch_of(recipe, world), recipe_plan.layout_of(recipe, world)
    old_batch = recipe_plan.batch_of(before, record["world_size"])
    tokens = batch.micro_batches * tokens_of_rank(layout, batch)
    old_tokens = old_batch.micro_batches * tokens_of_rank(
        recipe_plan.layout_of(before, record["world_size"]), old_batch
    )
    alone = 1.0
    if machine and (hidden := hidden_beside_kernels(record)):
        alone -= (
            SLOWED
            * hidden
            / sum(row["ms"] for row in record["parts"] if row["part"] not in (*NOT_CARRIED, *NOT_BESIDE))
        )
    parts, passes = [], [0.0, 0.0]
    for row in record["parts"]:
        if row["part"] in NOT_CARRIED:
            continue
        if row["part"] in old:
            factor = limit(new[row["part"]], *rates) / limit(old[row["part"]], *here)
        else:  # whatever has no work of its own goes with tokens and layers
            factor = tokens * shape.num_layers / (old_tokens * before.model.num_layers)
        if row["part"] not in NOT_BESIDE:
            factor *= alone
        done = new.get(row["part"], Work())
        parts.append(
            {
                "part": row["part"],
                "title": row["title"],
                "ms": row["ms"] * factor,
                "tflop": done.flops / 1e12,
                "gb": done.bytes / 1e9,
                "roofline": row["roofline"],
            }
        )
        if row["part"] not in NOT_BESIDE:
            passes = [passes[0] + row["forward_ms"] * factor, passes[1] + row["backward_ms"] * factor]
    if recompute != recomputed:
        again = added_seconds(shape, layout, batch, recompute, recipe_plan.machine_of(recipe))
        parts.append(
            {
                "part": "recomputation",
                "title": "recomputation",
                "ms": 1e3 * again,
                "tflop": 0.0,
                "gb": 0.0,
                "roofline": None,
            }
        )
        passes[1] += 1e3 * again
    forward, backward = (each / batch.micro_batches for each in passes)
    overlap = Overlap(
        recipe.parallel.overlap_grad_reduce, recipe.parallel.overlap_param_gather, recipe.parallel.ddp_bucket_size
    )
    muon = recipe.optim.name == "muon"
    links = (
        communication(shape, layout, batch, machine, overlap, forward / 1e3, backward / 1e3, muon) if machine else {}
    )
    exposed = sum(each["exposed_ms"] for each in links.values())
    copied = {"parameters"} if copies_parameters(recipe, world, machine) else set()
    if slowed := SLOWED * sum(each["ms"] - each["exposed_ms"] for name, each in links.items() if name not in copied):
        parts.append(
            {
                "part": "slowed",
                "title": "slowed by collectives",
                "ms": slowed,
                "tflop": 0.0,
                "gb": 0.0,
                "roofline": None,
            }
        )
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


def hidden_beside_kernels(record: dict) -> float:
    """Milliseconds of the record's collectives that ran beside kernels and on the same processors, which copy engines are not."""
    rows = [each for row in record["parts"] if row["part"] == "communication" for each in row["longest"]]
    copies = sum(each["ms"] for each in rows if each["name"].startswith("Memcpy"))
    return max(record.get("hidden_communication_ms", 0.0) - copies, 0.0)


def copies_parameters(recipe: Recipe, world: int, machine: Machine | None) -> bool:
    """Whether parameters are gathered by copy engines, which take nothing from the kernels beside them."""
    from zaya_plugin.run.rank_plan import COPY_ENGINES

    policy = (COPY_ENGINES | recipe.cluster.environment)["NCCL_CTA_POLICY"]
    return (
        bool(machine)
        and machine.copies
        and recipe.parallel.nccl_ub
        and policy == COPY_ENGINES["NCCL_CTA_POLICY"]
        and world <= machine.node
    )


def work_of(
    recipe: Recipe,
    world: int,
    vocabulary: int,
    optimizer: bool = True,
    written: frozenset[str] = frozenset({"experts"}),
) -> dict[str, Work]:
    """zaya_plugin.plan.step_work of one rank, from the recipe alone; zaya_plugin.bench.record.work_of asks the model that ran.

    written: the parts of which the first micro-batch writes its gradients; that is as zaya_plugin.optim.written_gradients does it.
    """
    from zaya_plugin.plan import recipe_plan
    from zaya_plugin.plan.expected_step import accumulated
    from zaya_plugin.plan.memory import tokens_of_rank
    from zaya_plugin.plan.step_work import Rank, step_work

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


def optimizer_share(shape: Shape, layout: Layout, recipe: Recipe) -> OptimizerShare:
    """The busiest rank's: matrices are never cut, so it has one of the largest ones at least."""
    from zaya_plugin.optim.newton_schulz_cost import newton_schulz_flops
    from zaya_plugin.plan.parameters import count_parameters
    from zaya_plugin.plan.step_work import OptimizerShare

    momentum = 2 if recipe.optim.muon_momentum_dtype == "bf16" else 4
    ranks = layout.expert_shards, layout.shards
    h, f, r, q, k = (
        shape.hidden_size,
        shape.moe_ffn_hidden_size,
        shape.router_hidden_size,
        shape.query_channels,
        shape.key_channels,
    )
    parts = count_parameters(shape)
    everything = sum(parts.values()) - parts["experts"]
    if recipe.optim.name != "muon":
        return OptimizerShare(0.0, parts["experts"] / layout.expert / ranks[0] + everything / ranks[1], momentum)
    halves = 2 if recipe.optim.muon_split_gate_up else 1
    of_experts = [(2 * f // halves, h)] * halves + [(h, f)]
    of_the_rest = [(q, h), (k, h), (k // 2, h), (k // 2, h), (h, q), (r, h), (r, r), (r, r), (shape.num_experts + 1, r)]
    experts = shape.num_layers * shape.num_experts / layout.expert
    elements = sum(m * n for m, n in of_the_rest) * shape.num_layers
    operations = (
        max(
            experts * sum(newton_schulz_flops(*size) for size in of_experts) / ranks[0],
            newton_schulz_flops(*of_experts[0]) * (ranks[0] > 1),
        )
        + shape.num_layers * sum(newton_schulz_flops(*size) for size in of_the_rest) / ranks[1]
    )
    muon = max(parts["experts"] / layout.expert / ranks[0], 2.0 * f * h * (ranks[0] > 1)) + elements / ranks[1]
    return OptimizerShare(muon, (everything - elements) / ranks[1], momentum, operations * recipe.optim.muon_steps / 5)


def text(found: dict) -> str:
    """The table."""
    step, on = found["step"], found["on"]
    lines = [
        "",
        f"PREDICTION, nothing of this was measured on {on['cluster']}: from {found['from']['device']}, commit {found['from']['commit']}",
        f"{on['devices']} devices, {on['gemm_tflops']:.4g} TFLOP/s in a matrix product, {on['copy_tb_per_s']:.3g} TB/s in a copy ({on['sources']})",
        f"a step of {step['tokens']} tokens in {step['micro_batches']} micro-batch{'es' if step['micro_batches'] > 1 else ''} a rank: {step['ms']:.1f} ms, "
        f"{step['tokens_per_s_per_device']:,.0f} tokens/s a device, {step['tflops_per_device']:.4g} TFLOP/s, {step['share_of_gemm']:.1%} of the GEMM rate; "
        f"memory plan {step['planned_gib']:.1f} GiB",
        f"  {'part':22}{'ms':>9}{'share':>8}{'TFLOP':>10}{'GB':>10}{'roofline':>9}",
    ]
    for row in found["parts"]:
        roofline = "" if row["roofline"] is None else f"{row['roofline']:.0%}"
        lines.append(
            f"  {row['title']:22}{row['ms']:9.2f}{row['ms'] / step['ms']:8.1%}{row['tflop']:10.3g}{row['gb']:10.3g}{roofline:>9}"
        )
    for name, each in found["communication"].items():
        lines.append(
            f"  {'exposed ' + name:22}{each['exposed_ms']:9.2f}{each['exposed_ms'] / step['ms']:8.1%}   of {each['ms']:.1f} ms"
        )
    lines.append(
        f"The record's idle time, {found['idle_of_the_record_ms']:.1f} ms of its traced step, is its host's and not carried over."
    )
    return "\n".join(lines)
