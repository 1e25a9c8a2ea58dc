# SPDX-License-Identifier: Apache-2.0
"""Everything before a start: the values of `auto`, the previous stage, checks of this machine and the data, and what a
dry run prints.

No torch import. A dry run prints its verdict and its plan, and stops with the messages with which the run would stop.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import resource
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin import compat
from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.convert.model_folder import resolve
from zaya_plugin.checkpoint.run_lock import check_free
from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.graphs import with_graphs
from zaya_plugin.config.megatron_review import unchecked_lines
from zaya_plugin.config.resume import changes, values_in
from zaya_plugin.config.run_directory import (
    check_creatable,
    check_kinds,
    check_resume,
    checkpoint_path,
    has_checkpoint,
    written_by,
)
from zaya_plugin.config.schedule import learning_rate, samples_until, step_count, token_count
from zaya_plugin.config.schema import LENGTH, SCHEDULE, STEPS_TO_TRAIN, Recipe, leaves
from zaya_plugin.config.validate import data_parallel_size, unused_kernels
from zaya_plugin.data.prepared import NO_DATASET, locate
from zaya_plugin.data.sources import compare_data, find_sources, named_datasets
from zaya_plugin.ground.errors import mistake, of_the_machine
from zaya_plugin.handover.data_places import with_consumed
from zaya_plugin.handover.predecessor import predecessor, saved_step
from zaya_plugin.plan import checkpoint_plan, recipe_plan
from zaya_plugin.run import megatron_check
from zaya_plugin.run.rank_plan import (
    HIDDEN_DEVICES,
    WORKER,
    Plan,
    check_environment,
    core_count,
    make_plan,
    rank_environment,
    slurm_variables,
)

OF_THE_SCHEDULE = {path for path, field in leaves() if field.metadata["resume"] in (LENGTH, SCHEDULE, STEPS_TO_TRAIN)}
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # NVIDIA, ROCm, WSL
OPEN_FILES = 256  # least limit; a rank with one data loader and no other rank has about 140 files open
TOKENIZER_UNKNOWN = "of the data set, which is not on this machine"
# NCCL's watchdog ends a rank from C++, and `launch.without_graphs` is then not reached
IF_ABORTED = (
    "cluster.graphs={}: one graph a step. If a rank is aborted while the first step is captured, add cluster.graphs=none "
    "to the command of all ranks"
)
MORE = (
    "more         --verbose adds the ranks' command and environment, Megatron's arguments and the tables of both plans"
)
# module, how to install it
REQUIRED = (
    ("torch", "install the build for your accelerator, or for a CPU `pip install 'zaya_plugin[cpu]'`"),
    (
        "megatron.training",
        "`pip install 'megatron-core[training]>=0.19.2'`, or put a Megatron-LM checkout on PYTHONPATH",
    ),
)


def with_choices(recipe: Recipe, plan: Plan) -> Recipe:
    """Return `recipe` with values for `auto` (see `settled`); rank 0 prints them."""
    recipe, lines = settled(recipe, plan.world_size)
    if plan.rank == 0:
        if plan.command is None and recipe.cluster.graphs != "none":
            lines.append(IF_ABORTED.format(recipe.cluster.graphs))
        for line in [*lines, *unused(recipe, plan)]:
            print(line, flush=True)
    return recipe


def unused(recipe: Recipe, plan: Plan) -> list[str]:
    """Return lines about what this machine does not carry out as asked."""
    lines = [crowded(recipe, plan), unused_kernels(recipe)]
    if text := os.environ.get("HIP_OPS_KERNELS"):
        lines.append(f"zaya: HIP_OPS_KERNELS={text}: is not read where there is a recipe; cluster.kernels decides")
    return [line for line in lines if line is not None]


def settled(recipe: Recipe, world_size: int) -> tuple[Recipe, list[str]]:
    """Return `recipe` with values for `auto` in parallel.recompute_granularity and cluster.graphs, and lines that name
    them.
    """
    recipe, recomputed = recipe_plan.with_recompute(recipe, world_size)
    recipe, graphs = with_graphs(recipe)
    return recipe, [line for line in (recomputed, graphs, *unchecked_lines(recipe)) if line is not None]


def take_over(recipe: Recipe) -> Recipe:
    """Return `recipe` with its place in the data and the vocabulary's padding of the run that it continues; raises
    ValueError if a new stage cannot start from `handover.from_run` or `handover.from_hf`. Fetches the latter's files.
    """
    if saved_step(Path(recipe.run_dir)) is None:
        predecessor(recipe)
        if recipe.handover.from_hf is not None:
            resolve(recipe.handover.from_hf, key="handover.from_hf")
    return with_consumed(with_padding(recipe))


def with_padding(recipe: Recipe) -> Recipe:
    """Return `recipe` with model.make_vocab_size_divisible_by of the run that it resumes or takes over: its tables have
    that many rows, whatever today's default is.
    """
    before = values_in(recipe.run_dir) if saved_step(Path(recipe.run_dir)) is not None else {}
    if not before and recipe.handover.from_run is not None:
        before = values_in(recipe.handover.from_run)
    if not before:
        return recipe
    divisor = before.get("model.make_vocab_size_divisible_by", 64)
    return replace(recipe, model=replace(recipe.model, make_vocab_size_divisible_by=divisor))


def changed_keys(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return messages about changes of the recipe that a run cannot resume with, and lines about those that it can; both
    empty for a new run or stage.

    Compared is the recipe that the newest complete checkpoint keeps, or run_dir/recipe.yaml beside one of an earlier
    version.
    """
    directory = checkpoint_path(recipe)
    if recipe.resume == "never" or not has_checkpoint(directory):
        return [], []
    folder, facts = on_disk.newest_facts(directory)
    before = facts.get(manifest.RECIPE) or values_in(recipe.run_dir)
    refused, warned = changes(before, recipe, recipe.run_dir)
    return refused, [*warned, *(what_is_left(before, recipe, on_disk.iteration_of(folder)) if facts else ())]


def what_is_left(before: Mapping[str, Any], recipe: Recipe, step: int) -> list[str]:
    """Return a line about a run that has no step left behind the checkpoint of `step`, or about the learning rate of the
    next step if the recipe before had another one for it. before: its values by key.
    """
    if step >= (steps := step_count(recipe)):
        return [
            f"zaya: resume: the newest checkpoint is of step {step}, and the recipe has {steps} steps "
            f"(stage.train_iters={recipe.stage.train_iters}): none is left. The run trains nothing and ends with exit "
            f"code 0; with a larger stage.train_iters it goes on"
        ]
    try:
        earlier = recipe
        for key in OF_THE_SCHEDULE & before.keys():
            group, _, name = key.partition(".")
            earlier = replace(earlier, **{group: replace(getattr(earlier, group), **{name: before[key]})})
        samples = samples_until(earlier, step)
        was, now = learning_rate(earlier, samples), learning_rate(recipe, samples)
    except (ValueError, TypeError, ArithmeticError):  # values of another version
        return []
    if math.isclose(was, now, rel_tol=1e-6):
        return []
    return [f"zaya: resume: the learning rate of step {step + 1} is {now:.4g}; the recipe before had {was:.4g}"]


def check_changed_keys(recipe: Recipe, plan: Plan) -> None:
    """Raise ValueError for changes of the recipe that a run cannot resume with; rank 0 prints the others."""
    refused, warned = changed_keys(recipe)
    if refused:
        raise ValueError("\n".join(refused))
    if plan.rank == 0:
        for line in warned:
            print(line, file=sys.stderr, flush=True)


def check_surroundings(recipe: Recipe, plan: Plan) -> None:
    """Raise ValueError if this machine has no torch, Megatron, device, free port or data for the recipe."""
    check_machine(recipe, plan)
    check_data(recipe)


def check_data(recipe: Recipe) -> None:
    """Raise ValueError if the data of the recipe cannot be used, or is not that of the run's checkpoint."""
    sources = find_sources(recipe)  # reads headers and sizes only
    check_creatable(sources.cache_path, "data.cache_path")
    if recipe.resume != "never" and has_checkpoint(directory := checkpoint_path(recipe)):
        checkpoint, facts = on_disk.newest_facts(directory)
        compare_data(facts.get("data"), sources.facts() if facts else None, checkpoint, recipe.data)


def check_directories(recipe: Recipe) -> None:
    """Raise ValueError if the run could not write its directories; creates nothing."""
    check_creatable(recipe.run_dir, "run_dir")
    if Path(recipe.checkpoint.path).is_absolute():
        check_creatable(checkpoint_path(recipe), "checkpoint.path")
    check_kinds(recipe)


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
            allowed="0.19 and 0.20",
            fix="`pip install 'megatron-core[training]>=0.19.2'`; in Primus, which pins 0.16, `zaya export primus`",
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
    components = recipe_plan.plan_of(recipe, plan.world_size, vocabulary).components
    smaller = "a smaller model.num_layers, hidden_size, num_experts or moe_ffn_hidden_size"
    if recipe.cluster.device == "cpu":
        needed = plan.local_ranks * sum(components[name] for name in ("weights", "gradients (fp32)", "optimizer"))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            raise mistake(
                "model",
                recipe.model.name,
                problem=f"does not fit: weights, gradients and optimizer state need {needed / recipe_plan.GIB:,.1f} GiB "
                f"for {plan.local_ranks} ranks on a machine with {memory / recipe_plan.GIB:,.1f} GiB of memory",
                allowed="a model that fits",
                fix=f"{smaller}, or more ranks that share it (docs/parallelism.md)",
            )
    elif (
        recipe.cluster.memory_gib is not None and sum(components.values()) > recipe.cluster.memory_gib * recipe_plan.GIB
    ):
        largest = max(components, key=components.__getitem__)
        raise mistake(
            "cluster.memory_gib",
            f"{recipe.cluster.memory_gib:g}",
            problem=f"the step does not fit: the memory plan needs {sum(components.values()) / recipe_plan.GIB:,.1f} GiB "
            f"of a device, {components[largest] / recipe_plan.GIB:,.1f} of them for {largest}",
            allowed="a step that fits; or null, with which the plan is printed and not checked",
            fix="parallel.recompute_granularity=auto, a smaller stage.micro_batch_size (currently "
            f"{recipe.stage.micro_batch_size}), {smaller}, or more ranks that share it (docs/parallelism.md)",
        )


def _check_visible(environ: Mapping[str, str], key: str, ranks: int) -> None:
    """Raise ValueError if a variable leaves the ranks fewer devices than they are, or is no list of devices."""
    for name in (name for name in HIDDEN_DEVICES if name in environ):
        entries = [entry.strip() for entry in environ[name].split(",") if entry.strip()]
        listed = all(re.fullmatch(r"-?[0-9]+|(GPU|MIG)-[\w/-]+", entry) for entry in entries)
        shown = itertools.takewhile(lambda entry: not entry.startswith("-"), entries)  # -1 ends the list
        count = len(list(shown)) if listed else 0
        if count < ranks:
            problem = (
                f"shows {count} devices, and {key}={ranks} ranks need one each" if listed else "is no list of devices"
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


def crowded(recipe: Recipe, plan: Plan) -> str | None:
    """Return a line if ranks on the CPU outnumber its cores, or None."""
    if recipe.cluster.device != "cpu" or plan.local_ranks <= (cores := core_count()):
        return None
    return f"zaya: {plan.local_ranks} ranks share the {cores} cores of this machine; nproc={cores} is the most without"


def _check_port(key: str, port: int, allowed: str, fix: str) -> None:
    try:
        socket.create_server(("", port)).close()  # a port in TIME_WAIT is free: it sets SO_REUSEADDR
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        problem = "the port is in use" if taken else f"the port cannot be opened ({error.strerror})"
        raise mistake(key, port, problem=problem, allowed=allowed, fix=fix) from None


def plan_of(recipe: Recipe, environ: Mapping[str, str]) -> Plan:
    """Return the launch on this machine, or for several nodes the launch on every node."""
    check_environment(environ)
    if recipe.cluster.num_nodes == 1 or "RANK" in environ or slurm_variables(environ) is not None:
        return make_plan(recipe, environ)
    nodes, local_ranks = recipe.cluster.num_nodes, recipe.cluster.gpus_per_node
    words = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(local_ranks), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "<first host>:29500", "-m", "zaya_plugin.cli", "train"]
    variables = rank_environment(recipe, local_ranks, environ)
    return Plan(nodes * local_ranks, local_ranks, 0, "torchrun on every node, or `zaya slurm`", words, variables)


def dry_run(recipe: Recipe, plan: Plan, verbose: bool = False, vocabulary: int | None = None) -> tuple[str, list[str]]:
    """Return what would start, with the verdict first, and the messages with which the run would stop.

    verbose: as in `describe`; vocabulary: as in `stops`.
    """
    problems, unchecked = stops(recipe, plan, vocabulary), unchecked_parts(recipe, plan, vocabulary)
    lines = [
        verdict(problems, unchecked),
        *describe(recipe, plan, verbose=verbose),
        *unchecked,
        *([] if verbose else [MORE]),
    ]
    return "\n".join([*lines, "dry_run=true: nothing was created or started"]), problems


def verdict(problems: Sequence[str], unchecked: Sequence[str]) -> str:
    """Return the first line of a dry run."""
    if problems:
        return f"verdict      does not start: {'; '.join(map(without_advice, problems))}"
    return f"verdict      can start{f' ({unchecked[0]})' if unchecked else ''}"


def describe(recipe: Recipe, plan: Plan, overrides: Sequence[str] = (), *, verbose: bool = False) -> list[str]:
    """Return lines about what would start.

    overrides: the words after `zaya train` on several nodes. verbose: with the environment, Megatron's arguments and the
    tables of both plans.
    """
    if several_nodes(plan):
        plan = replace(plan, command=[*plan.command, *overrides])
    chosen: list[str] = []
    with contextlib.suppress(ValueError):  # one of the problems of `stops`
        recipe, chosen = settled(recipe, plan.world_size)
    accumulation = recipe.stage.global_batch_size // (
        recipe.stage.micro_batch_size * data_parallel_size(recipe, plan.world_size)
    )
    command = f"command      {shlex.join(plan.command) if plan.command else f'in this process: {WORKER}.main(recipe)'}"
    lines = [
        f"name         {recipe.name}",
        f"run_dir      {os.path.abspath(recipe.run_dir)}",
        f"world size   {plan.world_size} ranks, {plan.local_ranks} on this machine, started by {plan.started_by}",
        f"steps        {step_count(recipe):,}, {token_count(recipe):,} tokens",
        f"batch        {recipe.stage.global_batch_size} sequences of {recipe.stage.seq_length} tokens a step: "
        f"{accumulation} micro-batches of {recipe.stage.micro_batch_size} a data-parallel rank",
        *([command] if verbose or several_nodes(plan) else []),
        *(line.removeprefix("zaya: ") for line in (*chosen, *unused(recipe, plan))),
        *recipe_plan.lines(recipe, plan.world_size, verbose),
        *checkpoint_plan.lines(recipe, plan.world_size, verbose),
    ]
    if verbose:
        variables = (f"{key}={value}" for key, value in sorted(plan.environment.items()))
        lines.append("environment  " + "\n             ".join(variables))
        values = megatron_arguments(recipe, tokenizer_arguments(recipe))
        del values["optimizer"]  # adam for each recipe; the optimizer that Megatron builds for it is replaced
        lines.append(f"Megatron     arguments; the optimizer is optim.name={recipe.optim.name}")
        lines += ["  " + line for line in argument_lines(values)]
    return lines


def without_advice(problem: str) -> str:
    """Return the first sentence of a message: key, value and what is wrong."""
    return re.split(r"\.? (?:Allowed|Fix): |\n", problem, maxsplit=1)[0].rstrip(".")


def stops(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> list[str]:
    """Return the messages with which a run would stop: before its ranks start, or by Megatron's validation in them.

    Where the run's nodes are other machines than this one (`is_elsewhere`), this one's devices and packages are not
    checked, and its data only where it is here too.

    vocabulary: of random tokens, in place of data.
    """
    try:
        chosen = settled(recipe, plan.world_size)[0]
    except ValueError as error:  # no recomputation makes it fit
        return [str(error)]
    checks = [lambda: check_free(written_by(recipe))] if plan.rank == 0 else []
    checks += [lambda: check_resume(recipe), lambda: check_changed_keys(recipe, plan), lambda: take_over(recipe)]
    if not several_nodes(plan):
        checks.append(lambda: check_directories(recipe))
    if not is_elsewhere(recipe, plan):
        checks.append(
            lambda: check_machine(chosen, plan, vocabulary) if vocabulary else check_surroundings(chosen, plan)
        )
    else:
        checks.append(lambda: check_memory(chosen, plan, vocabulary))
        if vocabulary is None and missing_data(recipe) is None:
            checks.append(lambda: check_data(recipe))
    checks.append(lambda: megatron_check.check(chosen, plan))
    texts = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            texts.append(str(error))
        except OSError as error:
            if (text := of_the_machine(error, recipe.run_dir)) is None:
                raise
            texts.append(text)
    return list(dict.fromkeys(texts))


def several_nodes(plan: Plan) -> bool:
    """Return whether the plan is one of `plan_of` for every node of a run."""
    return plan.command is not None and plan.command[0] == "torchrun"


def is_elsewhere(recipe: Recipe, plan: Plan) -> bool:
    """Return whether a dry run on this machine is about others: the run has several nodes, or devices and this machine
    has none.
    """
    return several_nodes(plan) or recipe.cluster.device == "cuda" and not has_device_files()


def has_device_files() -> bool:
    """Return whether this machine has an accelerator's files, as far as /dev says."""
    return any(os.path.exists(path) for path in DEVICE_FILES)


def missing_data(recipe: Recipe) -> str | None:
    """Return the message about a dataset of the recipe that this machine does not have, or None."""
    try:
        for _, path in named_datasets(recipe):
            locate(path)
    except ValueError as error:
        return str(error) if NO_DATASET in str(error) else None
    return None


def unchecked_parts(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> list[str]:
    """Return lines about what a dry run on this machine does not check."""
    lines = []
    if is_elsewhere(recipe, plan):
        missing = None if vocabulary else missing_data(recipe)
        lines.append("not checked: devices and packages of the nodes" + (", and data" if missing else ""))
        lines += [f"not checked: data: {without_advice(missing)}"] if missing else []
    if (why := megatron_check.skipped()) is not None:
        lines.append(f"not checked: Megatron's own validation of its arguments: {why}")
    return lines


def tokenizer_arguments(recipe: Recipe) -> dict:
    """Return Megatron's arguments for the tokenizer: those of the data set, or the recipe's where the data is on
    another machine.
    """
    try:
        return find_sources(recipe).tokenizer_arguments()
    except ValueError:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": recipe.data.tokenizer or TOKENIZER_UNKNOWN}


def argument_lines(values: Mapping[str, object]) -> list[str]:
    """Return Megatron's arguments as lines `--name value`, sorted by name. Values are JSON, which has one form for
    lists and null.
    """
    return [f"--{name.replace('_', '-')} {json.dumps(value, default=str)}" for name, value in sorted(values.items())]
