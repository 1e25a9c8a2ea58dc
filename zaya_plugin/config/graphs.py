# SPDX-License-Identifier: Apache-2.0
"""What a graph of a whole step cannot hold, and what `cluster.graphs=auto` stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zaya_plugin.config.schema import Recipe


def obstacles(recipe: Recipe) -> Iterator[str]:
    """A step that differs from the one before, or a question to the device within it; each with what is allowed."""
    needed = (
        ("cluster.device", recipe.cluster.device, "cuda", "a CPU has no graphs"),
        (
            "cluster.dtype",
            recipe.cluster.dtype,
            "bf16",
            "no grouped GEMM takes another on a GPU without asking the host",
        ),
        (
            "cluster.transformer_impl",
            recipe.cluster.transformer_impl,
            "local",
            "Transformer Engine's grouped GEMM asks the host",
        ),
        (
            "parallel.use_distributed_optimizer",
            recipe.parallel.use_distributed_optimizer,
            True,
            "without it Megatron looks at each loss on the host",
        ),
        (
            "stage.batch_size_ramp",
            recipe.stage.batch_size_ramp,
            None,
            "every replay has the same number of micro-batches",
        ),
        ("data.packing", recipe.data.packing, "none", "blocks of documents are found on the host"),
        (
            "parallel.pipeline_model_parallel_size",
            recipe.parallel.pipeline_model_parallel_size,
            1,
            "sends between stages are not captured",
        ),
        (
            "parallel.expert_model_parallel_size",
            recipe.parallel.expert_model_parallel_size,
            1,
            "the host reads how many tokens travel",
        ),
    )
    for key, value, only, why in needed:
        if value != only:
            yield f"{key} = {value}: allowed with cluster.graphs = full_iteration: {'null' if only is None else only}; {why}"
    overrides = recipe.cluster.kernel_overrides
    if overrides.get("grouped_product", recipe.cluster.kernels) == "reference":
        key = "kernel_overrides.grouped_product" if "grouped_product" in overrides else "kernels"
        yield (
            f"cluster.{key}=reference: grouped_product's reference reads the experts' borders on the host, and a graph cannot. Allowed with "
            "cluster.graphs=full_iteration: another version of grouped_product. Fix: cluster.kernel_overrides.grouped_product=auto"
        )


def with_graphs(recipe: Recipe) -> tuple[Recipe, str | None]:
    """`recipe` with what `cluster.graphs=auto` stands for, and a line about it where that is no graph; as it is, and None, where it does not ask."""
    if recipe.cluster.graphs != "auto":
        return recipe, None
    found = list(obstacles(recipe))
    graphs = "none" if found else "full_iteration"
    return replace(
        recipe, cluster=replace(recipe.cluster, graphs=graphs)
    ), f"no graph of a step: {found[0]}" if found else None
