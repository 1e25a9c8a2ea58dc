# SPDX-License-Identifier: Apache-2.0
"""The block spec for Megatron-LM's own script: `pretrain_gpt.py --spec zaya_plugin.spec zaya_block`, with arguments by
`zaya export megatron`.

Megatron 0.19 imports this module when it reads --spec, after its arguments and before it starts anything. The import
therefore applies the patches and installs the guest (hosts/guest.py): optimizers, balancing, hand-over. --spec names an
object before any model configuration exists, so `zaya_block` makes its layers when Megatron reads `layer_specs`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training import get_args

from zaya_plugin import patches
from zaya_plugin.config.compose import check_own_version, load_recipe
from zaya_plugin.ground.errors import mistake
from zaya_plugin.hosts.guest import Guest
from zaya_plugin.model.layer import ZayaTransformerLayer
from zaya_plugin.model.layer_specs import zaya_layer_submodules
from zaya_plugin.model.norm import norm_class

RECIPE_VARIABLE = "ZAYA_RECIPE"


def recipe_of_run(args) -> Path:
    """Return the path of the run's recipe: $ZAYA_RECIPE, else recipe.yaml in the directory that holds --save.

    Raises:
        ValueError: the file does not exist, or neither is given.
    """
    if named := os.environ.get(RECIPE_VARIABLE):
        path = Path(named)
    elif args.save:
        path = Path(args.save).parent / "recipe.yaml"
    else:
        raise mistake(
            "--save",
            problem="it is not given, and it leads to the recipe",
            allowed="<run_dir>/checkpoints, as `zaya export megatron` writes it",
            fix=f"--save <run_dir>/checkpoints, or {RECIPE_VARIABLE}=<recipe> in the environment",
        )
    if not path.is_file():
        raise mistake(
            str(path),
            problem="no such recipe; it holds the settings that Megatron has no argument for (router, Muon, balancing, "
            "hand-over)",
            fix=f"zaya export megatron experiment=<name> run_dir={path.parent}, or {RECIPE_VARIABLE}=<recipe> in the "
            "environment",
        )
    return path


class GuestLayer(ZayaTransformerLayer):
    """A layer in a model that the host builds.

    It has the guest's configuration, and its matrices are marked for Muon before the host lays out its buffers.
    """

    def __init__(self, config, layer_number: int = 1, **named):
        guest.share_config(config)
        super().__init__(guest.config, zaya_layer_submodules(guest.config), layer_number, **named)
        guest.mark(self, f"decoder.layers.{layer_number - 1}.")


class GuestBlock(TransformerBlockSubmodules):
    """The layers of a stage and our final norm, which reads the fp32 stream. All stages have the same number of
    layers.
    """

    def __init__(self):
        pass

    @property
    def layer_specs(self) -> list[ModuleSpec]:
        config = guest.config
        parts = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
        return [ModuleSpec(module=GuestLayer)] * (config.num_layers // parts)

    @property
    def layer_norm(self):
        return norm_class(guest.config)


def move_in(args) -> Guest:
    """Apply the patches, install a guest for `args`, and print on the first rank which arguments differ from the
    recipe.
    """
    patches.apply()
    path = recipe_of_run(args)
    check_own_version(path, f"zaya export megatron experiment=<name> run_dir={path.parent}, with the same overrides")
    guest = Guest(load_recipe(path), args)
    guest.check()
    guest.install()
    if args.rank == 0:
        print(*guest.summary(), sep="\n", flush=True)
    return guest


patches.apply_torch()
try:
    guest = move_in(get_args())
except (ValueError, ImportError) as error:
    sys.exit(f"zaya: {error}")
zaya_block = GuestBlock()
