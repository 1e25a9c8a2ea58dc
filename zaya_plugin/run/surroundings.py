# SPDX-License-Identifier: Apache-2.0
"""Check what a start needs: packages, devices, memory and ports of this machine, directories and data.
No torch import.
"""

import errno
import itertools
import os
import re
import resource
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from zaya_plugin import compat
from zaya_plugin.checkpoint import on_disk
from zaya_plugin.config.run_directory import check_creatable, check_kinds, checkpoint_path, has_checkpoint
from zaya_plugin.config.schema import Recipe
from zaya_plugin.config.validate import unused_kernels
from zaya_plugin.data.prepared import NO_DATASET, locate
from zaya_plugin.data.prompts import read_prompts
from zaya_plugin.data.sources import compare_data, find_sources, named_datasets
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.run.rank_plan import HIDDEN_DEVICES, Plan, core_count

DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # NVIDIA, ROCm, WSL
OPEN_FILES = 256  # least limit; a rank with one data loader and no other rank has about 140 files open
# module, how to install it
REQUIRED = (
    ("torch", "install the build for your accelerator, or for a CPU `pip install 'zaya_plugin[cpu]'`"),
    ("megatron.training", f"{compat.INSTALL}, or put a Megatron-LM checkout on PYTHONPATH"),
)


def check_surroundings(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> None:
    """Raise ValueError if this machine has no torch, Megatron, device, free port or data for the recipe. vocabulary: of
    random tokens, in place of data.
    """
    check_machine(recipe, plan, vocabulary)
    if vocabulary is None:
        check_data(recipe)


def check_machine(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> None:
    """Run the checks of `check_surroundings` except that of the data. vocabulary: rows of the embedding, where they are
    not those of the data.
    """
    for module, remedy in REQUIRED:
        if not compat.has_module(module):
            problem = f"is not installed in {sys.executable}; `zaya doctor` lists what is installed"
            raise mistake(module, problem=problem, fix=remedy)
    if not compat.zaya_train_fits():
        raise mistake(
            "megatron.core",
            compat.core_version(),
            problem="`zaya train` is not written for this version",
            allowed=compat.TRAINING,
            fix=f"{compat.INSTALL}; in Primus, which pins 0.16, `zaya export primus`",
        )
    if recipe.cluster.device == "cuda" and not has_device_files():
        raise mistake(
            "cluster.device",
            recipe.cluster.device,
            problem=f"no accelerator on this machine ({', '.join(DEVICE_FILES)} do not exist)",
            allowed="cpu",
            fix="cluster=cpu",
        )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < OPEN_FILES:
        problem = "a rank and its data loaders keep more files open, and wait for ever for one that they cannot open"
        raise mistake("ulimit -n", files, problem=problem, allowed=f"at least {OPEN_FILES}", fix="ulimit -n 1024")
    check_sizes(recipe, plan, vocabulary)
    if plan.command is not None and recipe.master_port is not None:
        _check_port("master_port", recipe.master_port, "a free port, or null for any free port", "master_port=null")
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens there already
    if plan.command is None and plan.rank == 0 and not by_agent:
        port = int(plan.environment.get("MASTER_PORT") or os.environ["MASTER_PORT"])
        _check_port(
            "MASTER_PORT", port, "a port that is free on the machine of rank 0", "export MASTER_PORT=<another port>"
        )


def check_sizes(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> None:
    """Raise ValueError if this machine has fewer devices than ranks, or `check_memory` does."""
    key = "cluster.gpus_per_node" if recipe.nproc is None else "nproc"
    on_cpu, devices = recipe.cluster.device == "cpu", device_count()
    if plan.command is not None and not on_cpu and 0 < devices < plan.local_ranks:
        problem = f"this machine has {devices} device{'s' if devices > 1 else ''}, and a rank needs one of its own"
        raise mistake(key, plan.local_ranks, problem=problem, allowed=f"at most {devices}", fix=f"nproc={devices}")
    if plan.command is not None and not on_cpu:
        _check_visible({**os.environ, **plan.environment}, key, plan.local_ranks)
    check_memory(recipe, plan, vocabulary)


def check_memory(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> None:
    """Raise ValueError if the memory plan of the fullest device exceeds cluster.memory_gib, or on a CPU, where the plan
    does not cover activations, if weights, gradients and optimizer state exceed the machine's memory.
    """
    memory_plan = recipe_plan.plan_of(recipe, plan.world_size, vocabulary)
    components = memory_plan.components
    smaller = "a smaller model.num_layers, hidden_size, num_experts or moe_ffn_hidden_size"
    if recipe.cluster.device == "cpu":
        needed = plan.local_ranks * sum(components[name] for name in ("weights", "gradients", "optimizer"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            raise mistake(
                "model",
                recipe.model.name,
                problem=f"does not fit: weights, gradients and optimizer state need {needed / recipe_plan.GIB:,.1f} "
                f"GiB for {plan.local_ranks} ranks on a machine with {memory / recipe_plan.GIB:,.1f} GiB of memory",
                allowed="a model that fits",
                fix=f"{smaller}, or more ranks that share it (docs/parallelism.md)",
            )
    elif recipe_plan.memory_share(memory_plan, recipe.cluster.memory_gib) > 1:
        largest = max(components, key=components.__getitem__)
        raise mistake(
            "cluster.memory_gib",
            f"{recipe.cluster.memory_gib:g}",
            problem=f"the step does not fit: the memory plan needs {sum(components.values()) / recipe_plan.GIB:,.1f} "
            f"GiB of a device, {components[largest] / recipe_plan.GIB:,.1f} of them for {largest}",
            allowed="a step that fits; or null, with which the plan is printed and not checked",
            fix="parallel.recompute_granularity=auto, a smaller stage.micro_batch_size (currently "
            f"{recipe.stage.micro_batch_size}), {smaller}, or more ranks that share it (docs/parallelism.md)",
        )


def _check_visible(environ: Mapping[str, str], key: str, ranks: int) -> None:
    """Raise ValueError if a variable leaves the ranks fewer devices than they are, or is not a list of devices."""
    for name in (name for name in HIDDEN_DEVICES if name in environ):
        entries = [entry.strip() for entry in environ[name].split(",") if entry.strip()]
        listed = all(re.fullmatch(r"-?[0-9]+|(GPU|MIG)-[\w/-]+", entry) for entry in entries)
        shown = itertools.takewhile(lambda entry: not entry.startswith("-"), entries)  # -1 ends the list
        count = len(list(shown)) if listed else 0
        if count < ranks:
            problem = (
                f"shows {count} devices, and {key}={ranks} ranks need one each"
                if listed
                else "is not a list of devices"
            )
            raise mistake(
                name,
                environ[name],
                problem=problem,
                allowed=f"numbers or UUIDs of {ranks} devices or more, with commas between",
                fix=f"unset {name}" + (f", or nproc={count}" if count else ""),
            )


def device_count() -> int:
    """Return the accelerators whose files this machine has, NVIDIA's or ROCm's; 0: none, or unknown (WSL)."""
    nvidia = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    return len(nvidia) or len(list(Path("/dev/dri").glob("renderD*"))) * os.path.exists("/dev/kfd")


def has_device_files() -> bool:
    """Return whether this machine has an accelerator's files, as far as /dev says."""
    return any(os.path.exists(path) for path in DEVICE_FILES)


def _check_port(key: str, port: int, allowed: str, fix: str) -> None:
    try:
        socket.create_server(("", port)).close()  # a port in TIME_WAIT is free: it sets SO_REUSEADDR
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        problem = "the port is in use" if taken else f"the port cannot be opened ({error.strerror})"
        raise mistake(key, port, problem=problem, allowed=allowed, fix=fix) from None


def unused(recipe: Recipe, plan: Plan) -> list[str]:
    """Return lines about what this machine does not carry out as asked."""
    lines = [crowded(recipe, plan), unused_kernels(recipe)]
    if text := os.environ.get("HIP_OPS_KERNELS"):
        lines.append(f"zaya: HIP_OPS_KERNELS={text}: is not read where there is a recipe; cluster.kernels decides")
    return [line for line in lines if line is not None]


def crowded(recipe: Recipe, plan: Plan) -> str | None:
    """Return a line if ranks on the CPU outnumber its cores, or None."""
    if recipe.cluster.device != "cpu" or plan.local_ranks <= (cores := core_count()):
        return None
    return f"zaya: {plan.local_ranks} ranks share the {cores} cores of this machine; nproc={cores} is the most without"


def check_directories(recipe: Recipe) -> None:
    """Raise ValueError if the run could not write its directories; creates nothing."""
    check_creatable(recipe.run_dir, "run_dir")
    if Path(recipe.checkpoint.path).is_absolute():
        check_creatable(checkpoint_path(recipe), "checkpoint.path")
    check_kinds(recipe)


def check_data(recipe: Recipe) -> None:
    """Raise ValueError if the data of the recipe cannot be used, or is not that of the run's checkpoint."""
    sources = find_sources(recipe)  # reads headers and sizes only
    check_creatable(sources.cache_path, "data.cache_path")
    read_prompts(recipe, sources)
    if recipe.resume != "never" and has_checkpoint(directory := checkpoint_path(recipe)):
        checkpoint, facts = on_disk.newest_facts(directory)
        compare_data(facts.get("data"), sources.facts() if facts else None, checkpoint, recipe.data)


def missing_data(recipe: Recipe) -> str | None:
    """Return the message about a dataset of the recipe that this machine does not have, or None."""
    try:
        for _, path, _ in named_datasets(recipe):
            locate(path)
    except ValueError as error:
        return str(error) if NO_DATASET in str(error) else None
    return None
