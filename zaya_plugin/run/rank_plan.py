# SPDX-License-Identifier: Apache-2.0
"""Who starts the ranks of a run, how many there are, and in which environment they run. No torch import."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin.config.schema import Recipe
from zaya_plugin.run import slurm

WORKER = "zaya_plugin.hosts.worker"
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
HIDDEN_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Megatron's --deterministic-mode wants these; one ring adds in one order, and a fixed workspace keeps cuBLAS to one algorithm.
DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# Of NCCL 2.28 and later, and of an RCCL as new: what is registered is gathered by copy engines.
COPY_ENGINES = {"NCCL_CTA_POLICY": "2"}


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
