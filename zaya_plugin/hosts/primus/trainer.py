# SPDX-License-Identifier: Apache-2.0
"""Primus' trainer stage `zaya_pretrain`: its pre-training, with our model, data, loss, optimizers and hand-over.

Primus runs its patches and swallows what fails in them (primus/core/patches/patch_runner.py). Nothing of ours is such a patch: the
guest moves in when the trainer's train() begins, after them, so that its names are the last ones set and its errors end the run.
"""

from __future__ import annotations

import re

from primus.backends.megatron.megatron_pretrain_trainer import MegatronPretrainTrainer
from primus.core.backend.backend_registry import BackendRegistry
from primus.core.utils.module_utils import log_rank_0

from zaya_plugin import patches
from zaya_plugin.config.compose import check_written_here, load_recipe, save_recipe
from zaya_plugin.handover.data_places import with_consumed
from zaya_plugin.hosts.primus import traps
from zaya_plugin.patches import hooks

STAGE = "zaya_pretrain"
# Patches of Primus that failed in this process; primus.core.patches keeps no list.
failed_patches: list[str] = []


def register() -> None:
    """Makes the stage known to Primus, and its failed patches to us."""
    BackendRegistry.register_trainer_class(ZayaPretrainTrainer, "megatron", STAGE)

    def note_and_report(report, message, *positional, **named):
        if found := re.search(r"Patch '([^']+)' failed", str(message)):
            failed_patches.append(found[1])
        return report(message, *positional, **named)

    hooks.install([("primus.core.patches.patch_runner.error_rank_0", note_and_report)])


class ZayaPretrainTrainer(MegatronPretrainTrainer):
    """Pre-training of the recipe that the experiment names in `zaya_recipe`."""

    def train(self) -> None:
        """Checks what Primus made of the experiment, moves in, and trains as Primus does.

        Raises:
            ValueError: see `zaya_plugin.hosts.primus.traps` and `zaya_plugin.hosts.guest`.
        """
        args = self.backend_args
        path = traps.recipe_path(args)
        check_written_here(path, f"zaya export primus experiment=<name> run_dir={path.parent}, with the same overrides")
        recipe = with_consumed(load_recipe(path))
        if self.rank == 0:  # with its place in the data, which the stage after this one will ask for
            save_recipe(recipe, path)
        traps.check(args, recipe, traps.known_keys(), failed_patches)
        patches.apply()
        from megatron.training import training

        from zaya_plugin.hosts.guest import Guest

        self.guest, self.checked = Guest(recipe, args), False
        self.guest.install()
        traps.check_flops(training.num_floating_point_operations)
        for line in self.guest.summary():
            log_rank_0(line)
        try:
            super().train()
        except SystemExit as left:  # Megatron leaves so on a signal, having saved; Primus would call it a failure
            if left.code:
                raise

    def model_provider(self, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        """Called by Primus in place of Megatron's model provider."""
        if not self.checked:  # with virtual stages there is one call for each
            self.checked = True
            self.guest.check_checkpoints()
        model = self.guest.model(pre_process, post_process, vp_stage, config, pg_collection)
        traps.check_assignments(model, self.guest.recipe)
        return model

    def get_forward_step(self):
        """Called by Primus."""
        from zaya_plugin.hosts.forward_step import forward_step

        return forward_step

    def get_datasets_provider(self):
        """Called by Primus."""

        def provide_datasets(num_samples, vp_stage=None):
            return self.guest.datasets(num_samples, vp_stage)

        # Every rank reads its part itself; without this the ranks wait for each other for ever under tensor parallelism.
        provide_datasets.is_distributed = True
        return provide_datasets
