# SPDX-License-Identifier: Apache-2.0
"""What a parallel layout asks of a recipe: sizes that divide what they cut, and why. Part of `zaya_plugin.config.validate`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zaya_plugin.config.schema import RECOMPUTE_MODULES, Recipe


def layout_problems(recipe: Recipe, world_size: int) -> Iterator[str]:
    """Yields what is impossible about the parallel sizes of `recipe` on `world_size` ranks."""
    parallel = recipe.parallel
    yield from _tensor_parallel(recipe)
    yield from _context_parallel(recipe)
    yield from _expert_parallel(recipe, world_size)
    product = (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )
    if world_size % product:
        yield (
            f"{world_size} ranks (nproc, cluster.gpus_per_node x cluster.num_nodes, or the outer launcher's WORLD_SIZE) cannot "
            f"be divided by tensor x pipeline x context parallel size = {product}; allowed: {nearest_multiples(world_size, product)}"
        )
    else:
        yield from _pipeline_parallel(recipe, world_size // product)
        yield from _optimizer_instances(recipe, world_size // (product // parallel.context_parallel_size))
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        yield (
            "parallel.overlap_param_gather = True needs parallel.use_distributed_optimizer = True (is "
            f"{parallel.use_distributed_optimizer}) and parallel.overlap_grad_reduce = True (is {parallel.overlap_grad_reduce})"
        )


def _optimizer_instances(recipe: Recipe, replicas: int) -> Iterator[str]:
    """replicas: ranks that hold the same weights outside the experts."""
    parallel, instances = recipe.parallel, recipe.parallel.num_distributed_optimizer_instances
    if instances <= 1:
        return
    here = f"parallel.num_distributed_optimizer_instances = {instances}"
    if not parallel.use_distributed_optimizer:
        yield f"{here}: allowed with parallel.use_distributed_optimizer = True (is False), which is what there are instances of; 1 goes everywhere"
    experts = replicas * parallel.tensor_model_parallel_size // parallel.expert_model_parallel_size
    if replicas % instances or experts % instances:
        yield f"{here}: allowed: a divisor of {math.gcd(replicas, experts)}, the ranks that hold the same weights and the same experts"


def _expert_parallel(recipe: Recipe, world_size: int) -> Iterator[str]:
    parallel, experts = recipe.parallel, recipe.parallel.expert_model_parallel_size
    if recipe.model.num_experts % experts:
        yield (
            f"parallel.expert_model_parallel_size = {experts}: allowed: a divisor of model.num_experts = "
            f"{recipe.model.num_experts}, because every rank holds as many whole experts"
        )
    elif world_size // parallel.pipeline_model_parallel_size % experts:
        yield (
            f"parallel.expert_model_parallel_size = {experts}: allowed: a divisor of the {world_size} ranks over "
            f"parallel.pipeline_model_parallel_size = {parallel.pipeline_model_parallel_size}, across which experts are dealt out"
        )


def _tensor_parallel(recipe: Recipe) -> Iterator[str]:
    tensor = recipe.parallel.tensor_model_parallel_size
    if tensor == 1:
        return
    here, model = f"parallel.tensor_model_parallel_size = {tensor}", recipe.model
    if model.num_query_groups % tensor:
        yield (
            f"{here}: allowed: a divisor of model.num_query_groups = {model.num_query_groups}, because a key/value head "
            "cannot be split"
        )
    optim = recipe.optim
    muon = ["optim.name = muon"] if optim.name == "muon" else []
    muon += [f"optim.overrides: {entry!r}" for entry in optim.overrides if "optimizer=muon" in entry.split()]
    for reason in muon:
        yield (
            f"{here} with {reason}: allowed: 1, or AdamW; Muon orthogonalises whole matrices, and tensor parallelism cuts the "
            "projections of attention"
        )
    rows = recipe.stage.seq_length // recipe.parallel.context_parallel_size
    if rows % tensor:
        yield (
            f"{here}: {rows} tokens of stage.seq_length / parallel.context_parallel_size cannot be shared out by sequence "
            f"parallelism; allowed: a stage.seq_length of {nearest_multiples(rows, tensor)} on a context-parallel rank"
        )
    if model.make_vocab_size_divisible_by % tensor:
        yield (
            f"{here}: the vocabulary is split, so model.make_vocab_size_divisible_by = {model.make_vocab_size_divisible_by} "
            f"has to be a multiple of it; allowed: {nearest_multiples(model.make_vocab_size_divisible_by, tensor)}"
        )


def _context_parallel(recipe: Recipe) -> Iterator[str]:
    parallel, length = recipe.parallel, recipe.stage.seq_length
    size, order = parallel.context_parallel_size, parallel.context_parallel_order
    if size == 1:
        return
    chunks = size * (2 if order == "zigzag" else 1)
    cut = f"parallel.context_parallel_size = {size} in {order} order cuts a sequence into {chunks} chunks"
    if length % chunks:
        yield f"stage.seq_length = {length}: {cut}; allowed: {nearest_multiples(length, chunks)}"
    elif length < 2 * chunks:
        yield (
            f"stage.seq_length = {length}: {cut}, and the convolutions look two tokens back into the chunk before; allowed: "
            f"at least {2 * chunks}"
        )
    if order != "zigzag" and recipe.cluster.transformer_impl == "transformer_engine":
        yield (
            f"parallel.context_parallel_order = {order}: allowed with cluster.transformer_impl = transformer_engine: zigzag, "
            "the only order of its attention"
        )


def _pipeline_parallel(recipe: Recipe, replicas: int) -> Iterator[str]:
    parallel, stage, layers = recipe.parallel, recipe.stage, recipe.model.num_layers
    ranks, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_stages
    if ranks == 1:
        if virtual != 1:
            yield (
                f"parallel.virtual_pipeline_stages = {virtual}: allowed: 1, unless parallel.pipeline_model_parallel_size is "
                "above 1 (is 1)"
            )
        return
    if layers % ranks:
        yield (
            f"parallel.pipeline_model_parallel_size = {ranks}: allowed: a divisor of model.num_layers = {layers} "
            f"({_listed(_divisors(layers))})"
        )
    elif layers // ranks % virtual:
        yield (
            f"parallel.virtual_pipeline_stages = {virtual}: allowed: a divisor of the {layers // ranks} layers of a pipeline "
            f"rank ({_listed(_divisors(layers // ranks))})"
        )
    micro_batches = stage.global_batch_size // (stage.micro_batch_size * replicas)
    if virtual > 1 and micro_batches % ranks:
        yield (
            f"parallel.virtual_pipeline_stages = {virtual}: a step has {micro_batches} micro-batches a data-parallel rank; "
            f"allowed: a multiple of parallel.pipeline_model_parallel_size = {ranks}, since virtual stages take turns in groups "
            "of so many; set stage.global_batch_size or stage.micro_batch_size"
        )
    elif micro_batches < ranks:
        yield (
            f"parallel.pipeline_model_parallel_size = {ranks}: a step has {micro_batches} micro-batches a data-parallel rank; "
            "allowed: at least as many as stages, or stages would never work at the same time; set stage.global_batch_size "
            "or stage.micro_batch_size"
        )


def _divisors(number: int) -> list[int]:
    """Divisors of a positive whole number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def recompute_problems(recipe: Recipe, world_size: int) -> Iterator[str]:
    """Yields what does not fit together about the activation recomputation of `recipe`."""
    parallel = recipe.parallel
    granularity, modules = parallel.recompute_granularity, parallel.recompute_modules
    full = {"method": parallel.recompute_method, "num_layers": parallel.recompute_num_layers}
    for name, value in full.items():
        if granularity == "full" and value is None:
            allowed = "uniform, block" if name == "method" else "a whole number above 0"
            yield f"parallel.recompute_{name} = null: parallel.recompute_granularity = full needs it; allowed: {allowed}"
        if granularity != "full" and value is not None:
            yield (
                f"parallel.recompute_{name} = {value}: allowed: null, unless parallel.recompute_granularity = full "
                f"(is {granularity or 'null'})"
            )
    stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_stages
    if granularity == "full" and (full["num_layers"] or 1) > recipe.model.num_layers // stages:
        yield (
            f"parallel.recompute_num_layers = {full['num_layers']}: allowed: at most model.num_layers = "
            f"{recipe.model.num_layers}" + (f" over {stages} pipeline stages" if stages > 1 else "")
        )
    if granularity == "auto" and recipe.cluster.device == "cpu":
        yield "parallel.recompute_granularity = auto: allowed with cluster.device = cuda (is cpu); the memory plan counts what an accelerator keeps"
    elif granularity == "auto" and recipe.cluster.memory_gib is None:
        yield (
            "cluster.memory_gib = null: parallel.recompute_granularity = auto needs it; allowed: GiB of one device's memory, such as 79 on an "
            "H100, 140 on an H200, 192 on an MI300X"
        )
    if granularity == "selective" and not modules:
        yield (
            "parallel.recompute_modules = []: parallel.recompute_granularity = selective needs some of "
            f"{', '.join(RECOMPUTE_MODULES)}"
        )
    if granularity != "selective" and modules:
        yield (
            f"parallel.recompute_modules = {modules}: allowed: [], unless parallel.recompute_granularity = selective "
            f"(is {granularity or 'null'})"
        )
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            yield f"parallel.recompute_modules = {modules}: {module} is unknown; allowed: {', '.join(RECOMPUTE_MODULES)}"
    if "permute" in modules:
        for key, value, only in (
            ("parallel.expert_model_parallel_size", parallel.expert_model_parallel_size, 1),
            ("cluster.transformer_impl", recipe.cluster.transformer_impl, "local"),
        ):
            if value != only:
                yield f"parallel.recompute_modules = {modules}: permute is allowed with {key} = {only} (is {value})"


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of unit around value, as text for a message."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
