# SPDX-License-Identifier: Apache-2.0
"""With data.order=continuing: how far the stages before have read each source, taken from their recipes. No torch import.

The ledger of a stage is what its recipe began with and what the recipe draws; so it needs no file of its own, and a kill cannot
leave it half written. It is fixed when a stage begins: a changed blend is a matter for the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schedule import sample_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.ledger import SourceUse, after, parse_ledger, stage_use, write_ledger
from zaya_plugin.handover.predecessor import saved_step

# What decides which samples a stage reads, and in which order.
OF_THE_ORDER = ("data.path", "data.blend", "data.order", "stage.seq_length", "seed")


def source_uses(recipe: Recipe) -> list[SourceUse]:
    """What the stage reads of each source; opens the sources' indices.

    Raises:
        ValueError: a source is missing or comes twice, or data.consumed is malformed.
    """
    ledger = parse_ledger(recipe.data.consumed)
    return stage_use(
        recipe.data.blend or [recipe.data.path], sample_count(recipe), recipe.stage.seq_length, ledger, recipe.seed
    )


def consumed_after(recipe: Recipe) -> list[str]:
    """data.consumed of the stage that follows `recipe`'s."""
    return write_ledger(after(parse_ledger(recipe.data.consumed), source_uses(recipe)))


def with_consumed(recipe: Recipe) -> Recipe:
    """`recipe` with the data.consumed that it goes on from: of its own first launch, else of the stage that hands over.

    Unchanged without data.order=continuing, and where neither is there.

    Raises:
        ValueError: data.consumed says otherwise, or what decides the order was changed after the stage had begun.
    """
    if recipe.data.order != "continuing":
        return recipe
    if recipe.handover.first_sample:
        raise ValueError(
            f"handover.first_sample = {recipe.handover.first_sample} with data.order = continuing: allowed: 0, since data.consumed "
            "says where the stage begins"
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
        raise ValueError(
            f"seed = {recipe.seed} with data.order = continuing: the stage before in {recipe.handover.from_run} read its sources in the "
            f"order of seed {before.seed}. Allowed: {before.seed}"
        )
    return _consumes(recipe, consumed_after(before), f"the stage before in {recipe.handover.from_run} ended with")


def _consumes(recipe: Recipe, consumed: Sequence[str], who: str) -> Recipe:
    if recipe.data.consumed and parse_ledger(recipe.data.consumed) != parse_ledger(consumed):
        raise ValueError(
            f"data.consumed = {list(recipe.data.consumed)}: {who} {list(consumed)}. Allowed: [], which takes that over; any other place "
            "would repeat samples or leave some out"
        )
    recipe = copy.deepcopy(recipe)
    recipe.data.consumed = list(consumed)
    return recipe


def _refuse_another_order(recipe: Recipe, begun: Recipe) -> None:
    changed = [
        f"{path} was {was!r} and is {now!r}"
        for path in OF_THE_ORDER
        if (was := _value(begun, path)) != (now := _value(recipe, path))
    ]
    if (was := sample_count(begun)) != (now := sample_count(recipe)):
        changed.append(f"the stage had {was} samples and has {now} (stage.train_iters, stage.global_batch_size)")
    if changed:
        raise ValueError(
            f"run_dir = {recipe.run_dir}: data.order = continuing, and what decides the order of the samples has changed since the stage "
            f"began: {'; '.join(changed)}. Allowed: as it was; another blend or length is another stage, with handover.from_run"
        )


def _value(recipe: Recipe, path: str):
    value = recipe
    for part in path.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, (list, tuple)) else value
