# SPDX-License-Identifier: Apache-2.0
"""The work of one rank in a recipe's step, from the recipe alone; zaya_plugin.bench.step_record reads the model that
ran. No torch import.
"""

from __future__ import annotations

import functools

from hip_ops.newton_schulz_form import newton_schulz_flops
from zaya_plugin.config.schema import Recipe
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.expected_step import accumulated
from zaya_plugin.plan.flops import Shape, count_parameters
from zaya_plugin.plan.memory import tokens_of_rank
from zaya_plugin.plan.parallelism import ParallelSizes
from zaya_plugin.plan.products import muon_matrices
from zaya_plugin.plan.step_work import OptimizerShare, Rank, Work, step_work


def work_of(
    recipe: Recipe,
    world: int,
    vocabulary: int | None = None,
    optimizer: bool = True,
    written: frozenset[str] = frozenset({"experts"}),
) -> dict[str, Work]:
    """Return the work of one rank by part.

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
    momentum = 2 if recipe.optim.muon_momentum_dtype == "bf16" else 4
    ranks = layout.expert_shards, layout.shards
    parts = count_parameters(shape)
    everything = sum(parts.values()) - parts["experts"]
    if recipe.optim.name != "muon":
        return OptimizerShare(0.0, parts["experts"] / layout.expert / ranks[0] + everything / ranks[1], momentum)
    of_experts, of_the_rest = muon_matrices(shape, recipe.optim.muon_split_gate_up)
    experts = shape.num_layers * shape.num_experts / layout.expert
    elements = sum(m * n for m, n in of_the_rest) * shape.num_layers
    flops = functools.partial(
        newton_schulz_flops, steps=recipe.optim.muon_steps, bf16=recipe.optim.muon_dtype == "bf16"
    )
    operations = (
        max(experts * sum(flops(*size) for size in of_experts) / ranks[0], flops(*of_experts[0]) * (ranks[0] > 1))
        + shape.num_layers * sum(flops(*size) for size in of_the_rest) / ranks[1]
    )
    gate_up = 2.0 * shape.moe_ffn_hidden_size * shape.hidden_size
    muon = max(parts["experts"] / layout.expert / ranks[0], gate_up * (ranks[0] > 1)) + elements / ranks[1]
    return OptimizerShare(muon, (everything - elements) / ranks[1], momentum, operations)
