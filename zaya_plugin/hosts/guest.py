# SPDX-License-Identifier: Apache-2.0
"""ZAYA as a guest in a training script that is not ours: Megatron-LM's pretrain_gpt.py, Primus.

The host parses arguments, reads data, logs and calls pretrain(). The guest adds the model's configuration and head, the
optimizers, the balancing of experts, the load at the start and the removal of old checkpoints. It replaces functions of
`megatron.training.training`, as `zaya train` does (zaya_plugin.patches.hooks).
"""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import signal
from pathlib import Path

from torch import nn

from zaya_plugin import compat
from zaya_plugin.checkpoint import commit, on_disk, restore
from zaya_plugin.checkpoint.replicas import check_replicas
from zaya_plugin.checkpoint.run_lock import RunLock
from zaya_plugin.config.arguments import DECIDED_AT_START, OWN_ARGUMENTS, megatron_arguments
from zaya_plugin.config.run_directory import written_by
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import find_sources
from zaya_plugin.errors import message, mistake
from zaya_plugin.handover.predecessor import predecessor
from zaya_plugin.hosts import data_loaders
from zaya_plugin.hosts.guest_heartbeat import GuestHeartbeat
from zaya_plugin.hosts.stage_handover import Handover, stage_datasets
from zaya_plugin.hosts.stage_model import build_stage, model_config
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.loss import ZayaGPTModel
from zaya_plugin.parent_death import BATCH_SIGNALS
from zaya_plugin.patches import hooks
from zaya_plugin.patches.hooks import SAVE, TRAINING
from zaya_plugin.training import heartbeat
from zaya_plugin.training.balancer import Balancer
from zaya_plugin.training.kernels import kernel_lines, select_kernels, warm_up_kernels
from zaya_plugin.training.lifecycle import Lifecycle, damage
from zaya_plugin.training.optimizer import assign_optimizers, optimizer_factory


class Guest:
    """What a recipe adds to a host's run.

    Args:
        recipe: the recipe that `zaya export` wrote.
        args: the host's validated namespace. The arguments that the host does not know are added, and `load` is set to
            the checkpoint to load.
        reads_data: whether the host calls `datasets`; else it reads the data of its own arguments, which the recipe does
            not know, and data that changed is not noticed.

    Attributes:
        resumed_at: step of the run's own checkpoint that the run resumes from, 0 for a new run.
        differences: arguments that the user gave another value than the recipe's: name -> (here, in the recipe).

    Raises:
        ValueError: the previous stage is not finished.
    """

    def __init__(self, recipe: Recipe, args: argparse.Namespace, reads_data: bool = False):
        self.recipe, self.args, self.reads_data = recipe, args, reads_data
        select_kernels(recipe)
        values = megatron_arguments(recipe, {})
        for name in OWN_ARGUMENTS:
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
            self.resumed_at = on_disk.latest(self.lifecycle.directory)[0]
            args.load = args.save
        else:
            self.resumed_at = 0
            self.before = predecessor(recipe)
            args.load = str(self.before.checkpoints) if self.before else recipe.handover.from_hf
        args.finetune = False
        args.exit_on_missing_checkpoint = args.load is not None
        self.handover = Handover(recipe, self.before, self.resumed_at)
        self.balancer = Balancer()
        self.heartbeat = GuestHeartbeat(args, self.resumed_at)
        self.built_optimizer = False

    def summary(self) -> list[str]:
        """Return lines for the first rank: the run's start, arguments that differ from the recipe, and the kernels."""
        begins = f"resumes from step {self.resumed_at}" if self.resumed_at else "begins"
        first = (
            f"{self.recipe.name} {begins}, optimizer {self.recipe.optim.name}, megatron.core {compat.core_version()}"
        )
        differences = (
            f"--{name.replace('_', '-')} is {here!r} here and {wanted!r} in the recipe"
            for name, (here, wanted) in sorted(self.differences.items())
        )
        return [f"zaya: {line}" for line in (first, *differences, *kernel_lines(self.recipe))]

    def install(self) -> None:
        """Replace the host's functions for the rest of the process."""
        relay_batch_signals(self.args)
        data_loaders.prepare(self.args.num_workers)
        atexit.register(data_loaders.end)  # before multiprocessing's own, which was registered earlier
        self.restore = hooks.install(
            [
                (TRAINING + "finalize_model_grads", self.finalize_and_balance),
                (TRAINING + "get_megatron_optimizer", self.optimizer),
                (TRAINING + "save_checkpoint", self.save_and_prune),
                (SAVE, commit.save),
                *self.handover.hooks(),
                *self.heartbeat.hooks(),
                (TRAINING + "load_checkpoint", self.load_and_check),
            ]
        )

    def check_checkpoints(self) -> None:
        """Take the lock of the run's directories, and compare the checkpoint to load with the arguments, once the host has
        completed them (the vocabulary's padding comes late).

        Raises:
            ValueError: another run writes there, or the checkpoint is damaged, of another model, recipe or data, or of a
                release that this one cannot read.
        """
        if self.args.rank == 0:
            directories, save = written_by(self.recipe), self.lifecycle.directory
            if not any(save.resolve().is_relative_to(each.resolve()) for each in directories.values()):
                directories["--save"] = save
            self.lifecycle.lock = RunLock.take(directories)
            atexit.register(self.lifecycle.lock.release)
        step = self.before.steps if self.before else self.resumed_at
        of_megatron = self.args.load and self.handover.published is None
        checkpoint = on_disk.folder(Path(self.args.load), step) if of_megatron else None
        if checkpoint is not None and not compat.can_read(checkpoint):
            raise mistake(
                str(checkpoint),
                problem=f"it was written by a later Megatron, and megatron.core {compat.core_version()} cannot read it",
                allowed="a checkpoint of this host",
                fix="train the previous stage in this host too, or continue with `zaya train`",
            )
        if self.reads_data:
            self.lifecycle.data = find_sources(self.recipe).facts()
        self.lifecycle.describe_into(self.args, self.before)
        for line in self.lifecycle.changed:
            print(f"zaya: {line}", flush=True)
        self.handover.check(self.args)

    @functools.cached_property
    def config(self) -> ZayaConfig:
        """The model's configuration from the host's arguments."""
        return model_config(self.args)

    def share_config(self, host) -> None:
        """Copy the fields that the host reads into its own configuration; may be called again."""
        for name in hooks.SHARED_WITH_HOST:
            hooks.set_attribute(f"TransformerConfig().{name}", host, getattr(self.config, name))

    def model(self, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        """Build the GPTModel of one (virtual) stage, for hosts that let the guest build it; in other hosts
        `zaya_plugin.spec` supplies the layers.
        """
        stage = dict(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage, pg_collection=pg_collection)
        return build_stage(self.recipe, self.args, self.config, **stage)

    def datasets(self, num_samples, vp_stage=None) -> list:
        """Build the training, validation and test sets of the recipe, for hosts that let the guest read the data."""
        batch_size = getattr(self.args, "eval_global_batch_size", None) or self.args.global_batch_size
        return stage_datasets(self.recipe, find_sources(self.recipe), self.args, num_samples, batch_size)

    def mark(self, layer: nn.Module, prefix: str) -> None:
        """Mark the matrices of one layer for Muon before the host lays out its buffers; `optimizer` later assigns all
        parameters.

        prefix: of the layer's parameters in the model, since overrides match whole names.
        """
        assign_optimizers(self.recipe, layer, part_of=prefix)

    def optimizer(self, get_megatron_optimizer, config, model_chunks, *positional, **named):
        """Give the models their head, loss and optimizer assignments, and build the optimizer; replaces Megatron's
        get_megatron_optimizer.

        Every rank calls it before the first step and with the process group, so the kernels are checked here too. Ends
        the run where ranks chose different versions.
        """
        try:
            checked = warm_up_kernels(self.recipe)
        except ValueError as error:
            raise SystemExit(f"zaya: {error}") from None
        if self.args.rank == 0:
            print(f"zaya: {checked}", flush=True)
        for chunk in model_chunks:
            model = _unwrapped(chunk)
            ZayaGPTModel.convert_in_place(model, self.config)
            assign_optimizers(self.recipe, model)
        self.built_optimizer = True
        return optimizer_factory(self.recipe)(get_megatron_optimizer, config, model_chunks, *positional, **named)

    def finalize_and_balance(self, _, *positional, **named):
        """Run Megatron's finalize_model_grads, which the balancer calls, and balance the experts.

        Ends the run if the host has built an optimizer of its own.
        """
        if not self.built_optimizer:
            raise SystemExit(
                "zaya: "
                + message(
                    "optim.name",
                    self.recipe.optim.name,
                    problem="the host has built another optimizer, so the model would be trained without the recipe's",
                    allowed=f"hosts that call {TRAINING}get_megatron_optimizer",
                    fix="train with Megatron's pretrain(), or use zaya_plugin.muon_optimizer in a loop of your own",
                )
            )
        self.balancer(*positional, **named)

    @heartbeat.during("load")
    def load_and_check(self, load_checkpoint, model, optimizer=None, *positional, **named):
        """Run Megatron's load, and stop a host that starts from step 0 although a checkpoint exists, or from a damaged
        one.
        """
        if self.resumed_at and (damaged := restore.compare(self.lifecycle.directory, self.resumed_at).damaged):
            raise SystemExit("zaya: " + damage(self.lifecycle.directory, damaged))
        loaded = load_checkpoint(model, optimizer, *positional, **named)
        iteration = loaded[0]
        if iteration != self.resumed_at:
            raise SystemExit(
                "zaya: "
                + message(
                    "--load",
                    self.args.load,
                    problem=f"it holds step {self.resumed_at} and the host would start from step {iteration}, because "
                    "its load failed without an error. Nothing was trained or overwritten",
                    fix="see the host's messages above this one",
                )
            )
        if self.args.load:
            check_replicas(model, optimizer)
        return loaded

    @heartbeat.during("save")
    def save_and_prune(self, save_checkpoint, iteration, *positional, **named):
        """Run Megatron's save, and remove older checkpoints once this one is complete.

        Ends the run if another one has taken its directories over.
        """
        try:
            self.lifecycle.check_lock()
        except ValueError as lost:
            raise SystemExit(f"zaya: {lost}") from None
        self.heartbeat.before = None
        save_checkpoint(iteration, *positional, **named)
        self.lifecycle.after_save(iteration)


def relay_batch_signals(args: argparse.Namespace) -> None:
    """Save and leave at batch systems' signals, as at the one that Megatron's --exit-signal-handler knows. Without this
    option they end the process, as they do in Megatron alone.
    """
    if args.exit_signal_handler:
        known = getattr(args, "exit_signal", signal.SIGTERM)
        for number in {*BATCH_SIGNALS} - {known}:
            signal.signal(number, lambda *unused: os.kill(os.getpid(), known))


def _unwrapped(module: nn.Module) -> nn.Module:
    while not hasattr(module, "decoder"):
        module = module.module
    return module


def _same(here, wanted) -> bool:
    """Compare two values; a list of one equals its item, and all values of a flag that is off are equal."""
    if isinstance(here, (list, tuple)) and len(here) == 1 and not isinstance(wanted, (list, tuple)):
        here = here[0]
    return here == wanted or (not here and not wanted) or str(here) == str(wanted)
