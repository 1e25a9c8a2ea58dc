# SPDX-License-Identifier: Apache-2.0
"""Translate a recipe into Megatron arguments, as a dictionary. Imports no Megatron: hosts/pretrain.py checks the names.

Recipe fields whose metadata names a Megatron argument are copied. This file adds the arguments that are the same for
every ZAYA model, and those that are computed from the recipe (data, checkpoints, precision, profiling).
"""

from pathlib import Path
from typing import Any

from zaya_plugin.config.entries import skipped_steps
from zaya_plugin.config.run_directory import checkpoint_path, checkpoints_of, has_checkpoint
from zaya_plugin.config.schema import Recipe, get, leaves, megatron_argument
from zaya_plugin.ground.errors import mistake

# What ZAYA adds to Megatron's arguments: declared by `option` in the schema.
OWN_ARGUMENTS = tuple(megatron_argument(field) for _, field in leaves() if field.metadata["adds"])
# Arguments that a guest in another host decides when the host starts, from the checkpoints on disk.
DECIDED_AT_START = ("load", "exit_on_missing_checkpoint")

# The arguments that define the ZAYA network (ZAYA1-8B Technical Report, arXiv 2605.05365; transformers'
# ZayaForCausalLM).
ZAYA = dict(
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
    # Experts are not split, also under tensor parallelism.
    expert_tensor_parallel_size=1,
)

# Settings of Megatron that this plugin relies on.
HOST = dict(
    ckpt_format="torch_dist",
    # Any number of data-parallel ranks can load the optimizer state.
    dist_ckpt_optim_fully_reshardable=True,
    use_checkpoint_opt_param_scheduler=False,
    override_opt_param_scheduler=True,
    exit_signal_handler=True,
    rerun_mode="disabled",
    log_interval=1,
    log_throughput=False,
    # The loss is the mean over all unmasked tokens of the step, independent of their division among ranks and
    # micro-batches.
    calculate_per_token_loss=True,
    # These kernels need apex or a build of Megatron.
    apply_rope_fusion=False,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    no_persist_layer_norm=True,
    bias_swiglu_fusion=False,
    bias_dropout_fusion=False,
)


def megatron_arguments(recipe: Recipe, data: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a run, by Megatron's names.

    Args:
        recipe: a validated recipe.
        data: tokenizer arguments of the data set (see zaya_plugin.data.sources).

    Raises:
        ValueError: parallel.recompute_granularity=auto is not resolved.
    """
    if recipe.parallel.recompute_granularity == "auto":
        raise mistake(
            "parallel.recompute_granularity",
            "auto",
            problem="`zaya train` resolves auto before this point; hosts and exports do not",
            allowed="null, full, selective",
            fix="the value that `zaya train --dry-run` shows for auto",
        )
    values = {**ZAYA, **HOST, **data}
    for path, field in leaves():
        if (name := megatron_argument(field)) and (value := get(recipe, path)) is not None:
            values[name] = value
    if recipe.parallel.virtual_pipeline_stages == 1:
        values.pop("num_virtual_stages_per_pipeline_rank")
    if not recipe.parallel.recompute_modules:
        values.pop("recompute_modules")
    tensor = recipe.parallel.tensor_model_parallel_size
    values["sequence_parallel"] = tensor > 1
    # Megatron pads to a multiple of this times the tensor-parallel size; the padded vocabulary must not depend on the
    # layout.
    values["make_vocab_size_divisible_by"] = recipe.model.make_vocab_size_divisible_by // tensor
    values["max_position_embeddings"] = recipe.stage.seq_length
    values["ffn_hidden_size"] = recipe.model.moe_ffn_hidden_size
    on_cpu = recipe.cluster.device == "cpu" or recipe.cluster.use_cpu_initialization
    values.update(bf16=recipe.cluster.dtype == "bf16", use_cpu_initialization=on_cpu)
    if recipe.cluster.graphs == "full_iteration":  # `zaya train` has resolved auto; in other hosts auto means none
        values.update(cuda_graph_impl=recipe.cluster.graphs, cuda_graph_modules=[])
    values.update(_checkpoints(recipe))
    if recipe.stage.batch_size_ramp is not None:
        _count_in_samples(values)
    values.update(_profiling(recipe))
    if recipe.stage.record_routing is not None:
        values["moe_enable_routing_replay"] = True
    if recipe.data.skip_steps:
        values["iterations_to_skip"] = skipped_steps(recipe)
    # zaya_plugin.training.optimizer replaces the optimizer that Megatron builds for this name.
    values["optimizer"] = "adam"
    # With it Megatron would wait for the device in each micro-batch;
    # this plugin's optimizer detects NaNs without waiting.
    if recipe.parallel.use_distributed_optimizer:
        values["check_for_nan_in_loss_and_grad"] = False
    # Megatron counts the batches of all domains, the recipe those of one.
    values["eval_iters"] = recipe.stage.eval_iters * max(1, len(recipe.data.valid_blend))
    return {**recipe.megatron_unchecked, **recipe.megatron, **values}


def arguments_with_event_files(recipe: Recipe, data: dict[str, Any]) -> dict[str, Any]:
    """Return `megatron_arguments` for a host in which Megatron itself writes TensorBoard's event files."""
    values = megatron_arguments(recipe, data)
    if recipe.logger.tensorboard or recipe.profile.enabled:  # the profiler writes its traces next to this directory
        values["tensorboard_dir"] = str(Path(recipe.run_dir) / "tensorboard")
    return values


def _checkpoints(recipe: Recipe) -> dict[str, Any]:
    directory = checkpoint_path(recipe)
    arguments = dict(save=str(directory), save_interval=recipe.checkpoint.save_interval or recipe.stage.train_iters)
    if has_checkpoint(directory):
        arguments.update(load=str(directory), exit_on_missing_checkpoint=True)
    elif recipe.handover.from_hf is not None:  # the same module reads them in place of Megatron
        arguments.update(load=recipe.handover.from_hf, exit_on_missing_checkpoint=True)
    elif recipe.handover.from_run is not None:
        # zaya_plugin.hosts.stage_handover starts a new stage from the loaded weights and optimizer state.
        arguments.update(load=str(checkpoints_of(recipe.handover.from_run)), exit_on_missing_checkpoint=True)
    return arguments


def _count_in_samples(values: dict[str, Any]) -> None:
    """Replace counts of steps by counts of sequences, because a batch size ramp changes the size of a step.

    Megatron 0.19 ignores its --rampup-batch-size, and refuses a --global-batch-size with --step-batch-size-schedule.
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
