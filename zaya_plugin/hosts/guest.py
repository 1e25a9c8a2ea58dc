# SPDX-License-Identifier: Apache-2.0
"""ZAYA as a guest in a training script that is not ours: Megatron-LM's pretrain_gpt.py, Primus.

The host parses arguments, reads data, logs and calls pretrain(). The guest adds the model, the optimizers, the
balancing of experts, the load at the start and the removal of old checkpoints. It replaces functions of
`megatron.training.training`, as `zaya train` does (zaya_plugin.patches.hooks).
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from zaya_plugin import compat
from zaya_plugin.checkpoint import commit, on_disk, restore
from zaya_plugin.checkpoint.run_lock import RunLock
from zaya_plugin.config.arguments import DECIDED_AT_START, HOST, OWN_ARGUMENTS, ZAYA, megatron_arguments
from zaya_plugin.config.megatron_review import review_problems
from zaya_plugin.config.run_directory import written_by
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import DataSources
from zaya_plugin.ground.errors import message, mistake
from zaya_plugin.ground.parent_death import BATCH_SIGNALS
from zaya_plugin.hosts import loader_processes
from zaya_plugin.hosts.adapter import Adapter
from zaya_plugin.hosts.measured_steps import graph_warm_up
from zaya_plugin.patches import hooks
from zaya_plugin.patches.hooks import SAVE, TRAINING
from zaya_plugin.training import heartbeat
from zaya_plugin.training.kernels import kernel_lines, select_kernels, warm_up_kernels
from zaya_plugin.training.lifecycle import Lifecycle, damage


class Guest(Adapter):
    """The recipe's part of a host's run.

    Args:
        recipe: the recipe that `zaya export` wrote.
        args: the host's validated namespace. The arguments that the host does not know are added, and `load` is set to
            the checkpoint to load.
        sources: data sets of the recipe, in a host that calls `datasets`; None: the host reads the data of its own
            arguments, which the recipe does not know, and data that changed is not noticed.

    Attributes:
        resumed_at: step of the run's own checkpoint that the run resumes from, 0 for a new run.
        differences: arguments that the user gave another value than the recipe's: name -> (host's, recipe's).

    Raises:
        ValueError: the previous stage is not finished.
    """

    def __init__(self, recipe: Recipe, args: argparse.Namespace, sources: DataSources | None = None):
        if problems := [*review_problems(recipe, frozenset({**ZAYA, **HOST}))]:  # of a recipe.yaml edited by hand
            raise ValueError("\n".join(problems))
        select_kernels(recipe)
        values = megatron_arguments(recipe, {})
        for name in OWN_ARGUMENTS:
            setattr(args, name, values.get(name))
        self.differences = {
            name: (getattr(args, name, None), value)
            for name, value in values.items()
            if name not in DECIDED_AT_START and not _same(getattr(args, name, None), value)
        }
        lifecycle = Lifecycle(recipe)
        lifecycle.directory = Path(args.save)
        super().__init__(recipe, args, lifecycle, sources)
        self.resumed_at = on_disk.latest(lifecycle.directory)[0] if lifecycle.has_checkpoint else 0
        if lifecycle.has_checkpoint:
            args.load = args.save
        else:
            args.load = str(self.before.checkpoints) if self.before else recipe.handover.from_hf
        args.finetune = False
        args.exit_on_missing_checkpoint = args.load is not None
        self.heartbeat = GuestHeartbeat(args, self.resumed_at)
        self.built_optimizer = False

    def summary(self) -> list[str]:
        """Return lines for the first rank: the run's start, and arguments that differ from the recipe."""
        begins = f"resumes from step {self.resumed_at}" if self.resumed_at else "begins"
        first = (
            f"{self.recipe.name} {begins}, optimizer {self.recipe.optim.name}, megatron.core {compat.core_version()}"
        )
        differences = (
            f"--{name.replace('_', '-')} is {of_host!r} in the host and {of_recipe!r} in the recipe"
            for name, (of_host, of_recipe) in sorted(self.differences.items())
        )
        return [f"zaya: {line}" for line in (first, *differences)]

    def install(self, more: Iterable[tuple[str, Callable]] = ()) -> None:
        """Replace the host's functions for the rest of the process. more: further symbols of this host, as `hooks`."""
        relay_batch_signals(self.args)
        atexit.register(loader_processes.end)  # before multiprocessing's own, which was registered earlier
        hooks.install([*self.hooks(), *more])

    def hooks(self) -> list[tuple[str, Callable]]:
        saves = [(TRAINING + "save_checkpoint", self.save_and_prune), (SAVE, commit.save)]
        return [*super().hooks(), *saves, *self.heartbeat.hooks()]

    def check(self) -> None:
        """Take the lock of the run's directories too. Call it once the host has completed its arguments; the
        vocabulary's padding comes late.

        Raises:
            ValueError: as `Adapter.check`, or another run writes there.
        """
        if self.args.rank == 0:
            directories, save = written_by(self.recipe), self.lifecycle.directory
            if not any(save.resolve().is_relative_to(folder.resolve()) for folder in directories.values()):
                directories["--save"] = save
            self.lifecycle.lock = RunLock.take(directories)
            atexit.register(self.lifecycle.lock.release)
        step = self.before.steps if self.before else self.resumed_at
        of_megatron = self.args.load and (step or self.recipe.handover.from_hf is None)
        checkpoint = on_disk.folder(Path(self.args.load), step) if of_megatron else None
        if checkpoint is not None and not compat.can_read(checkpoint):
            raise mistake(
                str(checkpoint),
                problem=f"it was written by a later Megatron, and megatron.core {compat.core_version()} cannot read it",
                allowed="a checkpoint of this host",
                fix="train the previous stage in this host too, or continue with `zaya train`",
            )
        try:
            super().check()
        finally:  # what has changed may be the cause of an error
            for line in self.lifecycle.changed:
                print(f"zaya: {line}", flush=True)

    def optimizer(self, *positional, **named):
        """Check the kernels and build the optimizer.

        Every rank calls it before the first step and with the process group, so the kernels are checked at that point
        too. Ends the run where ranks chose different versions.
        """
        try:
            checked = warm_up_kernels(self.recipe)
        except ValueError as error:
            raise SystemExit(f"zaya: {error}") from None
        if self.args.rank == 0:  # the table raises where a version is not available, which is on no rank by now
            print(*(f"zaya: {line}" for line in (*kernel_lines(self.recipe), checked)), sep="\n", flush=True)
        self.built_optimizer = True
        return super().optimizer(*positional, **named)

    def finalize(self, finalize_model_grads, model, *positional, **named):
        """Finish the gradients and balance the experts. Ends the run if the host has built an optimizer of its own."""
        if not self.built_optimizer:
            raise SystemExit(
                "zaya: "
                + message(
                    "optim.name",
                    self.recipe.optim.name,
                    problem="the host has built another optimizer, so the model would be trained without the recipe's",
                    allowed=f"hosts that call {TRAINING}get_megatron_optimizer",
                    fix="train with Megatron's pretrain(), or use zaya_plugin.muon_optimizer in a loop of your own",
                )
            )
        super().finalize(finalize_model_grads, model, *positional, **named)

    def check_content(self) -> None:
        if self.resumed_at and (damaged := restore.compare(self.lifecycle.directory, self.resumed_at).damaged):
            raise SystemExit("zaya: " + damage(self.lifecycle.directory, damaged))

    def check_loaded(self, iteration: int) -> None:
        """Stop a host that starts from step 0 although a checkpoint exists."""
        if iteration != self.resumed_at:
            raise SystemExit(
                "zaya: "
                + message(
                    "--load",
                    self.args.load,
                    problem=f"it holds step {self.resumed_at} and the host would start from step {iteration}, because "
                    "its load failed without an error. Nothing was trained or overwritten",
                    fix="see the host's messages above this one",
                )
            )

    @heartbeat.during("save")
    def save_and_prune(self, save_checkpoint, iteration, *positional, **named):
        """Run Megatron's save, and remove older checkpoints once this one is complete.

        Ends the run if another one has taken its directories over.
        """
        try:
            self.lifecycle.check_lock()
        except ValueError as lost:
            raise SystemExit(f"zaya: {lost}") from None
        self.heartbeat.before = None
        save_checkpoint(iteration, *positional, **named)
        self.lifecycle.after_save(iteration)


class GuestHeartbeat:
    """The heartbeat of a guest's rank: phases and steps of Megatron's loop, where `zaya aegis run` asks for them.

    Args:
        args: the host's namespace.
        resumed_at: the step that the host's loop continues from.
    """

    def __init__(self, args: argparse.Namespace, resumed_at: int):
        self.args, self.resumed_at, self.step = args, resumed_at, resumed_at
        self.before: float | None = None  # the end of the last step, unless something else came after it
        heartbeat.start(args.rank)
        heartbeat.phase("build", resumed_at)

    def hooks(self) -> list[tuple[str, Callable]]:
        """Return the replaced symbols with our functions; none without a supervisor."""
        if not heartbeat.is_on():
            return []
        return [
            (TRAINING + "train", self.train),
            (TRAINING + "train_step", self.train_step),
            (TRAINING + "evaluate_and_print_results", self.evaluate),
        ]

    def train(self, train, *positional, **named):
        """Run Megatron's loop between the phases warm_up and end."""
        heartbeat.phase("warm_up", self.step)
        result = train(*positional, **named)
        heartbeat.phase("end")
        return result

    def train_step(self, train_step, *positional, **named):
        """Run Megatron's step and tell that it has finished on the host: the device may still work on it."""
        begun = time.monotonic() if self.before is None else self.before
        result = train_step(*positional, **named)
        done = getattr(self.args, "curr_iteration", None)  # before this step; counts steps that are skipped
        self.step = self.step + 1 if done is None else done + 1
        self.before = time.monotonic()
        warm = self.step > self.resumed_at + graph_warm_up(self.args)
        heartbeat.step(self.step, self.before - begun, warm=warm)
        return result

    @heartbeat.during("validate")
    def evaluate(self, evaluate_and_print_results, *positional, **named):
        """Run Megatron's validation."""
        self.before = None
        return evaluate_and_print_results(*positional, **named)


def relay_batch_signals(args: argparse.Namespace) -> None:
    """Save and leave at batch systems' signals, as at the one that Megatron's --exit-signal-handler knows. Without this
    option they end the process, as they do in Megatron alone.
    """
    if args.exit_signal_handler:
        known = getattr(args, "exit_signal", signal.SIGTERM)
        for number in {*BATCH_SIGNALS} - {known}:
            signal.signal(number, lambda *unused: os.kill(os.getpid(), known))


def _same(of_host, of_recipe) -> bool:
    """Compare two values; a list of one equals its item, and all values of a flag that is off are equal."""
    if isinstance(of_host, (list, tuple)) and len(of_host) == 1 and not isinstance(of_recipe, (list, tuple)):
        of_host = of_host[0]
    return of_host == of_recipe or (not of_host and not of_recipe) or str(of_host) == str(of_recipe)
