# SPDX-License-Identifier: Apache-2.0
"""What is settled and checked before anything starts: what `auto` stands for, the stage before, this machine, the data. No torch import."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path

from zaya_plugin import compat
from zaya_plugin.config.graphs import with_graphs
from zaya_plugin.config.schema import Recipe
from zaya_plugin.handover.data_places import with_consumed
from zaya_plugin.handover.predecessor import predecessor, saved_step
from zaya_plugin.plan.recipe_plan import with_recompute
from zaya_plugin.run.rank_plan import Plan

DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # NVIDIA, ROCm, WSL


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
    from zaya_plugin.data.sources import find_sources  # reads headers and sizes only, without torch

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
            f"megatron.core {compat.core_version()}: allowed for `zaya train`: 0.19 and 0.20, as in `pip install 'megatron-core[training]>=0.19.2'`. In "
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
