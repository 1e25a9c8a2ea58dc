# SPDX-License-Identifier: Apache-2.0
"""The recipe, as dataclasses: every key a recipe may hold, its type, its default and what it is for.

One class per Hydra group (model, stage, data, optim, parallel, cluster, logger) and `Recipe` over all of them.
A field that is a Megatron argument carries Megatron's name, or says in its metadata which argument it fills;
every other field says which of our modules reads it. `tests/config/test_schema.py` holds that to be true, so a
recipe key that nothing reads cannot exist. No torch import: composing and checking a recipe must be quick.
"""

from __future__ import annotations

from dataclasses import MISSING as DATACLASS_MISSING
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING

from hip_ops.versions import KERNELS


def _field(default: Any, help: str, *, megatron: str | None = None, reader: str | None = None, choices: tuple = ()):
    """A recipe field. `megatron`: the argument it fills; `reader`: our module that reads it (exactly one of both)."""
    assert (megatron is None) != (reader is None), "a field has either a Megatron argument or a reader"
    metadata = {"help": help, "megatron": megatron, "reader": reader, "choices": choices}
    if isinstance(default, (list, dict)):
        value = default
        return field(default_factory=lambda: type(value)(value), metadata=metadata)
    return field(default=default, metadata=metadata)


def arg(default: Any, help: str, megatron: str = "", **kw):
    """A field that fills a Megatron argument; without `megatron` the argument has the field's own name."""
    return _field(default, help, megatron=megatron or "=", **kw)


def own(default: Any, help: str, reader: str, **kw):
    """A field that one of our modules reads."""
    return _field(default, help, reader=reader, **kw)


RECOMPUTE_MODULES = (
    "core_attn",
    "moe",
    "layernorm",
    "permute",
)  # parts of a layer that can be computed again by themselves
ADAPTER = "zaya_plugin.config.arguments"
METRICS = "zaya_plugin.training.metrics"
LAUNCH = "zaya_plugin.run.launch"
RANK_PLAN = "zaya_plugin.run.rank_plan"
LIFECYCLE = "zaya_plugin.training.lifecycle"
DATASETS = "zaya_plugin.data.sources"
OPTIMIZER = "zaya_plugin.training.optimizer"
HANDOVER = "zaya_plugin.handover.predecessor"
ADAPTER_HANDOVER = "zaya_plugin.hosts.stage_handover"
SBATCH = "zaya_plugin.run.sbatch"
CURRICULUM = "zaya_plugin.run.curriculum"
CURRICULUM_RUN = "zaya_plugin.run.curriculum_run"
MEMORY = "zaya_plugin.plan.recipe_plan"
KERNEL_SELECTION = "zaya_plugin.training.kernels"


@dataclass
class ModelConfig:
    """The network. Defaults are ZAYA1-base's (spec: ZAYA1-8B Technical Report, arXiv 2605.05365, table I)."""

    name: str = own(MISSING, "name of the model, shown in logs and kept in checkpoints", METRICS)
    num_layers: int = arg(40, "transformer layers; each is one CCA attention and one MoE sublayer")
    hidden_size: int = arg(2048, "width of the residual stream")
    num_attention_heads: int = arg(8, "query heads after compression")
    num_query_groups: int = arg(2, "key/value heads; even, since half of them carry the delayed value")
    kv_channels: int = arg(128, "channels of one head")
    num_experts: int = arg(16, "routed experts; the skip class comes on top")
    moe_ffn_hidden_size: int = arg(2048, "width of one expert after SwiGLU (gate and up are each this wide)")
    router_hidden_size: int = arg(256, "width of the router's latent state, which crosses layers (EDA)")
    rotary_percent: float = arg(0.5, "share of a head's channels that RoPE rotates")
    norm_epsilon: float = arg(1e-5, "epsilon of every RMSNorm", megatron="layernorm_epsilon")
    init_method_std: float = arg(0.02, "standard deviation of the normal initialisation")
    router_init_std: float | None = arg(
        None, "the same for the router's matrices; init_method_std when null; unpublished"
    )
    scaled_output_init: bool = arg(False, "divide the output projections' initial std by sqrt(2 layers); unpublished")
    make_vocab_size_divisible_by: int = arg(
        64, "the vocabulary is padded to a multiple of this times tensor parallelism"
    )
    temperature_form: str = arg(
        "linear",
        "key temperature T as used: linear T (report, released weights), exp(T) (CCA paper), clamped_exp",
        choices=("linear", "exp", "clamped_exp"),
    )
    temperature_init: float = arg(1.0, "initial key temperature; unpublished, this project's choice")
    skip_output: str = arg(
        "zero",
        "output of the skip class: zero (transformers, vLLM) or identity, p * input (Zyphra's first code)",
        choices=("zero", "identity"),
    )
    residual_in_fp32: bool = arg(True, "keep the residual stream in fp32")
    balancing_lr: float = arg(1e-3, "AdamW step of the expert biases; unpublished, this project's choice")
    balancing_beta1: float = arg(0.9, "first AdamW beta of the expert biases; unpublished")
    balancing_beta2: float = arg(0.999, "second AdamW beta of the expert biases; unpublished")
    balancing_eps: float = arg(1e-8, "AdamW epsilon of the expert biases; unpublished")
    balancing_centering: bool = arg(False, "keep the experts' biases at zero mean (ZONOS2 does; unpublished for ZAYA1)")


@dataclass
class StageConfig:
    """One stage of the curriculum: context, batch and length of training."""

    name: str = own(MISSING, "name of the stage", METRICS)
    seq_length: int = arg(4096, "tokens of one sequence")
    rotary_base: int = arg(10000, "RoPE base: 10,000 at 4K, 1,000,000 at 32K, 5,000,000 at 131K (report, table II)")
    micro_batch_size: int = arg(1, "sequences a rank computes at once")
    global_batch_size: int = arg(4096, "sequences a step; 4096 x 4096 tokens in the report's appendix B")
    batch_size_ramp: str | None = arg(
        None,
        "'0:1024 250B:2048 500B:4096': sequences a step from so many tokens of the stage on; ends at global_batch_size. Counts of "
        "steps then are of full batches, so that the stage keeps its tokens and takes more steps",
        megatron="step_batch_size_schedule",
    )
    train_iters: int = arg(MISSING, "optimizer steps")
    eval_interval: int = arg(1000, "steps between validations")
    eval_iters: int = arg(
        10, "batches a validation, of each source where data.valid_blend names several; 0 switches it off"
    )
    eval_at_start: bool = own(
        False,
        "validate before the first step too, and always on the same samples, to compare losses around a hand-over",
        ADAPTER_HANDOVER,
    )


@dataclass
class DataConfig:
    """What is trained on: the output of `zaya data prepare`, or bare Megatron .bin/.idx prefixes."""

    path: str = own(
        MISSING, "directory written by `zaya data prepare`, or a Megatron prefix without .bin/.idx", DATASETS
    )
    blend: list[str] = own(
        [], "more sources as 'weight path' entries; when set, `path` gives tokenizer and validation", DATASETS
    )
    valid_path: str | None = own(None, "validation data in place of the part that `path` holds out", DATASETS)
    valid_blend: list[str] = own(
        [],
        "validation domains as 'weight path' entries, each one's valid part, in place of the part that `path` holds out; each has a "
        "loss of its own, validation/<name>/loss, and valid_loss is their mean by weight",
        DATASETS,
    )
    tokenizer: str | None = own(None, "Hugging Face tokenizer; taken from `path`'s manifest when null", DATASETS)
    cache_path: str | None = own(None, "where the sample index is kept; <path>/cache when null", DATASETS)
    num_workers: int = arg(0, "data loader processes a rank")
    packing: str = arg(
        "none",
        "documents: those in one sequence do not see each other, in attention, convolutions and value shift; none: they do",
        choices=("none", "documents"),
    )
    reset_position_ids: bool = arg(False, "with packing = documents: RoPE counts from the start of each document")
    order: str = own(
        "megatron",
        "megatron: GPTDataset's, made for all samples at once; continuing: sources go on from data.consumed, whatever the blend, the "
        "sequence length and the number of samples of the stages before",
        DATASETS,
        choices=("megatron", "continuing"),
    )
    consumed: list[str] = own(
        [],
        "with order = continuing: 'tokens path' entries of what earlier stages read; `zaya data mixture` prints those for the next",
        DATASETS,
    )


@dataclass
class OptimConfig:
    """Muon on matrices, AdamW on the rest, one learning rate for both; or AdamW on everything.

    Published of ZAYA1: Muon on 2-D weights with five Newton-Schulz steps and AdamW's root mean square, AdamW on
    convolutions, embedding, norms, scales and temperatures, and stage 1's cosine from 6e-4 to 2e-4. Not published:
    momentum, Nesterov, coefficients, the constant, weight decay, betas, epsilon, clipping; the defaults are Jordan's
    (momentum 0.95, Nesterov, the quintic) and Liu et al.'s (0.2, decay 0.1; arXiv 2502.16982).
    """

    name: str = own(
        "adamw",
        "muon: matrices by Muon, the rest by AdamW; adamw: everything by AdamW",
        OPTIMIZER,
        choices=("adamw", "muon"),
    )
    lr: float = arg(6e-4, "highest learning rate")
    min_lr: float = arg(2e-4, "learning rate at the end of the decay")
    lr_decay_style: str = arg(
        "cosine", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_warmup_iters: int = arg(0, "steps of linear warm-up, counted from the start of the stage; unpublished")
    lr_warmup_init: float = arg(
        0.0, "learning rate that the warm-up starts from; after a hand-over the last one of the stage before"
    )
    lr_decay_iters: int | None = arg(None, "steps until min_lr; train_iters when null")
    lr_wsd_decay_iters: int | None = arg(None, "with WSD: steps of the last part, the decay from lr to min_lr")
    lr_wsd_decay_style: str = arg(
        "exponential", "with WSD: shape of that part", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    weight_decay: float = arg(0.1, "decoupled weight decay; unpublished")
    adam_beta1: float = arg(0.9, "AdamW's first beta; unpublished")
    adam_beta2: float = arg(0.95, "AdamW's second beta; unpublished")
    adam_eps: float = arg(1e-8, "AdamW's epsilon; unpublished")
    clip_grad: float = arg(1.0, "clip the global gradient norm at this; 0 switches it off; unpublished")
    z_loss: float = arg(0.0, "in training, this times the square of the logits' logsumexp is added to a token's loss")
    grad_reduce_in_fp32: bool = arg(
        True, "accumulate and reduce gradients in fp32", megatron="accumulate_allreduce_grads_in_fp32"
    )
    non_finite_gradients: str = own(
        "stop",
        "stop: end the run with an error; skip: leave the step out on all ranks and go on",
        OPTIMIZER,
        choices=("stop", "skip"),
    )
    muon_momentum: float = own(0.95, "Muon's momentum; unpublished", OPTIMIZER)
    muon_nesterov: bool = own(True, "Nesterov form of the momentum; unpublished", OPTIMIZER)
    muon_steps: int = own(5, "Newton-Schulz iterations", OPTIMIZER)
    muon_coefficients: str = own(
        "simple",
        "simple: 3.4445, -4.7750, 2.0315 in every step (Jordan 2024); quintic: modded-nanogpt's five triples; polar_express: "
        "arXiv 2505.16932; Megatron's names; unpublished",
        OPTIMIZER,
        choices=("simple", "quintic", "polar_express"),
    )
    muon_dtype: str = own(
        "bf16",
        "precision of the Newton-Schulz iterations; fp16 has more digits and is kept in range",
        OPTIMIZER,
        choices=("bf16", "fp16", "fp32"),
    )
    muon_rms_scale: float = own(
        0.2, "updates are scaled by this times sqrt(max(rows, columns)); unpublished", OPTIMIZER
    )
    muon_momentum_dtype: str = own(
        "fp32", "precision in which the momentum is kept", OPTIMIZER, choices=("fp32", "bf16")
    )
    muon_split_gate_up: bool = own(
        False, "orthogonalise gate and up halves of the experts' fc1 separately; unpublished", OPTIMIZER
    )
    overrides: list[str] = own(
        [], "by parameter name: 'PATTERN optimizer=muon|adamw lr_mult=X weight_decay_mult=Y', later ones win", OPTIMIZER
    )


@dataclass
class ParallelConfig:
    """How the work is cut. ZAYA1 was pre-trained with data parallelism and a ZeRO-1 optimizer alone."""

    tensor_model_parallel_size: int = arg(
        1, "tensor parallelism of attention and vocabulary, with sequence parallelism; divides num_query_groups"
    )
    pipeline_model_parallel_size: int = arg(1, "pipeline parallelism; divides num_layers")
    virtual_pipeline_stages: int = arg(
        1,
        "parts of the model that every pipeline rank holds, interleaved; divides the layers of a rank",
        megatron="num_virtual_stages_per_pipeline_rank",
    )
    context_parallel_size: int = arg(1, "context parallelism: ranks that share a sequence")
    context_parallel_order: str = arg(
        "zigzag",
        "rows a context-parallel rank holds: zigzag, a chunk from either end (equal attention work); contiguous, one chunk",
        choices=("zigzag", "contiguous"),
    )
    expert_model_parallel_size: int = arg(1, "expert parallelism; divides num_experts")
    moe_token_dispatcher: str = arg(
        "alltoall",
        "with expert parallelism: alltoall sends each token to its expert's rank, allgather all tokens to all ranks",
        megatron="moe_token_dispatcher_type",
        choices=("alltoall", "allgather"),
    )
    use_distributed_optimizer: bool = arg(True, "shard optimizer state over the data-parallel ranks (ZeRO-1)")
    num_distributed_optimizer_instances: int = arg(
        1,
        "groups of data-parallel ranks that each hold all optimizer state; more of them: smaller shards' buckets, so more overlap, for more of Muon's work",
    )
    overlap_grad_reduce: bool = arg(False, "reduce gradients while the backward pass runs")
    overlap_param_gather: bool = arg(False, "gather parameters while the forward pass runs")
    ddp_bucket_size: int | None = arg(None, "elements of a gradient bucket; Megatron's own when null")
    nccl_ub: bool = arg(
        False,
        "take DDP's buffers from NCCL's or RCCL's memory and register them as symmetric windows; inside one node parameters are then gathered by "
        "copy engines (NCCL_CTA_POLICY=2, unless cluster.environment says otherwise)",
    )
    recompute_granularity: str | None = arg(
        None,
        "activation recomputation: full, of whole layers; selective, of recompute_modules; auto, the cheapest of these with which the step fits "
        "into cluster.memory_gib, chosen from the memory plan when a run starts",
        choices=(None, "full", "selective", "auto"),
    )
    recompute_method: str | None = arg(None, "with full: uniform or block", choices=(None, "uniform", "block"))
    recompute_num_layers: int | None = arg(None, "with full: layers of one unit")
    recompute_modules: list[str] = arg(
        [], f"with selective: some of {', '.join(RECOMPUTE_MODULES)}; permute: the rows sorted by expert"
    )


@dataclass
class ClusterConfig:
    """The machine: device, precision, back ends and what its accelerators can reach."""

    name: str = own(MISSING, "name of the cluster", METRICS)
    device: str = own(
        "cuda", "cuda (NVIDIA and ROCm) or cpu; cpu hides any accelerator", RANK_PLAN, choices=("cuda", "cpu")
    )
    num_nodes: int = own(1, "nodes of a run", RANK_PLAN)
    gpus_per_node: int = own(8, "processes a node when nproc is null", RANK_PLAN)
    dtype: str = own("bf16", "weights and activations", ADAPTER, choices=("bf16", "fp32"))
    distributed_backend: str = arg("nccl", "collectives; RCCL answers to nccl", choices=("nccl", "gloo"))
    distributed_timeout_minutes: int = arg(10, "minutes until a stuck collective ends the run")
    transformer_impl: str = arg(
        "local", "local: torch; transformer_engine: from the host environment", choices=("local", "transformer_engine")
    )
    core_attention: str = arg(
        "sdpa",
        "softmax attention with transformer_impl = local: sdpa (torch: flash or cuDNN), flash_attn, flash_attn_4 or aiter (those packages)",
        choices=("sdpa", "flash_attn", "flash_attn_4", "aiter"),
    )
    kernels: str = own(
        "auto",
        "version of every operator: auto, the best one available on the device; hip, triton or compiled (torch.compile), where an operator "
        "has it; reference, plain torch. docs/kernels.md",
        KERNEL_SELECTION,
        choices=KERNELS,
    )
    kernel_overrides: dict[str, str] = own(
        {},
        "versions of single operators, such as {router_mlp: compiled}; one that is not available is an error. cluster.kernels on the command "
        "line drops those of the recipe's files",
        KERNEL_SELECTION,
    )
    deterministic: bool = arg(
        False, "the same bits in every repetition on the same devices, at a cost", megatron="deterministic_mode"
    )
    graphs: str = own(
        "none",
        "full_iteration: forward and backward of all micro-batches of a step become one CUDA or HIP graph, replayed with no work of the host; "
        "auto: where the rest of the recipe allows it",
        ADAPTER,
        choices=("none", "auto", "full_iteration"),
    )
    peak_tflops: float | None = own(
        None, "dense bf16 TFLOP/s of one device that MFU is measured against (nominal); null: no MFU", METRICS
    )
    reachable_tflops: float | None = own(None, "TFLOP/s that the best GEMMs reach on the device, shown beside", METRICS)
    memory_gib: float | None = own(
        None,
        "GiB of one device's memory, of which the memory plan leaves 8 % to libraries and allocator; null: no plan is held against it",
        MEMORY,
    )
    numa_nodes: list[int] = own(
        [], "NUMA node of every rank of a node, in order; srun binds them in `zaya slurm`'s script", SBATCH
    )
    sbatch: list[str] = own(
        [], "further options of `zaya slurm`'s script, such as [--partition=mi300x,--time=2-00:00:00]", SBATCH
    )
    threads_per_rank: int | None = own(None, "CPU threads of a rank; cores / ranks of the node when null", RANK_PLAN)
    environment: dict[str, str] = own({}, "environment variables set in every rank before torch starts", RANK_PLAN)


@dataclass
class LoggerConfig:
    """Where the numbers go. metrics.jsonl and the console line are always written."""

    wandb: bool = own(True, "log to Weights & Biases; offline without a key", METRICS)
    wandb_project: str = own("zaya", "W&B project", METRICS)
    wandb_entity: str | None = own(None, "W&B entity", METRICS)
    wandb_name: str | None = own(None, "name of the W&B run; the recipe's name when null", METRICS)
    wandb_group: str | None = own(
        None, "group of the W&B run; a curriculum puts the runs of its stages into one", METRICS
    )
    wandb_mode: str = own(
        "auto", "auto: online with a key, else offline", METRICS, choices=("auto", "online", "offline", "disabled")
    )
    tensorboard: bool = own(True, "write TensorBoard event files", METRICS)
    log_interval: int = own(1, "steps between console lines; every step is in metrics.jsonl", METRICS)
    expert_load_interval: int = own(10, "steps between tables of the load of every expert in every layer", METRICS)


@dataclass
class CheckpointConfig:
    """Checkpoints: Megatron's torch_dist format under <run_dir>/checkpoints."""

    save_interval: int | None = own(
        1000, "steps between checkpoints; one more is saved at the end and on SIGTERM; null: only those", ADAPTER
    )
    keep_last: int = own(
        3, "checkpoints kept; older ones are removed once a newer one is whole; 0 keeps all", LIFECYCLE
    )


@dataclass
class HandoverConfig:
    """What a stage takes over from the one before it. Steps, schedule and metrics begin anew; weights never change."""

    from_run: str | None = own(
        None, "run directory of the finished stage before: weights and optimizer state of step 0", HANDOVER
    )
    optimizer: str = own(
        "keep",
        "momenta of the stage before: keep or reset (to zero, AdamW's step count too)",
        ADAPTER_HANDOVER,
        choices=("keep", "reset"),
    )
    first_sample: int = own(
        0,
        "sample of the data's order that the stage begins with: those before it are of stages with the same data",
        ADAPTER_HANDOVER,
    )
    planned_samples: int | None = own(
        None,
        "samples of all stages with the same data; the order is made for so many at once. `zaya curriculum` sets both",
        ADAPTER_HANDOVER,
    )
    continuous_lr: bool = own(
        False, "refuse a first learning rate that is not the last one of the stage before", HANDOVER
    )


@dataclass
class CurriculumConfig:
    """Stages that `zaya curriculum` runs one after the other."""

    stages: list[str] = own([], "experiments, in order; each takes over from the one before", CURRICULUM)
    compare_positions: bool = own(
        False,
        "at the end, the loss by position of the last two stages' models on the same text, past the shorter context",
        CURRICULUM_RUN,
    )


@dataclass
class ProfileConfig:
    """Traces on request."""

    enabled: bool = own(False, "write a torch.profiler trace to <run_dir>/torch_profile/rank-<n>.json.gz", ADAPTER)
    step_start: int = own(10, "first traced step", ADAPTER)
    step_end: int = own(12, "step after the last traced one", ADAPTER)
    ranks: list[int] = own([0], "ranks that are traced", ADAPTER)
    memory_snapshot: bool = own(
        False, "record allocations and write <run_dir>/memory_snapshot_rank<n>.pickle at step_end; needs a GPU", ADAPTER
    )


@dataclass
class Recipe:
    """A whole run."""

    name: str = own(MISSING, "name of the run: directory, W&B name", "zaya_plugin.run.before_start")
    model: ModelConfig = field(default_factory=ModelConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    handover: HandoverConfig = field(default_factory=HandoverConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    run_dir: str = own("runs/${name}", "everything of the run is written here", LAUNCH)
    nproc: int | None = own(
        None,
        "ranks to start on this machine; cluster.gpus_per_node when null; ignored under torchrun or SLURM",
        RANK_PLAN,
    )
    master_port: int | None = own(None, "rendezvous port of the ranks started here; a free one when null", RANK_PLAN)
    resume: str = own(
        "never",
        "never: start anew, refuse a directory that holds a run; auto: continue if there is a checkpoint; must: it has to",
        LAUNCH,
        choices=("never", "auto", "must"),
    )
    seed: int = arg(1234, "seed of weights and data order")
    exit_interval: int | None = arg(None, "leave, saving, at the first step divisible by this")
    dry_run: bool = own(False, "print what would be launched and stop", LAUNCH)
    explain_optim: bool = own(False, "print every parameter's optimizer, learning rate and decay, and stop", LAUNCH)
    megatron: dict[str, Any] = own({}, "any further Megatron argument by its name; unknown names are refused", ADAPTER)


def megatron_argument(f) -> str | None:
    """Name of the Megatron argument that dataclass field `f` fills, or None."""
    name = f.metadata.get("megatron")
    return f.name if name == "=" else name


def leaves(cls=Recipe, prefix: str = ""):
    """Yields (dotted path, dataclass field) of every key of the recipe."""
    for f in fields(cls):
        kind = f.default_factory if f.default_factory is not DATACLASS_MISSING else None
        if isinstance(kind, type) and is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f
