# SPDX-License-Identifier: Apache-2.0
"""Compute where a stage with data.order=continuing starts in its sources, from the recipes of the stages before. No
torch import.

The ledger of a stage follows from its own data.consumed and its recipe, so it needs no file of its own, and a kill
cannot leave it half written. It is fixed when a stage begins: another blend needs another stage.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

from zaya_plugin.config.compose import get, load_recipe
from zaya_plugin.config.schedule import sample_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.ledger import SourceUse, after, parse_ledger, stage_use
from zaya_plugin.ground.errors import mistake
from zaya_plugin.handover.predecessor import saved_step

# Keys that decide which samples a stage reads, and in which order.
KEYS_OF_THE_ORDER = ("data.path", "data.blend", "data.order", "stage.seq_length", "seed")


def source_uses(recipe: Recipe) -> list[SourceUse]:
    """Return what the stage reads of each source; opens the sources' indices.

    Raises:
        ValueError: a source is missing or listed twice, or data.consumed is malformed.
    """
    ledger, blend = parse_ledger(recipe.data.consumed), recipe.data.blend or recipe.data.path
    return stage_use(blend, sample_count(recipe), recipe.stage.seq_length, ledger, recipe.seed)


def consumed_after(recipe: Recipe) -> list[str]:
    """Return data.consumed of the stage that follows `recipe`'s."""
    ledger = after(parse_ledger(recipe.data.consumed), source_uses(recipe))
    return [f"{tokens} {path}" for path, tokens in ledger.items()]


def with_consumed(recipe: Recipe) -> Recipe:
    """Return `recipe` with the data.consumed that it starts from: of its own first launch, else of the stage that hands
    over.

    Without data.order=continuing, and with neither of the two, the recipe is returned as it is.

    Raises:
        ValueError: data.consumed contradicts it, or what decides the order was changed after the stage had begun.
    """
    if recipe.data.order != "continuing":
        return recipe
    if recipe.handover.first_sample:
        raise mistake(
            "handover.first_sample",
            recipe.handover.first_sample,
            problem="with data.order=continuing data.consumed says where the stage begins",
            allowed="0",
            fix="handover.first_sample=0",
        )
    own = Path(recipe.run_dir) / "recipe.yaml"
    if saved_step(Path(recipe.run_dir)) is not None and own.is_file():
        begun = load_recipe(own)
        _refuse_another_order(recipe, begun)
        return _consumes(recipe, begun.data.consumed, "the stage began with")
    if recipe.handover.from_run is None:
        return recipe
    before = load_recipe(Path(recipe.handover.from_run) / "recipe.yaml")
    if before.data.order != "continuing":
        return recipe  # GPTDataset's order does not tell how far a source was read
    if before.seed != recipe.seed:
        raise mistake(
            "seed",
            recipe.seed,
            problem=f"the stage before in {recipe.handover.from_run} read its sources in the order of seed "
            f"{before.seed}, which data.order=continuing continues",
            allowed=str(before.seed),
            fix=f"seed={before.seed}",
        )
    return _consumes(recipe, consumed_after(before), f"the stage before in {recipe.handover.from_run} ended with")


def _consumes(recipe: Recipe, consumed: Sequence[str], who: str) -> Recipe:
    if recipe.data.consumed and parse_ledger(recipe.data.consumed) != parse_ledger(consumed):
        raise mistake(
            "data.consumed",
            list(recipe.data.consumed),
            problem=f"{who} {list(consumed)}; another place would repeat samples or leave some out",
            allowed="[], which takes that over",
            fix="data.consumed=[]",
        )
    recipe = copy.deepcopy(recipe)
    recipe.data.consumed = list(consumed)
    return recipe


def _refuse_another_order(recipe: Recipe, begun: Recipe) -> None:
    changed = [
        f"{path} was {was!r} and is {now!r}"
        for path in KEYS_OF_THE_ORDER
        if (was := get(begun, path)) != (now := get(recipe, path))
    ]
    if (was := sample_count(begun)) != (now := sample_count(recipe)):
        changed.append(f"the stage had {was} samples and has {now} (stage.train_iters, stage.global_batch_size)")
    if changed:
        raise mistake(
            "run_dir",
            recipe.run_dir,
            problem="with data.order=continuing the order of the samples is fixed when a stage begins, and what "
            f"decides it has changed: {'; '.join(changed)}",
            allowed="the values that the stage began with",
            fix="for another blend or length begin another stage, with another run_dir and handover.from_run",
        )
