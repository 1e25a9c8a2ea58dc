# SPDX-License-Identifier: Apache-2.0
"""`zaya slurm`: a batch script that a person can read, for a run or a whole curriculum; submitit as another way. No torch import."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from zaya_plugin.config.schema import Recipe
from zaya_plugin.run.rank_plan import rank_environment

MINUTES_TO_SAVE = 10  # before the time limit SLURM sends SIGTERM, upon which the ranks save and leave


def script(recipe: Recipe, commands: Sequence[Sequence[str]]) -> str:
    """The text of an sbatch script that runs `commands` (words after `srun`) one after the other on all nodes."""
    cluster, run_dir = recipe.cluster, os.path.abspath(recipe.run_dir)
    options = [
        f"--job-name={recipe.name}",
        f"--nodes={cluster.num_nodes}",
        f"--ntasks-per-node={cluster.gpus_per_node}",
        *([f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.device == "cuda" else []),
        "--exclusive",
        f"--signal=TERM@{60 * MINUTES_TO_SAVE}",
        "--requeue",
        "--open-mode=append",
        f"--output={run_dir}/slurm-%j.out",
        *cluster.sbatch,
    ]
    variables = job_environment(recipe)
    lines = [
        "#!/bin/bash",
        f"# {recipe.name}: {cluster.num_nodes} nodes of {cluster.gpus_per_node}, written by `zaya slurm`.",
        "# One task a device: `zaya` takes rank, world size and the first host from srun's variables.",
        f"# {MINUTES_TO_SAVE} minutes before its time limit the job gets SIGTERM, saves and leaves; sbatch this again to go on.",
        *(f"#SBATCH {option}" for option in options),
        "",
        "set -euo pipefail",
        f"mkdir -p {shlex.quote(run_dir)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        "",
    ]
    srun = ["srun", "--kill-on-bad-exit=1"]
    if cluster.numa_nodes:
        # Memory and threads of a rank on the socket of its device and NIC.
        srun.append(f"--cpu-bind=map_ldom:{','.join(map(str, cluster.numa_nodes))}")
    lines += [" \\\n  ".join([shlex.join(srun), shlex.join(command)]) for command in commands]
    return "\n".join(lines) + "\n"


def job_environment(recipe: Recipe) -> dict[str, str]:
    """What the script exports: nothing of this machine, whose cores and terminal are not the nodes'."""
    cluster = recipe.cluster
    variables = rank_environment(recipe, cluster.gpus_per_node, {"COLUMNS": "", "OMP_NUM_THREADS": ""})
    return {name: value for name, value in variables.items() if not name.startswith("TORCHELASTIC_")}


def check_slurm(recipe: Recipe) -> None:
    """Raises ValueError where the recipe's SLURM keys contradict each other."""
    cluster = recipe.cluster
    if cluster.numa_nodes and len(cluster.numa_nodes) != cluster.gpus_per_node:
        raise ValueError(
            f"cluster.numa_nodes = {cluster.numa_nodes}: allowed: one for each of cluster.gpus_per_node = {cluster.gpus_per_node} "
            "ranks of a node, or []"
        )
    for option in cluster.sbatch:
        if not option.startswith("-"):
            raise ValueError(f"cluster.sbatch: {option!r}: allowed: options of sbatch, such as --partition=mi300x")


def submit(recipe: Recipe, commands: Sequence[Sequence[str]], executor_cluster: str | None = None) -> str:
    """Submits through submitit and returns the job's id; every task runs `commands` as `zaya` would.

    Args:
        executor_cluster: submitit's `cluster`: None finds SLURM, "debug" runs in this process.

    Raises:
        ValueError: submitit is not installed.
    """
    try:
        import submitit
    except ImportError as missing:
        raise ValueError(
            "--submitit: the package submitit is not installed: pip install submitit, or sbatch the script"
        ) from missing
    cluster = recipe.cluster
    executor = submitit.AutoExecutor(folder=Path(recipe.run_dir) / "submitit" / "%j", cluster=executor_cluster)
    options = dict(item.lstrip("-").replace("-", "_").partition("=")[::2] for item in cluster.sbatch if "=" in item)
    parameters = dict(name=recipe.name, nodes=cluster.num_nodes, tasks_per_node=cluster.gpus_per_node)
    if cluster.device == "cuda":
        parameters["gpus_per_node"] = cluster.gpus_per_node
    executor.update_parameters(
        **parameters,
        slurm_additional_parameters={
            "exclusive": True,
            "requeue": True,
            "signal": f"TERM@{60 * MINUTES_TO_SAVE}",
            **options,
        },
    )
    variables = job_environment(recipe)
    job = executor.submit(Task([list(command) for command in commands], variables))
    return str(job.job_id)


class Task:
    """What a task of a submitit job does; a class, since submitit pickles it. Ends with the exit code of the first failure."""

    def __init__(self, commands: list[list[str]], variables: dict[str, str]):
        self.commands, self.variables = commands, variables

    def __call__(self) -> int:
        import subprocess

        for command in self.commands:
            if code := subprocess.run(command, env={**os.environ, **self.variables}).returncode:
                return code
        return 0
