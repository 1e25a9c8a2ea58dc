# SPDX-License-Identifier: Apache-2.0
"""Decides who starts the ranks of a run, how many there are, and their environment. No torch import."""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin.config.environment import variable_problems
from zaya_plugin.config.schema import Recipe
from zaya_plugin.config.validate import validate
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.node_list import node_names
from zaya_plugin.plan.expected_step import COPY_ENGINES

WORKER = "zaya_plugin.hosts.worker"
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
HIDDEN_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Required by Megatron's --deterministic-mode; one ring adds in one order, and a fixed workspace keeps cuBLAS to one
# algorithm.
DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# Transformer Engine's fp32 products are TF32 on NVIDIA, independent of torch's switches;
# cuBLAS reads this when it starts.
FULL_FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}


@dataclass(frozen=True)
class Plan:
    """One launch.

    Attributes:
        local_ranks: ranks on this machine. rank: this process's, 0 where it starts the ranks.
        command: the torchrun command, None where an outer launcher has started the ranks.
        environment: variables that differ from this process's.
        worker: the ranks' module and its arguments after the recipe; empty for training.
    """

    world_size: int
    local_ranks: int
    rank: int
    started_by: str
    command: list[str] | None
    environment: dict[str, str]
    worker: tuple[str, ...] = ()


def make_plan(recipe: Recipe, environ: Mapping[str, str], worker: Sequence[str] = (), any_node: bool = False) -> Plan:
    """Return the plan for `environ`: join the ranks of torchrun or SLURM, or start them.

    This is the one place in which a process that starts or joins a run validates its recipe; a rank validates the one
    that it gets, with the values for `auto` (hosts/worker.py).

    Args:
        worker: as Plan's.
        any_node: for a dry run, return the launch on every node where the recipe has several nodes.

    Raises:
        ValueError: the environment contradicts itself, or the recipe is impossible on these ranks.
    """
    plan = unchecked_plan(recipe, environ, tuple(worker), any_node)
    validate(recipe, plan.world_size)
    return plan


def planned_ranks(recipe: Recipe) -> int:
    """Return the number of ranks that the recipe is made for, on any machine."""
    return recipe.nproc or recipe.cluster.num_nodes * recipe.cluster.gpus_per_node


def unchecked_plan(recipe: Recipe, environ: Mapping[str, str], worker: tuple[str, ...], any_node: bool = False) -> Plan:
    """Return `make_plan`'s plan for ranks that do not train the recipe, which is not validated."""
    check_environment(environ)
    if all(name in environ for name in TORCHRUN_VARIABLES):
        outer, started_by = {name: environ[name] for name in TORCHRUN_VARIABLES}, "torchrun"
    else:
        outer, started_by = slurm_variables(environ, recipe.master_port), "SLURM"
    if outer is not None:
        local_ranks = int(
            outer.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_WORLD_SIZE") or recipe.cluster.gpus_per_node
        )
        variables = {**rank_environment(recipe, local_ranks, environ), **outer}
        return Plan(int(outer["WORLD_SIZE"]), local_ranks, int(outer["RANK"]), started_by, None, variables, worker)
    nodes, local_ranks = recipe.cluster.num_nodes, recipe.cluster.gpus_per_node
    if nodes > 1 and any_node:
        words = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(local_ranks), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "<first host>:29500", "-m", "zaya_plugin.cli", "train"]
        variables = rank_environment(recipe, local_ranks, environ)
        return Plan(
            nodes * local_ranks, local_ranks, 0, "torchrun on every node, or `zaya export slurm`", words, variables
        )
    if nodes > 1:
        raise mistake(
            "cluster.num_nodes",
            nodes,
            problem="`zaya train` starts ranks on one machine only",
            allowed="1, or an outer launcher on every node",
            fix="`srun zaya train ...`, or on every node `torchrun --nnodes <n> --nproc-per-node <n> --rdzv-backend "
            "c10d --rdzv-endpoint <host>:<port> -m zaya_plugin.cli train ...`",
        )
    ranks = local_ranks if recipe.nproc is None else recipe.nproc
    if ranks < 1:
        raise mistake("nproc", ranks, problem="a run has at least one rank", allowed="1 or more", fix="nproc=1")
    variables = rank_environment(recipe, ranks, environ)
    return Plan(ranks, ranks, 0, "zaya train", command(recipe, ranks, worker), variables, worker)


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise ValueError if a variable has a value that is not allowed, or those of an outer launcher are incomplete or
    out of range.

    Else a rank would wait for others that do not exist, or fail in a library that does not name the variable.
    """
    if problems := list(variable_problems(environ)):
        raise ValueError("\n".join(problems))
    slurm = is_task(environ)  # also `srun --pty bash`, of one task
    names = ("SLURM_PROCID", counted := task_count(environ), "SLURM_LOCALID")
    if slurm:
        _complete(environ, names, "as srun sets them")
        tasks = whole_variable(environ, counted, 1)
        whole_variable(environ, "SLURM_PROCID", 0, tasks - 1, counted)
        whole_variable(environ, "SLURM_LOCALID", 0, tasks - 1, counted)
    pairs = tuple(zip(TORCHRUN_VARIABLES, names, strict=True))
    if any(name in environ for name in TORCHRUN_VARIABLES):
        # Job scripts often export some of torchrun's variables for other programs; they must then say the same.
        if not slurm or any(name in environ and environ[name] != environ[same] for name, same in pairs):
            _complete(environ, (*TORCHRUN_VARIABLES, "MASTER_ADDR", "MASTER_PORT"), "as torchrun sets them")
        if all(name in environ for name in TORCHRUN_VARIABLES):
            ranks = whole_variable(environ, "WORLD_SIZE", 1)
            whole_variable(environ, "RANK", 0, ranks - 1, "WORLD_SIZE")
            local_ranks = (
                whole_variable(environ, "LOCAL_WORLD_SIZE", 1, ranks, "WORLD_SIZE")
                if "LOCAL_WORLD_SIZE" in environ
                else ranks
            )
            whole_variable(
                environ, "LOCAL_RANK", 0, local_ranks - 1, "LOCAL_WORLD_SIZE" if local_ranks != ranks else "WORLD_SIZE"
            )
    if "MASTER_PORT" in environ:
        whole_variable(environ, "MASTER_PORT", 0, 65535)


def _complete(environ: Mapping[str, str], names: Sequence[str], how: str) -> None:
    present = [name for name in names if environ.get(name)]
    if missing := [name for name in names if not environ.get(name)]:
        first = present[0] if present else next(name for name in names if name in environ)
        raise mistake(
            first,
            environ[first],
            problem=f"is set in the environment without {', '.join(missing)}",
            allowed=f"all of {', '.join(names)}, {how}, or none of them",
            fix=f"unset {' '.join(name for name in names if name in environ)}",
        )


def whole_variable(environ: Mapping[str, str], name: str, least: int, most: int | None = None, of: str = "") -> int:
    """Return the variable as a number; raises ValueError if it is not one, or out of range.
    of: the variable that limits it.
    """
    text = environ[name]
    number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None
    if number is None or number < least or most is not None and number > most:
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise mistake(
            name,
            text,
            problem="is set in the environment and is " + ("not a whole number" if number is None else "out of range"),
            allowed=allowed + (f" ({of}={environ[of]})" if of else ""),
            fix=f"unset {name}, or start the ranks with torchrun or srun, which set it",
        )
    return number


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of an `srun`. The batch script also has SLURM_PROCID=0, and is none."""
    return "SLURM_PROCID" in environ and (environ.get("ENVIRONMENT") != "BATCH" or "SLURM_STEP_ID" in environ)


def task_count(environ: Mapping[str, str]) -> str:
    """Return the variable with the number of tasks of this step. SLURM_NTASKS may be of the whole job: a shell inside
    an interactive step (`salloc`) has it, and is the only task of its step.
    """
    return "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def command(recipe: Recipe, ranks: int, worker: Sequence[str] = ()) -> list[str]:
    """Return the torchrun command. Every rank writes to files; the console shows stdout of the first and the last rank
    only.
    """
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


def core_count() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_environment(recipe: Recipe, local_ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of every rank that differ from `environ`; `cluster.environment` overrides all others."""
    variables = {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}"}
    if recipe.cluster.threads_per_rank is not None:
        variables["OMP_NUM_THREADS"] = str(recipe.cluster.threads_per_rank)
    elif "OMP_NUM_THREADS" not in environ:
        variables["OMP_NUM_THREADS"] = str(max(1, core_count() // local_ranks))
    if recipe.cluster.device == "cpu":
        variables |= dict.fromkeys(HIDDEN_DEVICES, "")
        # Compiling Megatron's jit_fuser functions takes seconds and saves microseconds on a CPU.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    ordered = recipe.parallel.tensor_model_parallel_size > 1 or recipe.parallel.context_parallel_size > 1
    if recipe.cluster.device == "cuda" and "CUDA_DEVICE_MAX_CONNECTIONS" not in environ:
        # Before Blackwell, Megatron requires one queue where kernels must reach the device in the order of their
        # launches, communication first. In all other cases a kernel that waits in that queue for another stream delays
        # all kernels behind it, in a graph too: CUDA's default then.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if ordered else "8"
    conditions = (
        (recipe.cluster.deterministic, DETERMINISTIC),
        (recipe.parallel.nccl_ub, COPY_ENGINES),
        (recipe.cluster.transformer_impl == "transformer_engine" and recipe.cluster.dtype == "fp32", FULL_FP32),
    )
    for applies, values in conditions:
        if applies:  # read by the libraries when they start
            variables |= {name: value for name, value in values.items() if name not in environ}
    if "WANDB_SILENT" not in environ:
        variables["WANDB_SILENT"] = "true"  # our own log names the W&B run
    if "COLUMNS" not in environ and sys.stdout.isatty():  # the ranks' own stdout is a file
        variables["COLUMNS"] = str(shutil.get_terminal_size().columns)
    variables |= recipe.cluster.environment
    return {name: value for name, value in variables.items() if environ.get(name) != value}


def slurm_variables(environ: Mapping[str, str], master_port: int | None = None) -> dict[str, str] | None:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this task, or None outside
    `srun`.

    All tasks must agree without communication: the address is the first host of the step, the port is computed from the
    job id.
    """
    counted = task_count(environ)
    if not is_task(environ) or counted not in environ or "SLURM_LOCALID" not in environ:
        return None
    tasks = int(environ[counted])
    if tasks < 2:
        return None
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not hosts and not environ.get("MASTER_ADDR"):
        raise mistake(
            "SLURM_JOB_NODELIST",
            problem="is not set, so the address of rank 0 is unknown",
            fix="export MASTER_ADDR=<host of rank 0>",
        )
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or first_host(hosts),
        "MASTER_PORT": str(master_port or environ.get("MASTER_PORT") or port(environ.get("SLURM_JOB_ID", "0"))),
    }
    local = tasks_on_node(environ)
    return variables if local is None else {**variables, "LOCAL_WORLD_SIZE": str(local)}


def port(job_id: str) -> int:
    """Return a port that two jobs on one node rarely share, below the range that Linux assigns (from 32768)."""
    return 20000 + int(re.sub(r"\D", "", job_id) or 0) % 10000


def tasks_on_node(environ: Mapping[str, str]) -> int | None:
    """Return the tasks on this node from SLURM_STEP_TASKS_PER_NODE, such as `8(x2),4`, or None where it is not set."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not text:
        return None
    counts = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return None
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    node = whole_variable(environ, "SLURM_NODEID", 0) if "SLURM_NODEID" in environ else 0
    return counts[node] if node < len(counts) else None


def first_host(hosts: str) -> str:
    """Return the first name of the node list in SLURM_JOB_NODELIST."""
    try:
        return node_names(hosts)[0]
    except ValueError as error:
        raise mistake("SLURM_JOB_NODELIST", hosts, problem=str(error)) from None
