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
from zaya_plugin.checkpoint import on_disk
from zaya_plugin.config.schema import Recipe
from zaya_plugin.errors import mistake
from zaya_plugin.handover.predecessor import Predecessor


class Lifecycle:
    """The state of a run across restarts.

    Attributes:
        directory: <run_dir>/checkpoints.
        resumed_at: iteration that the run resumes from, 0 for a new run.
        run_id: identity of the run, stored in every checkpoint; W&B's run id.
        lineage: run id, stage, steps and tokens of the preceding stage, or None; stored in every checkpoint.
    """

    def __init__(self, recipe: Recipe):
        self.directory = Path(recipe.run_dir) / "checkpoints"
        self.keep_last = recipe.checkpoint.keep_last
        self.recipe_name = recipe.name
        self.resumed_at = 0
        self.run_id: str | None = None
        self.lineage: dict | None = None
        self._args = None

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has a checkpoint of its own to resume from."""
        return (self.directory / on_disk.TRACKER).is_file()

    def describe_into(self, args, before: Predecessor | None = None) -> None:
        """Check the checkpoint to be loaded against `args`, and set `args.zaya`, which later checkpoints store.

        Args:
            before: the preceding stage, for a new run.

        Raises:
            ValueError: the checkpoint is damaged, or of another model.
        """
        iteration = on_disk.latest(self.directory) if args.load and self.has_checkpoint else None
        if iteration is not None:
            self.resumed_at = iteration
            if args.rank == 0:  # if one rank fails, all ranks end
                self._check(iteration, args)
                saved = getattr(on_disk.saved_arguments(self.directory, iteration), "zaya", {})
                self.run_id, self.lineage = saved.get("run_id"), saved.get("lineage")
        elif before is not None and args.rank == 0:
            saved = getattr(on_disk.saved_arguments(before.checkpoints, before.steps), "zaya", {})
            self.lineage = {
                "run_id": saved.get("run_id"),
                "stage": before.recipe.stage.name,
                "steps": before.steps,
                "tokens": before.tokens,
            }
        args.zaya = {"version": __version__, "recipe": self.recipe_name, "run_id": self.run_id, "lineage": self.lineage}
        self._args = args

    def _check(self, iteration: int, args) -> None:
        if broken := on_disk.problems(self.directory, iteration):
            whole = [i for i in on_disk.iterations(self.directory) if not on_disk.problems(self.directory, i)]
            raise mistake(
                str(self.directory),
                problem=f"the newest checkpoint is damaged ({'; '.join(broken)})",
                allowed=f"whole checkpoints: {', '.join(map(str, whole)) or 'none'}",
                fix=f"write the number of a whole checkpoint into {self.directory / on_disk.TRACKER}" if whole else "",
            )
        on_disk.check_same_model(self.directory, iteration, args)

    def share_run_id(self) -> None:
        """Send rank 0's run id and lineage to all ranks. It needs the process group."""
        box = [self.run_id or secrets.token_hex(4), self.lineage]
        torch.distributed.broadcast_object_list(box, src=0)
        self.run_id, self.lineage = box
        self._args.zaya.update(run_id=self.run_id, lineage=self.lineage)

    def after_save(self, iteration: int) -> None:
        """Remove all but the newest `keep_last` checkpoints, on rank 0, once the tracker names `iteration`."""
        if self.keep_last <= 0 or torch.distributed.get_rank() != 0 or on_disk.latest(self.directory) != iteration:
            return
        for old in [i for i in on_disk.iterations(self.directory) if i < iteration][: -self.keep_last + 1 or None]:
            path = on_disk.folder(self.directory, old)
            # Renamed first, so that a kill during the removal leaves no folder with a checkpoint's name.
            doomed = path.with_name(path.name + ".removed")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
