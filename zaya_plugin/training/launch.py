# SPDX-License-Identifier: Apache-2.0
"""From a recipe to running ranks: join the ranks that torchrun or SLURM has started, or start them here.

No torch import: what can be wrong with a recipe, its data or its directory is found before anything slow happens, and the
environment that torch reads at import is set before it is imported. The ranks started here are torchrun's children, but
signals go straight to them: torchrun would give them 30 seconds after SIGTERM and then kill them, amid a save.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin import compat
from zaya_plugin.config.compose import save_recipe
from zaya_plugin.config.graphs import with_graphs
from zaya_plugin.config.schema import Recipe
from zaya_plugin.config.validate import data_parallel_size, validate
from zaya_plugin.training import slurm
from zaya_plugin.training.data_handover import with_consumed
from zaya_plugin.training.handover import predecessor, saved_step
from zaya_plugin.training.memory_plan import with_recompute
from zaya_plugin.training.parent_death import die_with_parent
from zaya_plugin.training.rank_failure import first_failure
from zaya_plugin.training.run_directory import check_resume, keep_recipe, make_writable

WORKER = "zaya_plugin.training.worker"
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
HIDDEN_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # NVIDIA, ROCm, WSL
# Megatron's --deterministic-mode wants these; one ring adds in one order, and a fixed workspace keeps cuBLAS to one algorithm.
DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# Of NCCL 2.28 and later, and of an RCCL as new: what is registered is gathered by copy engines.
COPY_ENGINES = {"NCCL_CTA_POLICY": "2"}
FULL_DISK = 2**20  # free bytes under which a failure is put down to the disk


@dataclass(frozen=True)
class Plan:
    """What a launch will do. `command` is None where an outer launcher has started the ranks already. worker: the ranks' module
    and its arguments after the recipe; empty for training."""

    world_size: int
    ranks_here: int
    rank: int
    started_by: str
    command: list[str] | None
    environment: dict[str, str]
    worker: tuple[str, ...] = ()


def launch(recipe: Recipe) -> int:
    """Runs `recipe` and returns an exit code: 0, the first failing rank's own, or 128 + signal after a stop by signal.

    Raises `ValueError` for everything that a user can mend before a start, with nothing created for `dry_run`.
    """
    if recipe.dry_run:
        from zaya_plugin.training import dry_run

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
        from zaya_plugin.training.explain import explain_optimizer

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


def make_plan(recipe: Recipe, environ: Mapping[str, str], worker: Sequence[str] = ()) -> Plan:
    """Decides who starts the ranks, how many there are and in which environment they run. worker: as Plan's."""
    if all(name in environ for name in TORCHRUN_VARIABLES):
        outer, started_by = {name: environ[name] for name in TORCHRUN_VARIABLES}, "torchrun"
    else:
        outer, started_by = slurm.rank_variables(environ, recipe.master_port), "SLURM"
    if outer is not None:
        here = int(outer.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_WORLD_SIZE") or recipe.cluster.gpus_per_node)
        variables = {**rank_environment(recipe, here, environ), **outer}
        return Plan(int(outer["WORLD_SIZE"]), here, int(outer["RANK"]), started_by, None, variables, tuple(worker))
    if recipe.cluster.num_nodes > 1:
        raise ValueError(
            f"cluster.num_nodes = {recipe.cluster.num_nodes}: `zaya train` starts ranks on one machine only. Allowed: 1, or "
            "start it on every node with `torchrun --nnodes <n> --nproc-per-node <n> --rdzv-backend c10d "
            "--rdzv-endpoint <host>:<port> -m zaya_plugin.cli train ...`, or with `srun zaya train ...`"
        )
    ranks = recipe.nproc if recipe.nproc is not None else recipe.cluster.gpus_per_node
    if ranks < 1:
        raise ValueError(f"nproc = {ranks}: allowed: 1 or more")
    return Plan(
        ranks,
        ranks,
        0,
        "zaya train",
        command(recipe, ranks, worker),
        rank_environment(recipe, ranks, environ),
        tuple(worker),
    )


def command(recipe: Recipe, ranks: int, worker: Sequence[str] = ()) -> list[str]:
    """The torchrun command. Every rank writes to files; the console gets stdout of the first and the last rank alone."""
    shown = ",".join(f"{rank}:1" for rank in sorted({0, ranks - 1}))
    module, *further = worker or (WORKER,)
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{recipe.master_port or 0}"),  # 0: a free port
        *("--rdzv-id", "launch", "--local-addr", "localhost", "--role", ""),  # without a role lines have no prefix
        *("--log-dir", str(Path(recipe.run_dir) / "logs"), "--redirects", "3", "--tee", shown),
        *("-m", module, str(Path(recipe.run_dir) / "recipe.yaml"), *further),
    ]


def rank_environment(recipe: Recipe, ranks_here: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that differ from `environ` in every rank; `cluster.environment` has the last word."""
    variables = {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}"}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if recipe.cluster.threads_per_rank is not None:
        variables["OMP_NUM_THREADS"] = str(recipe.cluster.threads_per_rank)
    elif "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // ranks_here))
    if recipe.cluster.device == "cpu":
        variables |= dict.fromkeys(HIDDEN_DEVICES, "")
        variables["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's jit_fuser compiles for seconds what takes microseconds here
    parallel = recipe.parallel
    ordered = parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1
    if recipe.cluster.device == "cuda" and "CUDA_DEVICE_MAX_CONNECTIONS" not in environ:
        # Megatron insists on one queue before Blackwell where kernels must reach the device in the order of their launches, communication first. Everywhere
        # else what waits in that queue for another stream holds up all behind it, in a graph too: CUDA's own number then.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if ordered else "8"
    for wanted, values in ((recipe.cluster.deterministic, DETERMINISTIC), (recipe.parallel.nccl_ub, COPY_ENGINES)):
        if wanted:  # read by the libraries when they start
            variables |= {name: value for name, value in values.items() if name not in environ}
    if "WANDB_SILENT" not in environ:
        variables["WANDB_SILENT"] = "true"  # where the W&B run is, our own log says
    if "COLUMNS" not in environ and sys.stdout.isatty():  # the ranks' own stdout is a file
        variables["COLUMNS"] = str(shutil.get_terminal_size().columns)
    variables |= recipe.cluster.environment
    return {name: value for name, value in variables.items() if environ.get(name) != value}


def with_choices(recipe: Recipe, plan: Plan) -> Recipe:
    """`recipe` with what `auto` stands for (see `settled`); rank 0 says what that is."""
    recipe, lines = settled(recipe, plan.world_size)
    if plan.rank == 0:
        for line in lines:
            print(line, flush=True)
    return recipe


def settled(recipe: Recipe, world_size: int) -> tuple[Recipe, list[str]]:
    """`recipe` with what `auto` stands for in parallel.recompute_granularity and cluster.graphs, and lines that say so."""
    recipe, recomputed = with_recompute(recipe, world_size)
    recipe, graphs = with_graphs(recipe)
    return recipe, [line for line in (recomputed, graphs) if line is not None]


def take_over(recipe: Recipe) -> Recipe:
    """`recipe` with its place in the data; raises `ValueError` if a stage that begins cannot take over from `handover.from_run`."""
    if saved_step(Path(recipe.run_dir)) is None:
        predecessor(recipe)
    return with_consumed(recipe)


def check_surroundings(recipe: Recipe, plan: Plan) -> None:
    """Raises `ValueError` if this machine lacks what the recipe needs: torch, Megatron, a device, the port, the data."""
    check_machine(recipe, plan)
    from zaya_plugin.training.datasets import find_sources  # reads headers and sizes only, without torch

    find_sources(recipe)


def check_machine(recipe: Recipe, plan: Plan) -> None:
    """`check_surroundings` but for the data."""
    for module, remedy in (
        ("torch", "install the build for your accelerator, or `pip install 'zaya_plugin[cpu]'` for a CPU"),
        (
            "megatron.training",
            "`pip install 'megatron-core[training]>=0.19.2'`, or put a Megatron-LM checkout on PYTHONPATH",
        ),
    ):
        if not _importable(module):
            raise ValueError(
                f"{module} is not installed in {sys.executable}: {remedy}. `zaya doctor` shows what there is"
            )
    if not compat.zaya_train_fits():
        raise ValueError(
            f"megatron.core {compat.core_version()}: allowed for `zaya train`: 0.19, as in `pip install 'megatron-core[training]>=0.19.2'`. In "
            "Primus, which pins 0.16, train with `zaya export primus`"
        )
    if recipe.cluster.device == "cuda" and not any(os.path.exists(path) for path in DEVICE_FILES):
        raise ValueError(
            f"cluster.device = cuda: no accelerator on this machine ({', '.join(DEVICE_FILES)} do not exist). "
            "Allowed here: cpu; set it with cluster=cpu"
        )
    if plan.command is not None and recipe.master_port is not None and _port_in_use(recipe.master_port):
        raise ValueError(
            f"master_port = {recipe.master_port}: the port is in use. Allowed: a free port; "
            "master_port=null finds one by itself"
        )


def describe(recipe: Recipe, plan: Plan, more: Sequence[str] = ()) -> str:
    """What would run, for `dry_run`, and `more` lines; says too what would stop it now."""
    accumulation = recipe.stage.global_batch_size // (
        recipe.stage.micro_batch_size * data_parallel_size(recipe, plan.world_size)
    )
    lines = [
        f"name         {recipe.name}",
        f"run_dir      {os.path.abspath(recipe.run_dir)}",
        f"world size   {plan.world_size} ranks, {plan.ranks_here} on this machine, started by {plan.started_by}",
        f"batch        {recipe.stage.global_batch_size} sequences of {recipe.stage.seq_length} tokens a step: "
        f"{accumulation} micro-batches of {recipe.stage.micro_batch_size} a data-parallel rank",
        f"command      {shlex.join(plan.command) if plan.command else f'in this process: {WORKER}.main(recipe)'}",
        "environment  " + "\n             ".join(f"{key}={value}" for key, value in sorted(plan.environment.items())),
    ]
    for check in (
        lambda: check_resume(recipe.run_dir, recipe.resume),
        lambda: take_over(recipe),
        lambda: check_surroundings(recipe, plan),
    ):
        try:
            check()
        except ValueError as error:
            lines.append(f"would stop   {error}")
    return "\n".join([*lines, *more, "dry_run = true: nothing was created or started"])


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


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _port_in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that is only cooling down is free
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
