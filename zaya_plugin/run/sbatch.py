# SPDX-License-Identifier: Apache-2.0
"""`zaya export slurm`: a readable batch script for a run or a whole curriculum, or its submission through submitit. No
torch import.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import message, mistake
from zaya_plugin.ground.parent_death import GRACE
from zaya_plugin.run.rank_plan import rank_environment

MINUTES_TO_SAVE = 10  # SLURM sends SIGTERM so long before the time limit; the ranks then save and leave


def script(recipe: Recipe, commands: Sequence[Sequence[str]]) -> str:
    """Return an sbatch script that runs `commands` (words after `srun`) one after the other on all nodes."""
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
        f"# {recipe.name}: {cluster.num_nodes} nodes of {cluster.gpus_per_node}, written by `zaya export slurm`.",
        "# One task for each device: `zaya` reads rank, world size and the first host from srun's variables.",
        f"# {MINUTES_TO_SAVE} minutes before its time limit the job gets SIGTERM, saves and leaves; submit this again "
        "to resume.",
        *(f"#SBATCH {option}" for option in options),
        "",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())),
        "",
    ]
    srun = ["srun", "--kill-on-bad-exit=1"]
    if cluster.numa_nodes:
        # Memory and threads of a rank on the socket of its device and NIC.
        srun.append(f"--cpu-bind=map_ldom:{','.join(map(str, cluster.numa_nodes))}")
    lines += [" \\\n  ".join([shlex.join(srun), shlex.join(command)]) for command in commands]
    return "\n".join(lines) + "\n"


def create_run_dir(recipe: Recipe) -> None:
    """Create run_dir, in which SLURM opens the job's log before the script runs; where it cannot, say so on stderr."""
    try:
        os.makedirs(recipe.run_dir, exist_ok=True)
    except OSError as error:
        problem = f"cannot be created on this machine ({error.strerror}), and SLURM opens the job's log in it"
        print(message("run_dir", recipe.run_dir, problem=problem, fix="create it before sbatch"), file=sys.stderr)


def job_environment(recipe: Recipe) -> dict[str, str]:
    """Return the variables that the script exports; none of them depends on this machine's cores or terminal."""
    cluster = recipe.cluster
    variables = rank_environment(recipe, cluster.gpus_per_node, {"COLUMNS": "", "OMP_NUM_THREADS": ""})
    variables.setdefault(GRACE, str(60 * MINUTES_TO_SAVE))
    return {name: value for name, value in variables.items() if not name.startswith("TORCHELASTIC_")}


def check_slurm(recipe: Recipe) -> None:
    """Raise ValueError if the recipe's SLURM keys contradict each other."""
    numa, ranks = recipe.cluster.numa_nodes, recipe.cluster.gpus_per_node
    if numa and len(numa) != ranks:
        raise mistake(
            "cluster.numa_nodes",
            numa,
            problem=f"has {len(numa)} entries",
            allowed=f"one for each of cluster.gpus_per_node={ranks} ranks of a node, or []",
            fix="cluster.numa_nodes=[]",
        )
    for option in recipe.cluster.sbatch:
        if not option.startswith("-"):
            allowed = "options of sbatch, such as --partition=mi300x"
            raise mistake("cluster.sbatch", option, problem="must begin with -", allowed=allowed)


def submit(recipe: Recipe, commands: Sequence[Sequence[str]]) -> str:
    """Submit through submitit and return the job's id; every task runs `commands` as `zaya` would.

    Raises:
        ValueError: submitit is not installed.
    """
    try:
        import submitit
    except ImportError as missing:
        fix = "pip install submitit, or submit the script with sbatch"
        raise mistake("--submitit", problem="the package submitit is not installed", fix=fix) from missing
    cluster = recipe.cluster
    executor = submitit.AutoExecutor(folder=Path(recipe.run_dir) / "submitit" / "%j")
    options = dict(item.lstrip("-").replace("-", "_").partition("=")[::2] for item in cluster.sbatch if "=" in item)
    devices = {"gpus_per_node": cluster.gpus_per_node} if cluster.device == "cuda" else {}
    slurm = {"exclusive": True, "requeue": True, "signal": f"TERM@{60 * MINUTES_TO_SAVE}", **options}
    executor.update_parameters(
        name=recipe.name,
        nodes=cluster.num_nodes,
        tasks_per_node=cluster.gpus_per_node,
        slurm_additional_parameters=slurm,
        **devices,
    )
    job = executor.submit(run_commands, [list(command) for command in commands], job_environment(recipe))
    return str(job.job_id)


def run_commands(commands: list[list[str]], variables: dict[str, str]) -> int:
    """Run the commands of one task of a submitit job and return the exit code of the first that fails, or 0."""
    codes = (subprocess.run(command, env={**os.environ, **variables}).returncode for command in commands)
    return next((code for code in codes if code), 0)
