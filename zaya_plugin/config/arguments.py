# SPDX-License-Identifier: Apache-2.0
"""Recipe -> Megatron arguments, as a plain dictionary. No Megatron import: hosts/pretrain.py checks the names.

Fields whose metadata names a Megatron argument are copied; this file adds what is fixed for every ZAYA model and what
takes more than a copy (data, checkpoints, precision, profiling).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zaya_plugin.config.schema import Recipe, leaves, megatron_argument

# Megatron knows nothing of these; they become arguments so that they are validated, saved in checkpoints and fill
# ZayaConfig's fields of the same name.
OWN_ARGUMENTS = (
    "router_hidden_size",
    "router_init_std",
    "scaled_output_init",
    "temperature_form",
    "temperature_init",
    "skip_output",
    "residual_in_fp32",
    "balancing_lr",
    "balancing_beta1",
    "balancing_beta2",
    "balancing_eps",
    "balancing_centering",
    "z_loss",
    "context_parallel_order",
    "core_attention",
)
# The same for what `hosts.forward_step` reads and the model does not.
BATCH_ARGUMENTS = ("packing",)
# What a guest in another host decides when the host starts, from what lies on disk.
DECIDED_AT_START = ("load", "exit_on_missing_checkpoint")

# What makes a network ZAYA (ZAYA1-8B Technical Report, arXiv 2605.05365; transformers' ZayaForCausalLM).
ZAYA = dict(
    normalization="RMSNorm",
    position_embedding_type="rope",
    swiglu=True,
    add_bias_linear=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    group_query_attention=True,
    untie_embeddings_and_output_weights=False,
    moe_router_topk=1,
    moe_router_pre_softmax=True,
    moe_router_load_balancing_type="none",
    # Experts are never cut, also under tensor parallelism.
    expert_tensor_parallel_size=1,
)

# How Megatron is to behave under this plugin.
HOST = dict(
    ckpt_format="torch_dist",
    # Optimizer state that any number of data-parallel ranks can load.
    dist_ckpt_optim_fully_reshardable=True,
    use_checkpoint_opt_param_scheduler=False,
    override_opt_param_scheduler=True,
    exit_signal_handler=True,
    rerun_mode="disabled",
    log_interval=1,
    log_throughput=False,
    # The loss is the mean over the step's tokens that count, however they are dealt out to ranks and micro-batches.
    calculate_per_token_loss=True,
    # Kernels that need apex or a build of Megatron's own.
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    no_persist_layer_norm=True,
)


def megatron_arguments(recipe: Recipe, data: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a run by Megatron's names.

    Args:
        recipe: a validated recipe.
        data: tokenizer arguments found from the data set (see zaya_plugin.data.sources).

    Raises:
        ValueError: `megatron.<name>` in the recipe repeats an argument that another recipe key owns.
    """
    if recipe.parallel.recompute_granularity == "auto":
        raise ValueError(
            "parallel.recompute_granularity = auto: allowed here: null, full, selective; `zaya train --dry-run` says what auto stands for, and "
            "`zaya train` puts that in its place"
        )
    values = {**ZAYA, **HOST, **data}
    owner = {}
    for path, field in leaves():
        name = megatron_argument(field)
        if name is None:
            continue
        value = recipe
        for part in path.split("."):
            value = getattr(value, part)
        owner[name] = path
        if value is not None:
            values[name] = value
    if recipe.parallel.virtual_pipeline_stages == 1:
        values.pop("num_virtual_stages_per_pipeline_rank")
    if not recipe.parallel.recompute_modules:
        values.pop("recompute_modules")
    tensor = recipe.parallel.tensor_model_parallel_size
    values["sequence_parallel"] = tensor > 1
    # Megatron pads to a multiple of this times the tensor-parallel size; the vocabulary is to be the same in every layout.
    values["make_vocab_size_divisible_by"] = recipe.model.make_vocab_size_divisible_by // tensor
    values["max_position_embeddings"] = recipe.stage.seq_length
    values["ffn_hidden_size"] = recipe.model.moe_ffn_hidden_size
    values.update(_precision(recipe))
    values.update(_graphs(recipe))
    values.update(_checkpoints(recipe))
    if recipe.stage.batch_size_ramp is not None:
        _count_in_samples(values)
    values.update(_profiling(recipe))
    # Megatron's name for what zaya_plugin.training.optimizer puts in its place.
    values["optimizer"] = "adam"
    # else Megatron asks the device in each micro-batch; ours notices without waiting
    if recipe.parallel.use_distributed_optimizer:
        values["check_for_nan_in_loss_and_grad"] = False
    values["num_workers"] = recipe.data.num_workers
    # Megatron counts all batches of a validation, the recipe those of a domain.
    values["eval_iters"] = recipe.stage.eval_iters * max(1, len(recipe.data.valid_blend))
    if recipe.logger.tensorboard or recipe.profile.enabled:  # the profiler's traces go beside this folder
        values["tensorboard_dir"] = str(Path(recipe.run_dir) / "tensorboard")
    for name, value in recipe.megatron.items():
        if name in values or name in owner:
            where = owner.get(name, "the plugin, since it is part of what ZAYA is or how the plugin runs")
            raise ValueError(f"megatron.{name}={value!r}: this argument is set by {where}; set it there")
        values[name] = value
    return values


def _precision(recipe: Recipe) -> dict[str, Any]:
    on_cpu = recipe.cluster.device == "cpu"
    fused = recipe.cluster.transformer_impl == "transformer_engine"
    return dict(
        bf16=recipe.cluster.dtype == "bf16",
        use_cpu_initialization=on_cpu,
        bias_swiglu_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=fused,
    )


def _graphs(recipe: Recipe) -> dict[str, Any]:
    # `zaya train` has put something in the place of auto; other hosts go without
    if recipe.cluster.graphs != "full_iteration":
        return {}
    return dict(cuda_graph_impl=recipe.cluster.graphs, cuda_graph_modules=[])


def _checkpoints(recipe: Recipe) -> dict[str, Any]:
    directory = Path(recipe.run_dir) / "checkpoints"
    arguments = dict(save=str(directory), save_interval=recipe.checkpoint.save_interval or recipe.stage.train_iters)
    if (directory / "latest_checkpointed_iteration.txt").is_file():
        arguments.update(load=str(directory), exit_on_missing_checkpoint=True)
    elif recipe.handover.from_run is not None:
        # zaya_plugin.hosts.stage_handover begins a new stage with what is loaded.
        arguments.update(load=str(Path(recipe.handover.from_run) / "checkpoints"), exit_on_missing_checkpoint=True)
    return arguments


def _count_in_samples(values: dict[str, Any]) -> None:
    """Turns counts of steps into counts of sequences: steps are of different sizes while the batch is ramped up.

    Megatron 0.19 ignores its --rampup-batch-size; with --step-batch-size-schedule it refuses a --global-batch-size.
    """
    batch = values.pop("global_batch_size")
    values["eval_global_batch_size"] = batch
    for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay"):
        if (steps := values.pop(f"{name}_iters", None)) is not None:
            values[f"{name}_samples"] = steps * batch


def _profiling(recipe: Recipe) -> dict[str, Any]:
    profile = recipe.profile
    arguments: dict[str, Any] = {}
    if profile.enabled:
        arguments.update(
            profile=True,
            use_pytorch_profiler=True,
            profile_step_start=profile.step_start,
            profile_step_end=profile.step_end,
            profile_ranks=list(profile.ranks),
        )
    if profile.memory_snapshot:
        arguments.update(
            record_memory_history=True,
            memory_snapshot_path=str(Path(recipe.run_dir) / "memory_snapshot.pickle"),
            profile_ranks=list(profile.ranks),
        )
    return arguments
