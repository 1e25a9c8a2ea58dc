# SPDX-License-Identifier: Apache-2.0
"""Build what ranks of a large run would build, without the other ranks and without memory, and check their shards:
`python -m zaya_plugin.hosts.rank_layout <recipe.yaml> <ranks of the run> <rank> ...`, which `zaya plan run --layout`
starts.

torch's "fake" process groups have any number of ranks and communicate nothing. On each rank Megatron makes its groups,
the model is built on the meta device, its parameters get their optimizers, and Megatron's distributed optimizer, with
this project's placement inside, lays out DDP's buffers. Prints one line of JSON a rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from argparse import Namespace
from collections import Counter

import torch

from zaya_plugin import patches
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schema import Recipe


def main(argv: list[str]) -> int:
    """Print the layout of each rank in argv[2:], of the recipe in the file argv[0] on argv[1] ranks."""
    recipe, world, ranks = load_recipe(argv[0]), int(argv[1]), [int(word) for word in argv[2:]]
    with contextlib.redirect_stdout(io.StringIO()):
        args = arguments(recipe, world)
    for rank in ranks:
        with contextlib.redirect_stdout(io.StringIO()):
            described = rank_layout(recipe, args, world, rank)
        print(json.dumps(described), flush=True)
    return 0


def arguments(recipe: Recipe, world: int) -> Namespace:
    """Apply the patches, and return Megatron's arguments of the recipe on `world` ranks, after its own validation."""
    os.environ.update(RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0")
    patches.apply_torch()
    patches.apply()
    from zaya_plugin.hosts import stage_model

    return stage_model.arguments_without_data(recipe, use_cpu_initialization=True)


def rank_layout(recipe: Recipe, args: Namespace, world: int, rank: int) -> dict:
    """Return what a rank holds.

    Returns:
        rank; groups: by name its ranks' number and its own place; parameters: of its model chunks, experts and all
        others; tied: those of a copy of the embedding that another stage has too; buffers: as `buffers_of`.
    """
    from megatron.core import parallel_state, tensor_parallel

    from zaya_plugin.hosts import stage_model

    _begin(args, rank, world)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    config, chunks = stage_model.model_config(args), args.virtual_pipeline_model_parallel_size
    models = []
    for chunk in range(chunks or 1):
        place = {"ignore_virtual": False, "vp_stage": chunk if chunks else None}
        ends = parallel_state.is_pipeline_first_stage(**place), parallel_state.is_pipeline_last_stage(**place)
        with torch.device("meta"):
            models.append(
                stage_model.build_stage(
                    recipe, args, config, pre_process=ends[0], post_process=ends[1], vp_stage=place["vp_stage"]
                )
            )
    numbers, tied = Counter(experts=0, rest=0), 0
    for model in models:
        for parameter in model.parameters():
            numbers["rest" if getattr(parameter, "allreduce", True) else "experts"] += parameter.numel()
            copy = getattr(parameter, "shared_embedding", False) and not getattr(model, "pre_process", True)
            tied += parameter.numel() if copy else 0
    groups = {
        "data": (parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()),
        "context": (parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()),
        "expert": (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
        ),
        "tensor": (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        ),
        "pipeline": (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
        ),
    }
    buffers = [row for index, model in enumerate(models) for row in buffers_of(args, model, index)]
    return {"rank": rank, "groups": groups, "parameters": dict(numbers), "tied": tied, "buffers": buffers}


def buffers_of(args: Namespace, model: torch.nn.Module, chunk: int) -> list[dict]:
    """Return DDP's buffers of a model chunk as Megatron's distributed optimizer lays them out.

    Returns:
        Of each buffer: name; shards and the rank's own one; buckets; elements and those of padding; the elements and
        Muon's FLOPs of the fullest, the emptiest and the rank's own shard, and of all; cut: elements of Muon's matrices
        that lie in several shards; faults: parameters that the shards together do not hold exactly once.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from zaya_plugin.optim.parameter_role import role_of
    from zaya_plugin.optim.sharding.distributed import BufferLayout
    from zaya_plugin.optim.sharding.placement import work_of

    several = args.num_distributed_optimizer_instances > 1
    groups = {
        False: parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=several),
        True: parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=several),
    }
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
    )
    # as DistributedDataParallel: no buckets without overlap, in later chunks and on later stages
    bucket = args.ddp_bucket_size or max(40_000_000, 1_000_000 * parallel_state.get_data_parallel_world_size())
    if not args.overlap_grad_reduce or chunk or parallel_state.get_pipeline_model_parallel_rank():
        bucket = None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layout = DistributedOptimizer.compute_full_param_layout(
        parameters, bucket, groups[False].size(), config, expert_data_parallel_world_size=groups[True].size()
    )
    rows = []
    for key, buffer in layout.layouts.items():
        group = groups[key.is_expert_parallel]
        shards, own = (group.size(), group.rank()) if args.use_distributed_optimizer else (1, 0)
        described = BufferLayout(buffer.param_index_map, buffer.bucket_indices, shards)
        elements, flops, cut, faults = [0] * shards, [0] * shards, 0, 0
        for parameter in described.places:
            pieces = described.pieces(parameter)
            ends = [0, *(end for _, _, end in pieces)]
            whole = [start for _, start, _ in pieces] == ends[:-1] and ends[-1] == parameter.numel()
            faults += not whole
            for shard, start, end in pieces:
                elements[shard] += end - start
            if role_of(parameter).matrices is not None:
                cut += parameter.numel() if len(pieces) > 1 else 0
                flops[pieces[0][0]] += work_of(parameter)
        length = buffer.bucket_indices[-1][1]
        rows.append(
            {
                "name": ("experts" if key.is_expert_parallel else "rest") + (f" of chunk {chunk}" if chunk else ""),
                "shards": shards,
                "shard": own,
                "buckets": len(buffer.bucket_indices),
                "elements": sum(elements),
                "padding": length - sum(parameter.numel() for parameter in described.places),
                "shard_elements": (max(elements), min(elements), elements[own]),
                "muon_flops": (max(flops), min(flops), flops[own], sum(flops)),
                "cut": cut,
                "faults": faults,
            }
        )
    return rows


def _begin(args: Namespace, rank: int, world: int) -> None:
    """Make Megatron's groups as `rank` of `world` ranks makes them."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    os.environ["RANK"], args.rank = str(rank), rank
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
