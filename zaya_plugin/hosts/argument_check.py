# SPDX-License-Identifier: Apache-2.0
"""Let Megatron parse and validate a recipe's arguments, and match optim.overrides with the model's parameters, in one
process without a device and without groups of ranks.

zaya_plugin.run.megatron_check runs this file as a program, `python -m zaya_plugin.hosts.argument_check`. Each line of
stdin is a JSON object with a recipe's file, the number of ranks and their environment; the answer is a line of JSON:
the message that a rank would print, or null. Each recipe has a fork of its own, because Megatron keeps arguments and
groups in global variables, and its imports take seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import replace

from zaya_plugin import patches
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schema import ParallelConfig, Recipe
from zaya_plugin.data.tokenizer import check_opens


def main() -> int:
    """Answer until stdin ends; return 0, or 1 after a failure that is not a user's mistake."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what Megatron prints
    prepare()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _answer(json.loads(line), answers)
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


def _answer(asked: dict, answers: int) -> None:
    """Answer one line and end this process."""
    refused, code = None, 1
    try:
        os.environ.update(asked["environment"])
        try:
            check(load_recipe(asked["recipe"]), asked["ranks"])
        except ValueError as error:
            refused = str(error)
        os.write(answers, (json.dumps(refused) + "\n").encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def prepare() -> None:
    """Apply the patches and make the imports of `check`."""
    patches.apply_torch()
    patches.apply()
    for module in ("megatron.training", "zaya_plugin.hosts.optimizer_table", "zaya_plugin.hosts.stage_model"):
        importlib.import_module(module)


def check(recipe: Recipe, world_size: int) -> None:
    """Raise ValueError for what Megatron's validation or the assignment of optimizers refuses."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    from zaya_plugin.hosts.stage_model import arguments_without_data

    arguments = arguments_without_data(recipe)
    if recipe.data.tokenizer is not None:
        check_opens(recipe.data.tokenizer)
    if recipe.handover.from_hf is not None:
        from zaya_plugin.hosts.stage_handover import check_published

        check_published(recipe.handover.from_hf, arguments)
    if recipe.optim.overrides:
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
        from megatron.training.global_vars import destroy_global_vars

        from zaya_plugin.hosts.optimizer_table import model_without_memory
        from zaya_plugin.training.optimizer import assign_optimizers

        destroy_global_vars()
        destroy_num_microbatches_calculator()
        alone = replace(recipe, parallel=ParallelConfig())  # the names of the parameters are those of any layout
        assign_optimizers(recipe, model_without_memory(alone))


if __name__ == "__main__":
    sys.exit(main())
