# SPDX-License-Identifier: Apache-2.0
"""The recipe as dataclasses: every key with its type, default, help, choices and range. Imports no torch.

There is one class per Hydra group (model, stage, data, optim, parallel, cluster, logger), and `Recipe` contains them. A
field is declared by one of three functions, and everything else is made from these declarations: the checks of
`zaya_plugin.config.validate`, `zaya train --help`, the table in docs/keys.md and the arguments for Megatron.

    arg     fills a Megatron argument
    option  fills an argument that ZAYA adds to Megatron's, and ZayaConfig's field of the same name
    own     is read by one of this package's modules

`resume` of each says what happens when a run continues with another value.
`tests/config/test_schema.py` fails for a key that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING as DATACLASS_MISSING
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import reduce
from typing import Any

from hip_ops.versions import KERNELS

MISSING: Any = "???"  # as omegaconf.MISSING, of which processes that compose nothing import nothing


@dataclass(frozen=True)
class Limit:
    """The values that a key may have. null, where the key's type includes it, is always allowed.

    Attributes:
        text: the condition in words, behind the name of the type in messages: "a whole number" "above 0".
        holds: whether a value meets it.
    """

    text: str
    holds: Callable[[Any], bool]


def above_zero(most: float, why: str) -> Limit:
    """Return the limit of a number above 0 with a highest value, and why that one; NaN does not hold."""
    return Limit(f"above 0, at most {most} ({why})", lambda value: 0 < value <= most)


def zero_or_more(most: float, why: str) -> Limit:
    """Return `above_zero` with 0 included."""
    return Limit(f"0 or more, at most {most} ({why})", lambda value: 0 <= value <= most)


_TYPED = "a larger number is a mistake of typing"
_FOLDERS = "folders of checkpoints have seven digits"
_INT32 = "they are counted in 32 bits"
SIZE = above_zero(2**20, "no device holds a layer of more")
LAYERS = above_zero(10_000, _TYPED)
SKIP_FREQUENCY = Limit("from 2 to 10000 (1 would leave no layer with a window)", lambda value: 2 <= value <= 10_000)
TOKENS = above_zero(2**24, "positions are computed in fp32, which counts to 2^24")
SEQUENCES = above_zero(2**31 - 1, _INT32)
SAMPLES = zero_or_more(10**11, _TYPED)  # the whole curriculum of ZAYA1-base has 3 * 10**9

ELEMENTS = above_zero(2**31 - 1, "the elements of one message are counted in 32 bits")
STEPS, STEPS_OR_NONE = above_zero(9_999_999, _FOLDERS), zero_or_more(9_999_999, _FOLDERS)
RANKS = above_zero(2**20, _TYPED)
RANKS_OF_A_MACHINE = above_zero(1024, "no machine has more devices")
PROCESSES = zero_or_more(1024, "each of them is a process of every rank")
THREADS = above_zero(4096, "no machine has more cores")
MINUTES = above_zero(525_600, "a year")
GUARD_WINDOW = Limit("from 16 to 4096 (they are sorted at every step)", lambda value: 16 <= value <= 4096)
RATE, RATE_OR_ZERO = above_zero(1e9, _TYPED), zero_or_more(1e9, _TYPED)
LEARNING_RATE = above_zero(100.0, "no training converges with more")
LEARNING_RATE_OR_ZERO = zero_or_more(100.0, "no training converges with more")
FACTOR = zero_or_more(1e6, _TYPED)
STANDARD_DEVIATION = above_zero(100.0, "activations in bf16 and fp32 would overflow")
EPSILON = Limit("from 1e-38 to 1 (fp32 has no smaller normal number)", lambda value: 1e-38 <= value <= 1)
TEMPERATURE = Limit("from -1000 to 1000 (scores in bf16 would overflow)", lambda value: -1000 <= value <= 1000)
SAMPLING_TEMPERATURE = Limit("that is 0, or from 0.001 to 1000", lambda value: value == 0 or 1e-3 <= value <= 1e3)
SEED = zero_or_more(2**32 - 1, "numpy's seeds have 32 bits")
RANK_NUMBERS = Limit("of numbers from 0 to 1048575", lambda values: all(0 <= value < 2**20 for value in values))
BETA = Limit("from 0 to below 1", lambda value: 0 <= value < 1)
SHARE = Limit("above 0, at most 1", lambda value: 0 < value <= 1)
PORT = Limit("from 1 to 65535", lambda value: 1 <= value <= 65535)
ABSOLUTE = Limit("that begins with /", lambda value: value.startswith("/"))
NOT_EMPTY = Limit("that is not empty", lambda value: bool(value.strip()))


@dataclass(frozen=True)
class OnResume:
    """The action of a resume when a key has another value than the run has had so far (zaya_plugin.config.resume).

    Attributes:
        rule: "may change"; "warns", in one line; "refused"; "kept": the run keeps the value that it began with.
        why: the reason, as the end of a sentence.
    """

    rule: str
    why: str = ""


MAY_CHANGE = OnResume("may change")
KEPT = OnResume("kept", "the run keeps the value that it began with")
NETWORK = OnResume("refused", "the weights are those of another network")
OPTIMIZER = OnResume("refused", "the optimizer's state is that of the other one")
ASSIGNMENTS = OnResume("refused", "parameters would change their optimizer, whose state is another; multipliers warn")
SHARDS = OnResume("refused", "the optimizer's state is divided in another way")
PRECISION = OnResume("refused", "weights and optimizer state are stored in the other precision")
SEED_OF_THE_RUN = OnResume("refused", "the order of the data follows from it")
SAMPLES_OF_THE_RUN = OnResume("refused", "the run has read other samples than these, so that some would be repeated")
WEIGHTS_OF_SOURCES = OnResume("refused", "the order of the data follows from the weights; paths alone warn")
BY_CONTENT = OnResume("warns", "what it holds is compared with the checkpoint, see data.changed")
LENGTH = OnResume("warns", "the schedule ends at another step, and data that repeats is shuffled in another order")
STEPS_TO_TRAIN = OnResume(
    "warns",
    "the schedule ends at another step, which changes the learning rates of the steps to come, and data that repeats "
    "is shuffled in another order; with no step left the run trains nothing and ends with exit code 0",
)
SCHEDULE = OnResume("warns", "the learning rates of the steps to come follow the new schedule")
UPDATES = OnResume("warns", "the steps to come are computed with the new value")
BALANCING = OnResume("warns", "the experts' biases are moved with the new value")
ROUNDING = OnResume("warns", "the steps to come are rounded in another way")
UNUSED = OnResume("warns", "it has no effect, because the run continues from its own checkpoint")
BASE = OnResume(
    "warns",
    "it has no effect, but for adapters (optim.lora): it names their base, whose fingerprint must be that of the run so far",
)
PASSED_ON = OnResume("warns", "Megatron gets the new values")


def _field(default: Any, help: str, *, resume: OnResume, choices: tuple = (), limit: Limit | None = None, **use):
    """A recipe field. `use` is megatron=<argument that it fills> or reader=<module that reads it>."""
    metadata = {"help": help, "choices": choices, "limit": limit, "megatron": None, "reader": None, "adds": None}
    metadata |= {"fixed": False, "resume": resume} | use
    if isinstance(default, (list, dict)):
        value = default
        return field(default_factory=lambda: type(value)(value), metadata=metadata)
    return field(default=default, metadata=metadata)


def arg(default: Any, help: str, megatron: str = "=", **kw):
    """Declare a field that fills a Megatron argument, of the field's own name unless `megatron` names another."""
    return _field(default, help, megatron=megatron, **kw)


def option(default: Any, help: str, *, to: str = "model", name: str = "=", fixed: bool = False, **kw):
    """Declare a field that ZAYA adds to Megatron's arguments, so that checkpoints contain it and hosts pass it on.

    to: "model" makes it a field of ZayaConfig too; "batch" is for what only the forward step reads.
    name: of the argument and of ZayaConfig's field; "=": the field's own.
    fixed: a checkpoint loads only into a model with the value that it was trained with; a checkpoint that is older than
        the option was trained with its default.
    """
    if fixed:
        kw["resume"] = NETWORK
    return _field(default, help, megatron=name, adds=to, fixed=fixed, **kw)


def own(default: Any, help: str, reader: str, **kw):
    """Declare a field that the module zaya_plugin.<reader> reads."""
    return _field(default, help, reader=f"zaya_plugin.{reader}", **kw)


RECOMPUTE_MODULES = (
    "core_attn",
    "moe",
    "layernorm",
    "permute",
)  # parts of a layer that can be recomputed by themselves


@dataclass
class ModelConfig:
    """The network. Defaults are ZAYA1-base's (ZAYA1-8B Technical Report, arXiv 2605.05365, table I).

    Where the published sources disagree, the default is what the released weights run with in transformers
    (`modeling_zaya.py`), and the comment at the option names the alternatives.
    """

    name: str = own(
        MISSING, "name of the model, shown in logs and kept in checkpoints", "training.metrics", resume=MAY_CHANGE
    )
    num_layers: int = arg(
        40, "transformer layers; each is one CCA attention and one MoE sublayer", limit=LAYERS, resume=NETWORK
    )
    hidden_size: int = arg(2048, "width of the residual stream", limit=SIZE, resume=NETWORK)
    num_attention_heads: int = arg(8, "query heads after compression", limit=SIZE, resume=NETWORK)
    num_query_groups: int = arg(
        2, "key/value heads; even, because half of them carry the delayed value", limit=SIZE, resume=NETWORK
    )
    kv_channels: int = arg(128, "channels of one head", limit=SIZE, resume=NETWORK)
    num_experts: int = arg(16, "routed experts, without the skip class", limit=SIZE, resume=NETWORK)
    moe_ffn_hidden_size: int = arg(
        2048, "width of one expert after SwiGLU (gate and up each have this width)", limit=SIZE, resume=NETWORK
    )
    # `mlp_expansion` in the legacy Hub config.
    router_hidden_size: int = option(
        256, "width of the router's latent state, which is passed from layer to layer (EDA)", limit=SIZE, fixed=True
    )
    rotary_percent: float = arg(0.5, "share of a head's channels that RoPE rotates", limit=SHARE, resume=NETWORK)
    # Megatron's window_size has the same number on its left side, and so has swa_layers of legacy files. transformers'
    # sliding_window counts the token itself too, and so is larger by one.
    sliding_window: int | None = option(
        None,
        "previous tokens that a token sees in a layer with a sliding window; null: no layer has one",
        limit=TOKENS,
        fixed=True,
    )
    window_attn_skip_freq: int | None = arg(
        None,
        "every n-th layer sees all previous tokens: 2 gives windows to the layers 0, 2, 4, ...; null: all layers have the "
        "window",
        limit=SKIP_FREQUENCY,
        resume=NETWORK,
    )
    swa_rotary_base: int = option(
        10000, "RoPE base of the layers with a window, in every stage", limit=RATE, fixed=True
    )
    normalization: str = arg(
        "RMSNorm",
        "the layers' norms and the final norm: RMSNorm (ZAYA1) or LayerNorm, with mean and bias, for other models; the "
        "router and the q-k norm stay as they are",
        choices=("RMSNorm", "LayerNorm"),
        resume=NETWORK,
    )
    norm_epsilon: float = arg(
        1e-5, "epsilon of every norm", megatron="layernorm_epsilon", limit=EPSILON, resume=NETWORK
    )
    # The release code of ZAYA1-base (Zyphra/transformers, branch zaya) reads a key that its config lacks, and so ran
    # with 1e-6.
    router_norm_epsilon: float | None = option(
        None, "epsilon of the router's norm; null: norm_epsilon, as in transformers", limit=EPSILON, fixed=True
    )
    # gamma is a vector of router_hidden_size in all code; the report's equation 2 can be read as one coefficient.
    router_eda: bool = option(
        True,
        "exponential depth averaging: the router adds gamma times the state of the previous layer's router",
        fixed=True,
    )
    # True in all released configs (`zaya_use_mod`), absent from the papers.
    moe_skip_expert: bool = option(
        True, "score one more class than there are experts; its tokens skip the MoE", fixed=True
    )
    init_method_std: float = arg(
        0.02, "standard deviation of the normal initialisation", limit=STANDARD_DEVIATION, resume=UNUSED
    )
    # null is what transformers does; what training used is unknown. A narrow router needs a larger one (about
    # 1/sqrt(router_hidden_size)): with 0.02 its first probabilities differ between tokens by less than a step of the
    # balancing biases, and the biases alone then choose the experts.
    router_init_std: float | None = option(
        None,
        "the same for the router's matrices; null: init_method_std; unpublished",
        limit=STANDARD_DEVIATION,
        resume=UNUSED,
    )
    # False: attention output and expert down projections start like all other matrices (transformers' `_init_weights`).
    # True: Megatron's init_method_std / sqrt(2 * num_layers). What training used is unknown.
    scaled_output_init: bool = option(
        False, "divide the output projections' initial standard deviation by sqrt(2 layers); unpublished", resume=UNUSED
    )
    # The released tables have 262,272 rows, a multiple of 128, for a tokenizer of 262,147 entries.
    make_vocab_size_divisible_by: int = arg(
        128, "the vocabulary is padded to a multiple of this times tensor parallelism", limit=SIZE, resume=KEPT
    )
    # linear: arXiv 2605.05365, equation 29, and all released code. exp: arXiv 2510.04476, listing 1. clamped_exp:
    # exp(clamp(T, 1e-7, 2)), `clamp_temp` in vLLM and SGLang, off in the 8.3B models.
    temperature_form: str = option(
        "linear",
        "factor of the keys from the parameter T: linear, T (report, released weights); exp, exp(T) (CCA paper); "
        "clamped_exp, exp(clamp(T, 1e-7, 2))",
        choices=("linear", "exp", "clamped_exp"),
        fixed=True,
    )
    # Released code initialises 0, which under `linear` makes every key zero; Primus uses 1. What training used is
    # unknown.
    temperature_init: float = option(
        1.0, "initial key temperature T; unpublished, this project's choice", limit=TEMPERATURE, resume=UNUSED
    )
    # zero: transformers >= 5.13, Zyphra's vLLM. identity: the token's probability times the normed MoE input (release
    # code of November 2025, SGLang, Primus). Released weights never choose the skip class.
    skip_output: str = option(
        "zero",
        "output of the skip class: zero (transformers, vLLM) or identity, p * input (Zyphra's first code)",
        choices=("zero", "identity"),
        fixed=True,
    )
    # True: transformers, vLLM and the 8B config. False: the class default of ZAYA1-base's release code. Which one
    # pretraining used is not stated.
    residual_in_fp32: bool = option(True, "keep the residual stream in fp32", resume=ROUNDING)
    # AdamW moves the experts' balancing biases; the skip class keeps -1, as in the released weights.
    balancing_lr: float = option(
        1e-3,
        "AdamW learning rate of the expert biases; unpublished, this project's choice (as Primus)",
        limit=LEARNING_RATE_OR_ZERO,
        resume=BALANCING,
    )
    balancing_beta1: float = option(
        0.9, "first AdamW beta of the expert biases; unpublished", limit=BETA, resume=BALANCING
    )
    balancing_beta2: float = option(
        0.999, "second AdamW beta of the expert biases; unpublished", limit=BETA, resume=BALANCING
    )
    balancing_eps: float = option(
        1e-8, "AdamW epsilon of the expert biases; unpublished", limit=EPSILON, resume=BALANCING
    )
    # The sibling model ZONOS2 does it (arXiv 2606.24320); arXiv 2605.05365 has none.
    balancing_centering: bool = option(
        False, "keep the expert biases at zero mean (as ZONOS2); unpublished for ZAYA1", resume=BALANCING
    )


@dataclass
class StageConfig:
    """One stage of the curriculum: context, batch and length of training."""

    name: str = own(MISSING, "name of the stage", "training.metrics", resume=MAY_CHANGE)
    seq_length: int = arg(4096, "tokens of one sequence", limit=TOKENS, resume=SAMPLES_OF_THE_RUN)
    rotary_base: int = arg(
        10000,
        "RoPE base: 10,000 at 4K, 1,000,000 at 32K, 5,000,000 at 131K (report, table II)",
        limit=RATE,
        resume=NETWORK,
    )
    micro_batch_size: int = arg(
        1, "sequences of one forward and backward pass of a rank", limit=SEQUENCES, resume=MAY_CHANGE
    )
    global_batch_size: int = arg(
        4096,
        "sequences of a step, over all ranks; 4096 x 4096 tokens in the report's appendix B",
        limit=SEQUENCES,
        resume=LENGTH,
    )
    batch_size_ramp: str | None = arg(
        None,
        "'0:1024 250B:2048 500B:4096': sequences of a step from this number of tokens of the stage on; the last entry "
        "is global_batch_size. Counts of steps in the recipe are then of full batches: the stage keeps its tokens and "
        "takes more steps",
        megatron="step_batch_size_schedule",
        resume=LENGTH,
    )
    train_iters: int = arg(MISSING, "optimizer steps", limit=STEPS, resume=STEPS_TO_TRAIN)
    eval_interval: int = arg(1000, "steps between validations", limit=STEPS, resume=MAY_CHANGE)
    eval_iters: int = arg(
        10,
        "batches of a validation, the same in each, of each source if data.valid_blend names several; 0: no validation",
        limit=STEPS_OR_NONE,
        resume=MAY_CHANGE,
    )
    eval_at_start: bool = own(
        False,
        "validate before the first step too, to compare losses around a hand-over",
        "hosts.pretrain",
        resume=MAY_CHANGE,
    )
    record_routing: str | None = own(
        None,
        "file.npy for the classes that the routers choose, int16 [tokens, layers, 1]: the tokens of the stage's samples "
        "in the order of the data, -1 for those that no step has read",
        "hosts.routing",
        limit=NOT_EMPTY,
        resume=MAY_CHANGE,
    )
    replay_routing: str | None = own(
        None,
        "such a file, whose classes replace the routers' choices in training; -1: the router is free",
        "hosts.routing",
        limit=NOT_EMPTY,
        resume=SAMPLES_OF_THE_RUN,
    )
    sample_prompts: str | None = own(
        None,
        "text file with one prompt a line, which each validation continues, prints and logs",
        "data.prompts",
        limit=NOT_EMPTY,
        resume=MAY_CHANGE,
    )
    sample_tokens: int = own(
        32, "most new tokens of such a continuation", "hosts.samples", limit=TOKENS, resume=MAY_CHANGE
    )
    sample_temperature: float = own(
        0.0,
        "0: it takes the most probable token; else draws after division of the logits by this, alike in each validation",
        "hosts.samples",
        limit=SAMPLING_TEMPERATURE,
        resume=MAY_CHANGE,
    )


@dataclass
class DataConfig:
    """Training data: the output of `zaya data prepare`, or bare Megatron .bin/.idx prefixes."""

    path: str = own(
        MISSING,
        "directory written by `zaya data prepare`, or a Megatron prefix without .bin/.idx",
        "data.sources",
        limit=NOT_EMPTY,
        resume=BY_CONTENT,
    )
    blend: list[str] = own(
        [],
        "sources as 'weight path' entries, instead of `path`, which then gives the tokenizer and the validation data",
        "data.sources",
        resume=WEIGHTS_OF_SOURCES,
    )
    valid_path: str | None = own(
        None, "validation data instead of the part that `path` holds out", "data.sources", resume=BY_CONTENT
    )
    valid_blend: list[str] = own(
        [],
        "validation domains as 'weight path' entries: the validation part of each, instead of the part that `path` "
        "holds out. Each has a loss of its own, validation/<name>/loss; valid_loss is their weighted mean",
        "data.sources",
        resume=BY_CONTENT,
    )
    tokenizer: str | None = own(
        None, "Hugging Face tokenizer; null: the one in `path`'s manifest", "data.sources", resume=BY_CONTENT
    )
    cache_path: str | None = own(
        None, "directory of the sample index; null: <path>/cache", "data.sources", resume=MAY_CHANGE
    )
    changed: str = own(
        "refuse",
        "a run that resumes with other data or another tokenizer than its checkpoint was trained on. refuse: it does "
        "not start; accept: it starts, and says what differs",
        "data.sources",
        choices=("refuse", "accept"),
        resume=MAY_CHANGE,
    )
    num_workers: int = arg(0, "data loader processes of a rank", limit=PROCESSES, resume=MAY_CHANGE)
    packing: str = option(
        "none",
        "documents: documents of one sequence are separate, in attention, convolutions and value shift; none: they "
        "are not",
        to="batch",
        choices=("none", "documents"),
        resume=SAMPLES_OF_THE_RUN,
    )
    reset_position_ids: bool = arg(
        False, "with packing=documents: RoPE counts from the start of each document", resume=SAMPLES_OF_THE_RUN
    )
    order: str = own(
        "megatron",
        "megatron: GPTDataset's, made for all samples at once; continuing: each source continues after data.consumed, "
        "also when the blend, the sequence length or the number of samples changes between stages",
        "data.sources",
        choices=("megatron", "continuing"),
        resume=SAMPLES_OF_THE_RUN,
    )
    consumed: list[str] = own(
        [],
        "with order=continuing: 'tokens path' entries of what earlier stages read; `zaya data mixture` prints those "
        "for the next stage",
        "data.sources",
        resume=KEPT,
    )
    skip_steps: list[str] = own(
        [],
        "steps whose batches are read and not trained on, as '120' or '120-140', below stage.train_iters: what a roll "
        "back leaves out. All other steps keep their batches and learning rates",
        "config.arguments",
        resume=UPDATES,
    )


LORA_TARGETS = ("attention", "experts", "router")


@dataclass
class LoraConfig:
    """Low-rank adapters: W x becomes W x + alpha / rank * B (A x) (arXiv 2106.09685), and W is not trained.

    Adapters are under AdamW, also with optim.name=muon: Muon's update has the same size in all directions, which A and
    B, whose product is the update, do not have. Rank, alpha and targets are this project's choice.
    """

    rank: int | None = option(
        None,
        "rows of A; a multiple of 8 for the fastest kernels; null: no adapters, all weights are trained",
        name="lora_rank",
        limit=SIZE,
        fixed=True,
    )
    alpha: float = option(
        32.0, "the adapter's output is multiplied by alpha / rank", name="lora_alpha", limit=RATE, fixed=True
    )
    # Not among them: convolutions (the depthwise one has two numbers a channel; no loader has adapters for either),
    # norms, scales and temperatures, which are vectors.
    targets: list[str] = option(
        ["attention", "experts"],
        "attention: an adapter of each projection; experts: of each expert's two matrices; router: its matrices and "
        "their biases are trained themselves",
        name="lora_targets",
        limit=Limit(
            f"of {', '.join(LORA_TARGETS)}, each once, and attention or experts among them",
            lambda value: bool({*value} - {"router"}) and len({*value}) == len(value) and {*value} <= {*LORA_TARGETS},
        ),
        fixed=True,
    )
    experts: str = option(
        "each",
        "each: every expert has adapters of its own; shared: one adapter of each of the two matrices for all experts of a "
        "layer",
        name="lora_experts",
        choices=("each", "shared"),
        fixed=True,
    )
    balancing: bool = option(
        False,
        "move the routers' balancing biases; off, because no adapter file has a place for them: only a merged export "
        "holds them",
        name="lora_balancing",
        fixed=True,
    )


@dataclass
class OptimConfig:
    """Muon on matrices and AdamW on all other parameters, with one learning rate; or AdamW on all parameters.

    Published of ZAYA1: Muon on 2-D weights with five Newton-Schulz steps and AdamW's root mean square; AdamW on
    convolutions, embedding, norms, scales and temperatures; stage 1's cosine from 6e-4 to 2e-4. Not published:
    momentum, Nesterov, coefficients, the update's scale, weight decay, betas, epsilon, clipping. The defaults for those
    are Jordan's (momentum 0.95, Nesterov, his triple of coefficients) and Liu et al.'s (scale 0.2, decay 0.1;
    arXiv 2502.16982).
    """

    name: str = own(
        "adamw",
        "muon: matrices by Muon, all other parameters by AdamW; adamw: all parameters by AdamW",
        "training.optimizer",
        choices=("adamw", "muon"),
        resume=OPTIMIZER,
    )
    lr: float = arg(6e-4, "highest learning rate", limit=LEARNING_RATE, resume=SCHEDULE)
    min_lr: float = arg(2e-4, "learning rate at the end of the decay", limit=LEARNING_RATE_OR_ZERO, resume=SCHEDULE)
    lr_decay_style: str = arg(
        "cosine",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        resume=SCHEDULE,
    )
    lr_warmup_iters: int = arg(
        0,
        "steps of linear warm-up, counted from the start of the stage; unpublished",
        limit=STEPS_OR_NONE,
        resume=SCHEDULE,
    )
    lr_warmup_init: float = arg(
        0.0,
        "learning rate at the start of the warm-up; after a hand-over usually the last one of the stage before",
        limit=LEARNING_RATE_OR_ZERO,
        resume=SCHEDULE,
    )
    lr_decay_iters: int | None = arg(None, "steps until min_lr; null: train_iters", limit=STEPS, resume=SCHEDULE)
    lr_wsd_decay_iters: int | None = arg(
        None, "with WSD: steps of the last part, the decay from lr to min_lr", limit=STEPS, resume=SCHEDULE
    )
    lr_wsd_decay_style: str = arg(
        "exponential",
        "with WSD: shape of that part",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        resume=SCHEDULE,
    )
    weight_decay: float = arg(0.1, "decoupled weight decay; unpublished", limit=FACTOR, resume=UPDATES)
    adam_beta1: float = arg(0.9, "AdamW's first beta; unpublished", limit=BETA, resume=UPDATES)
    adam_beta2: float = arg(0.95, "AdamW's second beta; unpublished", limit=BETA, resume=UPDATES)
    adam_eps: float = arg(1e-8, "AdamW's epsilon; unpublished", limit=EPSILON, resume=UPDATES)
    clip_grad: float = arg(
        1.0, "the global gradient norm is clipped to this; 0: no clipping; unpublished", limit=FACTOR, resume=UPDATES
    )
    # arXiv 2204.02311
    z_loss: float = option(
        0.0,
        "in training, this times the square of the logits' logsumexp is added to each token's loss",
        limit=FACTOR,
        resume=UPDATES,
    )
    grad_reduce_in_fp32: bool = arg(
        True, "accumulate and reduce gradients in fp32", megatron="accumulate_allreduce_grads_in_fp32", resume=ROUNDING
    )
    non_finite_gradients: str = own(
        "stop",
        "stop: end the run with an error; skip: skip the step on all ranks and continue",
        "training.optimizer",
        choices=("stop", "skip"),
        resume=MAY_CHANGE,
    )
    max_non_finite_steps: int = own(
        10,
        "with non_finite_gradients=skip: steps in a row with infinite or NaN gradients that end the run",
        "training.optimizer",
        limit=STEPS,
        resume=MAY_CHANGE,
    )
    muon_momentum: float = own(0.95, "Muon's momentum; unpublished", "training.optimizer", limit=BETA, resume=UPDATES)
    muon_nesterov: bool = own(True, "Nesterov form of the momentum; unpublished", "training.optimizer", resume=UPDATES)
    muon_steps: int = own(5, "Newton-Schulz iterations", "training.optimizer", limit=LAYERS, resume=UPDATES)
    muon_coefficients: str = own(
        "simple",
        "simple: 3.4445, -4.7750, 2.0315 in every step (Jordan 2024); quintic: modded-nanogpt's five triples; "
        "polar_express: arXiv 2505.16932; Megatron's names; unpublished",
        "training.optimizer",
        choices=("simple", "quintic", "polar_express"),
        resume=UPDATES,
    )
    muon_dtype: str = own(
        "bf16",
        "precision of the Newton-Schulz iterations; fp16 has more digits, and inputs are scaled into its range",
        "training.optimizer",
        choices=("bf16", "fp16", "fp32"),
        resume=UPDATES,
    )
    muon_rms_scale: float = own(
        0.2,
        "updates are scaled by this times sqrt(max(rows, columns)); unpublished",
        "training.optimizer",
        limit=RATE,
        resume=UPDATES,
    )
    muon_momentum_dtype: str = own(
        "fp32",
        "precision in which the momentum is stored",
        "training.optimizer",
        choices=("fp32", "bf16"),
        resume=UPDATES,
    )
    muon_split_gate_up: bool = own(
        False,
        "orthogonalise the gate and up halves of the experts' fc1 separately; unpublished",
        "training.optimizer",
        resume=UPDATES,
    )
    overrides: list[str] = own(
        [],
        "by parameter name: 'PATTERN optimizer=muon|adamw lr_mult=X weight_decay_mult=Y'; a later entry overrides an "
        "earlier one",
        "training.optimizer",
        resume=ASSIGNMENTS,
    )
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class ParallelConfig:
    """How the work is divided among ranks. ZAYA1 was pre-trained with data parallelism and a ZeRO-1 optimizer alone."""

    tensor_model_parallel_size: int = arg(
        1,
        "tensor parallelism of attention and vocabulary, with sequence parallelism; divides num_query_groups",
        limit=RANKS,
        resume=MAY_CHANGE,
    )
    pipeline_model_parallel_size: int = arg(
        1, "pipeline parallelism; divides num_layers", limit=RANKS, resume=MAY_CHANGE
    )
    virtual_pipeline_stages: int = arg(
        1,
        "parts of the model on every pipeline rank, interleaved; divides the layers of a rank",
        megatron="num_virtual_stages_per_pipeline_rank",
        limit=LAYERS,
        resume=MAY_CHANGE,
    )
    context_parallel_size: int = arg(
        1, "context parallelism: ranks that share a sequence", limit=RANKS, resume=MAY_CHANGE
    )
    context_parallel_order: str = option(
        "zigzag",
        "part of a sequence on a context-parallel rank: zigzag, one chunk from either end (Megatron's order; equal "
        "attention work); contiguous, one chunk",
        choices=("zigzag", "contiguous"),
        resume=MAY_CHANGE,
    )
    expert_model_parallel_size: int = arg(1, "expert parallelism; divides num_experts", limit=RANKS, resume=MAY_CHANGE)
    moe_token_dispatcher: str = arg(
        "alltoall",
        "with expert parallelism: alltoall sends each token to its expert's rank, allgather sends all tokens to all "
        "ranks",
        megatron="moe_token_dispatcher_type",
        choices=("alltoall", "allgather"),
        resume=MAY_CHANGE,
    )
    use_distributed_optimizer: bool = arg(
        True, "shard optimizer state over the data-parallel ranks (ZeRO-1)", resume=SHARDS
    )
    num_distributed_optimizer_instances: int = arg(
        1,
        "groups of data-parallel ranks that each store the whole optimizer state; more groups: smaller shards and "
        "buckets, more overlap, more of Muon's work on each rank",
        limit=RANKS,
        resume=MAY_CHANGE,
    )
    overlap_grad_reduce: bool = arg(False, "reduce gradients during the backward pass", resume=MAY_CHANGE)
    overlap_param_gather: bool = arg(False, "gather parameters during the forward pass", resume=MAY_CHANGE)
    ddp_bucket_size: int | None = arg(
        None, "elements of a gradient bucket; null: Megatron's default", limit=ELEMENTS, resume=MAY_CHANGE
    )
    bucket_plan: str | None = own(
        None,
        "collectives.json of `zaya bench collectives` on the run's devices: sets ddp_bucket_size and "
        "num_distributed_optimizer_instances, in place of those of the recipe's files",
        "plan.bucket_plan",
        limit=NOT_EMPTY,
        resume=MAY_CHANGE,
    )
    nccl_ub: bool = arg(
        False,
        "allocate DDP's buffers from NCCL's or RCCL's memory and register them as symmetric windows; inside one node "
        "parameters are then gathered by copy engines (NCCL_CTA_POLICY=2, unless cluster.environment sets another "
        "value)",
        resume=MAY_CHANGE,
    )
    recompute_granularity: str | None = arg(
        None,
        "activation recomputation: full, of whole layers; selective, of recompute_modules; auto, the cheapest of these "
        "with which the step fits into cluster.memory_gib, chosen from the memory plan when a run starts",
        choices=(None, "full", "selective", "auto"),
        resume=MAY_CHANGE,
    )
    recompute_method: str | None = arg(
        None, "with full: uniform or block", choices=(None, "uniform", "block"), resume=MAY_CHANGE
    )
    recompute_num_layers: int | None = arg(None, "with full: layers of one unit", limit=LAYERS, resume=MAY_CHANGE)
    recompute_modules: list[str] = arg(
        [],
        f"with selective: some of {', '.join(RECOMPUTE_MODULES)}; permute: the rows sorted by expert",
        resume=MAY_CHANGE,
    )


@dataclass
class ClusterConfig:
    """The machine: device, precision, back ends and memory."""

    name: str = own(MISSING, "name of the cluster", "training.metrics", resume=MAY_CHANGE)
    device: str = own(
        "cuda",
        "cuda (NVIDIA and ROCm) or cpu; cpu hides accelerators from the ranks",
        "run.rank_plan",
        choices=("cuda", "cpu"),
        resume=MAY_CHANGE,
    )
    num_nodes: int = own(1, "nodes of a run", "run.rank_plan", limit=RANKS, resume=MAY_CHANGE)
    gpus_per_node: int = own(
        8, "processes of a node when nproc is null", "run.rank_plan", limit=RANKS_OF_A_MACHINE, resume=MAY_CHANGE
    )
    dtype: str = own("bf16", "weights and activations", "config.arguments", choices=("bf16", "fp32"), resume=PRECISION)
    distributed_backend: str = arg(
        "nccl", "collectives; nccl selects RCCL on ROCm", choices=("nccl", "gloo"), resume=MAY_CHANGE
    )
    distributed_timeout_minutes: int = arg(
        10, "minutes until a stuck collective ends the run", limit=MINUTES, resume=MAY_CHANGE
    )
    transformer_impl: str = arg(
        "local",
        "linears of queries, keys and attention's output: local, Megatron's own; transformer_engine, that package's, "
        "if the host environment has it",
        choices=("local", "transformer_engine"),
        resume=MAY_CHANGE,
    )
    core_attention: str = option(
        "auto",
        "softmax attention: auto, the fastest that is installed and passes its check on the device; sdpa "
        "(torch chooses), cudnn (through torch), or the package of that name. docs/another-part.md",
        choices=("auto", "sdpa", "cudnn", "flash_attn", "flash_attn_4", "aiter", "transformer_engine"),
        resume=MAY_CHANGE,
    )
    kernels: str = own(
        "auto",
        "version of every operator: auto, the best one available on the device; hip, triton or compiled "
        "(torch.compile), where an operator has it; reference, plain torch. docs/kernels.md",
        "training.kernels",
        choices=KERNELS,
        resume=MAY_CHANGE,
    )
    kernel_overrides: dict[str, str] = own(
        {},
        "versions of single operators, such as {router_mlp: compiled}; one that is not available is an error. "
        "cluster.kernels on the command line drops those of the recipe's files",
        "training.kernels",
        resume=MAY_CHANGE,
    )
    deterministic: bool = arg(
        False,
        "the same bits in every repetition on the same devices; slower",
        megatron="deterministic_mode",
        resume=MAY_CHANGE,
    )
    use_cpu_initialization: bool = arg(
        False, "draw the initial weights on the CPU; always so with cluster.device=cpu", resume=MAY_CHANGE
    )
    graphs: str = own(
        "none",
        "full_iteration: forward and backward of all micro-batches of a step become one CUDA or HIP graph, replayed "
        "without work of the host; auto: full_iteration if the recipe allows it, else none; a run of `zaya train` "
        "whose capture fails starts again with none",
        "config.arguments",
        choices=("none", "auto", "full_iteration"),
        resume=MAY_CHANGE,
    )
    peak_tflops: float | None = own(
        None,
        "nominal dense bf16 TFLOP/s of one device, the base of MFU; null: no MFU",
        "training.metrics",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    reachable_tflops: float | None = own(
        None,
        "TFLOP/s that the best GEMMs reach on the device, shown with MFU",
        "training.metrics",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    memory_gib: float | None = own(
        None,
        "GiB of one device's memory, of which the memory plan leaves 8 % to libraries and allocator; null: the plan "
        "is not checked",
        "plan.recipe_plan",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    numa_nodes: list[int] = own(
        [],
        "NUMA node of every rank of a node, in order; srun binds them in `zaya export slurm`'s script",
        "run.sbatch",
        limit=RANK_NUMBERS,
        resume=MAY_CHANGE,
    )
    sbatch: list[str] = own(
        [],
        "further options of `zaya export slurm`'s script, such as [--partition=mi300x,--time=2-00:00:00]",
        "run.sbatch",
        resume=MAY_CHANGE,
    )
    threads_per_rank: int | None = own(
        None,
        "CPU threads of a rank; null: cores / ranks of the node",
        "run.rank_plan",
        limit=THREADS,
        resume=MAY_CHANGE,
    )
    environment: dict[str, str] = own(
        {}, "environment variables set in every rank before torch starts", "run.rank_plan", resume=MAY_CHANGE
    )


@dataclass
class MachineConfig:
    """Rates of one accelerator and its links, for predictions. Defaults are an H100's, for clusters without rates of
    their own.
    """

    name: str | None = own(
        None,
        "part of the device's name in torch, such as H100; null: unknown, and predictions have no communication",
        "plan.prediction",
        resume=MAY_CHANGE,
    )
    gemm_tflops: float = own(
        790.0, "TFLOP/s of a large bf16 matrix product", "plan.recipe_plan", limit=RATE, resume=MAY_CHANGE
    )
    copy_tb_per_s: float = own(
        3.0, "TB/s that a copy reads and writes", "plan.recipe_plan", limit=RATE, resume=MAY_CHANGE
    )
    attention_tflops: float | None = own(
        None,
        "TFLOP/s of core attention, forward and backward at 4,096 tokens, counted as three forward passes; null: "
        "predictions keep the measured step's share of a large product",
        "plan.prediction",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    devices_per_node: int = own(
        8,
        "devices of a node, which its links connect",
        "plan.expected_step",
        limit=RANKS_OF_A_MACHINE,
        resume=MAY_CHANGE,
    )
    link_gb_per_s: float = own(
        340.0,
        "GB/s that a device sends in a collective inside a node",
        "plan.expected_step",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    latency_us: float = own(
        45.0,
        "microseconds of a small collective inside a node",
        "plan.expected_step",
        limit=RATE_OR_ZERO,
        resume=MAY_CHANGE,
    )
    network_gb_per_s: float = own(
        50.0, "GB/s that a device sends between nodes", "plan.expected_step", limit=RATE, resume=MAY_CHANGE
    )
    hop_us: float = own(
        10.0,
        "microseconds that each further rank between nodes adds to a collective",
        "plan.expected_step",
        limit=RATE_OR_ZERO,
        resume=MAY_CHANGE,
    )
    host_link_gb_per_s: float = own(
        52.8, "GB/s that a device copies to the host's memory", "plan.run_costs", limit=RATE, resume=MAY_CHANGE
    )
    storage_gb_per_s: float = own(
        2.0,
        "GB/s that the storage of the checkpoints takes from the whole job; the default is one plain NFS mount",
        "plan.run_costs",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    device_hours_per_failure: float = own(
        8090.0,
        "mean hours of one device between failures that end a run; a job fails as often as all its devices together",
        "plan.run_costs",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    copy_engines: bool = own(
        False,
        "inside a node copy engines gather registered buffers (parallel.nccl_ub) without slowing kernels",
        "plan.prediction",
        resume=MAY_CHANGE,
    )
    sources: str = own(
        "", "source of each rate, and whether this project measured it", "plan.prediction", resume=MAY_CHANGE
    )


@dataclass
class LoggerConfig:
    """Where metrics go. metrics.jsonl and the console line are always written."""

    wandb: bool = own(True, "log to Weights & Biases; offline without a key", "training.metrics", resume=MAY_CHANGE)
    wandb_project: str = own(
        "zaya", "project of W&B and trackio", "training.metrics", limit=NOT_EMPTY, resume=MAY_CHANGE
    )
    wandb_entity: str | None = own(None, "W&B entity", "training.metrics", limit=NOT_EMPTY, resume=MAY_CHANGE)
    wandb_name: str | None = own(
        None,
        "name of the run in W&B and trackio; null: the recipe's name",
        "training.metrics",
        limit=NOT_EMPTY,
        resume=MAY_CHANGE,
    )
    wandb_group: str | None = own(
        None,
        "group of the run in W&B and trackio; a curriculum sets one group for the runs of its stages",
        "training.metrics",
        limit=NOT_EMPTY,
        resume=MAY_CHANGE,
    )
    wandb_mode: str = own(
        "auto",
        "auto: online with a key, else offline; WANDB_MODE in the environment wins",
        "training.metrics",
        choices=("auto", "online", "offline", "disabled"),
        resume=MAY_CHANGE,
    )
    trackio: bool = own(
        False,
        "log to trackio, on this machine; TRACKIO_SPACE_ID or TRACKIO_SERVER_URL in the environment names another place",
        "training.metrics",
        resume=MAY_CHANGE,
    )
    tensorboard: bool = own(True, "write TensorBoard event files", "training.metrics", resume=MAY_CHANGE)
    log_interval: int = own(
        1,
        "steps between console lines; metrics.jsonl has every step",
        "training.metrics",
        limit=STEPS,
        resume=MAY_CHANGE,
    )
    expert_load_interval: int = own(
        10,
        "steps between tables of the load of every expert in every layer",
        "training.metrics",
        limit=STEPS,
        resume=MAY_CHANGE,
    )


@dataclass
class CheckpointConfig:
    """Checkpoints: Megatron's torch_dist format."""

    path: str = own(
        "checkpoints",
        "directory of the checkpoints, seen by all nodes; a relative path is below run_dir",
        "config.run_directory",
        limit=NOT_EMPTY,
        resume=MAY_CHANGE,
    )
    local_path: str | None = own(
        None,
        "directory on a disk of each node (or in its memory, /dev/shm) to which checkpoints are written first; null: "
        "they are written to path at once",
        "training.lifecycle",
        limit=ABSOLUTE,
        resume=MAY_CHANGE,
    )
    upload_limit: float | None = own(
        None,
        "GB a second with which a node copies from local_path to path, so that the reading of data does not wait; "
        "null: no limit",
        "training.lifecycle",
        limit=RATE,
        resume=MAY_CHANGE,
    )
    save_interval: int | None = own(
        1000,
        "steps between checkpoints; a checkpoint at the end and on SIGTERM is always saved; null: only those",
        "config.arguments",
        limit=STEPS,
        resume=MAY_CHANGE,
    )
    save: str = own(
        "async",
        "async: a process of its own writes a checkpoint while training goes on; sync: training waits for it",
        "hosts.saved_state",
        choices=("async", "sync"),
        resume=MAY_CHANGE,
    )
    keep_last: int = own(
        3,
        "checkpoints kept; an older one is removed once a newer one is complete; 0: all are kept",
        "training.lifecycle",
        limit=STEPS_OR_NONE,
        resume=MAY_CHANGE,
    )
    keep_every: int | None = own(
        None,
        "steps; checkpoints at its multiples are never removed; null: keep_last alone decides",
        "training.lifecycle",
        limit=STEPS,
        resume=MAY_CHANGE,
    )


@dataclass
class HandoverConfig:
    """The hand-over from the stage before. Steps, schedule and metrics start from 0; weights are not
    changed.
    """

    from_run: str | None = own(
        None,
        "run directory of the finished stage before: its weights and optimizer state at step 0",
        "handover.predecessor",
        resume=UNUSED,
    )
    from_hf: str | None = own(
        None,
        "published weights to start from: a folder, or a name on the Hugging Face Hub such as Zyphra/ZAYA1-base; the "
        "optimizer and the balancing of the experts start from zero",
        "hosts.stage_handover",
        limit=NOT_EMPTY,
        resume=BASE,
    )
    adapter: str | None = own(
        None,
        "folder of an adapter by peft, of the optim.lora in the recipe, to start from; a resume does not read it",
        "hosts.stage_handover",
        limit=NOT_EMPTY,
        resume=MAY_CHANGE,
    )
    optimizer: str = own(
        "keep",
        "momenta of the stage before: keep, or reset (to zero, AdamW's step count too)",
        "hosts.stage_handover",
        choices=("keep", "reset"),
        resume=UNUSED,
    )
    first_sample: int = own(
        0,
        "first sample of the stage in the data's order; earlier samples belong to stages with the same data",
        "hosts.stage_handover",
        limit=SAMPLES,
        resume=SAMPLES_OF_THE_RUN,
    )
    planned_samples: int | None = own(
        None,
        "samples of all stages with the same data, for which the order is made at once. `zaya curriculum` sets this "
        "and first_sample",
        "hosts.stage_handover",
        limit=SAMPLES,
        resume=LENGTH,
    )
    continuous_lr: bool = own(
        False,
        "raise an error if the first learning rate is not the last one of the stage before",
        "handover.predecessor",
        resume=MAY_CHANGE,
    )


@dataclass
class CurriculumConfig:
    """The stages that `zaya curriculum` runs one after the other."""

    stages: list[str] = own(
        [], "experiments, in order; each starts from the end of the one before", "run.stages", resume=MAY_CHANGE
    )
    compare_positions: bool = own(
        False,
        "at the end, compare the last two stages' models by position on the same text, past the shorter context",
        "run.curriculum_run",
        resume=MAY_CHANGE,
    )


@dataclass
class ProfileConfig:
    """Profiler traces and memory snapshots."""

    enabled: bool = own(
        False,
        "write a torch.profiler trace to <run_dir>/torch_profile/rank-<n>.json.gz",
        "config.arguments",
        resume=MAY_CHANGE,
    )
    step_start: int = own(10, "first traced step", "config.arguments", limit=STEPS_OR_NONE, resume=MAY_CHANGE)
    step_end: int = own(12, "step after the last traced one", "config.arguments", limit=STEPS, resume=MAY_CHANGE)
    ranks: list[int] = own([0], "ranks that are traced", "config.arguments", limit=RANK_NUMBERS, resume=MAY_CHANGE)
    memory_snapshot: bool = own(
        False,
        "record allocations and write <run_dir>/memory_snapshot_rank<n>.pickle at step_end; needs a GPU",
        "config.arguments",
        resume=MAY_CHANGE,
    )


@dataclass
class GuardConfig:
    """Guards inside a run."""

    loss_spike: str = own(
        "warn",
        "a loss far above those of the last steps: off; warn: name it on the console and in metrics.jsonl; roll_back: "
        "also end the run on all ranks with exit code 76, without a checkpoint of the spiked state",
        "training.loss_guard",
        choices=("off", "warn", "roll_back"),
        resume=MAY_CHANGE,
    )
    window: int = own(
        128, "steps that a loss is compared with", "training.loss_guard", limit=GUARD_WINDOW, resume=MAY_CHANGE
    )
    threshold: float = own(
        8.0,
        "robust standard deviations above the median from which a loss is a spike; half of them, while the norm of "
        "the gradients is so far above its own",
        "training.loss_guard",
        limit=FACTOR,
        resume=MAY_CHANGE,
    )
    patience: int = own(
        3, "spiked steps in a row with which the guard acts", "training.loss_guard", limit=STEPS, resume=MAY_CHANGE
    )
    skip_data: bool = own(
        False,
        "with roll_back: ask the supervisor to leave out the batches from the step before the first spike to the one "
        "at which the guard acted (data.skip_steps)",
        "hosts.pretrain",
        resume=MAY_CHANGE,
    )


@dataclass
class Recipe:
    """A whole run."""

    name: str = own(MISSING, "name of the run: directory, W&B name", "run.dry_run", limit=NOT_EMPTY, resume=MAY_CHANGE)
    model: ModelConfig = field(default_factory=ModelConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    handover: HandoverConfig = field(default_factory=HandoverConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    run_dir: str = own(
        "runs/${name}", "directory of everything that the run writes", "run.launch", limit=NOT_EMPTY, resume=MAY_CHANGE
    )
    nproc: int | None = own(
        None,
        "ranks started on this machine; null: cluster.gpus_per_node; ignored under torchrun or SLURM",
        "run.rank_plan",
        limit=RANKS_OF_A_MACHINE,
        resume=MAY_CHANGE,
    )
    master_port: int | None = own(
        None,
        "rendezvous port of the ranks that this command starts; null: a free one",
        "run.rank_plan",
        limit=PORT,
        resume=MAY_CHANGE,
    )
    resume: str = own(
        "never",
        "never: start a new run, and refuse a directory with a checkpoint; auto: continue if there is a checkpoint; "
        "must: refuse a directory without one",
        "config.run_directory",
        choices=("never", "auto", "must"),
        resume=MAY_CHANGE,
    )
    seed: int = arg(1234, "seed of weights and data order", limit=SEED, resume=SEED_OF_THE_RUN)
    exit_interval: int | None = arg(
        None, "save and exit at the first step that is divisible by this", limit=STEPS, resume=MAY_CHANGE
    )
    dry_run: bool = own(False, "print what would be launched and exit", "run.launch", resume=MAY_CHANGE)
    explain_optim: bool = own(
        False, "print every parameter's optimizer, learning rate and decay, and exit", "run.launch", resume=MAY_CHANGE
    )
    megatron: dict[str, Any] = own(
        {},
        "further Megatron arguments by name, of those reviewed in config/megatron_review.py",
        "config.arguments",
        resume=PASSED_ON,
    )
    megatron_unchecked: dict[str, Any] = own(
        {},
        "arguments of a Megatron release that this plugin has not reviewed; every start names them",
        "config.arguments",
        resume=PASSED_ON,
    )


def megatron_argument(f) -> str | None:
    """Return the Megatron argument that dataclass field `f` fills, or None."""
    name = f.metadata["megatron"]
    return f.name if name == "=" else name


def leaves(cls=Recipe, prefix: str = ""):
    """Yield (dotted path, dataclass field) of every key of the recipe."""
    for f in fields(cls):
        kind = f.default_factory if f.default_factory is not DATACLASS_MISSING else None
        if isinstance(kind, type) and is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f


def default_of(f) -> Any:
    """Return the default of dataclass field `f`."""
    return f.default if f.default is not DATACLASS_MISSING else f.default_factory()


def get(recipe: Recipe, path: str) -> Any:
    """Return the value of the dotted key `path`."""
    return reduce(getattr, path.split("."), recipe)


def with_values(target: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a recipe, or of a part of it, with other values of the dotted keys; they are not checked."""
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            value = with_values(target[name] if isinstance(target, dict) else getattr(target, name), {rest: value})
        target = {**target, name: value} if isinstance(target, dict) else replace(target, **{name: value})
    return target


# The mixin from which ZayaConfig has its options: a dataclass with the fields declared by `option`, of the same names,
# types and defaults.
ZayaOptions: Any = make_dataclass(
    "ZayaOptions",
    [
        (megatron_argument(f), f.type, field(default=f.default, default_factory=f.default_factory, metadata=f.metadata))
        for _, f in leaves()
        if f.metadata["adds"] == "model"
    ],
)
