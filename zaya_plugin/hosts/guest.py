# SPDX-License-Identifier: Apache-2.0
"""ZAYA as a guest in a training script that is not ours: Megatron-LM's pretrain_gpt.py, Primus.

The host parses arguments, reads data, logs and calls pretrain(). The guest sees to what makes the run ZAYA's and not just its
layers: the model's configuration, the optimizers, the balancing of experts, what is loaded at the start, and which
checkpoints stay. It replaces functions of `megatron.training.training`, as `zaya train` does (zaya_plugin.patches.hooks).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.training import get_tokenizer
from torch import nn

from zaya_plugin import compat
from zaya_plugin.checkpoint import on_disk
from zaya_plugin.config.arguments import BATCH_ARGUMENTS, DECIDED_AT_START, OWN_ARGUMENTS, megatron_arguments
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import find_sources
from zaya_plugin.handover.predecessor import predecessor
from zaya_plugin.hosts.stage_handover import Handover, stage_part, stage_samples, validation_part
from zaya_plugin.hosts.stage_model import build_stage, model_config
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.loss import ZayaGPTModel
from zaya_plugin.patches import hooks
from zaya_plugin.patches.hooks import TRAINING
from zaya_plugin.training.balancer import Balancer
from zaya_plugin.training.kernels import kernel_lines, select_kernels
from zaya_plugin.training.lifecycle import Lifecycle
from zaya_plugin.training.optimizer import assign_optimizers, mark_matrices, optimizer_factory

# What a host's own TransformerConfig has to know of ours: the block and the schedules read them there.
SHARED_WITH_HOST = ("hetereogenous_dist_checkpoint", "fp32_residual_connection", "pipeline_dtype")


class Guest:
    """What a recipe adds to a host's run.

    Args:
        recipe: what `zaya export` was given.
        args: the host's namespace, validated. Gets the arguments that the host does not know; `load` says afterwards what
            is really loaded.

    Attributes:
        resumed_at: step of the run's own checkpoint that is continued from, 0 for a new run.
        differences: arguments whose value is not the recipe's, as the user gave others: name -> (here, in the recipe).

    Raises:
        ValueError: the stage before is not finished.
    """

    def __init__(self, recipe: Recipe, args: argparse.Namespace):
        self.recipe, self.args = recipe, args
        select_kernels(recipe)
        values = megatron_arguments(recipe, {})
        for name in (*OWN_ARGUMENTS, *BATCH_ARGUMENTS):
            setattr(args, name, values.get(name))
        here = {name: getattr(args, name, None) for name in values}
        self.differences = {
            name: (here[name], value)
            for name, value in values.items()
            if name not in DECIDED_AT_START and not _same(here[name], value)
        }
        self.lifecycle = Lifecycle(recipe)
        self.lifecycle.directory = Path(args.save)
        self.before = None
        if self.lifecycle.has_checkpoint:
            self.resumed_at = on_disk.latest(self.lifecycle.directory)
            args.load = args.save
        else:
            self.resumed_at = 0
            self.before = predecessor(recipe)
            args.load = str(self.before.checkpoints) if self.before else None
        args.finetune = False
        args.exit_on_missing_checkpoint = args.load is not None
        self.handover = Handover(recipe, self.before, self.resumed_at)
        self.balancer = Balancer()
        self.built_optimizer = False
        self._config: ZayaConfig | None = None

    def summary(self) -> list[str]:
        """Lines for the first rank: what begins, where the host's arguments differ from the recipe, and the kernels."""
        begins = f"goes on after step {self.resumed_at}" if self.resumed_at else "begins"
        first = (
            f"{self.recipe.name} {begins}, optimizer {self.recipe.optim.name}, megatron.core {compat.core_version()}"
        )
        differences = (
            f"--{name.replace('_', '-')} is {here!r} here and {wanted!r} in the recipe"
            for name, (here, wanted) in sorted(self.differences.items())
        )
        return [f"zaya: {line}" for line in (first, *differences, *kernel_lines(self.recipe))]

    def install(self) -> None:
        """Replaces the host's functions for the rest of the process."""
        self.restore = hooks.install(
            [
                (TRAINING + "finalize_model_grads", self.finalize_and_balance),
                (TRAINING + "get_megatron_optimizer", self.optimizer),
                (TRAINING + "save_checkpoint", self.save_and_prune),
                *self.handover.hooks(),
                (TRAINING + "load_checkpoint", self.load_and_check),
            ]
        )

    def check_checkpoints(self) -> None:
        """Holds what will be loaded against the arguments, once the host has completed them (the vocabulary's padding comes late).

        Raises:
            ValueError: a checkpoint is damaged, of another model, or of a release that this one cannot read.
        """
        step = self.before.steps if self.before else self.resumed_at
        checkpoint = on_disk.folder(Path(self.args.load), step) if self.args.load else None
        if checkpoint is not None and not compat.can_read(checkpoint):
            raise ValueError(
                f"{checkpoint} was written by a later Megatron than megatron.core {compat.core_version()}, which cannot read it. Allowed: a "
                "checkpoint of this host, as of a stage before that was trained here too; or going on with `zaya train`"
            )
        self.lifecycle.describe_into(self.args, self.before)
        self.handover.check(self.args)

    @property
    def config(self) -> ZayaConfig:
        """The model's configuration, from the host's arguments."""
        if self._config is None:
            self._config = model_config(self.args)
        return self._config

    def share_config(self, host) -> None:
        """Writes into the host's own configuration what it must know of the model; harmless when repeated."""
        for name in SHARED_WITH_HOST:
            setattr(host, name, getattr(self.config, name))
        # Read by patches/megatron_stage_width.py; no field of Megatron's.
        host.pipeline_state_size = self.config.pipeline_state_size

    def model(self, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        """A GPTModel of one (virtual) stage, for hosts that let the guest build it; see `zaya_plugin.spec` for those that do not."""
        stage = dict(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, pg_collection=pg_collection)
        return build_stage(self.recipe, self.args, self.config, **stage)

    def datasets(self, num_samples, vp_stage=None) -> list:
        """Train, validation and test sets of the recipe, for hosts that let the guest read the data."""
        batch = getattr(self.args, "eval_global_batch_size", None) or self.args.global_batch_size
        validations = self.args.eval_iters * batch
        counts = stage_samples(self.recipe, num_samples, validations)
        sets = find_sources(self.recipe).build(
            counts, self.args.seq_length, self.args.seed, get_tokenizer(), validations
        )
        return [stage_part(self.recipe, sets[0]), validation_part(self.recipe, sets[1], validations), *sets[2:]]

    def mark(self, layer: nn.Module, prefix: str) -> None:
        """Marks the matrices of one layer for Muon before the host lays out its buffers, as `optimizer` does for all later.

        prefix: of the layer's parameters in the model, since overrides go by whole names.
        """
        named = [(prefix + name, parameter) for name, parameter in layer.named_parameters()]
        mark_matrices(self.recipe, named)

    def optimizer(self, get_megatron_optimizer, config, model_chunks, *positional, **named):
        """Give the models their head, loss and optimizer assignments, and build the optimizer; replaces Megatron's get_megatron_optimizer."""
        for chunk in model_chunks:
            model = _unwrapped(chunk)
            ZayaGPTModel.take_over(model, self.config)
            assign_optimizers(self.recipe, model)
        self.built_optimizer = True
        return optimizer_factory(self.recipe)(get_megatron_optimizer, config, model_chunks, *positional, **named)

    def finalize_and_balance(self, _, *positional, **named):
        """Megatron's finalize_model_grads, which the balancer calls, and the balancing of the experts.

        Ends the run where the host has built an optimizer of its own.
        """
        if not self.built_optimizer:
            raise SystemExit(
                "zaya: the host has not built its optimizer by megatron.training.training.get_megatron_optimizer, so the model would be trained "
                f"without {self.recipe.optim.name} of the recipe. Use Megatron's pretrain(), or zaya_plugin.muon_optimizer in a loop of your own"
            )
        self.balancer(*positional, **named)

    def load_and_check(self, load_checkpoint, *positional, **named):
        """Megatron's load; a host that quietly begins anew although there is a checkpoint is stopped."""
        loaded = load_checkpoint(*positional, **named)
        iteration = loaded[0]
        if iteration != self.resumed_at:
            raise SystemExit(
                f"zaya: {self.args.load} holds step {self.resumed_at} and the host would go on from step {iteration}: "
                "its load failed without an error. Nothing was trained or overwritten; see its messages above"
            )
        return loaded

    def save_and_prune(self, save_checkpoint, iteration, *positional, **named):
        """Megatron's save; older checkpoints go once this one is whole."""
        save_checkpoint(iteration, *positional, **named)
        self.lifecycle.after_save(iteration)


def _unwrapped(module: nn.Module) -> nn.Module:
    while not hasattr(module, "decoder"):
        module = module.module
    return module


def _same(here, wanted) -> bool:
    """Equal, where Megatron keeps a list of one for one, or nothing for a flag that is off."""
    if isinstance(here, (list, tuple)) and len(here) == 1 and not isinstance(wanted, (list, tuple)):
        here = here[0]
    return here == wanted or (not here and not wanted) or str(here) == str(wanted)
