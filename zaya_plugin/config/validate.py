# SPDX-License-Identifier: Apache-2.0
"""Check relations between the keys of a recipe, before anything starts. Imports no torch.

The schema defines types, choices and ranges of single keys, which `zaya_plugin.config.compose` checks. All problems are
collected into one error.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from hip_ops.versions import KERNELS, NO_FP32, VERSIONS, check_selection
from zaya_plugin.config.arguments import HOST, ZAYA
from zaya_plugin.config.entries import Override, assigns_muon, parse_blend, skipped_steps
from zaya_plugin.config.environment import variable_problems
from zaya_plugin.config.layout import data_parallel_size, layout_problems
from zaya_plugin.config.megatron_review import review_problems
from zaya_plugin.config.messages import must_be, must_be_multiple, require
from zaya_plugin.config.paths import PATHS
from zaya_plugin.config.schedule import schedule_problems
from zaya_plugin.config.schema import RECOMPUTE_MODULES, Recipe, get
from zaya_plugin.ground.errors import as_typed, message

CPU_VERSIONS = ("auto", "reference", "hip", "grouped_mm")  # hip: built by g++, to verify the kernels

# (key, value): the keys that must then have one value, that value, and why.
EXCLUSIONS = {
    ("cluster.device", "cpu"): (
        ("cluster.core_attention", "sdpa", "this attention requires an accelerator"),
        ("cluster.distributed_backend", "gloo", "NCCL requires an accelerator"),
        ("cluster.transformer_impl", "local", "Transformer Engine requires an accelerator"),
        ("parallel.nccl_ub", False, "NCCL's memory requires an accelerator"),
        ("profile.memory_snapshot", False, "a snapshot records the accelerator's allocator"),
    ),
    ("cluster.device", "cuda"): (
        ("cluster.distributed_backend", "nccl", "tensors of an accelerator are sent by NCCL or RCCL"),
    ),
    ("cluster.core_attention", "cudnn"): (
        ("cluster.deterministic", False, "cuDNN's backward pass is not deterministic"),
    ),
    ("cluster.dtype", "fp32"): (("cluster.core_attention", "sdpa", "this attention requires bf16"),),
    ("cluster.deterministic", True): (
        (
            "parallel.nccl_ub",
            False,
            "registered gradients are added by symmetric kernels, whose order NCCL_ALGO does not set",
        ),
    ),
    ("data.packing", "none"): (
        ("data.reset_position_ids", False, "positions restart only at documents of a packed sequence"),
    ),
    ("parallel.use_distributed_optimizer", False): (
        ("optim.non_finite_gradients", "stop", "only the distributed optimizer can skip a step"),
        ("parallel.num_distributed_optimizer_instances", 1, "instances are groups of ranks that shard its state"),
        ("parallel.bucket_plan", None, "it is for the reduce-scatters of shards"),
    ),
    ("parallel.pipeline_model_parallel_size", 1): (
        ("parallel.virtual_pipeline_stages", 1, "virtual stages are parts of a pipeline rank"),
    ),
    ("logger.wandb_mode", "disabled"): (("logger.wandb", False, "nothing is logged then; auto logs"),),
    ("optim.lr_warmup_iters", 0): (("optim.lr_warmup_init", 0.0, "it requires a warm-up"),),
}

# Key, the value that a graph requires, and why: all steps must be alike, and the host must not wait for the device
# within one.
GRAPH_REQUIREMENTS = (
    ("cluster.device", "cuda", "a CPU has no graphs"),
    ("cluster.dtype", "bf16", "on a GPU, grouped GEMMs of other types synchronise with the host"),
    (
        "parallel.use_distributed_optimizer",
        True,
        "without the distributed optimizer Megatron reads each loss on the host",
    ),
    ("stage.record_routing", None, "the host writes what each micro-batch chose"),
    ("stage.replay_routing", None, "a graph has no routing as input"),
    ("stage.batch_size_ramp", None, "every replay of a graph has the same number of micro-batches"),
    ("data.packing", "none", "the host computes the blocks of documents"),
    ("parallel.pipeline_model_parallel_size", 1, "a graph does not capture sends between stages"),
    ("parallel.expert_model_parallel_size", 1, "the host reads how many tokens are sent"),
)
WHOLE_STEP_GRAPH = "cluster.graphs=full_iteration"

LONGEST_NAME = 255  # bytes
LONGEST_PATH = 3_500  # bytes: the system takes 4,096, and a run makes folders and files below its paths
# Variables that torchrun, srun or the launcher of this package set for the ranks.
OF_THE_LAUNCHER = re.compile(
    r"RANK|(LOCAL|GROUP|ROLE)_RANK|ROLE_NAME|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w*"
    r"|SLURM_\w*|ZAYA_(RUN_LOCKS|RANK_PID|LAUNCHER_PID|AEGIS_\w*)"
)


def validate(recipe: Recipe, world_size: int) -> None:
    """Raise one `ValueError` that lists everything impossible about `recipe` on `world_size` ranks."""
    checks = (
        _paths,
        _exclusions,
        _model,
        layout_problems,
        _batch,
        _samples,
        _optimizer,
        _schedule,
        _recompute,
        _kernels,
        _data,
        _profile,
        _environment,
        _megatron,
    )
    if problems := [problem for check in checks for problem in check(recipe, world_size)]:
        raise ValueError("\n".join(problems))


def _paths(recipe: Recipe, world_size: int) -> Iterator[str]:
    """No file system has such names, and each look at one would end with the system's own words, without the key."""
    for key in PATHS:
        path = os.fsencode(get(recipe, key) or "")
        longest = max(map(len, path.split(b"/")))
        if longest > LONGEST_NAME or len(path) > LONGEST_PATH:
            allowed = f"at most {LONGEST_NAME} bytes between two slashes, and {LONGEST_PATH:,} in all"
            problem = "a name in it is too long" if longest > LONGEST_NAME else "is too long"
            yield message(key, get(recipe, key), problem=problem, allowed=allowed, fix="a shorter path")


def _exclusions(recipe: Recipe, world_size: int) -> Iterator[str]:
    for (key, value), excluded in EXCLUSIONS.items():
        if get(recipe, key) == value:
            for other, only, why in excluded:
                if get(recipe, other) != "auto":  # which takes what runs
                    yield from must_be(recipe, other, only, f"{key}={as_typed(value)}", why)
    if recipe.handover.from_hf is not None:
        yield from must_be(
            recipe, "handover.from_run", None, "handover.from_hf", "the stage starts from published weights"
        )
    for key in ("stage.record_routing", "stage.replay_routing"):
        for other in ("tensor", "pipeline") if get(recipe, key) is not None else ():
            why = "the files have whole layers and a context-parallel part of each sequence a rank"
            yield from must_be(recipe, f"parallel.{other}_model_parallel_size", 1, key, why)
    if (recorded := recipe.stage.record_routing) is not None and recorded == recipe.stage.replay_routing:
        problem = "is replayed too, and a new run begins its record with -1 in all rows"
        allowed = "another file than stage.replay_routing"
        yield message("stage.record_routing", recorded, problem=problem, allowed=allowed)
    if recipe.cluster.graphs == "full_iteration":
        yield from graph_obstacles(recipe)


def graph_obstacles(recipe: Recipe) -> Iterator[str]:
    """Yield a message for each value of `recipe` with which a step cannot be one graph."""
    for key, value, why in GRAPH_REQUIREMENTS:
        yield from must_be(recipe, key, value, WHOLE_STEP_GRAPH, why)
    overrides = recipe.cluster.kernel_overrides
    yield from require(
        overrides.get("grouped_product", recipe.cluster.kernels) != "reference",
        f"cluster.{'kernel_overrides.grouped_product' if 'grouped_product' in overrides else 'kernels'}",
        "reference",
        problem="grouped_product's reference reads the experts' borders on the host, which a graph does not support",
        allowed=f"another version of grouped_product with {WHOLE_STEP_GRAPH}",
        fix="cluster.kernel_overrides.grouped_product=auto",
    )


def with_graphs(recipe: Recipe) -> tuple[Recipe, str | None]:
    """Resolve `cluster.graphs=auto` to none or full_iteration.

    Returns:
        The recipe, and a line with the reason if auto becomes none. With another value the recipe itself, and None.
    """
    if recipe.cluster.graphs != "auto":
        return recipe, None
    obstacle = next(graph_obstacles(recipe), None)
    cluster = replace(recipe.cluster, graphs="none" if obstacle else "full_iteration")
    return replace(recipe, cluster=cluster), f"no graph of a step: {obstacle}" if obstacle else None


def _model(recipe: Recipe, world_size: int) -> Iterator[str]:
    model = recipe.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    uneven = f"is not a multiple of model.num_query_groups={groups}"
    yield from must_be_multiple("model.num_attention_heads", heads, groups, uneven)
    yield from require(
        groups % 2 == 0,
        "model.num_query_groups",
        groups,
        problem="half of the key/value heads carry the delayed value",
        allowed="an even number",
        fix=f"model.num_query_groups={groups + 1}",
    )
    rotated = model.kv_channels * model.rotary_percent
    yield from require(
        rotated % 2 == 0,
        "model.rotary_percent",
        model.rotary_percent,
        problem=f"rotates {rotated:g} channels of model.kv_channels={model.kv_channels}, and RoPE rotates pairs",
        allowed="an even number of rotated channels",
        fix=f"model.rotary_percent={max(rotated // 2 * 2, 2) / model.kv_channels:g}",
    )
    yield from require(
        model.sliding_window is not None or model.window_attn_skip_freq is None,
        "model.window_attn_skip_freq",
        model.window_attn_skip_freq,
        problem="no layer has a sliding window",
        allowed="null with model.sliding_window=null",
        fix="model.sliding_window=4096",
    )


def _batch(recipe: Recipe, world_size: int) -> Iterator[str]:
    stage, replicas = recipe.stage, max(data_parallel_size(recipe, world_size), 1)
    unit = stage.micro_batch_size * replicas
    why = (
        f"is not a multiple of stage.micro_batch_size={stage.micro_batch_size} x {replicas} data-parallel ranks = "
        f"{unit}"
    )
    yield from must_be_multiple("stage.global_batch_size", stage.global_batch_size, unit, why)


def _samples(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.stage.sample_prompts is None:
        return
    for group in ("tensor_model", "pipeline_model", "context", "expert_model"):
        key = f"parallel.{group}_parallel_size"
        yield from require(
            (size := get(recipe, key)) == 1,
            key,
            size,
            problem="decoding requires the whole model and whole sequences on each rank",
            allowed="1 with stage.sample_prompts",
            fix="stage.sample_prompts=null",
        )
    yield from require(
        recipe.stage.eval_iters > 0,
        "stage.eval_iters",
        0,
        problem="there is no validation at which to continue the prompts",
        allowed="1 or more with stage.sample_prompts",
        fix="stage.eval_iters=1",
    )


def _optimizer(recipe: Recipe, world_size: int) -> Iterator[str]:
    for entry in recipe.optim.overrides:
        try:
            Override.parse(entry)
        except ValueError as error:
            yield str(error)
    if (rank := recipe.optim.lora.rank) is None:
        yield from must_be(recipe, "handover.adapter", None, "optim.lora.rank=null", "the model has no adapters")
    else:
        why = "an adapter is not split, and attention's matrices are; experts are divided by expert_model_parallel_size"
        yield from must_be(recipe, "parallel.tensor_model_parallel_size", 1, f"optim.lora.rank={rank}", why)


def _schedule(recipe: Recipe, world_size: int) -> Iterator[str]:
    optim, stage = recipe.optim, recipe.stage
    warmup, decay = optim.lr_warmup_iters, optim.lr_decay_iters
    yield from require(
        warmup < stage.train_iters,
        "optim.lr_warmup_iters",
        warmup,
        problem="the warm-up does not end within the stage",
        allowed=f"less than stage.train_iters={stage.train_iters}",
        fix=f"optim.lr_warmup_iters={stage.train_iters // 10}",
    )
    yield from require(
        warmup >= stage.train_iters or decay is None or decay > warmup,
        "optim.lr_decay_iters",
        decay,
        problem="the decay ends within the warm-up",
        allowed=f"more than optim.lr_warmup_iters={warmup}, or null",
        fix="optim.lr_decay_iters=null",
    )
    yield from require(
        optim.min_lr <= optim.lr,
        "optim.min_lr",
        optim.min_lr,
        problem="the decay would end above the highest learning rate",
        allowed=f"at most optim.lr={optim.lr}",
        fix=f"optim.min_lr={optim.lr}",
    )
    yield from schedule_problems(recipe, stage.micro_batch_size * max(data_parallel_size(recipe, world_size), 1))


def _recompute(recipe: Recipe, world_size: int) -> Iterator[str]:
    """Yield problems of the activation recomputation."""
    parallel, cluster, layers = recipe.parallel, recipe.cluster, recipe.model.num_layers
    granularity, modules, number = (
        parallel.recompute_granularity,
        parallel.recompute_modules,
        parallel.recompute_num_layers,
    )
    listed, condition = f"[{','.join(modules)}]", f"parallel.recompute_granularity={as_typed(granularity)}"
    if granularity == "full":
        for name, value, allowed in (
            ("method", "block", "uniform, block"),
            ("num_layers", 1, "a whole number above 0"),
        ):
            key = f"parallel.recompute_{name}"
            needed = f"{condition} requires it"
            is_set = get(recipe, key) is not None
            yield from require(is_set, key, None, problem=needed, allowed=allowed, fix=f"{key}={value}")
        stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_stages
        yield from require(
            (number or 1) <= layers // stages,
            "parallel.recompute_num_layers",
            number,
            problem="a stage has fewer layers",
            allowed=f"at most model.num_layers={layers}" + (f" over {stages} pipeline stages" if stages > 1 else ""),
            fix=f"parallel.recompute_num_layers={layers // stages}",
        )
    else:
        for key in ("parallel.recompute_method", "parallel.recompute_num_layers"):
            yield from must_be(recipe, key, None, condition, "only recompute_granularity=full has this")
    on_cpu, auto = cluster.device == "cpu", granularity == "auto"
    yield from require(
        not (auto and on_cpu),
        "parallel.recompute_granularity",
        granularity,
        problem="the memory plan counts the memory of an accelerator",
        allowed="null, full, selective with cluster.device=cpu",
        fix="parallel.recompute_granularity=null",
    )
    yield from require(
        not auto or on_cpu or cluster.memory_gib is not None,
        "cluster.memory_gib",
        None,
        problem=f"{condition} requires it",
        allowed="GiB of one device's memory, such as 79 on an H100, 140 on an H200, 192 on an MI300X",
        fix="cluster.memory_gib=<number>",
    )
    key, selective, known = "parallel.recompute_modules", granularity == "selective", ", ".join(RECOMPUTE_MODULES)
    yield from require(
        not selective or bool(modules),
        key,
        [],
        problem=f"{condition} requires modules",
        allowed=f"some of {known}",
        fix=f"{key}=[{RECOMPUTE_MODULES[0]}]",
    )
    yield from require(
        selective or not modules,
        key,
        listed,
        problem="only recompute_granularity=selective has this",
        allowed=f"[] with {condition}",
        fix="parallel.recompute_granularity=selective",
    )
    unknown = [module for module in modules if module not in RECOMPUTE_MODULES]
    yield from require(
        not unknown,
        key,
        listed,
        problem=f"no such module: {', '.join(unknown)}",
        allowed=known,
        fix=f"{key}=[{','.join(module for module in modules if module in RECOMPUTE_MODULES)}]",
    )
    if "permute" in modules:
        why = "to recompute permute, rows of other ranks would be sent again"
        yield from must_be(recipe, "parallel.expert_model_parallel_size", 1, f"{key}={listed}", why)


def _kernels(recipe: Recipe, world_size: int) -> Iterator[str]:
    """Yield problems of core attention, cluster.kernels and cluster.kernel_overrides. The override auto, which recipes
    use, is always allowed.
    """
    cluster, on_cpu = recipe.cluster, recipe.cluster.device == "cpu"
    window, length = recipe.model.sliding_window, recipe.stage.seq_length
    yield from require(
        cluster.core_attention != "cudnn" or window is None or length <= window + 1,
        "cluster.core_attention",
        cluster.core_attention,
        problem=f"torch's call of cuDNN has no sliding window (model.sliding_window={window})",
        allowed=f"another value, or stage.seq_length of at most {(window or 0) + 1} (currently {length})",
        fix="cluster.core_attention=auto",
    )
    try:
        check_selection(cluster.kernels, cluster.kernel_overrides, "cluster.")
    except ValueError as error:
        yield str(error)
        return
    yield from require(
        not on_cpu or cluster.kernels in CPU_VERSIONS,
        "cluster.kernels",
        cluster.kernels,
        problem="requires an accelerator",
        allowed=f"{', '.join(name for name in KERNELS if name in CPU_VERSIONS)} with cluster.device=cpu",
        fix="cluster.kernels=auto",
    )
    for operator, version in cluster.kernel_overrides.items():
        if version == "auto":
            continue
        key, allowed = f"cluster.kernel_overrides.{operator}", ["auto", *VERSIONS[operator], "reference"]
        fix = f"{key}=auto"
        if on_cpu:
            allowed = [name for name in allowed if name in CPU_VERSIONS]
            if version not in allowed:
                text = f"{', '.join(allowed)} with cluster.device=cpu"
                yield message(key, version, problem="requires an accelerator", allowed=text, fix=fix)
                continue
        dtype_key, dtype = "cluster.dtype", cluster.dtype
        if operator == "newton_schulz":  # not called without Muon
            dtype_key, dtype = "optim.muon_dtype", recipe.optim.muon_dtype if _uses_muon(recipe) else None
        wide = [name for name in allowed if name not in NO_FP32.get(operator, ()) or on_cpu and name == "grouped_mm"]
        if dtype == "fp32" and version not in wide:
            why, text = "this version does not support fp32 matrices", f"{', '.join(wide)} with {dtype_key}=fp32"
            yield message(key, version, problem=why, allowed=text, fix=fix)


def unused_kernels(recipe: Recipe) -> str | None:
    """Return a line about a choice of GPU kernels for a run on the CPU, or None."""
    cluster = recipe.cluster
    chosen = {name: cluster.kernel_overrides.get(name, "auto") for name in VERSIONS}
    if cluster.device != "cpu" or "hip" not in (cluster.kernels, *chosen.values()):
        return None
    without = [name for name, versions in VERSIONS.items() if chosen[name] == "auto" and "hip" not in versions]
    unused = [name for name in ("newton_schulz", "muon") if not _uses_muon(recipe)]
    names = [*without, *unused] if cluster.kernels == "hip" else [name for name in unused if chosen[name] == "hip"]
    rest = f"; not used in this run: hip for {', '.join(names)}" if names else ""
    return f"zaya: kernels=hip on a CPU is the g++ build, which verifies kernels and gains no speed{rest}"


def _uses_muon(recipe: Recipe) -> bool:
    """Return whether any parameter is assigned to Muon."""
    return recipe.optim.name == "muon" or any(map(assigns_muon, recipe.optim.overrides))


def _data(recipe: Recipe, world_size: int) -> Iterator[str]:
    try:
        parse_blend(recipe.data.blend, "data.blend", weighted=True)
    except ValueError as problem:
        yield str(problem)
    try:
        skipped_steps(recipe)
    except ValueError as problem:
        yield str(problem)


def _profile(recipe: Recipe, world_size: int) -> Iterator[str]:
    profile = recipe.profile
    yield from require(
        profile.step_end > profile.step_start,
        "profile.step_end",
        profile.step_end,
        problem="no step is traced",
        allowed=f"above profile.step_start={profile.step_start}",
        fix=f"profile.step_end={profile.step_start + 1}",
    )
    if not profile.enabled and not profile.memory_snapshot:
        return
    yield from require(
        bool(profile.ranks) and all(0 <= rank < world_size for rank in profile.ranks),
        "profile.ranks",
        profile.ranks,
        problem=f"the run has {world_size} ranks" if profile.ranks else "no rank is traced",
        allowed=f"ranks from 0 to {world_size - 1}",
        fix="profile.ranks=[0]",
    )
    steps = recipe.stage.train_iters
    yield from require(
        profile.step_end <= steps,
        "profile.step_end",
        profile.step_end,
        problem="the trace is written after this step, and the run has fewer",
        allowed=f"at most stage.train_iters={steps}",
        fix=f"profile.step_start={min(profile.step_start, steps - 1)} profile.step_end={steps}",
    )


def _environment(recipe: Recipe, world_size: int) -> Iterator[str]:
    """A launcher gives each rank its number and the place of rank 0; one value for all ranks would contradict it."""
    for name, value in recipe.cluster.environment.items():
        key = f"cluster.environment.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or "\0" in value:
            allowed = "letters, digits and _, not beginning with a digit"
            yield message(key, value, problem="is not of the form NAME=VALUE", allowed=allowed)
        elif OF_THE_LAUNCHER.fullmatch(name):
            fix = f"leave {name} out; nproc, master_port and the launcher set it"
            yield message(key, value, problem="is set by the launcher, for each rank another value", fix=fix)
    theirs = {name: value for name, value in recipe.cluster.environment.items() if not OF_THE_LAUNCHER.fullmatch(name)}
    yield from variable_problems(theirs, "cluster.environment.")


def _megatron(recipe: Recipe, world_size: int) -> Iterator[str]:
    yield from review_problems(recipe, frozenset({**ZAYA, **HOST}))
