# SPDX-License-Identifier: Apache-2.0
"""The review of Megatron's arguments: what `megatron.<name>=<value>` may set. Imports no Megatron.

Every argument of Megatron 0.19 is in one place: the schema (a key of its own), `ZAYA` and `HOST` of config/arguments.py
(fixed for every ZAYA model), OWNED_BY_KEY (a key decides it), IMPOSSIBLE (by reason) or PASSED_ON (by its values).
`tests/config/test_megatron_review.py` holds these lists against the installed Megatron and names what is missing.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from zaya_plugin.config.schema import Recipe, leaves, megatron_argument
from zaya_plugin.ground.errors import as_typed, message

# Recipe key -> the arguments that it decides, in addition to the one that its field names.
OWNED_BY_KEY = {
    "checkpoint.keep_every": "save_retain_interval",
    "checkpoint.local_path": """
        non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo
        non_persistent_local_ckpt_dir non_persistent_save_interval
    """,
    "checkpoint.path": "save",
    "checkpoint.save": "async_save async_strategy use_persistent_ckpt_worker",
    "checkpoint.save_interval": "save_interval",
    "cluster.core_attention": """
        attention_backend flash_attention_version kitchen_attention_backend use_flash_attn use_kitchen_attention
    """,
    "cluster.dtype": "bf16 fp16 fp4 fp4_param_gather fp8 fp8_param_gather",
    "cluster.graphs": """
        cuda_graph_impl cuda_graph_modules cuda_graph_scope_deprecated enable_cuda_graph external_cuda_graph
        optimizer_cuda_graph
    """,
    "data.blend": "data_args_path per_split_data_args_path",
    "data.cache_path": "data_cache_path",
    "data.packing": "dataloader_inter_document_masking reset_attention_mask",
    "data.path": "data_path mock_data split train_data_path",
    "data.skip_steps": "iterations_to_skip",
    "data.tokenizer": "merge_file padded_vocab_size tokenizer_model tokenizer_type vocab_file vocab_size",
    "data.valid_blend": "multiple_validation_sets validation_set_names",
    "data.valid_path": "test_data_path valid_data_path",
    "handover.from_hf": "pretrained_checkpoint",
    "handover.from_run": "ckpt_step finetune load load_main_params_from_ckpt",
    "handover.optimizer": "no_load_optim no_save_optim",
    "logger.log_interval": "tensorboard_log_interval",
    "logger.tensorboard": "tensorboard_dir",
    "logger.wandb_entity": "wandb_entity",
    "logger.wandb_name": "wandb_exp_name",
    "logger.wandb_project": "wandb_project",
    "model.make_vocab_size_divisible_by": "pad_vocab_size",
    "model.moe_ffn_hidden_size": "ffn_hidden_size",
    "model.num_layers": "decoder_num_layers encoder_num_layers",
    "model.residual_in_fp32": "fp32_residual_connection",
    "optim.grad_reduce_in_fp32": """
        ddp_param_name_patterns_for_fp32_local_accumulation ddp_reduce_scatter_with_fp32_accumulation
        grad_reduce_in_bf16 main_grads_dtype
    """,
    "optim.lr_decay_iters": "lr_decay_samples",
    "optim.lr_warmup_iters": "lr_warmup_fraction lr_warmup_samples warmup",
    "optim.lr_wsd_decay_iters": "lr_wsd_decay_samples",
    "optim.muon_coefficients": "muon_coefficient_type",
    "optim.muon_dtype": "muon_fp32_matmul_prec",
    "optim.muon_momentum": "muon_momentum",
    "optim.muon_nesterov": "muon_nesterov",
    "optim.muon_rms_scale": "muon_extra_scale_factor muon_scale_mode",
    "optim.muon_steps": "muon_num_ns_steps",
    "optim.name": "muon_scalar_optimizer optimizer",
    "optim.non_finite_gradients": "check_for_nan_in_loss_and_grad",
    "optim.overrides": "apply_wd_to_qk_layernorm decoupled_lr decoupled_min_lr no_weight_decay_cond_type",
    "optim.weight_decay": "end_weight_decay start_weight_decay weight_decay_incr_style",
    "parallel.context_parallel_order": "cp_comm_type hierarchical_context_parallel_sizes hybrid_context_parallel",
    "parallel.ddp_bucket_size": "ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw",
    "parallel.nccl_ub": "disable_symmetric_registration",
    "parallel.pipeline_model_parallel_size": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers pipeline_model_parallel_layout
    """,
    "parallel.recompute_granularity": """
        checkpoint_activations distribute_saved_activations moe_layer_recompute recompute_activations
    """,
    "parallel.tensor_model_parallel_size": "model_parallel_size sequence_parallel",
    "parallel.virtual_pipeline_stages": "microbatch_group_size_per_vp_stage num_layers_per_virtual_pipeline_stage",
    "profile.enabled": "profile record_shapes use_pytorch_profiler",
    "profile.memory_snapshot": "memory_snapshot_path record_memory_history",
    "profile.ranks": "profile_ranks",
    "profile.step_end": "profile_step_end",
    "profile.step_start": "profile_step_start",
    "resume": "exit_on_missing_checkpoint override_ckpt_iteration",
    "run_dir": "wandb_save_dir",
    "stage.batch_size_ramp": "decrease_batch_size_if_needed rampup_batch_size",
    "stage.eval_iters": "full_validation start_eval_at_iter",
    "stage.global_batch_size": "eval_global_batch_size",
    "stage.micro_batch_size": "batch_size eval_micro_batch_size",
    "stage.seq_length": "decoder_seq_length encoder_seq_length max_position_embeddings",
    "stage.train_iters": "skip_train train_samples",
}

# Reason -> the arguments that are refused for it.
IMPOSSIBLE = {
    "ZAYA's layers have no such part, or have it in one form only": """
        activation_func_clamp_value add_position_embedding add_qkv_bias apply_query_key_layer_scaling
        apply_residual_connection_post_layernorm attention_output_gate bert_binary_head bert_embedder_type bert_load
        cache_mla_latents dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_use_sparse_loss dsa_kernel_backend embedding_init_method_std experimental_attention_variant
        glu_linear_offset heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
        hybrid_layer_pattern hybrid_override_pattern init_method_xavier_uniform init_model_with_meta_device
        is_hybrid_model kv_lora_rank layernorm_zero_centered_gamma linear_attention_freq linear_conv_kernel_dim
        linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_head_dim
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype mamba_num_groups mamba_num_heads
        mamba_state_dim mamba_training_ssm_states_dtype mla_down_proj_fusion moe_latent_size moe_layer_freq
        moe_shared_expert_gate moe_shared_expert_glu_interleave_size moe_shared_expert_intermediate_size
        moe_shared_expert_overlap moe_upcycling_granularity moe_use_upcycling mrope_section mscale mscale_all_dim
        mtp_detach_heads mtp_hybrid_override_pattern mtp_loss_scaling_factor mtp_num_layers mtp_standalone
        mtp_use_repeated_layer multi_latent_attention mup_attn_scale_power mup_base_head_dim mup_base_hidden_size
        mup_embedding_mult mup_output_mult mup_width_mult no_rope_freq num_classes onnx_safe openai_gelu
        perform_initialization q_lora_rank qk_clip qk_clip_alpha qk_clip_threshold qk_head_dim qk_l2_norm qk_layernorm
        qk_pos_emb_head_dim quick_geglu relative_attention_max_distance relative_attention_num_buckets
        rope_scaling_factor rope_type rotary_interleaved rotary_scaling_factor rotary_seq_len_interpolation_factor
        softmax_type squared_relu use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
        use_mamba_mem_eff_path use_mup use_rope_scaling use_rotary_position_embeddings v_head_dim
        window_size yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int
        yarn_original_max_position_embeddings
    """,
    "ZAYA's own router and experts replace Megatron's, which read it": """
        delay_wgrad_compute ep_overlap_early_attn_memory_release moe_apply_probs_on_input moe_aux_loss_coeff
        moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_expert_capacity_factor
        moe_expert_rank_capacity_factor moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_grouped_gemm
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
        moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_input_jitter_eps
        moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy moe_pad_expert_input_to_capacity
        moe_pad_experts_for_cuda_graph_inference moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
        moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging moe_permute_fusion
        moe_permute_fusion_into_hybridep moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
        moe_router_force_biased moe_router_force_load_balancing moe_router_fusion moe_router_group_topk
        moe_router_num_groups moe_router_padding_for_fp8 moe_router_padding_for_quantization
        moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk_scaling_factor
        moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits moe_routing_trace_dump_weights
        moe_routing_trace_max_training_iters moe_routing_trace_path moe_single_grouped_bias moe_single_grouped_weight
        moe_token_drop_policy moe_z_loss_coeff overlap_dispatch_backward_with_experts_wgrad
        overlap_moe_expert_parallel_comm
    """,
    "ZAYA's own kernels, norms and loss replace the parts of Megatron that read it": """
        attention_softmax_in_fp32 batch_invariant_mode bias_gelu_fusion clone_scatter_output_in_embedding
        cross_entropy_fusion_impl cross_entropy_loss_fusion defer_embedding_wgrad_compute
        disable_bf16_reduced_precision_matmul flash_decode fp16_lm_cross_entropy fused_residual_rmsnorm
        use_fused_weighted_squared_relu use_te_activation_func use_transformer_engine_op_fuser wgrad_deferral_limit
    """,
    "the recipe's precisions are bf16 and fp32": """
        first_last_layers_bf16 fp4_quantizer_factory fp4_recipe fp8_amax_compute_algo fp8_amax_history_len
        fp8_interval fp8_margin fp8_output_proj fp8_quantizer_factory fp8_recipe fp8_wgrad hysteresis
        initial_loss_scale loss_scale loss_scale_window min_loss_scale num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16 reuse_grad_buf_for_mxfp8_param_ag te_precision_config_file
    """,
    "the plugin's optimizer does not read it": """
        dump_param_to_param_group_map exp_avg_dtype exp_avg_sq_dtype freeze_all_layers lion_beta1 lion_beta2
        main_params_dtype muon_split_qkv muon_tp_mode optimizer_cpu_offload optimizer_offload_fraction
        overlap_cpu_optimizer_d2h_h2d overlap_param_gather_with_optimizer_step pin_cpu_grads pin_cpu_params
        sgd_momentum use_layer_wise_param_layout use_precision_aware_optimizer use_torch_optimizer_for_cpu_offload
    """,
    "the plugin's sharded optimizer needs Megatron's own DDP, as it is set up": """
        create_all_gather_group data_parallel_random_init data_parallel_sharding_strategy ddp_average_in_collective
        enable_full_sharding_in_hsdp fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration
        gradient_reduce_div_fusion keep_fp8_transpose_cache megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
        megatron_fsdp_max_pool_double_buffer outer_dp_sharding_strategy suggested_communication_unit_size
        torch_fsdp2_reshard_after_forward use_megatron_fsdp use_torch_fsdp2
    """,
    "the plugin's checkpoints are written and read by its own code": """
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm auto_detect_ckpt_format
        ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save ckpt_fully_parallel_save_deprecated
        ckpt_fully_parallel_save_process_group ckpt_load_validate_sharding_integrity dist_ckpt_format_deprecated
        dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness dist_ckpt_workers
        distrib_optim_fully_reshardable_mem_efficient no_save_rng replication replication_factor replication_jump
        save_activations_interval save_dgrads_interval save_params_interval save_tokens_per_expert_interval
        save_wgrads_interval stream_ckpt_dequant strict_fsdp_dtensor_load use_checkpoint_args use_dist_ckpt_deprecated
        use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args verify_integrity
    """,
    "the plugin's data sets and data order do not read it": """
        allow_ambiguous_pad_tokens create_attention_mask_in_dataloader data_sharding dataloader_defer_npy_index_mmap
        dataloader_fast_cache_load dataloader_type disable_msc_deprecated enable_msc eod_mask_loss fim_data
        fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate
        fim_split_sample fim_spm_rate fim_suffix_token mask_prob mid_level_dataset_surplus
        mmap_bin_files num_dataset_builder_threads object_storage_cache_path per_dataset_sequences_path
        phase_transition_iterations sample_rate sft sft_tokenizer_prompt_format short_seq_prob
    """,
    "the plugin reads Hugging Face tokenizers, from data.tokenizer or the data's manifest": """
        chat_template metadata_path null_tokenizer_eod_id null_tokenizer_pad_id special_tokens
        tiktoken_num_special_tokens tiktoken_pattern tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy trust_remote_code
        vocab_extra_ids
    """,
    "the plugin measures and reports the steps itself, and nothing would show it": """
        app_tag_run_name app_tag_run_version barrier_with_L1_time config_logger_dir log_device_memory_used log_energy
        log_loss_scale_to_tensorboard log_max_attention_logit log_memory_interval log_memory_to_tensorboard
        log_num_zeros_in_grad log_params_norm log_progress log_straggler log_timers_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard one_logger_async one_logger_project
        one_logger_run_name pytorch_profiler_collect_chakra result_rejected_tracker_filename
        run_workload_inspector_server timing_log_level timing_log_option
    """,
    "the plugin ends, resumes and supervises runs itself": """
        adlr_autoresume adlr_autoresume_interval calc_ft_timeouts check_for_large_grads check_for_spiky_loss
        check_weight_hash_across_dp_replicas_interval disable_straggler_on_startup enable_ft_package
        error_injection_rate error_injection_type exit_signal exit_signal_handler_for_training
        fault_injector_delay_start_iteration fault_injector_fault_delay fault_injector_fault_probabilities
        fault_injector_fault_types fault_injector_mtti_seconds fault_injector_num_ranks fault_injector_offset_seconds
        fault_injector_ranks fault_injector_seed ft_num_warmup_iters gpu_sniff_test_interval
        inprocess_active_world_size inprocess_barrier_timeout inprocess_completion_timeout inprocess_empty_cuda_cache
        inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval inprocess_heartbeat_timeout
        inprocess_last_call_wait inprocess_max_iterations inprocess_monitor_process_interval
        inprocess_monitor_thread_interval inprocess_progress_watchdog_interval inprocess_restart
        inprocess_soft_timeout inprocess_termination_grace_time straggler_ctrlr_port straggler_minmax_count test_mode
    """,
    "the plugin relies on Megatron's own order of ranks and its default process groups": """
        expert_tensor_parallel_num_weight_shards fake_process_group high_priority_a2a_comm_stream
        high_priority_stream_groups lazy_mpu_init local_rank max_seqlen_per_dp_cp_rank
        pipeline_model_parallel_comm_backend sharp_enabled_group symmetric_ar_type tensor_parallel_num_weight_shards
        use_gloo_process_groups use_ring_exchange_p2p use_sharp use_tp_pp_dp_mapping
    """,
    "only overlapped pipeline messages are tested with ZAYA; batched ones give wrong losses over gloo": """
        overlap_p2p_comm overlap_p2p_comm_warmup_flush
    """,
    "the overlap of tensor-parallel messages is Transformer Engine's, and its tests with ZAYA need that package": """
        tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag
        tp_comm_overlap_cfg tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    """,
    "offloading of activations was not tried with ZAYA's layers": """
        activation_offload_fraction cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers
        delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks fine_grained_activation_offloading
        fine_grained_offloading_max_inflight_offloads min_offloaded_tensor_size offload_modules
    """,
    "the recipe takes the place of these ways to describe a model or a run": """
        cuda_graph_warmup_steps deprecated_use_mcore_models enable_experimental spec te_rng_tracker yaml_cfg
    """,
    "it is for inference, which this plugin does not do": """
        decode_only_cuda_graphs enable_chunked_prefill inference_batch_times_seqlen_threshold
        inference_coordinator_port inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens
        inference_cuda_graph_scope inference_disable_ep_consensus inference_disable_triton_nvls_kernels
        inference_dynamic_batching inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_eviction_policy inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_sampling_backend
        inference_dynamic_batching_track_generated_token_events inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_unified_memory_level inference_fuse_tp_communication inference_grouped_gemm_backend
        inference_logging_step_interval inference_max_requests inference_max_seq_length
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type inference_rng_tracker
        inference_shards inference_text_gen_server_logging inference_use_synchronous_zmq_collectives
        inference_wandb_logging max_tokens_to_oom mlp_chunks_for_prefill mlp_chunks_for_training
        nccl_all_reduce_for_prefill num_speculative_tokens offset_sampling_seed_by_dp_rank output_bert_embeddings
        use_legacy_static_engine
    """,
    "it is for reinforcement learning, which this plugin does not do": """
        grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight grpo_filter_groups_with_same_reward
        grpo_group_size grpo_iterations grpo_kl_beta grpo_prompts_per_step langrl_env_config perform_rl_step
        refit_method rl_consumption_granularity rl_default_temperature rl_default_top_k rl_default_top_p
        rl_generation_lag rl_importance_sampling_truncation_coef rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_logprobs_is_correction
        rl_inference_model_unified_memory_level rl_inference_parsers rl_inference_pipeline_model_parallel_size
        rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode
        rl_offload_inference_model_weights_when_idle rl_offload_optimizer_during_inference rl_partial_rollouts
        rl_persist_cuda_graphs rl_profile rl_profile_dir rl_prompts_per_eval rl_sequence_packing_algo
        rl_sequence_packing_max_sequences_per_bin rl_skip_bos_token rl_submission_granularity rl_training_cuda_graphs
        rl_use_sequence_packing rl_verify_model_weights_swap
    """,
    "it is for distillation, which this plugin does not do": """
        logits_load_decode_threads logits_load_dir logits_load_ignore_errors logits_load_kd_loss_alpha
        logits_load_msc_prefetch_depth logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k
        logits_save_top_p logits_save_top_p_min_k
    """,
    "it is for other models than GPT (BERT, retrieval, vision)": """
        biencoder_projection_dim biencoder_shared_query_context_model block_data_path classes_fraction
        data_per_class_fraction dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size
        dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp
        dino_warmup_teacher_temp_epochs embedding_path evidence_data_path head_lr_mult ict_head_size ict_load img_h
        img_w indexer_batch_size indexer_log_interval iter_per_epoch mask_factor mask_type num_channels patch_dim
        query_in_block_prob retriever_report_topk_accuracies retriever_score_scaling swin_backbone_type
        titles_data_path use_one_sent_docs vision_backbone_type vision_pretraining vision_pretraining_type
    """,
}

# Allowed values -> the arguments that are passed on: they change neither the model nor what another key decides.
PASSED_ON = {
    "true or false": """
        align_grad_reduce align_param_gather disable_jit_fuser enable_one_logger exit_signal_handler_for_dataloader
        flight_recorder_dump_on_timeout flight_recorder_extra_dump_on_exec flight_recorder_include_only_active
        flight_recorder_include_stack_trace manual_gc manual_gc_eval no_load_rng nvtx_ranges
        pytorch_profiler_collect_callstack pytorch_profiler_collect_shapes
    """,
    "a whole number above 0": """
        distributed_timeout_seconds_after_init exit_duration_in_mins flight_recorder_trace_buffer_size
        manual_gc_interval tensorboard_queue_size train_sync_interval
    """,
    "0, 1, 2": """
        empty_unused_memory_level
    """,
    "10, 20, 30, 40, 50": """
        logging_level
    """,
    "text": """
        flight_recorder_dump_path nccl_communicator_config_path
    """,
}

HOLDS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "a whole number above 0": lambda value: type(value) is int and 0 < value < 2**31,
    "0, 1, 2": lambda value: type(value) is int and value in (0, 1, 2),
    "10, 20, 30, 40, 50": lambda value: type(value) is int and value in (10, 20, 30, 40, 50),
    "text": lambda value: isinstance(value, str) and bool(value.strip()),
}


@cache
def owners() -> dict[str, str]:
    """Return the recipe key of every argument that a key decides."""
    filled = {megatron_argument(field): path for path, field in leaves() if megatron_argument(field)}
    return {name: key for key, names in OWNED_BY_KEY.items() for name in names.split()} | filled


@cache
def impossible() -> dict[str, str]:
    """Return the reason against every argument that is refused."""
    return {name: reason for reason, names in IMPOSSIBLE.items() for name in names.split()}


@cache
def passed_on() -> dict[str, str]:
    """Return the allowed values of every argument that is passed on."""
    return {name: values for values, names in PASSED_ON.items() for name in names.split()}


def key_of(name: str) -> str:
    """Return the recipe key that gives the argument `name` its value."""
    return owners().get(name) or f"{'megatron' if name in passed_on() else 'megatron_unchecked'}.{name}"


def review_problems(recipe: Recipe, fixed: frozenset[str]) -> Iterator[str]:
    """Yield a message for each entry of `megatron` and `megatron_unchecked` that is refused.

    fixed: the arguments that have one value for every ZAYA model.
    """
    for group in ("megatron", "megatron_unchecked"):
        for name, value in getattr(recipe, group).items():
            key, remove = f"{group}.{name}", f"remove {group}.{name}"
            if name in owners():
                problem = f"this argument is decided by {owners()[name]}"
                fix = owners()[name]
                fix = f"{fix}={as_typed(value)}" if _fills(fix, name) else f"{fix}=<value>"
                yield message(key, value, problem=problem, fix=fix)
            elif name in fixed:
                yield message(
                    key, value, problem="this argument is set by the plugin, for every ZAYA model", fix=remove
                )
            elif name in impossible():
                yield message(key, value, problem=f"it is not available: {impossible()[name]}", fix=remove)
            elif name in passed_on():
                allowed = passed_on()[name]
                if not HOLDS[allowed](value):
                    yield message(key, value, problem="this value is not allowed", allowed=allowed, fix=remove)
            elif group == "megatron":
                yield message(
                    key,
                    value,
                    problem="this plugin has not reviewed an argument of this name, so it may contradict the recipe",
                    allowed=", ".join(sorted(passed_on())),
                    fix=f"correct the name, or at your own risk megatron_unchecked.{name}={as_typed(value)}",
                )


def _fills(key: str, name: str) -> bool:
    """Return whether `key` is declared to fill the argument `name` with its own value."""
    return any(path == key and megatron_argument(field) == name for path, field in leaves())


def unchecked_lines(recipe: Recipe) -> list[str]:
    """Return what every start says about arguments that were not reviewed."""
    text = "passed to Megatron without a review by this plugin; it may contradict the recipe"
    return [
        f"zaya: megatron_unchecked.{name}={as_typed(value)}: {text}"
        for name, value in recipe.megatron_unchecked.items()
    ]
