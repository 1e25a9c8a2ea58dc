# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: the one to resume from and its checks, the identity of the run in W&B, removal of older
checkpoints.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import torch

from zaya_plugin import __version__
from zaya_plugin.checkpoint import commit, manifest, on_disk
from zaya_plugin.config.schema import Recipe
from zaya_plugin.errors import message
from zaya_plugin.handover.predecessor import Predecessor


class Lifecycle:
    """The state of a run across restarts.

    Attributes:
        directory: <run_dir>/checkpoints.
        resumed_at: iteration that the run resumes from, 0 for a new run.
        run_id: identity of the run, stored in every checkpoint; W&B's run id.
        lineage: run id, stage, steps and tokens of the preceding stage, or the published weights that the run began
            with, or None; stored in every checkpoint.
    """

    def __init__(self, recipe: Recipe):
        self.directory = Path(recipe.run_dir) / "checkpoints"
        self.keep_last = recipe.checkpoint.keep_last
        self.keep_every = recipe.checkpoint.keep_every
        self.resume = recipe.resume
        self.recipe_name = recipe.name
        self.resumed_at = 0
        self.run_id: str | None = None
        published = recipe.handover.from_hf
        self.lineage: dict | None = {"published": published} if published is not None else None
        self._args = None
        self._skipped: list[str] = []

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has checkpoints of its own, complete or not."""
        return bool(on_disk.iterations(self.directory))

    def describe_into(self, args, before: Predecessor | None = None) -> None:
        """Choose the checkpoint to load, check it against `args`, and set `args.zaya`, which later checkpoints store.

        Args:
            before: the preceding stage, for a new run.

        Raises:
            ValueError: no checkpoint is complete, with resume=must the newest is not, or it is of another model.
        """
        saved = {}
        if args.load and self.has_checkpoint:
            self.resumed_at, skipped = on_disk.latest(self.directory)
            self._skip(skipped)
            if args.rank == 0:  # if one rank fails, all ranks end
                on_disk.check_same_model(self.directory, self.resumed_at, args)
                saved = getattr(on_disk.saved_arguments(self.directory, self.resumed_at), "zaya", {})
                self.run_id, self.lineage = saved.get("run_id"), saved.get("lineage")
                on_disk.name_as_latest(self.directory, self.resumed_at)
        elif before is not None and args.rank == 0:
            on_disk.name_as_latest(before.checkpoints, before.steps)
            saved = getattr(on_disk.saved_arguments(before.checkpoints, before.steps), "zaya", {})
            self.lineage = {
                "run_id": saved.get("run_id"),
                "stage": before.recipe.stage.name,
                "steps": before.steps,
                "tokens": before.tokens,
            }
        args.zaya = {"version": __version__, "recipe": self.recipe_name, "run_id": self.run_id, "lineage": self.lineage}
        self._args = args

    def _skip(self, problems: list[str]) -> None:
        """Note why a newer checkpoint is skipped, or raise ValueError with resume=must."""
        if problems and self.resume == "must":
            raise ValueError(damage(self.directory, problems))
        self._skipped += problems

    def settle(self) -> list[str]:
        """Read the checkpoint to load, compare its checksums, and take an older one if they differ; then give all ranks
        rank 0's run id and lineage. A collective. Return lines about what was skipped.

        Raises:
            ValueError: no checkpoint is intact, or with resume=must the newest is not.
        """
        rank = torch.distributed.get_rank()
        aside = []
        while self.resumed_at and (damaged := commit.damaged(self.directory, self.resumed_at)):
            self._skip(damaged)
            aside.append(self.resumed_at)
            self.resumed_at, broken = on_disk.latest(self.directory, below=self.resumed_at)
            self._skip(broken)
        if aside and rank == 0:
            on_disk.name_as_latest(self.directory, self.resumed_at)
            for iteration in aside:  # else they would count as the newest to keep
                on_disk.put_aside(self.directory, iteration)
        box = [self.run_id or secrets.token_hex(4), self.lineage]
        torch.distributed.broadcast_object_list(box, src=0)
        self.run_id, self.lineage = box
        self._args.zaya.update(run_id=self.run_id, lineage=self.lineage)
        lines = [f"WARNING: a newer checkpoint is not used: {problem}" for problem in self._skipped]
        if self.resumed_at and not on_disk.has_manifest(self.directory, self.resumed_at):
            lines.append(
                f"WARNING: the checkpoint of step {self.resumed_at} has no checksums: another program or an earlier "
                "version wrote it. `zaya checkpoint adopt` adds them"
            )
        return lines

    def after_save(self, iteration: int) -> None:
        """Remove older checkpoints, and what killed saves have left, on rank 0, once that of `iteration` is complete."""
        if torch.distributed.get_rank() != 0 or on_disk.problems(self.directory, iteration):
            return
        for end in (manifest.UNFINISHED, manifest.REMOVED):
            for left in self.directory.glob(f"iter_*{end}"):
                shutil.rmtree(left, ignore_errors=True)
        for old in on_disk.removable(self.directory, self.keep_last, self.keep_every, newest=iteration):
            on_disk.remove(self.directory, old)


def damage(directory: Path, problems: list[str]) -> str:
    """Return the message about a newest checkpoint that is damaged."""
    whole = [i for i in on_disk.iterations(directory) if not on_disk.problems(directory, i)]
    return message(
        str(directory),
        problem=f"the newest checkpoint is damaged ({'; '.join(problems)})",
        allowed=f"checkpoints with all their files: {', '.join(map(str, whole)) or 'none'}",
        fix="resume=auto, which takes the newest intact one",
    )
