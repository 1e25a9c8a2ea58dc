# SPDX-License-Identifier: Apache-2.0
"""From a recipe to running ranks: joins the ranks that torchrun or SLURM has started, or starts them, and reports the
first failure.

No torch import: errors in a recipe, its data or its directory are reported before any slow import, and the environment
that torch reads at import is set first. The ranks are torchrun's children, but signals go directly to them: torchrun
would kill them 30 seconds after SIGTERM, possibly during a save.

When one rank fails, the others follow within moments with errors about closed connections, and torchrun's summary names
one of them. The failure that is shown is that of a rank with a message for the user, else of a rank killed by a signal,
else of the first traceback.
"""

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zaya_plugin.checkpoint import places
from zaya_plugin.checkpoint.run_lock import LOCKS, RunLock
from zaya_plugin.config.compose import save_recipe
from zaya_plugin.config.run_directory import check_resume, checkpoint_path, keep_recipe, make_writable, written_by
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import damaged_data
from zaya_plugin.ground import phases, processes
from zaya_plugin.ground.errors import free_space, is_full, message, mistake
from zaya_plugin.ground.exit_codes import ENDED_EARLY, ROLL_BACK
from zaya_plugin.ground.parent_death import (
    BATCH_SIGNALS,
    COPY_SECONDS,
    GRACE,
    GRACE_SECONDS,
    LAUNCHER_PID,
    adopt_orphans,
    die_with_parent,
    on_end_signals,
    stat,
)
from zaya_plugin.run import megatron_check, start_recipe, surroundings
from zaya_plugin.run.dry_run import dry_run
from zaya_plugin.run.rank_plan import WORKER, Plan, make_plan

EXPLAIN = "zaya_plugin.hosts.optimizer_table"
SHOWN_LINES = 30
# In what torch, CUDA, HIP and hip_ops say about a capture that failed, or about a query during one (NCCL's watchdog on
# ROCm).
CAPTURE = re.compile(
    r"stream is capturing|during (CUDA graph )?capture|capturing (blocking )?stream|CapturedEvent|StreamCapture"
    r"|a graph is captured|outside graph capture"
)
# Tracebacks that ended no process: of a destructor, a thread, a function at the exit, a child.
BLOCK = r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*.*\n?"
CHAIN = re.compile(rf"^{BLOCK}(?:\n(?:During handling|The above exception).*\n\n{BLOCK})*", re.MULTILINE)
ENDED_NOTHING = re.compile(
    rf"^(?:Exception ignored|Exception in thread|Error in atexit|Process \S+:).*\n{BLOCK}(?:\n.*:\n\n{BLOCK})*",
    re.MULTILINE,
)
FROM_TORCHRUN = signal.SIGTERM  # how torchrun itself stops the surviving ranks


def launch(
    recipe: Recipe,
    verbose: bool = False,
    plan: Plan | None = None,
    vocabulary: int | None = None,
    run: Callable[[Recipe, Plan], int] | None = None,
) -> int:
    """Run `recipe` and return an exit code: 0, that of the first failing rank, ENDED_EARLY after a signal upon which
    the ranks have saved, or 128 + signal after one upon which they have not.

    Raises ValueError for a user's mistake before the start. With `dry_run` nothing is created.

    Args:
        verbose: the dry run prints everything.
        plan: of `make_plan` for this recipe, which has validated it; None: made by this call.
        vocabulary: rows of the embedding for random tokens in place of the recipe's data.
        run: called in place of the training with the recipe without `auto` and the plan, rank 0 holding the run's lock.
    """
    phases.begin("checking directories, checkpoints and data")
    plan = plan or make_plan(recipe, os.environ, any_node=recipe.dry_run)
    if recipe.dry_run and not recipe.explain_optim:
        text, problems = dry_run(recipe, plan, verbose, vocabulary)
        phases.end()
        print(text, flush=True)
        if problems:
            raise ValueError("\n".join(problems))
        return 0
    if plan.rank != 0:
        phases.show(None)
    is_training, composed = run is None, recipe
    recipe = start_recipe.with_choices(recipe, plan)
    if recipe.explain_optim:
        return become_rank(recipe, replace(plan, worker=(EXPLAIN,)))
    run = run or partial(_start, auto_graphs=composed.cluster.graphs == "auto")
    places.require_answer(checkpoint_path(recipe), "checkpoint.path")
    if recipe.handover.from_run is not None:
        places.require_answer(recipe.handover.from_run, "handover.from_run")
    if is_training and recipe.optim.lora.rank is not None and recipe.handover.from_hf is None:
        raise mistake(
            "handover.from_hf",
            None,
            problem="checkpoints of adapters hold no other weights, so those have to be published ones",
            allowed="a folder, or a name on the Hub such as Zyphra/ZAYA1-base",
        )
    check_resume(recipe)
    start_recipe.check_changed_keys(recipe, plan)
    recipe = start_recipe.take_over(recipe)
    surroundings.check_directories(recipe)
    surroundings.check_surroundings(recipe, plan, vocabulary)
    if plan.command is not None:  # ranks of an outer launcher have Megatron validate at once
        megatron_check.check(recipe, plan)
        megatron_check.close()
    if is_training and plan.rank == 0:
        print(*start_recipe.cost_lines(composed, plan), sep="\n", flush=True)
    make_writable(recipe.run_dir)
    if Path(recipe.checkpoint.path).is_absolute():
        make_writable(checkpoint_path(recipe), "checkpoint.path")
    if plan.rank != 0:
        return run(recipe, plan)
    lock = RunLock.take(written_by(recipe))
    try:
        keep_recipe(recipe, recipe.run_dir)
        return run(recipe, replace(plan, environment={**plan.environment, LOCKS: lock.shared()}))
    finally:
        phases.end()
        lock.release()


def _start(recipe: Recipe, plan: Plan, auto_graphs: bool) -> int:
    """Join or start the ranks of `plan`, a second time without graphs where `auto` chose them and a capture failed."""
    ranks = "this rank" if plan.command is None else f"{plan.local_ranks} ranks" if plan.local_ranks > 1 else "1 rank"
    phases.begin(f"starting {ranks}: importing torch and Megatron (log: {Path(recipe.run_dir) / 'logs'})")
    if plan.command is None:
        try:
            return become_rank(recipe, plan)
        except Exception as error:
            if recipe.cluster.graphs != "none" and capture_raised(error):
                raise without_graphs(recipe, error) from error
            raise
    logs = Path(recipe.run_dir) / "logs"
    ended = run_ranks(plan, logs)
    # A file that was mapped is shorter now, or its disk fails.
    if ended.code == 128 + signal.SIGBUS and (damage := damaged_data(recipe)) is not None:
        print(f"zaya: {damage}", file=sys.stderr)
    may_restart = ended.code and not ended.stopped and auto_graphs and recipe.cluster.graphs != "none"
    if may_restart and ended.folder is not None and capture_failed(ended.folder):
        text = "zaya: cluster.graphs=auto: the step could not be captured as a graph; starting again kernel by kernel"
        print(text, file=sys.stderr, flush=True)
        recipe = replace(recipe, cluster=replace(recipe.cluster, graphs="none"))
        keep_recipe(recipe, recipe.run_dir)
        ended = run_ranks(plan, logs)
    return ended.code


@dataclass(frozen=True)
class Ended:
    """How a launch ended: its exit code, torchrun's folder of logs (None if torchrun failed before it made one), and
    whether a signal to this process stopped it.
    """

    code: int
    folder: Path | None = None
    stopped: bool = False


def capture_failed(folder: Path) -> bool:
    """Return whether a rank of the launch with this folder of logs reports that the capture of a graph failed."""
    return any(CAPTURE.search(_read(path)) for path in folder.glob("attempt_*/*/stderr.log"))


def capture_raised(error: BaseException | None) -> bool:
    """Return whether this error, or one that led to it, says that the capture of a graph failed."""
    while error is not None and not CAPTURE.search(str(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def without_graphs(recipe: Recipe, error: Exception) -> ValueError:
    """Return the message of a rank of torchrun or SLURM whose capture failed. It cannot start again kernel by kernel,
    since all ranks would have to, and their devices and communicators are in an unknown state.
    """
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return mistake(
        "cluster.graphs",
        recipe.cluster.graphs,
        problem=f"the step could not be captured as a graph: {text}",
        allowed="none, or full_iteration where the capture works (`zaya verify --only graph_capture` tries one)",
        fix="cluster.graphs=none in the command of all ranks",
    )


def become_rank(recipe: Recipe, plan: Plan) -> int:
    """Run the worker in this process, as `python -m` would: processes that it spawns import the worker as their main
    module.

    The recipe is passed in a file of this rank, since rank 0 may not have written the shared one yet.
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


def run_ranks(plan: Plan, log_dir: Path) -> Ended:
    """Start torchrun, pass signals to the ranks and return how they ended; see `launch`."""
    log_dir.mkdir(parents=True, exist_ok=True)
    before = set(log_dir.glob("launch_*"))
    environment = {**os.environ, **plan.environment}
    environment[GRACE] = environment.get(GRACE) or "inf"  # the signals below have no time limit
    environment[LAUNCHER_PID] = str(os.getpid())
    environment.pop("HYDRA_FULL_ERROR", None)
    torchrun_log = log_dir / "torchrun.log"
    others = _children(os.getpid())
    adopt_orphans()
    with open(torchrun_log, "w") as stderr:
        torchrun = subprocess.Popen(
            plan.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which passes it on
            preexec_fn=_as_torchrun,
        )
        received: dict[int, float] = {}
        previous = on_end_signals(lambda number, frame: _pass_on(number, torchrun.pid, received))
        try:
            code = torchrun.wait()
            if code < 0:
                _await_orphans(others)
        finally:
            adopt_orphans(False)
            for number, handler in previous.items():
                signal.signal(number, handler)
    folder = next(iter(set(log_dir.glob("launch_*")) - before), None)
    codes = set(_exit_codes(torchrun_log).values())
    if received:
        print(f"zaya: stopped by {signal.Signals(next(iter(received))).name}", file=sys.stderr)
    # torchrun ends the others with SIGTERM when the first rank has left
    early = ENDED_EARLY in codes and codes <= {ENDED_EARLY, -FROM_TORCHRUN}
    if folder is not None and (early or code < 0):
        print("".join(early_ends(folder)), end="", file=sys.stderr)
    if early:
        return Ended(ENDED_EARLY, folder, stopped=True)
    if received:
        return Ended(128 + next(iter(received)), stopped=True)
    if code == 0:
        return Ended(0)
    if code < 0:
        print(f"zaya: torchrun was killed by {_signal_name(-code)}; its ranks have ended", file=sys.stderr)
        return Ended(128 - code, folder, stopped=True)
    if is_full(log_dir):
        # The ranks' own messages are on that disk and incomplete.
        problem = f"No space left on device ({free_space(str(log_dir))}); earlier checkpoints are complete"
        fix = "free some space, then the same command with resume=auto"
        print(f"zaya: {message('run_dir', log_dir.parent, problem=problem, fix=fix)}", file=sys.stderr)
    failure = first_failure(folder, torchrun_log) if folder else None
    if failure is not None:
        print(failure.message, file=sys.stderr)
        return Ended(failure.exit_code, folder)
    print(f"zaya: torchrun failed with exit code {code}:\n{torchrun_log.read_text().rstrip()}", file=sys.stderr)
    return Ended(code, folder)


def _as_torchrun() -> None:
    """In the process that becomes torchrun: if this one is killed, torchrun and the ranks get SIGTERM. It knows no
    signals of batch systems, which come to all processes of a job; its ranks do.
    """
    die_with_parent()
    for number in BATCH_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _pass_on(number: int, torchrun: int, received: dict[int, float]) -> None:
    """Send SIGTERM to every rank, upon which they save and leave; SIGKILL when the same signal comes again, and is no
    copy. A batch system warns by one signal, and ends the job by another one.

    received: when each signal came first.
    """
    first, now = not received, time.monotonic()
    repeated = now - received.setdefault(number, now) > COPY_SECONDS
    ranks = _children(torchrun)
    if first:
        print(
            f"zaya: stopping; the ranks save first. To stop without saving, send it again after {COPY_SECONDS:g} s",
            file=sys.stderr,
            flush=True,
        )
    processes.send(ranks or [torchrun], signal.SIGKILL if repeated else signal.SIGTERM)


def _await_orphans(others: list[int]) -> None:
    """Wait for the ranks of a torchrun that was killed, which have got SIGTERM from the kernel; kill those that stay.

    others: children of this process from before the launch.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while left := [pid for pid in _children(os.getpid()) if pid not in others]:
        if time.monotonic() > deadline:
            processes.send(left, signal.SIGKILL)
        time.sleep(0.05)


def early_ends(folder: Path) -> list[str]:
    """Return the lines about an early end in the ranks' logs of this launch, without repetitions."""
    texts = (_read(path) for path in sorted(folder.glob("attempt_*/*/stderr.log")))
    lines = (line for text in texts for line in text.splitlines(keepends=True))
    return list(dict.fromkeys(line for line in lines if line.startswith("zaya: a signal ended the run early")))


def _children(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`; none without /proc."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if (fields := stat(pid)) and int(fields[1]) == parent and fields[0] != "Z"]


@dataclass(frozen=True)
class RankFailure:
    """The first failure of a launch: rank, exit code as a shell shows it, the end of the rank's stderr, and its log
    file.
    """

    rank: int
    exit_code: int
    text: str
    log: Path

    @property
    def message(self) -> str:
        """The text for the console: the rank's own message where it left with one, else the traceback."""
        start = self.text.rfind("zaya: ")
        if (
            self.exit_code in (1, 2, ROLL_BACK)
            and start >= 0
            and "Traceback (most recent call last)" not in self.text[start:]
        ):
            return self.text[start:]
        return (
            f"zaya: rank {self.rank} failed first, exit code {self.exit_code}:\n{self.text}\n"
            f"zaya: complete log: {self.log}"
        )


def first_failure(log_dir: Path, torchrun_log: Path) -> RankFailure | None:
    """Return the first failing rank under `log_dir` (torchrun's folder of this launch), or None if no rank has
    failed.
    """
    exit_codes = _exit_codes(torchrun_log)
    stderr = {int(path.parent.name): path for path in log_dir.glob("attempt_*/*/stderr.log")}
    killed = [rank for rank, code in exit_codes.items() if code < 0 and -code != FROM_TORCHRUN and rank in stderr]
    # A rank that leaves with a message for the user ends the others; their tracebacks are about the connection.
    mistaken = [rank for rank, code in exit_codes.items() if rank in stderr and _left_with_message(code, stderr[rank])]
    with_traceback = [rank for rank, path in stderr.items() if "Traceback (most recent call last)" in _last_part(path)]
    with_traceback.sort(key=lambda rank: stderr[rank].stat().st_mtime_ns)
    rank = next(iter(mistaken + killed + with_traceback + [rank for rank in exit_codes if rank in stderr]), None)
    if rank is None:
        return None
    code = exit_codes.get(rank, 1)
    if -code == FROM_TORCHRUN and rank in with_traceback:
        code = 1  # on a busy machine torchrun's signal for another rank comes before the end of this one
    if code < 0:
        text = f"killed by {_signal_name(-code)}"
        if -code == signal.SIGKILL:
            text += " (the system does this when memory runs out)"
        if -code == signal.SIGBUS:
            text += " (a file that was mapped into memory is shorter now, or its disk failed)"
        return RankFailure(rank, 128 - code, text, stderr[rank])
    return RankFailure(rank, code, last_words(_last_part(stderr[rank])), stderr[rank])


def _left_with_message(code: int, stderr: Path) -> bool:
    """Return whether a rank left with a message of its own, for a user's mistake (2) or because training cannot go on
    (1, ROLL_BACK).
    """
    text = _last_part(stderr)
    start = max(text.rfind("\nzaya: "), 0 if text.startswith("zaya: ") else -1)
    return (
        code in (2, ROLL_BACK) and start >= 0 or code == 1 and start > text.rfind("Traceback (most recent call last)")
    )


def _last_part(stderr: Path) -> str:
    """Return what a rank wrote, without tracebacks that ended no process."""
    return ENDED_NOTHING.sub("", _read(stderr))


def last_words(stderr: str) -> str:
    """Return the last traceback in `stderr`, behind the error that it began with,
    or its last lines where it has none.
    """
    start = stderr.rfind("Traceback (most recent call last)")
    if (chains := CHAIN.findall(stderr)) and chains[-1].rstrip() != (first := re.match(BLOCK, chains[-1])[0].rstrip()):
        return f"it began with {first.splitlines()[-1]}\n{last_words(stderr[start:])}"
    lines = stderr[max(start, 0) :].rstrip().splitlines()
    if start >= 0 and len(lines) > SHOWN_LINES:
        return "\n".join([lines[0], "  ...", *lines[-SHOWN_LINES:]])
    return "\n".join(lines[-SHOWN_LINES:])


def _exit_codes(torchrun_log: Path) -> dict[int, int]:
    """Return the exit codes in torchrun's summary, rank -> code; the root cause comes first."""
    text = _read(torchrun_log)
    root = text.rfind("Root Cause")
    pattern = r"rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)"
    codes: dict[int, int] = {}
    for rank, code in re.findall(pattern, text[max(root, 0) :]) + re.findall(pattern, text):
        codes.setdefault(int(rank), int(code))
    return codes


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
