# SPDX-License-Identifier: Apache-2.0
"""What cannot be: combinations of a recipe's values that no run can have, found before anything starts.

Plain arithmetic, no torch. Types and choices are the schema's business (`zaya_plugin.config.compose`); here are ranges and
the relations between keys. All problems are collected, so that a user mends a recipe once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from hip_ops.versions import KERNELS, NO_FP32, VERSIONS, check_selection
from zaya_plugin.config.compose import get
from zaya_plugin.config.graphs import obstacles
from zaya_plugin.config.layout_rules import layout_problems, nearest_multiples, recompute_problems
from zaya_plugin.config.optimizer_override import Override
from zaya_plugin.config.schedule import schedule_problems
from zaya_plugin.config.schema import Recipe, leaves, megatron_argument

PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)

CPU_VERSIONS = ("auto", "reference", "hip", "grouped_mm")  # hip: built by g++, to verify the kernels


def _above_zero(value) -> bool:
    return value > 0


def _zero_or_more(value) -> bool:
    return value >= 0


def _beta(value) -> bool:
    return 0 <= value < 1


def _share(value) -> bool:
    return 0 < value <= 1


# What is allowed, the test, and the keys it holds for; null, where the schema lets it be, is always allowed.
RANGES: tuple[tuple[str, Callable, tuple[str, ...]], ...] = (
    (
        "above 0",
        _above_zero,
        (
            *(
                f"model.{key}"
                for key in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
            ),
            *(f"model.{key}" for key in ("num_experts", "moe_ffn_hidden_size", "router_hidden_size", "norm_epsilon")),
            *(
                f"model.{key}"
                for key in ("init_method_std", "router_init_std", "make_vocab_size_divisible_by", "balancing_eps")
            ),
            *(
                f"stage.{key}"
                for key in ("seq_length", "rotary_base", "micro_batch_size", "global_batch_size", "train_iters")
            ),
            *(
                "stage.eval_interval",
                "optim.lr",
                "optim.adam_eps",
                "parallel.ddp_bucket_size",
                "parallel.recompute_num_layers",
            ),
            *("parallel.virtual_pipeline_stages", "parallel.num_distributed_optimizer_instances"),
            *(f"parallel.{key}" for key in PARALLEL_SIZES),
            *(f"cluster.{key}" for key in ("num_nodes", "gpus_per_node", "distributed_timeout_minutes", "peak_tflops")),
            *(
                "cluster.memory_gib",
                "cluster.reachable_tflops",
                "cluster.threads_per_rank",
                "logger.log_interval",
                "logger.expert_load_interval",
            ),
            *("checkpoint.save_interval", "nproc", "exit_interval", "optim.lr_decay_iters", "optim.lr_wsd_decay_iters"),
            *("optim.muon_steps", "optim.muon_rms_scale"),
        ),
    ),
    (
        "0 or more",
        _zero_or_more,
        (
            *("stage.eval_iters", "data.num_workers", "optim.min_lr", "optim.lr_warmup_iters", "optim.weight_decay"),
            *("optim.lr_warmup_init", "handover.first_sample", "handover.planned_samples"),
            *(
                "optim.clip_grad",
                "optim.z_loss",
                "checkpoint.keep_last",
                "profile.step_start",
                "seed",
                "model.balancing_lr",
            ),
        ),
    ),
    (
        "from 0 to below 1",
        _beta,
        (
            "optim.adam_beta1",
            "optim.adam_beta2",
            "optim.muon_momentum",
            "model.balancing_beta1",
            "model.balancing_beta2",
        ),
    ),
    ("above 0, at most 1", _share, ("model.rotary_percent",)),
    ("a port from 1 to 65535", lambda value: 1 <= value <= 65535, ("master_port",)),
    ("a name that is not empty", lambda value: bool(value.strip()), ("name", "run_dir", "data.path")),
)


def data_parallel_size(recipe: Recipe, world_size: int) -> int:
    """Ranks that see different sequences: the world size over tensor, pipeline and context parallel sizes."""
    parallel = recipe.parallel
    return world_size // (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )


def validate(recipe: Recipe, world_size: int) -> None:
    """Raises one `ValueError` that lists everything impossible about `recipe` on `world_size` ranks."""
    problems = list(_ranges(recipe))
    if not problems:  # the relations below divide by values whose range must hold first
        for check in (
            _model,
            layout_problems,
            _batch,
            _optimizer,
            _schedule,
            recompute_problems,
            _cluster,
            _data,
            _rest,
        ):
            problems += check(recipe, world_size)
    if problems:
        raise ValueError("\n".join(problems))


def _ranges(recipe: Recipe) -> Iterator[str]:
    for allowed, holds, paths in RANGES:
        for path in paths:
            value = get(recipe, path)
            if value is not None and not holds(value):
                yield f"{path} = {value!r}: allowed: {allowed}"


def _model(recipe: Recipe, world_size: int) -> Iterator[str]:
    model = recipe.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if heads % groups:
        yield (
            f"model.num_attention_heads = {heads} is not a multiple of model.num_query_groups = {groups}; "
            f"allowed: {nearest_multiples(heads, groups)}"
        )
    if groups % 2:
        yield (
            f"model.num_query_groups = {groups}: allowed: an even number, since half of the key/value heads carry the "
            "delayed value"
        )
    rotated = model.kv_channels * model.rotary_percent
    if rotated % 2:
        yield (
            f"model.rotary_percent = {model.rotary_percent} of model.kv_channels = {model.kv_channels} rotates {rotated:g} "
            "channels; allowed: an even number of channels, since RoPE rotates pairs"
        )


def _batch(recipe: Recipe, world_size: int) -> Iterator[str]:
    stage = recipe.stage
    replicas = max(data_parallel_size(recipe, world_size), 1)
    unit = stage.micro_batch_size * replicas
    if stage.global_batch_size % unit:
        yield (
            f"stage.global_batch_size = {stage.global_batch_size} is not a multiple of stage.micro_batch_size = "
            f"{stage.micro_batch_size} x {replicas} data-parallel ranks = {unit}; allowed: "
            f"{nearest_multiples(stage.global_batch_size, unit)}"
        )


def _optimizer(recipe: Recipe, world_size: int) -> Iterator[str]:
    optim = recipe.optim
    for entry in optim.overrides:
        try:
            Override.parse(entry)
        except ValueError as error:
            yield str(error)
    if optim.non_finite_gradients == "skip" and not recipe.parallel.use_distributed_optimizer:
        yield (
            "optim.non_finite_gradients = 'skip' with parallel.use_distributed_optimizer = False: allowed: stop, or the "
            "distributed optimizer"
        )


def _schedule(recipe: Recipe, world_size: int) -> Iterator[str]:
    optim, stage = recipe.optim, recipe.stage
    if optim.lr_warmup_iters >= stage.train_iters:
        yield (
            f"optim.lr_warmup_iters = {optim.lr_warmup_iters}: allowed: less than stage.train_iters = {stage.train_iters}"
        )
    elif optim.lr_decay_iters is not None and optim.lr_decay_iters <= optim.lr_warmup_iters:
        yield (
            f"optim.lr_decay_iters = {optim.lr_decay_iters}: allowed: more than optim.lr_warmup_iters = "
            f"{optim.lr_warmup_iters}, or null"
        )
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr = {optim.min_lr}: allowed: at most optim.lr = {optim.lr}"
    yield from schedule_problems(recipe, stage.micro_batch_size * max(data_parallel_size(recipe, world_size), 1))


def _cluster(recipe: Recipe, world_size: int) -> Iterator[str]:
    cluster = recipe.cluster
    if cluster.core_attention != "sdpa":
        if cluster.transformer_impl == "transformer_engine":
            yield (
                f"cluster.core_attention = {cluster.core_attention}: allowed with cluster.transformer_impl = "
                "transformer_engine, which brings its own attention: sdpa"
            )
        elif cluster.device == "cpu" or cluster.dtype != "bf16":
            yield (
                f"cluster.core_attention = {cluster.core_attention}: allowed with cluster.device = cuda and cluster.dtype = bf16 "
                f"(are {cluster.device}, {cluster.dtype}); sdpa goes everywhere"
            )
    yield from _kernels(recipe)
    if cluster.device == "cpu":
        for name, needed in (("distributed_backend", "gloo"), ("transformer_impl", "local")):
            if getattr(cluster, name) != needed:
                yield f"cluster.{name} = {getattr(cluster, name)}: allowed with cluster.device = cpu: {needed}"
        if recipe.parallel.nccl_ub:
            yield "parallel.nccl_ub = True: allowed with cluster.device = cuda (is cpu), whose collectives take registered memory"
    elif cluster.distributed_backend != "nccl":
        yield f"cluster.distributed_backend = {cluster.distributed_backend}: allowed with cluster.device = cuda: nccl"
    if recipe.parallel.nccl_ub and cluster.deterministic:
        yield (
            "parallel.nccl_ub = True: allowed with cluster.deterministic = False (is True); registered gradients are added by symmetric kernels, "
            "whose order NCCL_ALGO does not set"
        )
    if cluster.graphs == "full_iteration":
        yield from obstacles(recipe)


def _kernels(recipe: Recipe) -> Iterator[str]:
    """What is wrong with cluster.kernels and cluster.kernel_overrides. The override auto, as recipes have it, is always allowed."""
    cluster, on_cpu = recipe.cluster, recipe.cluster.device == "cpu"
    try:
        check_selection(cluster.kernels, cluster.kernel_overrides, "cluster.")
    except ValueError as error:
        yield str(error)
        return
    if on_cpu and cluster.kernels not in CPU_VERSIONS:
        allowed = ", ".join(each for each in KERNELS if each in CPU_VERSIONS)
        yield (
            f"cluster.kernels={cluster.kernels}: requires an accelerator. Allowed with cluster.device=cpu: {allowed}. "
            "Fix: cluster.kernels=auto"
        )
    for operator, version in cluster.kernel_overrides.items():
        if version == "auto":
            continue
        key, allowed = f"cluster.kernel_overrides.{operator}", ["auto", *VERSIONS[operator], "reference"]
        if on_cpu:
            allowed = [each for each in allowed if each in CPU_VERSIONS]
            if version not in allowed:
                yield (
                    f"{key}={version}: requires an accelerator. Allowed with cluster.device=cpu: {', '.join(allowed)}. "
                    f"Fix: {key}=auto"
                )
                continue
        if operator == "grouped_product" and cluster.transformer_impl == "transformer_engine":
            yield (
                f"{key}={version}: Transformer Engine computes the experts, not grouped_product. Allowed with "
                f"cluster.transformer_impl=local (currently transformer_engine). Fix: {key}=auto"
            )
        dtype_key, dtype = "cluster.dtype", cluster.dtype
        if operator == "newton_schulz":  # without Muon nothing calls it
            dtype_key, dtype = "optim.muon_dtype", recipe.optim.muon_dtype if _uses_muon(recipe) else None
        wide = [each for each in allowed if each not in NO_FP32.get(operator, ()) or on_cpu and each == "grouped_mm"]
        if dtype == "fp32" and version not in wide:
            yield (
                f"{key}={version}: this version takes no fp32 matrices. Allowed with {dtype_key}=fp32: {', '.join(wide)}. "
                f"Fix: {key}=auto"
            )


def _uses_muon(recipe: Recipe) -> bool:
    return recipe.optim.name == "muon" or any("optimizer=muon" in entry.split() for entry in recipe.optim.overrides)


def _data(recipe: Recipe, world_size: int) -> Iterator[str]:
    packing, implementation = recipe.data.packing, recipe.cluster.transformer_impl
    if packing == "documents" and implementation != "local":
        yield (
            f"data.packing = documents: allowed with cluster.transformer_impl = local (is {implementation}); Transformer Engine's "
            "attention would look across documents"
        )
    if recipe.data.reset_position_ids and packing == "none":
        yield "data.reset_position_ids = True: allowed with data.packing = documents (is none)"
    for entry in recipe.data.blend:
        if (
            not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\s+\S.*", entry.strip())
            or float(entry.split()[0]) <= 0
        ):
            yield f"data.blend: {entry!r}: allowed: '<weight above 0> <path>', such as '0.3 data/code'"


def _rest(recipe: Recipe, world_size: int) -> Iterator[str]:
    profile = recipe.profile
    if profile.memory_snapshot and recipe.cluster.device == "cpu":
        yield "profile.memory_snapshot = true: allowed with cluster.device = cuda; it records the device's allocator"
    if profile.step_end <= profile.step_start:
        yield f"profile.step_end = {profile.step_end}: allowed: above profile.step_start = {profile.step_start}"
    for rank in profile.ranks:
        if profile.enabled and not 0 <= rank < world_size:
            yield f"profile.ranks = {profile.ranks}: allowed: ranks from 0 to {world_size - 1}"
    filled = {megatron_argument(field): path for path, field in leaves() if megatron_argument(field)}
    for name, value in recipe.megatron.items():
        if name in filled:
            yield f"megatron.{name} = {value!r}: this argument has a key of its own; set {filled[name]}={value}"
