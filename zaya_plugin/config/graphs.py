# SPDX-License-Identifier: Apache-2.0
"""Decide whether a whole step can be one CUDA or HIP graph: `cluster.graphs`."""

from collections.abc import Iterator
from dataclasses import replace

from zaya_plugin.config.messages import must_be, require
from zaya_plugin.config.schema import Recipe

# Key, the value that a graph requires, and why: all steps must be alike, and the host must not wait for the device
# within one.
REQUIRED = (
    ("cluster.device", "cuda", "a CPU has no graphs"),
    ("cluster.dtype", "bf16", "on a GPU, grouped GEMMs of other types synchronise with the host"),
    (
        "parallel.use_distributed_optimizer",
        True,
        "without the distributed optimizer Megatron reads each loss on the host",
    ),
    ("stage.batch_size_ramp", None, "every replay of a graph has the same number of micro-batches"),
    ("data.packing", "none", "the host computes the blocks of documents"),
    ("parallel.pipeline_model_parallel_size", 1, "a graph does not capture sends between stages"),
    ("parallel.expert_model_parallel_size", 1, "the host reads how many tokens are sent"),
)
CONDITION = "cluster.graphs=full_iteration"


def obstacles(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each value of `recipe` with which a step cannot be one graph."""
    for key, value, why in REQUIRED:
        yield from must_be(recipe, key, value, CONDITION, why)
    overrides = recipe.cluster.kernel_overrides
    yield from require(
        overrides.get("grouped_product", recipe.cluster.kernels) != "reference",
        f"cluster.{'kernel_overrides.grouped_product' if 'grouped_product' in overrides else 'kernels'}",
        "reference",
        problem="grouped_product's reference reads the experts' borders on the host, which a graph does not support",
        allowed=f"another version of grouped_product with {CONDITION}",
        fix="cluster.kernel_overrides.grouped_product=auto",
    )


def with_graphs(recipe: Recipe) -> tuple[Recipe, str | None]:
    """Resolve `cluster.graphs=auto` to none or full_iteration.

    Returns:
        The recipe, and a line with the reason if auto becomes none. With another value the recipe itself, and None.
    """
    if recipe.cluster.graphs != "auto":
        return recipe, None
    obstacle = next(obstacles(recipe), None)
    cluster = replace(recipe.cluster, graphs="none" if obstacle else "full_iteration")
    return replace(recipe, cluster=cluster), f"no graph of a step: {obstacle}" if obstacle else None
