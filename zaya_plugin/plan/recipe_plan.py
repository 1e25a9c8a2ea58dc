# SPDX-License-Identifier: Apache-2.0
"""A recipe's memory plan, and the recomputation that `parallel.recompute_granularity=auto` stands for. No torch import."""

from __future__ import annotations

from dataclasses import replace

from zaya_plugin.config.graphs import with_graphs
from zaya_plugin.config.schema import Recipe
from zaya_plugin.config.validate import data_parallel_size
from zaya_plugin.data.vocabulary import padded, vocabulary_of
from zaya_plugin.plan import recompute as choice
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.machines import Machine
from zaya_plugin.plan.memory import MemoryPlan, Optimizer, Recompute, memory_plan
from zaya_plugin.plan.parallelism import Batch, Layout

GIB = 2**30


def shape_of(recipe: Recipe, vocabulary: int | None = None) -> Shape:
    """vocabulary: rows of the table, where the recipe's data does not say."""
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
    )


def layout_of(recipe: Recipe, world_size: int) -> Layout:
    parallel = recipe.parallel
    return Layout(
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
    stage = recipe.stage
    micro_batches = stage.global_batch_size // (stage.micro_batch_size * data_parallel_size(recipe, world_size))
    dtype_bytes = 2 if recipe.cluster.dtype == "bf16" else 4
    stream_bytes = 4 if recipe.model.residual_in_fp32 else dtype_bytes
    return Batch(stage.seq_length, stage.micro_batch_size, micro_batches, dtype_bytes, stream_bytes)


def optimizer_of(recipe: Recipe) -> Optimizer:
    return Optimizer(recipe.optim.name == "muon", 2 if recipe.optim.muon_momentum_dtype == "bf16" else 4)


def recompute_of(recipe: Recipe) -> Recompute:
    parallel, stages = recipe.parallel, recipe.parallel.pipeline_model_parallel_size
    if parallel.recompute_granularity == "selective":
        return Recompute(frozenset(parallel.recompute_modules))
    if parallel.recompute_granularity == "full":
        if parallel.recompute_method == "uniform":
            return Recompute(full_layers=recipe.model.num_layers // stages, unit=parallel.recompute_num_layers)
        return Recompute(full_layers=parallel.recompute_num_layers * parallel.virtual_pipeline_stages)
    return Recompute()


def has_graph(recipe: Recipe) -> bool:
    """Whether a step is one graph, by the key or by what `auto` stands for."""
    return with_graphs(recipe)[0].cluster.graphs == "full_iteration"


def machine_of(recipe: Recipe) -> Machine:
    """Return the recipe's rates in base units. Clusters without rates have an H100's: they decide little between choices."""
    machine = recipe.machine
    return Machine(
        name=machine.name,
        gemm=machine.gemm_tflops * 1e12,
        copy=machine.copy_tb_per_s * 1e12,
        node=machine.devices_per_node,
        link=machine.link_gb_per_s * 1e9,
        latency=machine.latency_us / 1e6,
        network=machine.network_gb_per_s * 1e9,
        hop=machine.hop_us / 1e6,
        sources=machine.sources,
        copies=machine.copy_engines,
    )


def plan_of(recipe: Recipe, world_size: int, vocabulary: int | None = None) -> MemoryPlan:
    """What the fullest rank of `recipe` holds at its peak."""
    return memory_plan(
        shape_of(recipe, vocabulary),
        layout_of(recipe, world_size),
        batch_of(recipe, world_size),
        recompute_of(recipe),
        optimizer_of(recipe),
        has_graph(recipe),
    )


def with_recompute(recipe: Recipe, world_size: int, vocabulary: int | None = None) -> tuple[Recipe, str | None]:
    """`recipe` with the recomputation that `auto` stands for, and a line about it; as it is, and None, where it does not ask.

    Raises:
        ValueError: the step does not fit into cluster.memory_gib whatever is recomputed.
    """
    if recipe.parallel.recompute_granularity != "auto":
        return recipe, None
    allowed = tuple(
        name
        for name in choice.MODULES
        if name != "permute"
        or (recipe.parallel.expert_model_parallel_size == 1 and recipe.cluster.transformer_impl == "local")
    )
    found = choice.choices(
        shape_of(recipe, vocabulary),
        layout_of(recipe, world_size),
        batch_of(recipe, world_size),
        optimizer_of(recipe),
        machine_of(recipe),
        allowed,
        has_graph(recipe),
    )
    memory_gib = recipe.cluster.memory_gib
    try:
        chosen = choice.choose(found, memory_gib)
    except ValueError as error:
        raise ValueError(
            f"parallel.recompute_granularity = auto: {error}. Allowed: a smaller stage.micro_batch_size (is {recipe.stage.micro_batch_size}), more "
            "data-, context-, expert- or pipeline-parallel ranks"
        ) from None
    parallel = replace(recipe.parallel, recompute_granularity=None)
    if chosen.recompute.full_layers:
        per_stage = -(-chosen.recompute.full_layers // recipe.parallel.virtual_pipeline_stages)
        parallel = replace(
            parallel, recompute_granularity="full", recompute_method="block", recompute_num_layers=per_stage
        )
    elif chosen.recompute.modules:
        modules = [name for name in choice.MODULES if name in chosen.recompute.modules]
        parallel = replace(parallel, recompute_granularity="selective", recompute_modules=modules)
    line = (
        f"recomputed: {chosen.name}, about {chosen.milliseconds:.1f} ms a step; memory plan {chosen.plan.total / GIB:.1f} of {memory_gib:g} GiB a "
        f"device ({choice.table(chosen.plan, ', ')})"
    )
    return replace(recipe, parallel=parallel), line


def lines(recipe: Recipe, world_size: int, vocabulary: int | None = None) -> list[str]:
    """The plan for a dry run: a table of components, and of the largest tensors that a layer keeps. None on a CPU, which the plan is not made for."""
    if recipe.cluster.device == "cpu":
        return []
    plan = plan_of(recipe, world_size, vocabulary)
    of = (
        ""
        if recipe.cluster.memory_gib is None
        else f", of {recipe.cluster.memory_gib:g} ({choice.RESERVE:.0%} of them for libraries and allocator)"
    )
    found = [f"memory plan  GiB of the fullest device (prediction); sum {plan.total / GIB:.2f}{of}"]
    found += [f"  {value / GIB:8.2f}  {name}" for name, value in plan.components.items()]
    if recompute_of(recipe).full_layers == 0:
        found.append("  of a layer and micro-batch, MiB:")
        largest = sorted(plan.layer, key=lambda saved: -saved.bytes)
        found += [
            f"  {saved.bytes / 2**20:8.1f}  {saved.name}" for saved in largest if saved.bytes > 0.01 * largest[0].bytes
        ]
    return found
