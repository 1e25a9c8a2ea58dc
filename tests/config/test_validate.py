# SPDX-License-Identifier: Apache-2.0
"""Messages about impossible combinations name the keys, the value and what is allowed."""

import functools

import pytest
from omegaconf import OmegaConf

from zaya_plugin.config.compose import _composed, compose, to_recipe
from zaya_plugin.config.layout import data_parallel_size
from zaya_plugin.config.messages import refused, schema
from zaya_plugin.config.validate import EXCLUSIONS, GRAPH_REQUIREMENTS, validate

# Overrides of the demo, ranks -> parts of the message.
IMPOSSIBLE = [
    (
        ["model.num_attention_heads=7"],
        2,
        ["model.num_attention_heads=7", "num_query_groups=2", "Allowed: 6 or 8. Fix: model.num_attention_heads=6."],
    ),
    (["model.num_query_groups=1"], 2, ["model.num_query_groups=1", "an even number", "delayed"]),
    (["model.rotary_percent=0.3"], 2, ["model.rotary_percent=0.3", "model.kv_channels=16", "rotates 4.8"]),
    (["model.kv_channels=6"], 2, ["rotates 3 channels", "even"]),
    (["model.rotary_percent=1.5"], 2, ["model.rotary_percent=1.5", "at most 1"]),
    (["model.num_layers=0"], 2, ["model.num_layers=0", "above 0"]),
    (["stage.seq_length=0"], 2, ["stage.seq_length=0", "above 0"]),
    (["stage.global_batch_size=10"], 2, ["stage.global_batch_size=10", "stage.micro_batch_size=4 x 2", "8 or 16"]),
    ([], 3, ["stage.global_batch_size=16", "4 x 3 data-parallel ranks = 12", "12 or 24"]),
    (["stage.global_batch_size=4"], 2, ["stage.global_batch_size=4", "Allowed: 8. Fix: stage.global_batch_size=8."]),
    (["stage.eval_iters=-1"], 2, ["stage.eval_iters=-1", "0 or more"]),
    (["stage.eval_interval=0"], 2, ["stage.eval_interval=0", "above 0"]),
    (
        ["parallel.tensor_model_parallel_size=4"],
        4,
        ["parallel.tensor_model_parallel_size=4", "num_query_groups=2", "cannot be split"],
    ),
    (
        ["parallel.tensor_model_parallel_size=2", "optim=muon"],
        2,
        ["tensor_model_parallel_size=2", "Allowed: 1 with optim.name=muon", "AdamW"],
    ),
    (
        ["parallel.tensor_model_parallel_size=2", "optim.overrides=['*linear_q* optimizer=muon']"],
        2,
        ["tensor_model_parallel_size=2", "splits the projections", "1 with the entry '*linear_q* optimizer=muon'"],
    ),
    (
        ["parallel.tensor_model_parallel_size=2", "stage.seq_length=33"],
        2,
        ["33 tokens", "sequence parallelism", "32 or 34"],
    ),
    (
        ["parallel.tensor_model_parallel_size=2", "model.make_vocab_size_divisible_by=5"],
        2,
        ["make_vocab_size_divisible_by=5: is not a multiple", "4 or 6"],
    ),
    (["parallel.pipeline_model_parallel_size=3"], 3, ["pipeline_model_parallel_size=3", "num_layers=4 (1, 2, 4)"]),
    (
        ["parallel.virtual_pipeline_stages=2"],
        2,
        ["virtual_pipeline_stages=2", "Allowed: 1 with parallel.pipeline_model_parallel_size=1."],
    ),
    (
        ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_stages=4"],
        2,
        ["virtual_pipeline_stages=4", "the 2 layers of a pipeline rank (1, 2)"],
    ),
    (
        ["parallel.pipeline_model_parallel_size=4", "stage.global_batch_size=8"],
        4,
        ["pipeline_model_parallel_size=4", "2 micro-batches", "at least as many micro-batches as stages"],
    ),
    (
        ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_stages=2", "stage.global_batch_size=12"],
        2,
        ["virtual_pipeline_stages=2", "3 micro-batches", "a multiple of parallel.pipeline_model_parallel_size=2"],
    ),
    (
        [
            *("parallel.pipeline_model_parallel_size=2", "parallel.recompute_granularity=full"),
            *("parallel.recompute_method=uniform", "parallel.recompute_num_layers=3"),
        ],
        2,
        ["parallel.recompute_num_layers=3", "model.num_layers=4 over 2 pipeline stages"],
    ),
    (
        ["parallel.context_parallel_size=2", "stage.seq_length=30"],
        2,
        ["stage.seq_length=30", "zigzag order", "4 chunks", "28 or 32"],
    ),
    (
        ["parallel.context_parallel_size=3", "parallel.context_parallel_order=contiguous"],
        3,
        ["stage.seq_length=256", "contiguous order", "3 chunks", "255 or 258"],
    ),
    (
        ["parallel.context_parallel_size=2", "stage.seq_length=4"],
        2,
        ["stage.seq_length=4", "two tokens of the chunk before", "at least 8"],
    ),
    (["data.reset_position_ids=true"], 2, ["data.reset_position_ids", "Allowed: false with data.packing=none"]),
    (["parallel.nccl_ub=true"], 2, ["parallel.nccl_ub=true", "Allowed: false with cluster.device=cpu"]),
    (
        ["cluster=gpu", "parallel.nccl_ub=true", "cluster.deterministic=true"],
        2,
        ["parallel.nccl_ub=true", "Allowed: false with cluster.deterministic=true"],
    ),
    (
        ["cluster.core_attention=aiter"],
        2,
        [
            "cluster.core_attention=aiter: this attention requires an accelerator",
            "Allowed: sdpa with cluster.device=cpu",
        ],
    ),
    (
        ["cluster.kernel_overrides={router: triton}"],
        2,
        ["cluster.kernel_overrides.router=triton: no such operator", "router_mlp", "Fix: remove it"],
    ),
    (
        ["cluster=gpu", "cluster.kernel_overrides={router_mlp: hip}"],
        2,
        [
            "cluster.kernel_overrides.router_mlp=hip:",
            "Allowed: auto, triton, compiled, reference. Fix: cluster.kernel_overrides",
        ],
    ),
    (
        ["cluster.kernels=triton"],
        2,
        ["cluster.kernels=triton", "requires an accelerator", "Allowed: auto, hip, reference with cluster.device=cpu."],
    ),
    (
        ["cluster.kernel_overrides={cca_prologue: hip}"],
        2,
        [
            "cluster.kernel_overrides.cca_prologue=hip: this version does not support fp32 matrices",
            "Allowed: auto, reference with cluster.dtype=fp32",
        ],
    ),
    (["cluster.kernels=compiled"], 2, ["cluster.kernels=compiled", "requires an accelerator"]),
    (
        ["cluster=gpu", "cluster.dtype=fp32", "cluster.kernel_overrides={grouped_product: quack}"],
        2,
        ["cluster.kernel_overrides.grouped_product=quack", "Allowed: auto, reference with cluster.dtype=fp32"],
    ),
    (
        ["cluster=gpu", "cluster.dtype=fp32", "cluster.kernel_overrides={router_mlp: triton}"],
        2,
        ["cluster.kernel_overrides.router_mlp=triton", "Allowed: auto, compiled, reference with cluster.dtype=fp32"],
    ),
    (
        ["cluster=gpu", "optim=muon", "optim.muon_dtype=fp32", "cluster.kernel_overrides={newton_schulz: quack}"],
        2,
        ["cluster.kernel_overrides.newton_schulz=quack", "Allowed: auto, reference with optim.muon_dtype=fp32"],
    ),
    (
        ["cluster=h200_8", "cluster.graphs=full_iteration", "cluster.kernels=reference"],
        2,
        ["cluster.kernels=reference", "Fix: cluster.kernel_overrides.grouped_product=auto"],
    ),
    (
        ["cluster.kernel_overrides={router_mlp: compiled, grouped_product: quack}"],
        2,
        ["cluster.kernel_overrides.router_mlp=compiled", "cluster.kernel_overrides.grouped_product=quack"],
    ),
    (
        ["cluster=h200_8", "cluster.core_attention=cudnn", "cluster.deterministic=true"],
        2,
        ["cluster.deterministic=true", "Allowed: false with cluster.core_attention=cudnn"],
    ),
    (
        ["parallel.num_distributed_optimizer_instances=3"],
        4,
        ["parallel.num_distributed_optimizer_instances=3", "a divisor of 4"],
    ),
    (
        ["parallel.num_distributed_optimizer_instances=2", "parallel.use_distributed_optimizer=false"],
        4,
        ["parallel.num_distributed_optimizer_instances=2", "Allowed: 1 with parallel.use_distributed_optimizer=false"],
    ),
    (
        ["cluster.graphs=full_iteration"],
        2,
        ["cluster.device=cpu", "Allowed: cuda with", "cluster.dtype=fp32", "Allowed: bf16 with"],
    ),
    (
        [
            *("cluster=gpu", "cluster.graphs=full_iteration", "data.packing=documents"),
            *(
                "parallel.pipeline_model_parallel_size=2",
                "parallel.expert_model_parallel_size=2",
                "stage.batch_size_ramp='0:8 400:16'",
            ),
        ],
        2,
        [
            "data.packing=documents",
            "parallel.pipeline_model_parallel_size=2",
            "parallel.expert_model_parallel_size=2",
            "batch_size_ramp",
            "null",
        ],
    ),
    (
        ["parallel.expert_model_parallel_size=3"],
        3,
        ["parallel.expert_model_parallel_size=3", "a divisor of model.num_experts=16"],
    ),
    (["parallel.expert_model_parallel_size=4"], 2, ["parallel.expert_model_parallel_size=4", "the 2 ranks over"]),
    (["parallel.pipeline_model_parallel_size=2"], 3, ["3 ranks", "= 2", "Allowed: 2 or 4. Fix: nproc=2."]),
    (
        ["parallel.overlap_param_gather=true"],
        2,
        ["parallel.overlap_param_gather", "parallel.overlap_grad_reduce=true (currently false)"],
    ),
    (["optim.lr_warmup_iters=150"], 2, ["optim.lr_warmup_iters=150", "less than stage.train_iters=60"]),
    (["optim.lr_decay_iters=10"], 2, ["optim.lr_decay_iters=10", "more than optim.lr_warmup_iters=10"]),
    (["optim.min_lr=1"], 2, ["optim.min_lr=1.0", "at most optim.lr=0.01"]),
    (["optim.lr=0"], 2, ["optim.lr=0.0", "above 0"]),
    (["optim.adam_beta2=1"], 2, ["optim.adam_beta2=1.0", "below 1"]),
    (["parallel.recompute_granularity=full"], 2, ["parallel.recompute_method=null", "uniform, block"]),
    (["parallel.recompute_granularity=full"], 2, ["parallel.recompute_num_layers=null", "requires it"]),
    (["parallel.recompute_method=block"], 2, ["parallel.recompute_method=block", "recompute_granularity=full"]),
    (["parallel.recompute_granularity=selective"], 2, ["parallel.recompute_modules=[]", "core_attn, moe, layernorm"]),
    (["parallel.recompute_modules=[moe]"], 2, ["parallel.recompute_modules", "recompute_granularity=selective"]),
    (
        ["parallel.recompute_granularity=selective", "parallel.recompute_modules=[mlp]"],
        2,
        ["parallel.recompute_modules", "no such module: mlp", "core_attn, moe, layernorm"],
    ),
    (
        [
            *("parallel.recompute_granularity=selective", "parallel.recompute_modules=[permute]"),
            *("parallel.expert_model_parallel_size=2", "stage.global_batch_size=4"),
        ],
        2,
        ["parallel.expert_model_parallel_size=2", "Allowed: 1 with parallel.recompute_modules=[permute]"],
    ),
    (
        ["parallel.recompute_granularity=auto"],
        2,
        ["recompute_granularity=auto", "Allowed: null, full, selective with cluster.device=cpu"],
    ),
    (
        ["cluster=gpu", "parallel.recompute_granularity=auto"],
        2,
        ["cluster.memory_gib=null", "recompute_granularity=auto requires it"],
    ),
    (["cluster.memory_gib=0"], 2, ["cluster.memory_gib=0.0", "above 0"]),
    (
        ["cluster.distributed_backend=nccl"],
        2,
        ["cluster.distributed_backend=nccl", "Allowed: gloo with cluster.device=cpu"],
    ),
    (
        ["cluster.transformer_impl=transformer_engine"],
        2,
        ["cluster.transformer_impl", "Allowed: local with cluster.device=cpu"],
    ),
    (["cluster.device=cuda"], 2, ["cluster.distributed_backend=gloo", "nccl"]),
    *(
        (
            [f"{key}=2", "stage.sample_prompts=prompts.txt"],
            2,
            [f"{key}=2: decoding requires", "Allowed: 1 with stage.sample_prompts. Fix: stage.sample_prompts=null"],
        )
        for key in (f"parallel.{group}_parallel_size" for group in ("context", "expert_model", "pipeline_model"))
    ),
    (["stage.eval_iters=0", "stage.sample_prompts=prompts.txt"], 2, ["stage.eval_iters=0: there is no validation"]),
    (["stage.sample_temperature=1e-4"], 2, ["Allowed: a number that is 0, or from 0.001 to 1000"]),
    (["checkpoint.save_interval=0"], 2, ["checkpoint.save_interval=0", "above 0"]),
    (["checkpoint.keep_last=-1"], 2, ["checkpoint.keep_last=-1", "0 or more"]),
    (["profile.step_start=5", "profile.step_end=5"], 2, ["profile.step_end=5", "above profile.step_start=5"]),
    (
        ["profile.enabled=true", "profile.ranks=[]"],
        2,
        ["profile.ranks=[]: no rank is traced", "Fix: profile.ranks=[0]"],
    ),
    (
        ["profile.enabled=true", "profile.step_start=95", "profile.step_end=100"],
        2,
        ["profile.step_end=100", "Allowed: at most stage.train_iters=60", "profile.step_start=59 profile.step_end=60"],
    ),
    (["logger.wandb_mode=disabled"], 2, ["logger.wandb=true", "Allowed: false with logger.wandb_mode=disabled"]),
    (["logger.wandb_project="], 2, ["logger.wandb_project=", "Allowed: text that is not empty", "wandb_project=zaya"]),
    (["logger.wandb_name="], 2, ["logger.wandb_name=", "Allowed: text that is not empty, or null"]),
    ([f"run_dir={'a/' * 2500}"], 2, ["... (5,008 characters): is too long", "and 3,500 in all. Fix: a shorter path"]),
    ([f"checkpoint.path=/{'b' * 300}"], 2, ["checkpoint.path=/bbb", "a name in it is too long"]),
    (["profile.enabled=true", "profile.ranks=[2]"], 2, ["profile.ranks=[2]", "ranks from 0 to 1"]),
    (["master_port=70000"], 2, ["master_port=70000", "1 to 65535"]),
    (["nproc=0"], 2, ["nproc=0", "above 0"]),
    (["profile.memory_snapshot=true"], 2, ["profile.memory_snapshot=true", "Allowed: false with cluster.device=cpu"]),
    (["data.blend=[data/a]"], 2, ["data.blend", "'data/a'", "<weight above 0> <path>"]),
    (["data.blend=['0 data/a']"], 2, ["data.blend", "'0 data/a'"]),
    (["data.path=' '"], 2, ["data.path= :", "not empty"]),
    (["megatron.lr=1"], 2, ["megatron.lr=1", "Fix: optim.lr=1."]),
    (["megatron.layernorm_epsilon=1"], 2, ["megatron.layernorm_epsilon", "Fix: model.norm_epsilon=1."]),
    (["model.window_attn_skip_freq=2"], 2, ["model.window_attn_skip_freq=2", "no layer has a sliding window"]),
    (["model.window_attn_skip_freq=1"], 2, ["model.window_attn_skip_freq=1", "from 2 to 10000"]),
    (
        ["model.sliding_window=64", "cluster.core_attention=cudnn"],
        2,
        ["cluster.core_attention=cudnn", "no sliding window", "stage.seq_length of at most 65"],
    ),
]


_of_groups = functools.cache(lambda *groups: _composed(["experiment=cpu_demo", *groups]))


def changed(overrides):
    """Return compose(["experiment=cpu_demo", *overrides]); Hydra composes each choice of groups once, and all where
    its grammar or `open_overrides` matters.
    """
    if any(item.startswith("megatron.") or item.endswith("=") or "{" in item for item in overrides):
        return compose(["experiment=cpu_demo", *overrides])
    groups = [item for item in overrides if "." not in item.partition("=")[0]]
    values = OmegaConf.from_dotlist([item for item in overrides if item not in groups])
    return to_recipe(OmegaConf.merge(_of_groups(*groups), values), ["experiment=cpu_demo", *overrides])


def test_a_changed_recipe_is_the_composed_one():
    for overrides in (
        *(one[0] for one in IMPOSSIBLE[30:90:15]),
        ["cluster=gpu", "optim=adamw", "optim.muon_dtype=fp32"],
    ):
        assert changed(overrides) == compose(["experiment=cpu_demo", *overrides])


@pytest.mark.parametrize(("overrides", "world_size", "parts"), IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_impossible_combinations_are_named(overrides, world_size, parts):
    with pytest.raises(ValueError) as caught:
        validate(changed(overrides), world_size)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["stage.eval_iters=0", "checkpoint.save_interval=null", "checkpoint.keep_last=0", "optim.clip_grad=0"],
        ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"],
        ["parallel.recompute_granularity=full", "parallel.recompute_method=block", "parallel.recompute_num_layers=4"],
        ["parallel.recompute_granularity=selective", "parallel.recompute_modules=[core_attn,moe,layernorm,permute]"],
        ["data.blend=['0.7 data/a', '1e-1 data/b c']"],
        ["optim.lr_warmup_iters=0", "optim.lr_decay_iters=500", "optim.min_lr=2e-3"],
        ["model.num_query_groups=8", "model.rotary_percent=1.0"],
        ["master_port=65535", "megatron.manual_gc=true"],
        [
            *("cluster=gpu", "cluster.transformer_impl=transformer_engine", "cluster.core_attention=aiter"),
            *("data.packing=documents", "parallel.context_parallel_size=2"),
            "parallel.context_parallel_order=contiguous",
        ],
        ["cluster=gpu", "optim=adamw", "optim.muon_dtype=fp32", "cluster.kernel_overrides={newton_schulz: quack}"],
        ["cluster.kernel_overrides={grouped_product: grouped_mm}"],
        [
            "cluster.kernels=hip",
            "cluster.kernel_overrides={rms_norm: reference, router_mlp: auto}",
            "optim.z_loss=1e-4",
        ],
        [
            "optim=adamw",
            "parallel.tensor_model_parallel_size=2",
            "parallel.expert_model_parallel_size=2",
            "stage.global_batch_size=4",
        ],
        [
            "parallel.context_parallel_size=2",
            "stage.seq_length=8",
            "data.packing=documents",
            "data.reset_position_ids=true",
        ],
        ["parallel.context_parallel_size=2", "parallel.context_parallel_order=contiguous", "stage.seq_length=258"],
        ["parallel.expert_model_parallel_size=2", "parallel.moe_token_dispatcher=allgather", "optim=muon"],
    ],
)
def test_what_is_possible_passes(overrides):
    validate(changed(overrides), 2)


def test_tables_name_keys_and_values_that_exist():
    rows = [(*pair, "") for pair in EXCLUSIONS] + [row for rows in EXCLUSIONS.values() for row in rows]
    rows += GRAPH_REQUIREMENTS
    for key, value, _ in rows:
        assert refused(key, schema()[key], value) is None, (key, value)


def test_all_problems_are_listed_at_once():
    recipe = compose(
        ["experiment=cpu_demo", "model.num_query_groups=3", "optim.min_lr=1", "cluster.distributed_backend=nccl"]
    )
    with pytest.raises(ValueError) as caught:
        validate(recipe, 3)
    assert len(str(caught.value).splitlines()) == 5  # heads, even groups, batch, min_lr, back end


def test_data_parallel_size_is_what_the_model_parallel_sizes_leave():
    recipe = compose(["experiment=cpu_demo"])
    assert data_parallel_size(recipe, 8) == 8
    recipe.parallel.tensor_model_parallel_size = 2
    recipe.parallel.context_parallel_size = 2
    assert data_parallel_size(recipe, 8) == 2


def test_the_named_nearest_batches_are_themselves_allowed():
    recipe = compose(["experiment=cpu_demo"])
    for size in (24, 12):
        recipe.stage.global_batch_size = size
        validate(recipe, 3)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID"])
def test_variables_of_the_launcher_are_not_given_to_all_ranks(name):
    recipe = compose(["experiment=cpu_demo", f"cluster.environment.{name}=3"])
    with pytest.raises(ValueError, match=f"^cluster.environment.{name}=3: is "):
        validate(recipe, 2)
    validate(compose(["experiment=cpu_demo", "cluster.environment.NCCL_DEBUG=INFO"]), 2)
