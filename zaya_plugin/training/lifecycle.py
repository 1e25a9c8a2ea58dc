# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: the one to resume from and its checks, the identity of the run in W&B, removal of older
checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from pathlib import Path

import torch

from zaya_plugin import __version__
from zaya_plugin.checkpoint import manifest, on_disk, places, restore, starts
from zaya_plugin.checkpoint.run_lock import RunLock
from zaya_plugin.config.resume import changes as changed_keys
from zaya_plugin.config.resume import trains_alike, values_of
from zaya_plugin.config.run_directory import checkpoint_path, has_checkpoint, make_writable, uploads
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import compare_data, other_rule
from zaya_plugin.ground.errors import NotFiniteError, message, mistake
from zaya_plugin.handover.predecessor import Predecessor


class Lifecycle:
    """The state of a run across restarts.

    Attributes:
        directory: of its checkpoints, checkpoint.path.
        local: this node's folder for them, below checkpoint.local_path; None without one.
        upload_limit: bytes a second of this rank, after settle(); None: no limit.
        resumed_at: iteration that the run resumes from, 0 for a new run.
        run_id: identity of the run, stored in every checkpoint.
        tracker_id: W&B's run id: run_id, with an end of its own in a copied run directory.
        generation: of this start of the run, by which the writers of an earlier start cannot write into this one.
        leads: whether this rank is the first of its node.
        lock: of the run's directories, after settle(); None where no launcher took it.
        lineage: run id, stage, steps and tokens of the preceding stage, or the published weights that the run began
            with, or None; stored in every checkpoint.
        data: facts of the run's data (DataSources.facts), None for none; stored in every checkpoint, and compared with
            those of the checkpoint to load.
    """

    def __init__(self, recipe: Recipe):
        self.directory = checkpoint_path(recipe)
        path, limit = recipe.checkpoint.local_path, recipe.checkpoint.upload_limit
        self.local = None if path is None else places.local_folder(path, self.directory)
        self.upload_limit = None if limit is None else limit * 1e9
        self.keep_last = recipe.checkpoint.keep_last
        self.keep_every = recipe.checkpoint.keep_every
        self.resume = recipe.resume
        self.data: dict | None = None
        self.changed: list[str] = []  # lines about data that changed, and may
        self.recipe = recipe
        self.run_dir = Path(recipe.run_dir)
        self.recipe_checksum = starts.checksum(recipe)
        self.resumed_at = 0
        self.run_id: str | None = None
        self._saved_in: str | None = None  # the directory that the checkpoint to load was written to
        self.tracker_id = ""
        self.generation, self.leads = "", False
        self.lock: RunLock | None = None
        published = recipe.handover.from_hf
        self.lineage: dict | None = {"published": published} if published is not None else None
        self._args = None
        self._begun = False
        self._checked: int | None = None  # the checkpoint that was compared with the model
        self._aside: list[tuple[int, str]] = []
        self._history = starts.History()

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run has checkpoints of its own, complete or not."""
        return has_checkpoint(self.directory)

    def describe_into(self, args, before: Predecessor | None = None, data: dict | None = None) -> None:
        """Choose the checkpoint to load, check it against `args`, and set `args.zaya`, which later checkpoints store.

        Args:
            before: the preceding stage, for a new run. data: becomes the attribute.

        Raises:
            ValueError: no checkpoint is complete, with resume=must the newest is not, or it is of another model.
        """
        self.data = data
        if args.load and self.has_checkpoint:
            # A first choice, for early errors; settle() makes it, together with uploads that it can finish.
            known, pending = on_disk.iterations(self.directory), uploads(self.directory)
            self.resumed_at = max([*known, *(iteration for iteration, _ in pending)])
            if args.rank == 0 and not pending:
                newest, skipped = on_disk.latest(self.directory)
                self._skip(skipped)  # with resume=must it raises
                with contextlib.suppress(on_disk.UnreadableError):  # settle() compares its content, and puts it aside
                    self._check(newest, args)
        elif before is not None and args.rank == 0:
            on_disk.name_as_latest(before.checkpoints, before.steps)
            saved = getattr(on_disk.saved_arguments(before.checkpoints, before.steps), "zaya", {})
            # Another stage may read other data, in the tokens that the model knows.
            facts = saved.get("data") or {}
            self._compare_data({"tokenizer": facts.get("tokenizer")}, before.checkpoints)
            self.changed += [f"note: {before.checkpoints}: {line}" for line in other_rule(facts, self.data or {})]
            self.lineage = {
                "run_id": saved.get("run_id"),
                "stage": before.recipe.stage.name,
                "steps": before.steps,
                "tokens": before.tokens,
            }
        args.zaya = {"version": __version__, "recipe": self.recipe.name, "run_id": self.run_id, "lineage": self.lineage}
        args.zaya |= {
            "data": self.data,
            manifest.RECIPE: values_of(self.recipe),
            "directory": os.path.realpath(self.directory),
        }
        self._args = args

    def _check(self, iteration: int, args) -> None:
        """Compare a checkpoint with the model to build, and take over the run's identity from it; on rank 0."""
        on_disk.check_same_model(self.directory, iteration, args)
        saved = getattr(on_disk.saved_arguments(self.directory, iteration), "zaya", {})
        self._compare_data(saved.get("data"), on_disk.folder(self.directory, iteration))
        values = saved.get(manifest.RECIPE) or {}
        refused, _ = changed_keys(values, self.recipe, self.run_dir)
        if refused:  # a guest in another host; `zaya train` has compared before the start
            raise ValueError("\n".join(refused))
        if not trains_alike(values, self.recipe):  # a failure may be the new values', until a checkpoint has them
            self.recipe_checksum = None
        self.run_id, self.lineage, self._saved_in = saved.get("run_id"), saved.get("lineage"), saved.get("directory")
        on_disk.name_as_latest(self.directory, iteration)
        self._checked = iteration

    def _compare_data(self, before: dict | None, checkpoint: Path) -> None:
        """Compare the data with that of a checkpoint; raises ValueError as `compare_data` does."""
        if line := compare_data(before, self.data, checkpoint, self.recipe.data):
            self.changed = [line]

    def _skip(self, problems: list[str]) -> list[str]:
        """Return lines about why a newer checkpoint is skipped; raise ValueError with resume=must."""
        if problems and self.resume == "must":
            raise ValueError(damage(self.directory, problems))
        return [f"WARNING: a newer checkpoint is not used: {problem}" for problem in problems]

    def settle(self) -> list[str]:
        """Choose the checkpoint to load, read it and compare its checksums, and give all ranks rank 0's choice, run id
        and lineage. A collective. Return lines about what was skipped and where the checkpoint is read from.

        Raises:
            ValueError: no checkpoint is intact, or with resume=must the newest is not.
        """
        nodes, having, lines = self._find_nodes()
        lines = [*restore.on_rank_0(lambda: self.changed), *lines]
        if len({bool(step) for step in restore.gathered(self.resumed_at)}) > 1:
            problem = "some ranks find checkpoints there, and others none"
            raise mistake("checkpoint.path", self.directory, problem=problem, allowed="a directory that all nodes see")
        if self.resumed_at:
            tried = restore.finish_uploads(self.directory, having)
            lines += tried + self._choose_and_compare(nodes, tried)
        if self.upload_limit is not None:
            self.upload_limit /= len(nodes.ranks[nodes.own])
        self.run_id, self.lineage, self.generation, locks, fork, copy_lines = restore.on_rank_0(self._begin)
        self.tracker_id = "-".join(filter(None, (self.run_id, fork)))
        lines += copy_lines
        if self.lock is None and locks is not None:
            self.lock = RunLock(*locks)
        self.leads = nodes.ranks[nodes.own][0] == torch.distributed.get_rank()
        if self.local is not None and self.leads:
            manifest.remove_leftovers(self.local, keep=self._uploads())
        self._args.zaya.update(run_id=self.run_id, lineage=self.lineage)
        self._begun = True
        return lines

    def last_good(self) -> str:
        """Return a sentence with the folder of the newest complete checkpoint."""
        try:
            step, _ = on_disk.latest(self.directory)
        except ValueError:
            step = None
        if step is None:
            return f"There is no complete checkpoint in {self.directory}"
        return f"The last good checkpoint is {on_disk.folder(self.directory, step)}"

    def put_aside_from(self, step: int) -> None:
        """Put checkpoints of `step` and later ones aside, on rank 0: they hold a state that is not to be loaded."""
        on_disk.put_aside_from(self.directory, step)

    def ended(self, error: BaseException | None) -> None:
        """Note that numbers that are not finite have ended the run, for the choice of the next start. An error of the
        configuration, of the machine or of another rank tells nothing about the checkpoint.
        """
        if self._begun and isinstance(error, NotFiniteError):
            starts.note_failure(self.directory)

    def _find_nodes(self) -> tuple[restore.Nodes, restore.Nodes, list[str]]:
        """Return the nodes with the local folder that all can use, those with the one that all can read, and why a
        local_path is not used: if one node cannot use it, none does.
        """
        readable = usable = restore.Nodes.find(self.local)
        for answers in (True, False):
            broken = {text for text in usable.gathered(functools.partial(self._local_problem, answers)) if text}
            if not broken:
                continue
            self.local, usable = None, restore.Nodes.find(None)
            lines = [f"WARNING: checkpoints are not written locally: {text}" for text in sorted(broken)]
            return usable, usable if answers else readable, lines
        return usable, readable, []

    def _local_problem(self, answers: bool) -> str | None:
        """Return why the local folder does not answer, or why it cannot be written."""
        if self.local is None:
            return None
        try:
            if answers:
                places.require_answer(self.local.parent, "checkpoint.local_path")
            else:
                make_writable(self.local, "checkpoint.local_path")
        except ValueError as error:
            return f"{error} ({os.uname().nodename})"
        return None

    def _choose_and_compare(self, nodes: restore.Nodes, uploads: list[str]) -> list[str]:
        self.resumed_at, lines = restore.on_rank_0(functools.partial(self._choose, uploads))
        while (compared := restore.compare(self.directory, self.resumed_at, nodes)).damaged:
            lines += [f"WARNING: the shared copy is read: {note}" for note in compared.notes]
            self.resumed_at, more = restore.on_rank_0(functools.partial(self._choose_before, compared.damaged))
            lines += more
        restore.on_rank_0(self._put_aside)
        self._args.load = str(restore.link(self.directory, self.resumed_at, nodes, compared))
        lines += [f"WARNING: the shared copy is read: {note}" for note in compared.notes]
        if compared.files is None:
            lines.append(
                f"WARNING: the checkpoint of step {self.resumed_at} has no checksums: another program or an earlier "
                "version wrote it. `zaya checkpoint adopt` adds them"
            )
        elif nodes.local is not None:
            lines.append(restore.origin(self.directory, self.resumed_at, nodes, compared))
        return lines

    def _choose(self, uploads: list[str]) -> tuple[int, list[str]]:
        """Return the newest complete checkpoint, and lines about newer ones. With resume=auto the one before it, if two
        starts from the newest have failed at the same step; only once, since a third failure is not the checkpoint's.

        uploads: lines about uploads that could not be finished.
        """
        step, skipped = on_disk.latest(self.directory)
        if step is None:
            raise mistake(
                str(self.directory),
                problem=f"no checkpoint is complete. {'; '.join(uploads) or 'The only one is of another run'}",
                fix="start on the nodes that hold its files, or remove its iter_* folder to begin from the start",
            )
        lines = self._skip(skipped)
        self._history = past = starts.history(self.directory, step, self.recipe_checksum, self.run_dir)
        older = on_disk.before(self.directory, step)
        if past.failed_at is None or past.passed is not None or older is None or self.resume != "auto":
            return step, lines
        failed = f"from the checkpoint of step {step} failed at step {past.failed_at}"
        if not past.repeated:
            lines.append(
                f"WARNING: the last start {failed}. If this one fails there too, the next one begins at step {older} "
                "(not with resume=must)"
            )
            return step, lines
        self._aside.append((step, manifest.FAILED))
        self._history = starts.History(passed=step)
        kept = on_disk.folder(self.directory, step).name + manifest.FAILED
        return older, [*lines, f"WARNING: a newer checkpoint is not used: two starts {failed}. It is kept as {kept}"]

    def _choose_before(self, damaged: list[str]) -> tuple[int, list[str]]:
        """Return the newest complete checkpoint before one whose content is damaged, and lines about newer ones."""
        lines = self._skip(damaged)
        self._aside.append((self.resumed_at, manifest.DAMAGED))
        self._history = starts.History()
        step, skipped = on_disk.latest(self.directory, below=self.resumed_at)
        return step, lines + self._skip(skipped)

    def _put_aside(self) -> None:
        """Rename checkpoints that are not to be loaded: else they would count as the newest to keep, and a step that is
        saved again would keep its first checkpoint.
        """
        for iteration, end in self._aside:
            on_disk.put_aside(self.directory, iteration, end)

    def _uploads(self) -> set[str]:
        """Return the names of the uploads that a later start may finish, if its nodes have their files."""
        known, begun = starts.read(self.directory).get("run_id"), self.resumed_at
        newer = [folder for step, folder in uploads(self.directory) if begun and step > begun]
        return {folder.name for folder in newer if manifest.is_of(folder, known)}

    def _begin(self) -> tuple[str, dict | None, str, tuple | None, str | None, list[str]]:
        """Check the chosen checkpoint, record the start, and return run id, lineage, generation, the lock's files and
        token, what tells a copied run from its original, and lines about it.
        """
        self.lock = RunLock.of_launcher()
        manifest.remove_leftovers(self.directory, keep=self._uploads())
        if self.resumed_at and self.resumed_at != self._checked:
            self._check(self.resumed_at, self._args)
        self.run_id = self.run_id or secrets.token_hex(4)
        fork, lines = starts.read(self.directory).get("fork") if self.resumed_at else None, []
        original = starts.original_of_copy(self.directory, self.run_id, self._saved_in) if self.resumed_at else None
        if original is not None:
            fork = secrets.token_hex(2)
            lines = [f"this run is a copy of the one in {original}, so it is another run in W&B: {self.run_id}-{fork}"]
        if self.resumed_at or starts.read(self.directory):  # a new run has no record; one of an older run is replaced
            known = {"run_id": self.run_id, "step": self.resumed_at, "recipe": self.recipe_checksum}
            past = {"failed_at": self._history.failed_at, "passed": self._history.passed}
            starts.begin(self.directory, **known, **past, fork=fork)
        locks = None if self.lock is None else (self.lock.files, self.lock.token)
        return self.run_id, self.lineage, secrets.token_hex(4), locks, fork, lines

    def check_lock(self) -> None:
        """Raise LostLockError if another start has taken this run's directories over; call it before a write."""
        if self.lock is not None:
            self.lock.check()

    def after_save(self, iteration: int) -> None:
        """Remove older checkpoints, and what killed saves have left, on rank 0, once that of `iteration` is complete."""
        if torch.distributed.get_rank() != 0 or on_disk.problems(self.directory, iteration):
            return
        manifest.remove_leftovers(self.directory)
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
