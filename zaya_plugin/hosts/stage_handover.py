# SPDX-License-Identifier: Apache-2.0
"""The data of every run (`stage_datasets`), and the first launch of a stage that takes over from another: Megatron's
checkpoint load, with steps and schedule from 0.

Neither of Megatron's own ways fits: --finetune drops the optimizer's state, and a plain load continues steps, samples
and schedule.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.training import get_args, get_tokenizer
from torch.utils.data import DataLoader, Dataset, Subset

from zaya_plugin.checkpoint import on_disk, restore
from zaya_plugin.checkpoint.convert.adapters import check_base, fingerprint
from zaya_plugin.checkpoint.convert.built_model import load_adapter, load_hf
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.schedule import sample_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import DataSources, find_sources
from zaya_plugin.ground.errors import message, mistake
from zaya_plugin.handover.predecessor import Predecessor
from zaya_plugin.hosts import loader_processes
from zaya_plugin.hosts.routing import samples_with_routing
from zaya_plugin.hosts.stage_model import arguments_of_model
from zaya_plugin.optim.chained import ChainedMuonAdamW


def check_published(source: str, args) -> None:
    """Raise ValueError if the published weights are of another model than the one that will be built."""
    try:
        published = open_source(source, download=False)
    except ValueError as error:  # names the source as the commands do
        raise ValueError(str(error).replace("SOURCE=", "handover.from_hf=", 1)) from error
    model = Description.of_arguments(args)
    if different := model.differences(published.model):
        problem = f"holds another model (recipe and there): {different}"
        raise mistake("handover.from_hf", source, problem=problem, fix=model.fix(published.model))
    base = published.model.rotary_base
    if model.rotary_base != base:
        raise mistake(
            "stage.rotary_base",
            model.rotary_base,
            problem=f"{source} was trained with another",
            allowed=str(base),
            fix=f"stage.rotary_base={base}; a stage after this one (handover.from_run) may have another",
        )
    published.with_rows(args.padded_vocab_size)


class Handover:
    """The load of a run whose checkpoint directory may still be empty.

    Args:
        recipe: of the stage that begins.
        before: the previous stage, or None.
        resumed_at: step of this stage's own checkpoint that the run resumes from; 0: the stage begins.
    """

    def __init__(self, recipe: Recipe, before: Predecessor | None, resumed_at: int):
        self.recipe = recipe
        self.before = before if resumed_at == 0 else None
        self.begins = resumed_at == 0
        self.has_adapters = recipe.optim.lora.rank is not None  # the base is then read at every start
        self.published = recipe.handover.from_hf if self.begins or self.has_adapters else None

    def check(self, args) -> None:
        """Raise ValueError if the checkpoint to take over is damaged or of another model."""
        if self.published is not None and args.rank == 0:
            check_published(self.published, args)
        if self.before is None or args.rank != 0:
            return
        directory, steps = self.before.checkpoints, self.before.steps
        if broken := on_disk.problems(directory, steps):
            raise ValueError(self.damage(broken))
        on_disk.check_same_model(directory, steps, args)

    def damage(self, broken: list[str]) -> str:
        """Return the message about a damaged checkpoint of the previous stage."""
        problem = "the checkpoint of the previous stage is damaged:\n  " + "\n  ".join(broken)
        return message("handover.from_run", self.recipe.handover.from_run, problem=problem)

    def load(self, load_checkpoint, model, optimizer, *positional, **named) -> tuple[int, int]:
        """Load the run's own checkpoint, the previous stage's, or published weights. Return Megatron's pair, whose
        first number is the step that the run continues from.
        """
        if self.has_adapters:
            return self.load_adapters(load_checkpoint, model, optimizer, *positional, **named)
        if self.published is not None:
            return self.load_published(model, optimizer)
        if self.before is not None:
            return self.load_and_begin(load_checkpoint, model, optimizer, *positional, **named)
        return load_checkpoint(model, optimizer, *positional, **named)

    def load_published(self, model, optimizer) -> tuple[int, int]:
        """Copy published weights into the model and into the optimizer's fp32 copies."""
        load_hf(model, self.published)
        if optimizer is not None:
            optimizer.reload_model_params()
        return 0, 0

    def load_adapters(self, load_checkpoint, model, optimizer, *positional, **named) -> tuple[int, int]:
        """Copy the published base into the model, and load the run's own adapter or begin with that of the recipe.

        Raises:
            ValueError: the run's adapter was trained on another base.
        """
        args, name, adapter = get_args(), self.recipe.handover.from_hf, self.recipe.handover.adapter
        base = load_hf(model, name)
        args.zaya["base"] = restore.on_rank_0(lambda: {"source": name, "fingerprint": fingerprint(base)})
        loaded = 0, 0
        if not self.begins:
            loaded = load_checkpoint(model, optimizer, *positional, **named)
            saved = restore.on_rank_0(lambda: on_disk.saved_arguments(Path(args.load), loaded[0]).zaya["base"])
            check_base("handover.from_hf", name, saved, args.zaya["base"]["fingerprint"])
        elif adapter is not None:
            load_adapter(model, Path(adapter))
        if optimizer is not None and self.begins:
            optimizer.reload_model_params()
        return loaded

    def load_and_begin(self, load_checkpoint, model, optimizer, scheduler, *positional, **named) -> tuple[int, int]:
        """Load weights and optimizer state of the previous stage; steps, samples, schedule and FLOPs start from 0."""
        if broken := restore.compare(self.before.checkpoints, self.before.steps).damaged:
            raise ValueError(self.damage(broken))
        args = get_args()
        load_checkpoint(model, optimizer, scheduler, *positional, **named)
        if self.recipe.handover.optimizer == "reset":
            reset_optimizer(optimizer)
        scheduler.num_steps = 0
        scheduler.step(0)
        args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
        update_num_microbatches(0, consistency_check=False)
        return 0, 0


def stage_samples(recipe: Recipe, counts: tuple[int, int, int], validation: int) -> tuple[int, int, int]:
    """Return the samples of training, validation and test to build, from Megatron's `counts`; validation: samples of
    one validation, which all read.

    The training set is made for all stages that share its order. Megatron shuffles the requested epochs together, so a
    longer set has another order.
    """
    train, valid, test = counts
    train = max(train, sample_count(recipe))  # a ramp may end amid a batch
    handover = recipe.handover
    planned = max(handover.planned_samples or 0, handover.first_sample + train)
    return planned, validation if valid else 0, test


def stage_part(recipe: Recipe, dataset):
    """Return the training samples of this stage: those from `handover.first_sample` on."""
    first = recipe.handover.first_sample
    return dataset if dataset is None or first == 0 else Subset(dataset, range(first, len(dataset)))


class Repeated(Dataset):
    """The first `period` samples of a validation set without end, so that every validation reads the same ones."""

    def __init__(self, dataset, period: int):
        self.dataset, self.period = dataset, period
        self.split = getattr(dataset, "index_split", getattr(dataset, "split", None))  # read by Megatron's loader

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int):
        return self.dataset[index % self.period]


def stage_datasets(recipe: Recipe, sources: DataSources, args, counts: tuple[int, int, int], batch_size: int) -> list:
    """Build the training, validation and test sets of a stage for Megatron's `counts`; batch_size: of validation."""
    samples = args.eval_iters * batch_size  # of one validation
    args.consumed_valid_samples = 0
    counts = stage_samples(recipe, counts, samples)
    train, valid, *more = sources.build(counts, args.seq_length, args.seed, get_tokenizer(), samples)
    return [samples_with_routing(recipe, stage_part(recipe, train)), valid and Repeated(valid, samples), *more]


def loader_alone(recipe: Recipe) -> tuple[DataLoader, int]:
    """Return the loader that Megatron's loop makes of a stage's training samples on this rank, without a model, and the
    micro-batches of a step. Starts torch.distributed and Megatron's groups.
    """
    from megatron.training.datasets.data_samplers import build_pretraining_data_loader  # not in an older host

    sources = find_sources(recipe)
    args = arguments_of_model(megatron_arguments(recipe, sources.tokenizer_arguments()))
    torch.distributed.init_process_group("gloo")
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(*sizes, context_parallel_size=args.context_parallel_size)
    loader_processes.prepare(args.num_workers)
    train, *_ = stage_datasets(recipe, sources, args, (sample_count(recipe), 0, 0), args.global_batch_size)
    return build_pretraining_data_loader(train, 0), get_num_microbatches()


def reset_optimizer(optimizer: ChainedMuonAdamW) -> None:
    """Zero all momenta and step counts; the fp32 copies of the weights stay, so that no bit of a weight changes."""
    for part in optimizer.parts:
        for state in part.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    value.zero_()
        for group in part.optimizer.param_groups:
            if "step" in group:
                group["step"] = torch.zeros_like(group["step"]) if torch.is_tensor(group["step"]) else 0
