# SPDX-License-Identifier: Apache-2.0
"""The plugin inside Megatron-LM's own script: `pretrain_gpt.py --spec zaya_plugin.spec zaya_block`, with arguments by
`zaya export megatron`.

Megatron imports this module when it reads --spec: 0.19 after its arguments and before it starts anything, 0.16 (Primus'
own stage) when it builds the model. The import therefore applies the patches and installs the guest (hosts/guest.py):
model, optimizers, balancing, hand-over.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from megatron.training import get_args

from zaya_plugin import compat, patches
from zaya_plugin.config.compose import check_own_version, load_recipe
from zaya_plugin.ground.errors import mistake
from zaya_plugin.hosts.guest import Guest
from zaya_plugin.patches.hooks import TRAINING

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
            problem="the recipe does not exist; it holds the settings that Megatron has no argument for (router, "
            "Muon, balancing, hand-over)",
            fix=f"zaya export megatron experiment=<name> run_dir={path.parent}, or {RECIPE_VARIABLE}=<recipe> in the "
            "environment",
        )
    return path


def zaya_block(*_):
    """The object that --spec names. In a run the guest builds the model, and Megatron does not call this."""
    raise mistake(
        "--spec",
        "zaya_plugin.spec zaya_block",
        problem="this script builds its model in another way than Megatron's pretrain_gpt.py",
        allowed="scripts that call megatron.training.pretrain, such as pretrain_gpt.py",
        fix="zaya_plugin.build_zaya_model in a script of your own",
    )


def our_setup(setup_model_and_optimizer, model_type, *, cfg_container, model_provider_func=None, **named):
    """Call Megatron's setup_model_and_optimizer with the guest's model, which `zaya train` builds too, in place of the
    one that Megatron's builder makes of the arguments.
    """
    container = replace(cfg_container, model=None)  # with a configuration of the model it would not call the function
    return setup_model_and_optimizer(model_type, model_provider_func=guest.model, cfg_container=container, **named)


def our_model(_, *, pre_process, post_process, vp_stage=None, **named):
    """Build the guest's model where a script of 0.16 builds its GPTModel."""
    return guest.model(pre_process, post_process, vp_stage, pg_collection=named.get("pg_collection"))


def move_in(args) -> Guest:
    """Apply the patches, install a guest for `args`, and print on the first rank which arguments differ from the
    recipe.
    """
    patches.apply()
    path = recipe_of_run(args)
    check_own_version(path, f"zaya export megatron experiment=<name> run_dir={path.parent}, with the same overrides")
    guest = Guest(load_recipe(path), args)
    guest.check()
    # 0.16 imports this module while it builds the model.
    later = (TRAINING + "setup_model_and_optimizer", our_setup)
    guest.install([later if compat.at_least("0.19.0rc0") else ("gpt_builders.GPTModel", our_model)])
    if args.rank == 0:
        print(*guest.summary(), sep="\n", flush=True)
    return guest


patches.apply_torch()
try:
    guest = move_in(get_args())
except (ValueError, ImportError) as error:
    sys.exit(f"zaya: {error}")
