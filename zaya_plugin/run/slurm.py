# SPDX-License-Identifier: Apache-2.0
"""What `torch.distributed` wants to know, read from the variables that `srun` gives every task. No torch import."""

from __future__ import annotations

import re
from collections.abc import Mapping


def rank_variables(environ: Mapping[str, str], master_port: int | None = None) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this task, or None outside `srun`.

    The batch script itself also sees SLURM_PROCID=0; it is no task of a step, so it does not count as one.
    All tasks must agree without talking: the address is the first host of the step, the port follows from the job id.
    """
    if not all(name in environ for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        return None
    if environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ:
        return None
    tasks = int(environ["SLURM_NTASKS"])
    if tasks < 2:
        return None
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not hosts and "MASTER_ADDR" not in environ:
        raise ValueError("SLURM_JOB_NODELIST is not set, so the address of rank 0 is unknown: set MASTER_ADDR")
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
    """A port that two jobs on one node rarely share, below the range that Linux hands out by itself (32768 on)."""
    return 20000 + int(re.sub(r"\D", "", job_id) or 0) % 10000


def tasks_on_node(environ: Mapping[str, str]) -> int | None:
    """Tasks on this node from SLURM_STEP_TASKS_PER_NODE, such as `8(x2),4`, or None if Slurm does not say."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not text:
        return None
    counts = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return None
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else None


def first_host(node_list: str) -> str:
    """First host of Slurm's list notation: `a[01-03,7],b` -> `a01`, `rack[0-1]n[3,5]` -> `rack0n3`."""
    depth, first = 0, ""
    for character in node_list.strip():
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            break
        first += character
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    if depth or not host or "[" in host:
        raise ValueError(f"SLURM_JOB_NODELIST = {node_list!r} is not a node list such as a[01-03,7],b")
    return host
