# SPDX-License-Identifier: Apache-2.0
"""A recipe's memory plan, and the cheapest recomputation with which a step fits into memory, for
recompute_granularity=auto.

Every choice is tried: each set of modules, and whole layers from the first on, one after the other. The cost of a
choice is the time of a forward pass of the recomputed parts: operations at a share of the device's matrix-product
rate, bytes at its copy rate. No torch import.
"""

from dataclasses import replace
from itertools import chain, combinations
from math import ceil
from typing import NamedTuple

from zaya_plugin.config.layout import data_parallel_size
from zaya_plugin.config.schema import RECOMPUTE_MODULES, MachineConfig, Recipe, with_values
from zaya_plugin.config.validate import validate, with_graphs
from zaya_plugin.data.sources import padded, vocabulary_of
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan.flops import Shape, forward_flops_by_part
from zaya_plugin.plan.memory import MemoryPlan, Optimizer, Recompute, memory_plan, tokens_of_rank
from zaya_plugin.plan.parallelism import GRADIENT_BYTES, Batch, ParallelSizes

GIB = 2**30
RESERVED_SHARE = 0.08  # of a device's memory: context, NCCL's buffers, and fragmentation of the allocator
# Shares of the matrix-product rate that the parts' forward passes reached on an H100
# (benchmarks/results/step12-h100.json); other parts are bound by copies.
FORWARD_SHARE = {"projections": 0.8, "attention": 0.6, "experts": 0.65, "router": 0.2, "prologue": 0.08}

NO_RECOMPUTE = {
    "parallel.recompute_granularity": None,
    "parallel.recompute_method": None,
    "parallel.recompute_num_layers": None,
    "parallel.recompute_modules": [],
}


def sizes_of(recipe: Recipe, world_size: int, vocabulary: int | None = None) -> tuple[Shape, ParallelSizes, Batch]:
    """Return the recipe's sizes, its parallel layout and the work of one data-parallel rank and step."""
    return shape_of(recipe, vocabulary), layout_of(recipe, world_size), batch_of(recipe, world_size)


def shape_of(recipe: Recipe, vocabulary: int | None = None) -> Shape:
    """Return the recipe's sizes. vocabulary: rows of the embedding, where the recipe's data is not available."""
    model = recipe.model
    rows = padded(vocabulary or vocabulary_of(recipe), model.make_vocab_size_divisible_by)
    return Shape(
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.num_query_groups,
        model.kv_channels,
        model.num_experts,
        model.moe_ffn_hidden_size,
        model.router_hidden_size,
        rows,
        normalization=model.normalization,
        sliding_window=model.sliding_window,
        window_attn_skip_freq=model.window_attn_skip_freq,
        lora_rank=recipe.optim.lora.rank,
        lora_targets=tuple(recipe.optim.lora.targets),
        lora_experts=recipe.optim.lora.experts,
    )


def layout_of(recipe: Recipe, world_size: int) -> ParallelSizes:
    """Return the recipe's parallel layout."""
    parallel = recipe.parallel
    return ParallelSizes(
        data=data_parallel_size(recipe, world_size),
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        pipeline=parallel.pipeline_model_parallel_size,
        virtual=parallel.virtual_pipeline_stages,
        zigzag=parallel.context_parallel_order == "zigzag",
        allgather_dispatcher=parallel.moe_token_dispatcher == "allgather",
        distributed_optimizer=parallel.use_distributed_optimizer,
        instances=parallel.num_distributed_optimizer_instances,
    )


def batch_of(recipe: Recipe, world_size: int) -> Batch:
    """Return the work of one data-parallel rank and step."""
    stage, dtype_bytes = recipe.stage, 2 if recipe.cluster.dtype == "bf16" else 4
    micro_batches = stage.global_batch_size // (stage.micro_batch_size * data_parallel_size(recipe, world_size))
    stream_bytes = 4 if recipe.model.residual_in_fp32 else dtype_bytes
    gradient_bytes = GRADIENT_BYTES if recipe.optim.grad_reduce_in_fp32 else dtype_bytes
    return Batch(stage.seq_length, stage.micro_batch_size, micro_batches, dtype_bytes, stream_bytes, gradient_bytes)


def optimizer_of(recipe: Recipe) -> Optimizer:
    """Return what the memory plan reads of the recipe's optimizer. Adapters are under AdamW with every name."""
    muon = recipe.optim.name == "muon" and recipe.optim.lora.rank is None
    return Optimizer(muon, 2 if recipe.optim.muon_momentum_dtype == "bf16" else 4)


def recompute_of(recipe: Recipe) -> Recompute:
    """Return the recipe's recomputation."""
    parallel, stages = recipe.parallel, recipe.parallel.pipeline_model_parallel_size
    if parallel.recompute_granularity == "selective":
        return Recompute(frozenset(parallel.recompute_modules))
    if parallel.recompute_granularity == "full":
        if parallel.recompute_method == "uniform":
            return Recompute(full_layers=recipe.model.num_layers // stages, unit=parallel.recompute_num_layers)
        return Recompute(full_layers=parallel.recompute_num_layers * parallel.virtual_pipeline_stages)
    return Recompute()


def has_graph(recipe: Recipe) -> bool:
    """Whether a step is one graph, with `auto` resolved."""
    return with_graphs(recipe)[0].cluster.graphs == "full_iteration"


def plan_of(recipe: Recipe, world_size: int, vocabulary: int | None = None, optimizer: bool = True) -> MemoryPlan:
    """Return the memory plan of the fullest rank. optimizer: False for a step without one, which keeps no state."""
    state = optimizer_of(recipe) if optimizer else Optimizer(muon=False)
    plan = memory_plan(*sizes_of(recipe, world_size, vocabulary), recompute_of(recipe), state, has_graph(recipe))
    return replace(
        plan, components={name: plan.components[name] for name in plan.components if optimizer or name != "optimizer"}
    )


def is_valid(recipe: Recipe, world_size: int) -> bool:
    """Whether a recipe passes validation on a number of ranks."""
    try:
        validate(recipe, world_size)
    except ValueError:
        return False
    return True


def memory_share(plan: MemoryPlan, memory_gib: float | None) -> float:
    """Return the share of a device's memory that a plan takes; 0 without cluster.memory_gib."""
    return plan.total / (memory_gib * GIB) if memory_gib else 0.0


def with_recompute(recipe: Recipe, world_size: int, vocabulary: int | None = None) -> tuple[Recipe, str | None]:
    """Return `recipe` with the recomputation for `auto` and a line about it; without `auto`, the unchanged recipe and
    None.

    Raises:
        ValueError: the step does not fit into cluster.memory_gib with any recomputation.
    """
    if recipe.parallel.recompute_granularity != "auto":
        return recipe, None
    memory_gib, choices = recipe.cluster.memory_gib, choices_of(recipe, world_size, vocabulary)
    fitting = [choice for choice in choices if memory_share(choice.plan, memory_gib) <= 1 - RESERVED_SHARE]
    chosen = fitting[0] if fitting else min(choices, key=lambda choice: choice.plan.total)
    gib, name = chosen.plan.total / GIB, chosen.recompute.name
    components = ", ".join(f"{name} {value / GIB:.2f}" for name, value in chosen.plan.components.items())
    if not fitting:
        raise mistake(
            "parallel.recompute_granularity",
            "auto",
            problem=f"the step needs {gib:.1f} GiB a device even with {name} recomputed ({components}), and "
            f"{(1 - RESERVED_SHARE) * memory_gib:.1f} of cluster.memory_gib={memory_gib:g} are available",
            allowed="a step that fits",
            fix=f"a smaller stage.micro_batch_size (currently {recipe.stage.micro_batch_size}), or more data-, "
            "context-, expert- or pipeline-parallel ranks",
        )
    line = (
        f"recomputed: {name}, about {chosen.milliseconds:.1f} ms a step; memory plan {gib:.1f} of {memory_gib:g} GiB a "
        f"device ({components})"
    )
    return with_choice(recipe, chosen.recompute), line


class Choice(NamedTuple):
    """A recomputation, its memory plan, and the milliseconds that it adds to a step."""

    recompute: Recompute
    plan: MemoryPlan
    milliseconds: float


def choices_of(recipe: Recipe, world_size: int, vocabulary: int | None = None) -> list[Choice]:
    """Return all recomputations of a recipe, cheapest first."""
    sizes = shape, layout, _ = sizes_of(recipe, world_size, vocabulary)
    allowed = [name for name in RECOMPUTE_MODULES if name != "permute" or layout.expert == 1]
    modules = chain.from_iterable(combinations(allowed, count) for count in range(len(allowed) + 1))
    # recomputed experts sort their rows again anyway
    candidates = [Recompute(frozenset(names)) for names in modules if not {"moe", "permute"} <= {*names}]
    candidates += [Recompute(full_layers=count) for count in range(1, shape.num_layers // layout.pipeline + 1)]
    rest = optimizer_of(recipe), has_graph(recipe)
    choices = [
        Choice(one, memory_plan(*sizes, one, *rest), 1e3 * added_seconds(*sizes, one, recipe.machine))
        for one in candidates
    ]
    return sorted(choices, key=lambda choice: (choice.milliseconds, choice.plan.total))


def with_choice(recipe: Recipe, recompute: Recompute) -> Recipe:
    """Return the recipe with a recomputation."""
    values = {}
    if recompute.full_layers:
        layers = ceil(recompute.full_layers / recipe.parallel.virtual_pipeline_stages)
        values = {"granularity": "full", "method": "block", "num_layers": layers}
    elif recompute.modules:
        values = {"granularity": "selective", "modules": sorted(recompute.modules, key=RECOMPUTE_MODULES.index)}
    return with_values(recipe, NO_RECOMPUTE | {f"parallel.recompute_{name}": value for name, value in values.items()})


def lines(recipe: Recipe, world_size: int, verbose: bool = True) -> list[str]:
    """Return the plan for a dry run: the sum, and with `verbose` the components and the largest tensors that a layer
    keeps. Empty on a CPU, which the plan does not cover.
    """
    if recipe.cluster.device == "cpu":
        return []
    plan, memory = plan_of(recipe, world_size), recipe.cluster.memory_gib
    of = "" if memory is None else f", of {memory:g} ({RESERVED_SHARE:.0%} of them for libraries and allocator)"
    report = [f"memory plan  GiB of the fullest device (prediction); sum {plan.total / GIB:.2f}{of}"]
    if verbose:
        report += [f"  {value / GIB:8.2f}  {name}" for name, value in plan.components.items()]
    if verbose and recompute_of(recipe).full_layers == 0:
        largest = sorted(plan.layer.items(), key=lambda tensor: -tensor[1])
        tensors = [f"  {size / 2**20:8.1f}  {name}" for name, size in largest if size > 0.01 * largest[0][1]]
        report += ["  of a layer and micro-batch, MiB:", *tensors]
    return report


def added_seconds(
    shape: Shape, layout: ParallelSizes, batch: Batch, recompute: Recompute, machine: MachineConfig
) -> float:
    """Return seconds that a rank spends on recomputation in a step."""
    h, gemm, copy = shape.hidden_size, machine.gemm_tflops * 1e12, machine.copy_tb_per_s * 1e12
    flops = forward_flops_by_part(shape, batch.seq_length)
    time = {part: flops[part] / shape.num_layers / gemm / share for part, share in FORWARD_SHARE.items()}
    norm, rows = (batch.stream_bytes + batch.dtype_bytes) * h / copy, 2 * batch.dtype_bytes * h / copy
    moe = time["experts"] + time["router"] + 2 * rows
    # A recomputed norm is not fused with the merge before it, which costs one more read of the stream in each
    # direction.
    layernorm = 2 * norm + 4 * batch.stream_bytes * h / copy
    modules = {"permute": rows, "moe": moe, "core_attn": time["attention"], "layernorm": layernorm}
    whole = time["projections"] + time["prologue"] + time["attention"] + moe + 4 * norm
    others = shape.num_layers // layout.pipeline - recompute.full_layers
    seconds = sum(modules[name] for name in recompute.modules) * others + whole * recompute.full_layers
    return batch.micro_batches * tokens_of_rank(layout, batch) * seconds
