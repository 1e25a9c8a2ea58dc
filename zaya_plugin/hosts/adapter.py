# SPDX-License-Identifier: Apache-2.0
"""A recipe's part of a run in Megatron's training loop, whichever host runs it: `zaya train`, Megatron-LM's
pretrain_gpt.py or Primus.

pretrain.py adds what only `zaya train` does (reports, saves during the training, guards), guest.py what a host that is
not ours needs. Both replace functions of `megatron.training.training` (zaya_plugin.patches.hooks).

The path of a batch from the data loader to the loss, in order:

    data/dataset.py             `BinGPTDataset.__getitem__`: a sample; data/prepared.py has the loss mask of packed bins
                                (data.order=continuing: data/stream_dataset.py)
    stage_handover.py           the stage's part of the order, or `Repeated` for validation
    adapter.py                  `forward_step`, `micro_batch`: this rank's rows (parallel/context_order.py) and document
                                boundaries (parallel/packed_documents.py)
    model/gpt_model.py          `ZayaGPTModel`: embedding, angles of RoPE, and at the end head and loss
    model/layer.py              `forward`, once a layer; stream.py has the residual stream, residual.py its norms and
                                merges, parameters.py `gathered` and `view_together`
      model/attention.py        projections, `hip_ops.cca_prologue`, core_attention.py, output projection; with context
                                parallelism parallel/context_exchange.py
      model/moe.py              router.py, `hip_ops.permute_to_experts`, experts.py, `hip_ops.unpermute_from_experts`;
                                with expert parallelism parallel/token_dispatch.py
      hip_ops.runtime.main_grad linear layers whose backward pass adds to DDP's gradient
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from megatron.training import get_args, get_tokenizer
from torch import Tensor

from zaya_plugin.checkpoint.replicas import check_replicas
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import DataSources
from zaya_plugin.ground import phases
from zaya_plugin.handover.predecessor import predecessor
from zaya_plugin.hosts import loader_processes
from zaya_plugin.hosts.routing import ROUTED
from zaya_plugin.hosts.stage_handover import Handover, stage_datasets
from zaya_plugin.hosts.stage_model import build_stage, model_config
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.gpt_model import ZayaGPTModel
from zaya_plugin.model.router import check_classes
from zaya_plugin.optim.factory import load_with_rates
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.packed_documents import PackedDocuments
from zaya_plugin.patches.hooks import TRAINING
from zaya_plugin.training import heartbeat
from zaya_plugin.training.balancer import Balancer
from zaya_plugin.training.lifecycle import Lifecycle
from zaya_plugin.training.optimizer import build_optimizer


def forward_step(data_iterator, model):
    """Run one micro-batch; return the losses of the tokens [b, s] and the function that reduces them.

    The batch's field `routed_experts`, integers [b, S, layers, 1], replaces the routers' choices where it is not
    negative.

    Raises:
        ValueError: the field, on the host, has a class that the model lacks.
    """
    args, batch = get_args(), next(data_iterator)
    if ROUTED in batch and batch[ROUTED].device.type == "cpu":
        check_classes(batch[ROUTED], unwrap_model(model).config.num_router_classes)
    shard = ContextShard.of(parallel_state.get_context_parallel_group(), args.context_parallel_order)
    eod = get_tokenizer().eod if args.packing == "documents" else None
    rows = micro_batch(batch, torch.cuda.current_device(), shard, eod, args.reset_position_ids)
    mask, replay = rows.loss_mask, {} if rows.forced is None else {"extra_block_kwargs": {"context_mask": rows.forced}}

    def reduce_loss(losses):
        """Return the sum over the tokens that count, their number, and both for the report. The loss stays the sum:
        gradients are divided by the number of tokens later, and Megatron divides the report.
        """
        total, count = (losses.float() * mask).sum(), mask.sum()
        return total, count.to(torch.int), {"lm loss": torch.stack((total.detach(), count))}

    losses = model(
        rows.tokens, rows.positions, None, labels=rows.labels, loss_mask=mask, packed_seq_params=rows.packed, **replay
    )
    return losses, reduce_loss


@dataclass(frozen=True)
class MicroBatch:
    """tokens, labels, positions int64 [b, s] and loss_mask [b, s] of this rank's rows; packed: boundaries, or None;
    forced: classes int64 [layers, s, b] that replace the routers' choices where they are not negative, or None.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    packed: PackedDocuments | None
    forced: Tensor | None = None


def micro_batch(
    batch: dict[str, Tensor], device, shard: ContextShard, eod: int | None = None, reset_positions: bool = False
) -> MicroBatch:
    """Return this rank's part of a batch of Megatron's GPTDataset, on the device. Every rank reads whole sequences, so
    that the ranks of one sequence agree without communication.

    Args:
        batch: tokens, labels, position_ids, loss_mask of whole sequences, [b, S], on any device; and document_ends bool
            [b, S], without which documents end at `eod`; and routed_experts [b, S, layers, 1], see `forward_step`.
        shard: this rank's part of the sequences.
        eod: the token that ends a document, to compute each document by itself; None: documents attend to each other.
        reset_positions: RoPE counts from the start of each document.
    """
    names = ("tokens", "labels", "position_ids", "loss_mask")
    tokens, labels, positions, mask = (batch[name].to(device, non_blocking=True) for name in names)
    # Before the cut, because the documents of a rank's rows depend on the rows before them.
    packed = None
    if eod is not None:
        ends = batch["document_ends"].to(device, non_blocking=True) if "document_ends" in batch else tokens == eod
        packed = PackedDocuments.from_ends(ends, shard, reset_positions)
    tokens, labels, positions, mask = (shard.take(x, 1) for x in (tokens, labels, positions, mask))
    forced = batch.get(ROUTED)
    if forced is not None:
        forced = shard.take(forced.to(device, torch.int64, non_blocking=True).squeeze(-1), 1).permute(2, 1, 0)
    positions = packed.positions.t() if reset_positions and packed else positions
    return MicroBatch(tokens, labels, positions, mask, packed, forced)


class Adapter:
    """The functions with which a host's loop trains a recipe, in the order in which it calls them.

    Args:
        recipe: validated; patches are applied already.
        args: Megatron's validated namespace.
        lifecycle: the run's checkpoints.
        sources: tokenizer and data sets; None: the host reads the data of its own arguments.

    Attributes:
        before: the previous stage, of a new run that begins with its weights.
        handover: how the run begins, after `check`.

    Raises:
        ValueError: the previous stage is not finished.
    """

    def __init__(self, recipe: Recipe, args: argparse.Namespace, lifecycle: Lifecycle, sources: DataSources | None):
        self.recipe, self.args, self.lifecycle, self.sources = recipe, args, lifecycle, sources
        loader_processes.prepare(args.num_workers)
        self.before = None if lifecycle.has_checkpoint else predecessor(recipe)
        self.balancer = Balancer()

    def check(self) -> None:
        """Choose the checkpoint to load, and compare it with the arguments.

        Raises:
            ValueError: it is damaged, of another model, recipe or data, or of a release that this one cannot read.
        """
        facts = self.sources.facts() if isinstance(self.sources, DataSources) else None
        self.lifecycle.describe_into(self.args, self.before, facts)
        self.handover = Handover(self.recipe, self.before, self.lifecycle.resumed_at)
        self.handover.check(self.args)

    def hooks(self) -> list[tuple[str, Callable]]:
        """Return the replaced symbols with our functions; each is called with the function that it replaces."""
        return [
            (TRAINING + "get_megatron_optimizer", self.optimizer),
            (TRAINING + "load_checkpoint", self.load),
            (TRAINING + "finalize_model_grads", self.finalize),
        ]

    @functools.cached_property
    def config(self) -> ZayaConfig:
        """The model's configuration."""
        return model_config(self.args)

    def model(
        self, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None
    ) -> ZayaGPTModel:
        """Build the model of one (virtual) stage; a host calls this after it has made the process groups."""
        stage = dict(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, pg_collection=pg_collection)
        return build_stage(self.recipe, self.args, self.config, **stage)

    def optimizer(self, get_megatron_optimizer, config, model_chunks, **named):
        """Build Muon and AdamW; replaces Megatron's get_megatron_optimizer."""
        return build_optimizer(self.recipe, get_megatron_optimizer, config, model_chunks, **named)

    @heartbeat.during("load")
    def load(self, load_checkpoint, model, optimizer, *positional, **named):
        """Load the run's checkpoint, or what the stage begins with, and compare what ranks hold that must hold the
        same; replaces Megatron's load_checkpoint.
        """
        if self.args.load:
            phases.begin("loading the checkpoint")
        self.check_content()
        load = functools.partial(load_with_rates, load_checkpoint)
        loaded = self.handover.load(load, model, optimizer, *positional, **named)
        self.check_loaded(loaded[0])
        if self.args.load:
            check_replicas(model, optimizer)
        return loaded

    def check_content(self) -> None:
        """Compare the content of the checkpoint to load with its checksums, unless `Lifecycle.settle` has."""

    def check_loaded(self, iteration: int) -> None:
        """Check the step that the host has loaded; a guest's host may have failed without an error."""

    def datasets(self, num_samples, vp_stage=None) -> list:
        """Build the training, validation and test sets for Megatron's numbers of samples."""
        phases.begin("opening the data")
        batch_size = getattr(self.args, "eval_global_batch_size", None) or self.args.global_batch_size
        return stage_datasets(self.recipe, self.sources, self.args, num_samples, batch_size)

    # Every rank reads its own part. Without this attribute Megatron broadcasts from one rank, and under tensor
    # parallelism the ranks of Primus wait for each other for ever.
    datasets.is_distributed = True

    def finalize(self, finalize_model_grads, model, *positional, **named):
        """Run Megatron's finalize_model_grads and balance the experts, after the backward passes of a step.

        finalize_model_grads completes the gradients' reduction among ranks and calls each buffer's `scale_gradients`
        (`zaya_plugin.optim.chained.DeferredScale`) with 1 / number of tokens.
        """
        finalize_model_grads(model, *positional, **named)
        self.balancer.balance(model)
