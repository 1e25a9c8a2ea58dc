# SPDX-License-Identifier: Apache-2.0
"""Let Megatron parse and validate a recipe's arguments, and match optim.overrides with the model's parameters, in one
process without a device and without groups of ranks.

`zaya train dry_run=true` runs this file as a program: `python -m zaya_plugin.hosts.argument_check <recipe.yaml>
<ranks>`. Only a mistake is printed, as the rank would print it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import replace

from zaya_plugin import patches
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schema import ParallelConfig, Recipe
from zaya_plugin.data.sources import vocabulary_of


def main(argv: list[str]) -> int:
    """Check the recipe in the file argv[0] on argv[1] ranks. Return 0, or 2 for a mistake of the user."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check(load_recipe(argv[0]), int(argv[1]))
    except ValueError as error:
        print(error)
        return 2
    return 0


def check(recipe: Recipe, world_size: int) -> None:
    """Raise ValueError for what Megatron's validation or the assignment of optimizers refuses."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    patches.apply_torch()
    patches.apply()
    from zaya_plugin.config.arguments import megatron_arguments
    from zaya_plugin.hosts.stage_model import arguments_of_model

    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": vocabulary_of(recipe)}
    arguments_of_model(megatron_arguments(recipe, tokenizer))
    if recipe.optim.overrides:
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
        from megatron.training.global_vars import destroy_global_vars

        from zaya_plugin.hosts.explain import model_without_memory
        from zaya_plugin.training.optimizer import assign_optimizers

        destroy_global_vars()
        destroy_num_microbatches_calculator()
        alone = replace(recipe, parallel=ParallelConfig())  # the names of the parameters are those of any layout
        assign_optimizers(recipe, model_without_memory(alone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
