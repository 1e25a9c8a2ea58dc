# SPDX-License-Identifier: Apache-2.0
"""Checks of the parallel sizes of a recipe, for a number of ranks."""

import math
from collections.abc import Iterator

from zaya_plugin.config.entries import assigns_muon
from zaya_plugin.config.messages import multiples, must_be_multiple, must_divide, require
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import as_typed, message


def data_parallel_size(recipe: Recipe, world_size: int) -> int:
    """Return the number of ranks that see different sequences: the world size over tensor, pipeline and context
    parallel sizes.
    """
    parallel = recipe.parallel
    return world_size // (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )


def layout_problems(recipe: Recipe, world_size: int) -> Iterator[str]:
    """Yield what is impossible about the parallel sizes."""
    parallel = recipe.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    yield from _tensor_parallel(recipe)
    yield from _context_parallel(recipe)
    yield from _expert_parallel(recipe, world_size)
    product = tensor * pipeline * parallel.context_parallel_size
    if world_size % product:
        yield message(
            f"{world_size} ranks",
            problem=f"cannot be divided by tensor x pipeline x context parallel size = {product}; ranks are nproc, or "
            "cluster.gpus_per_node x cluster.num_nodes, or the outer launcher's WORLD_SIZE",
            **multiples("nproc", world_size, product),
        )
    else:
        yield from _pipeline_parallel(recipe, world_size // product)
        yield from _optimizer_instances(recipe, world_size // (tensor * pipeline))
    yield from require(
        not parallel.overlap_param_gather or parallel.use_distributed_optimizer and parallel.overlap_grad_reduce,
        "parallel.overlap_param_gather",
        True,
        problem="requires the distributed optimizer with overlapped gradient reduction",
        allowed=f"false, or true with parallel.use_distributed_optimizer=true (currently "
        f"{as_typed(parallel.use_distributed_optimizer)}) and parallel.overlap_grad_reduce=true (currently "
        f"{as_typed(parallel.overlap_grad_reduce)})",
        fix="parallel.use_distributed_optimizer=true parallel.overlap_grad_reduce=true",
    )


def _tensor_parallel(recipe: Recipe) -> Iterator[str]:
    key, tensor = "parallel.tensor_model_parallel_size", recipe.parallel.tensor_model_parallel_size
    if tensor == 1:
        return
    model, optim = recipe.model, recipe.optim
    yield from require(
        model.num_query_groups % tensor == 0,
        key,
        tensor,
        problem="a key/value head cannot be split",
        allowed=f"a divisor of model.num_query_groups={model.num_query_groups}",
        fix=f"{key}=1",
    )
    muon = ["optim.name=muon"] if optim.name == "muon" else []
    muon += [f"the entry {entry!r} of optim.overrides" for entry in optim.overrides if assigns_muon(entry)]
    for reason in muon:
        yield message(
            key,
            tensor,
            problem="tensor parallelism splits the projections of attention, and Muon orthogonalises whole matrices",
            allowed=f"1 with {reason}",
            fix=f"{key}=1, or AdamW for these parameters",
        )
    context = recipe.parallel.context_parallel_size
    rows = recipe.stage.seq_length // context
    yield from require(
        rows % tensor == 0,
        key,
        tensor,
        problem=f"sequence parallelism cannot divide the {rows} tokens of stage.seq_length / "
        "parallel.context_parallel_size",
        allowed=f"{multiples('', rows, tensor)['allowed']} tokens on a context-parallel rank",
        fix=f"stage.seq_length={(rows // tensor * tensor or tensor) * context}",
    )
    vocabulary = f"is not a multiple of {key}={tensor}, which splits the vocabulary"
    divisor = model.make_vocab_size_divisible_by
    yield from must_be_multiple("model.make_vocab_size_divisible_by", divisor, tensor, vocabulary)


def _context_parallel(recipe: Recipe) -> Iterator[str]:
    parallel, length = recipe.parallel, recipe.stage.seq_length
    size, order = parallel.context_parallel_size, parallel.context_parallel_order
    if size == 1:
        return
    chunks = size * (2 if order == "zigzag" else 1)
    cut = f"parallel.context_parallel_size={size} in {order} order divides a sequence into {chunks} chunks"
    yield from must_be_multiple("stage.seq_length", length, chunks, cut)
    yield from require(
        length % chunks > 0 or length >= 2 * chunks,
        "stage.seq_length",
        length,
        problem=f"{cut}, and the convolutions read two tokens of the chunk before",
        allowed=f"at least {2 * chunks}",
        fix=f"stage.seq_length={2 * chunks}",
    )


def _expert_parallel(recipe: Recipe, world_size: int) -> Iterator[str]:
    key, experts = "parallel.expert_model_parallel_size", recipe.parallel.expert_model_parallel_size
    pipeline, count = recipe.parallel.pipeline_model_parallel_size, recipe.model.num_experts
    if count % experts:
        whole = "every rank holds the same number of whole experts"
        yield from must_divide(key, experts, count, f"model.num_experts={count}", whole)
    else:
        ranks = f"the {world_size} ranks over parallel.pipeline_model_parallel_size={pipeline}"
        divided = "the experts are divided among the ranks of a pipeline stage"
        yield from must_divide(key, experts, world_size // pipeline, ranks, divided)


def _pipeline_parallel(recipe: Recipe, replicas: int) -> Iterator[str]:
    parallel, stage, layers = recipe.parallel, recipe.stage, recipe.model.num_layers
    ranks, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_stages
    key, virtual_key = "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_stages"
    if ranks == 1:
        return
    if layers % ranks:
        what, even = f"model.num_layers={layers}", "every stage has the same number of layers"
        yield from must_divide(key, ranks, layers, f"{what} ({_divisors(layers)})", even)
    else:
        rank_layers = layers // ranks
        what, even = f"the {rank_layers} layers of a pipeline rank", "every virtual stage has the same number of layers"
        yield from must_divide(virtual_key, virtual, rank_layers, f"{what} ({_divisors(rank_layers)})", even)
    micro_batches = stage.global_batch_size // (stage.micro_batch_size * replicas)
    fix = f"stage.global_batch_size={max(micro_batches // ranks, 1) * ranks * stage.micro_batch_size * replicas}"
    have = f"a step has {micro_batches} micro-batches on a data-parallel rank"
    uneven = virtual > 1 and micro_batches % ranks > 0
    yield from require(
        not uneven,
        virtual_key,
        virtual,
        problem=f"{have}, and virtual stages alternate in groups of {ranks}",
        allowed=f"micro-batches that are a multiple of {key}={ranks}",
        fix=fix,
    )
    yield from require(
        uneven or micro_batches >= ranks,
        key,
        ranks,
        problem=f"{have}, so that not all stages can work at the same time",
        allowed=f"at least as many micro-batches as stages, {ranks}",
        fix=fix,
    )


def _optimizer_instances(recipe: Recipe, replicas: int) -> Iterator[str]:
    """Yield problems of the optimizer's instances. replicas: ranks that hold the same weights outside the experts."""
    parallel, key = recipe.parallel, "parallel.num_distributed_optimizer_instances"
    experts = replicas * parallel.tensor_model_parallel_size // parallel.expert_model_parallel_size
    common = math.gcd(replicas, experts)
    why = "does not divide the ranks that hold the same weights and the same experts"
    yield from must_divide(key, parallel.num_distributed_optimizer_instances, common, str(common), why)


def _divisors(number: int) -> str:
    """Return the divisors of a positive whole number in words."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
