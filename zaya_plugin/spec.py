# SPDX-License-Identifier: Apache-2.0
"""For Megatron-LM's own script: `pretrain_gpt.py --spec zaya_plugin.spec zaya_block $(zaya export megatron ...)`.

Megatron imports this module when it reads --spec, after its arguments and before it starts anything (0.19), so the import is
where the guest moves in: patches, optimizers, balancing, hand-over (hosts/guest.py). --spec takes an object by its name,
before any model configuration exists; `zaya_block` therefore finds its layers when Megatron asks for them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training import get_args

from zaya_plugin import patches
from zaya_plugin.config.compose import check_written_here, load_recipe
from zaya_plugin.hosts.guest import Guest
from zaya_plugin.model.layer import ZayaTransformerLayer
from zaya_plugin.model.norm import ZayaRMSNorm
from zaya_plugin.model.spec import zaya_layer_submodules

RECIPE_VARIABLE = "ZAYA_RECIPE"


def recipe_path(args) -> Path:
    """Where the recipe of the run lies: $ZAYA_RECIPE, else recipe.yaml in the run directory, which holds --save.

    Raises:
        ValueError: there is none.
    """
    if named := os.environ.get(RECIPE_VARIABLE):
        path = Path(named)
    elif args.save:
        path = Path(args.save).parent / "recipe.yaml"
    else:
        raise ValueError(
            f"--save is not given: allowed: <run_dir>/checkpoints as `zaya export megatron` writes it, or {RECIPE_VARIABLE}=<recipe>"
        )
    if not path.is_file():
        raise ValueError(
            f"{path}: no such recipe. It holds what Megatron has no argument for (router, Muon, hand-over): write it with "
            f"`zaya export megatron experiment=... run_dir={path.parent}`, or name it in {RECIPE_VARIABLE}"
        )
    return path


class GuestLayer(ZayaTransformerLayer):
    """A layer in a model that the host builds: with the guest's configuration, and its matrices marked for Muon before the
    host lays out its buffers."""

    def __init__(self, config, layer_number: int = 1, **named):
        guest.share_config(config)
        super().__init__(guest.config, zaya_layer_submodules(guest.config), layer_number, **named)
        guest.mark(self, f"decoder.layers.{layer_number - 1}.")


class GuestBlock(TransformerBlockSubmodules):
    """The layers of a stage and our final norm, which reads the fp32 stream; every stage has as many layers."""

    def __init__(self):
        pass

    @property
    def layer_specs(self) -> list[ModuleSpec]:
        config = guest.config
        parts = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
        return [ModuleSpec(module=GuestLayer)] * (config.num_layers // parts)

    @property
    def layer_norm(self):
        return ZayaRMSNorm


def move_in(args) -> Guest:
    """Applies the patches, installs a guest for `args`, and says on the first rank what differs from the recipe."""
    patches.apply()
    path = recipe_path(args)
    check_written_here(path, f"zaya export megatron experiment=<name> run_dir={path.parent}, with the same overrides")
    guest = Guest(load_recipe(path), args)
    guest.check_checkpoints()
    guest.install()
    if args.rank == 0:
        print(*guest.summary(), sep="\n", flush=True)
    return guest


patches.apply_torch()
try:
    guest = move_in(get_args())
except ValueError as error:
    sys.exit(f"zaya: {error}")
zaya_block = GuestBlock()
