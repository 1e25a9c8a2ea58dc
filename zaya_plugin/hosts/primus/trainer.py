# SPDX-License-Identifier: Apache-2.0
"""Primus' trainer stage `zaya_pretrain`: its pre-training, with our model, data, loss, optimizers and hand-over.

Primus only logs an error in one of its patches (primus/core/patches/patch_runner.py). So the guest is no such patch: it
is installed when the trainer's train() begins, after Primus' patches. Its replacements come last, and its errors end
the run.
"""

from __future__ import annotations

import functools
import re

from primus.backends.megatron.megatron_pretrain_trainer import MegatronPretrainTrainer
from primus.core.backend.backend_registry import BackendRegistry
from primus.core.utils.module_utils import log_rank_0

from zaya_plugin import patches
from zaya_plugin.config.compose import check_own_version, load_recipe, save_recipe
from zaya_plugin.handover.data_places import with_consumed
from zaya_plugin.hosts.primus import traps
from zaya_plugin.patches import hooks

STAGE = "zaya_pretrain"
# Patches of Primus that failed in this process; Primus itself keeps no list.
failed_patches: list[str] = []


def register() -> None:
    """Register the stage with Primus, and record Primus' failed patches."""
    BackendRegistry.register_trainer_class(ZayaPretrainTrainer, "megatron", STAGE)

    def note_and_report(report, message, *positional, **named):
        if patch := re.search(r"Patch '([^']+)' failed", str(message)):
            failed_patches.append(patch[1])
        return report(message, *positional, **named)

    hooks.install([("primus.core.patches.patch_runner.error_rank_0", note_and_report)])


class ZayaPretrainTrainer(MegatronPretrainTrainer):
    """Pre-training of the recipe that the experiment names in `zaya_recipe`."""

    def train(self) -> None:
        """Check the arguments that Primus made of the experiment, install the guest, and train as Primus does.

        Raises:
            ValueError: see `zaya_plugin.hosts.primus.traps` and `zaya_plugin.hosts.guest`.
        """
        args = self.backend_args
        path = traps.recipe_path(args)
        check_own_version(path, f"zaya export primus experiment=<name> run_dir={path.parent}, with the same overrides")
        recipe = with_consumed(load_recipe(path))
        if self.rank == 0:  # with its position in the data, which the next stage reads
            save_recipe(recipe, path)
        traps.check(args, recipe, traps.known_keys(), failed_patches)
        patches.apply()
        from megatron.training import training

        from zaya_plugin.data.sources import find_sources
        from zaya_plugin.hosts.guest import Guest

        self.guest, self.checked = Guest(recipe, args, find_sources(recipe)), False
        self.guest.install()
        traps.check_flops(training.num_floating_point_operations)
        for line in self.guest.summary():
            log_rank_0(line)
        try:
            super().train()
        except SystemExit as left:  # Megatron exits so on a signal, after a save; Primus would report a failure
            if left.code:
                raise

    def model_provider(self, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        """Called by Primus in place of Megatron's model provider."""
        if not self.checked:  # with virtual stages there is one call for each
            self.checked = True
            self.guest.check()
        model = self.guest.model(pre_process, post_process, vp_stage, config, pg_collection)
        traps.check_assignments(model, self.guest.recipe)
        return model

    def get_forward_step(self):
        """Called by Primus."""
        from zaya_plugin.hosts.adapter import forward_step

        return forward_step

    def get_datasets_provider(self):
        """Called by Primus, which may set attributes of the function."""
        provide = functools.partial(self.guest.datasets)
        provide.is_distributed = True  # as the adapter's
        return provide
