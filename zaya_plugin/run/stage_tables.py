# SPDX-License-Identifier: Apache-2.0
"""What became of a curriculum's stages, as tables for a terminal. No torch import."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zaya_plugin.config.schedule import first_learning_rate, last_learning_rate, token_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.handover.data_places import source_uses
from zaya_plugin.handover.predecessor import domain_losses, losses
from zaya_plugin.run.curriculum import Curriculum


def table(curriculum: Curriculum) -> str:
    """The stages and what became of them. Losses are nats a token: validation before the first step and after the last."""
    rows = [
        (
            "stage",
            "context",
            "RoPE base",
            "CP",
            "tokens",
            "steps",
            "learning rate",
            "loss before",
            "after",
            "at hand-over",
        )
    ]
    last = None
    for stage in curriculum.stages:
        recipe, seen = stage.recipe, losses(stage.run_dir)
        begins = seen["valid_first"] if recipe.stage.eval_at_start else seen["first"]
        ends = seen["valid_last"] if seen["valid_last"] is not None else seen["last"]
        ends = ends if stage.finished else None
        jump = "" if last is None or begins is None else f"{last:.3f} -> {begins:.3f}"
        rows.append(
            (
                stage.name,
                str(recipe.stage.seq_length),
                f"{recipe.stage.rotary_base:,}",
                str(recipe.parallel.context_parallel_size),
                _short(token_count(recipe)),
                f"{min(stage.done, stage.steps)}/{stage.steps}",
                f"{first_learning_rate(recipe):.1e} -> {last_learning_rate(recipe):.1e}",
                "-" if begins is None else f"{begins:.3f}",
                "-" if ends is None else f"{ends:.3f}",
                jump,
            )
        )
        last = ends
    return aligned(rows)


def domain_table(curriculum: Curriculum) -> str:
    """Validation loss of each domain of data.valid_blend before a stage and after it; empty where no stage has domains."""
    found = {stage.name: domain_losses(stage.run_dir) for stage in curriculum.stages}
    names = list(dict.fromkeys(name for domains in found.values() for name in domains))
    rows = [("validation", *names)]
    for stage, domains in found.items():
        shown = (domains.get(name) for name in names)
        rows.append((stage, *("-" if pair is None else f"{pair[0]:.3f} -> {pair[1]:.3f}" for pair in shown)))
    return aligned(rows) if names else ""


def tokens_by_source(recipes: Sequence[Recipe]) -> str:
    """A table for a terminal: tokens that each stage draws from each source, their sum, and how often that goes through it.

    With GPTDataset's order a source's share of the samples is that of its weight to within one sample.
    """
    names = [recipe.stage.name for recipe in recipes]
    drawn: dict[str, list[int]] = {}
    epoch: dict[str, int] = {}
    for number, recipe in enumerate(recipes):
        for use in source_uses(recipe):
            drawn.setdefault(use.prefix, [0] * len(recipes))[number] += use.after - use.before
            epoch[use.prefix] = use.epoch_tokens
    rows = [("tokens of", *names, "all", "epochs")]
    rows += [
        (prefix[-40:], *(f"{tokens:,}" for tokens in stages), f"{sum(stages):,}", f"{sum(stages) / epoch[prefix]:.3f}")
        for prefix, stages in drawn.items()
    ]
    return aligned(rows, right=range(1, len(rows[0])))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns of equal width; those whose numbers are in `right` end at one edge."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _short(tokens: int) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= limit:
            return f"{tokens / limit:.4g}{unit}"
    return str(tokens)
