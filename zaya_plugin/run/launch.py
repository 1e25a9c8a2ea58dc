# SPDX-License-Identifier: Apache-2.0
"""From a recipe to running ranks: join the ranks that torchrun or SLURM has started, or start them here.

No torch import: what can be wrong with a recipe, its data or its directory is found before anything slow happens, and the
environment that torch reads at import is set before it is imported. The ranks started here are torchrun's children, but
signals go straight to them: torchrun would give them 30 seconds after SIGTERM and then kill them, amid a save.
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from zaya_plugin.config.compose import save_recipe
from zaya_plugin.config.run_directory import check_resume, keep_recipe, make_writable
from zaya_plugin.config.schema import Recipe
from zaya_plugin.config.validate import validate
from zaya_plugin.hosts.parent_death import die_with_parent
from zaya_plugin.run import dry_run
from zaya_plugin.run.before_start import check_surroundings, take_over, with_choices
from zaya_plugin.run.rank_failure import first_failure
from zaya_plugin.run.rank_plan import WORKER, Plan, make_plan

FULL_DISK = 2**20  # free bytes under which a failure is put down to the disk


def launch(recipe: Recipe) -> int:
    """Runs `recipe` and returns an exit code: 0, the first failing rank's own, or 128 + signal after a stop by signal.

    Raises `ValueError` for everything that a user can mend before a start, with nothing created for `dry_run`.
    """
    if recipe.dry_run:
        plan = dry_run.plan_of(recipe, os.environ)
        validate(recipe, plan.world_size)
        if not recipe.explain_optim:
            print(dry_run.describe(recipe, plan))
            return 0
    else:
        plan = make_plan(recipe, os.environ)
        validate(recipe, plan.world_size)
    recipe = with_choices(recipe, plan)
    if recipe.explain_optim:
        from zaya_plugin.hosts.explain import explain_optimizer

        explain_optimizer(recipe)
        return 0
    check_resume(recipe.run_dir, recipe.resume)
    recipe = take_over(recipe)
    check_surroundings(recipe, plan)
    make_writable(recipe.run_dir)
    if plan.rank == 0:
        keep_recipe(recipe, recipe.run_dir)
    if plan.command is None:
        return become_rank(recipe, plan)
    return run_ranks(plan, Path(recipe.run_dir) / "logs")


def become_rank(recipe: Recipe, plan: Plan) -> int:
    """Runs the worker in this process, as `python -m` would: what it spawns imports the worker again as its main module.

    The recipe goes through a file of this rank's own, since rank 0 may not have written the shared one yet.
    """
    os.environ.update(plan.environment)
    module, *further = plan.worker or (WORKER,)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        save_recipe(recipe, path)
        arguments, sys.argv = sys.argv, [module, str(path), *further]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.argv = arguments
    return 0


def run_ranks(plan: Plan, log_dir: Path) -> int:
    """Starts torchrun, hands signals to the ranks and returns the exit code of the first that failed."""
    log_dir.mkdir(parents=True, exist_ok=True)
    before = set(log_dir.glob("launch_*"))
    environment = {**os.environ, **plan.environment}
    environment.pop("HYDRA_FULL_ERROR", None)
    torchrun_log = log_dir / "torchrun.log"
    with open(torchrun_log, "w") as stderr:
        torchrun = subprocess.Popen(
            plan.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which passes it on
            preexec_fn=die_with_parent,  # torchrun gets SIGTERM, and with it the ranks, should this process be killed outright
        )
        received: list[int] = []
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in previous:
            signal.signal(number, lambda number, frame: _pass_on(number, torchrun.pid, received))
        try:
            code = torchrun.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
    if received:
        print(f"zaya: stopped by {signal.Signals(received[0]).name}", file=sys.stderr)
        return 128 + received[0]
    if code == 0:
        return 0
    if (free := shutil.disk_usage(log_dir).free) < FULL_DISK:
        # The ranks' own messages are on that disk, and cut off.
        print(
            f"zaya: No space left on device: {free // 1024} KiB are free where {log_dir.parent} lies. Checkpoints that were "
            "whole are still whole: make room and go on with resume=auto",
            file=sys.stderr,
        )
    for folder in set(log_dir.glob("launch_*")) - before:
        failure = first_failure(folder, torchrun_log)
        if failure is not None:
            print(failure.message, file=sys.stderr)
            return failure.exit_code
    print(f"zaya: torchrun failed with exit code {code}:\n{torchrun_log.read_text().rstrip()}", file=sys.stderr)
    return code if code > 0 else 128 - code


def _pass_on(number: int, torchrun: int, received: list[int]) -> None:
    """First signal: SIGTERM to every rank, which saves and leaves. Any later one: SIGKILL."""
    received.append(number)
    ranks = _children(torchrun)
    if len(received) == 1:
        print("zaya: stopping; the ranks save first. Once more to stop without saving", file=sys.stderr, flush=True)
    for pid in ranks or [torchrun]:
        try:
            os.kill(pid, signal.SIGTERM if len(received) == 1 else signal.SIGKILL)
        except ProcessLookupError:
            pass


def _children(parent: int) -> list[int]:
    """Processes whose parent is `parent`; none where there is no /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
