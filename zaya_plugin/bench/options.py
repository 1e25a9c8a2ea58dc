# SPDX-License-Identifier: Apache-2.0
"""What `zaya bench step` was asked for, and the recipe that its ranks run. No torch import."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe

ANCHORS = ("transformers",)
RECORD, TRACE, ANCHOR, PICTURE = "step.json", "trace.json.gz", "anchor.json", "step.svg"
GRAPH_STEPS = 16  # room for Megatron's own warm-up before it captures a step
VOCABULARY = 262_272  # rows of ZAYA1's table, for random tokens


@dataclass(frozen=True)
class Options:
    """The command line. random_tokens: rows of a vocabulary to draw from, 0: the recipe's data; command: as it was given."""

    steps: int = 5
    warmup: int = 3
    trace: bool = True
    optimizer: bool = True
    random_tokens: int = 0
    anchor: str | None = None
    command: str = ""
    commit: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Options:
        return Options(**json.loads(text))


def measured_recipe(recipe: Recipe, options: Options, output: str | None) -> Recipe:
    """`recipe` for a few steps that leave nothing behind but what is measured: no schedule, validation, checkpoint or hand-over.

    Everything that makes a step what it is stays. W&B runs offline, so that a benchmark is not among the runs of a project.
    """
    logger = recipe.logger
    # Never all taken: two steps belong to the profiler, the run ends at the beginning of the next, and a graph is captured before.
    steps = options.warmup + options.steps + 3 + (GRAPH_STEPS if recipe.cluster.graphs != "none" else 0)
    return replace(
        recipe,
        run_dir=output or str(Path(recipe.run_dir) / "bench"),
        stage=replace(recipe.stage, train_iters=steps, eval_iters=0, eval_at_start=False, batch_size_ramp=None),
        data=replace(recipe.data, valid_path=None, valid_blend=[]),
        optim=replace(
            recipe.optim,
            lr_decay_style="constant",
            lr_warmup_iters=0,
            lr_warmup_init=0.0,
            lr_decay_iters=None,
            lr_wsd_decay_iters=None,
        ),
        checkpoint=replace(recipe.checkpoint, save_interval=None),
        logger=replace(
            logger, wandb_mode="offline" if logger.wandb and logger.wandb_mode != "disabled" else logger.wandb_mode
        ),
        handover=type(recipe.handover)(),
        curriculum=type(recipe.curriculum)(),
        profile=type(recipe.profile)(),
        resume="never",
        exit_interval=None,
    )
