# SPDX-License-Identifier: Apache-2.0
"""The loader of a recipe's training without its model, for a rank that measures it."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from torch import distributed
from torch.utils.data import DataLoader

from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.schedule import sample_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import find_sources
from zaya_plugin.hosts import loader_processes
from zaya_plugin.hosts.stage_handover import stage_datasets
from zaya_plugin.hosts.stage_model import arguments_of_model


def loader_of(recipe: Recipe) -> tuple[DataLoader, int]:
    """Return the loader of the training samples that Megatron's loop makes on this rank, and the micro-batches of a
    step. Starts torch.distributed and Megatron's groups.
    """
    sources = find_sources(recipe)
    args = arguments_of_model(megatron_arguments(recipe, sources.tokenizer_arguments()))
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    loader_processes.prepare(args.num_workers)
    train, *_ = stage_datasets(recipe, sources, args, (sample_count(recipe), 0, 0), args.global_batch_size)
    return build_pretraining_data_loader(train, 0), get_num_microbatches()
