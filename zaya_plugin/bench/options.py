# SPDX-License-Identifier: Apache-2.0
"""The options of `zaya bench step`, and the recipe that its ranks run. No torch import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe

RECORD, TRACE, PICTURE = "step.json", "trace.json.gz", "step.png"
GRAPH_STEPS = 16  # steps of Megatron's own warm-up before it captures a step, at most
VOCABULARY = 262_272  # rows of ZAYA1's embedding, for random tokens


@dataclass(frozen=True)
class Options:
    """The command line. random_tokens: rows of the vocabulary, 0 for the recipe's data. command: the words as typed."""

    steps: int = 5
    warmup: int = 3
    trace: bool = True
    optimizer: bool = True
    random_tokens: int = 0
    command: str = ""
    commit: str | None = None


def with_data_path(overrides: list[str]) -> list[str]:
    """Return `overrides` with a data.path; a recipe without one is refused, and no data is read."""
    return overrides if any(item.startswith("data.path=") for item in overrides) else [*overrides, "data.path=none"]


def measured_recipe(recipe: Recipe, options: Options, output: str | None) -> Recipe:
    """Return `recipe` for a few steps without schedule, validation, checkpoint or hand-over; every key that affects a
    step stays.

    W&B runs offline, so a benchmark is not among the runs of a project.
    """
    logger = recipe.logger
    # The run ends before the last step: two steps are the profiler's, and a graph is captured before them.
    steps = options.warmup + options.steps + 3 + (GRAPH_STEPS if recipe.cluster.graphs != "none" else 0)
    # The memory plan counts the optimizer, which is left out.
    cluster = recipe.cluster if options.optimizer else replace(recipe.cluster, memory_gib=None)
    return replace(
        recipe,
        cluster=cluster,
        run_dir=output or str(Path(recipe.run_dir) / "bench"),
        stage=replace(
            recipe.stage,
            train_iters=steps,
            eval_iters=0,
            eval_at_start=False,
            sample_prompts=None,
            batch_size_ramp=None,
        ),
        data=replace(recipe.data, valid_path=None, valid_blend=[]),
        optim=replace(
            recipe.optim,
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_warmup_init=0.0,
            lr_decay_iters=None,
            lr_wsd_decay_iters=None,
        ),
        checkpoint=type(recipe.checkpoint)(save_interval=None),
        logger=replace(
            logger, wandb_mode="offline" if logger.wandb and logger.wandb_mode != "disabled" else logger.wandb_mode
        ),
        handover=type(recipe.handover)(),
        curriculum=type(recipe.curriculum)(),
        profile=type(recipe.profile)(),
        resume="never",
        exit_interval=None,
    )
