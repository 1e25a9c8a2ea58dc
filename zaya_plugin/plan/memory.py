# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank, by component: state, tensors that a forward pass keeps for the backward pass, and working memory
at the peak.

Activations are counted tensor by tensor, as autograd keeps them on an accelerator, where the functions between matrix
products are compiled; `tests/plan/test_saved_tensors.py` compares this table with the tensors of a small model under
every choice, within 0.5 %. Not counted: memory of libraries (context, NCCL's or RCCL's buffers, workspaces) and the
allocator's fragmentation; docs/verification.md compares these figures with measured peaks. Plain arithmetic.
"""

from dataclasses import dataclass, field, replace
from math import ceil

from hip_ops import saved_bytes
from zaya_plugin.config.schema import RECOMPUTE_MODULES
from zaya_plugin.plan.flops import Shape, count_parameters, muon_matrices
from zaya_plugin.plan.parallelism import (
    Batch,
    ParallelSizes,
    largest_matrices,
    local_parameters,
    owned_parameters,
    reached_keys,
    trained_parameters,
)

FLOAT32_BYTES = 4
RANDOM_STATE_BYTES = 2 * 5056  # bytes that a checkpoint keeps of the random generators
MUON_ROUND_ELEMENTS = 2**27  # elements; zaya_plugin.optim.muon.MuonSettings.elements_at_once


@dataclass(frozen=True)
class Recompute:
    """Recomputation in the backward pass.

    Attributes:
        modules: of every layer: "layernorm", "permute", "moe", "core_attn".
        full_layers: number of layers of a stage, from its first on, that are recomputed whole. unit: consecutive layers
            that keep one input.
    """

    modules: frozenset[str] = frozenset()
    full_layers: int = 0
    unit: int = 1

    @property
    def name(self) -> str:
        if self.full_layers:
            return f"{self.full_layers} whole layers"
        return " + ".join(name for name in RECOMPUTE_MODULES if name in self.modules) or "nothing"


@dataclass(frozen=True)
class Optimizer:
    """State of the optimizer. muon: whether matrices are under Muon. momentum_bytes: of an element of its momentum."""

    muon: bool = True
    momentum_bytes: int = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest rank. components: by name; their sum is the peak. layer: of the tensors that a layer keeps."""

    components: dict[str, float]
    layer: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> float:
        return sum(self.components.values())


def tokens_of_rank(layout: ParallelSizes, batch: Batch) -> int:
    """Return the tokens of one rank and micro-batch outside attention."""
    return batch.seq_length * batch.micro_batch_size // (layout.context * layout.tensor)


def layer_tensors(
    shape: Shape, layout: ParallelSizes, batch: Batch, recompute: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Return bytes of the tensors that one layer keeps of one micro-batch, by name; with even loads of the experts and
    without the dispatcher's own copies.

    Under tensor parallelism of t, attention has t times as many tokens, of 1 / t of the heads. h: hidden channels; q,
    k: channels of queries and keys (values have as many as keys); a: bytes of an activation.
    """
    a, tp, cp = batch.dtype_bytes, layout.tensor, layout.context
    tokens, h = tokens_of_rank(layout, batch), shape.hidden_size
    whole, q, k = tokens * tp, shape.query_channels // tp, shape.key_channels // tp
    norms, moe, core, rows = (name not in recompute for name in ("layernorm", "moe", "core_attn", "permute"))
    gathered = core and cp > 1  # attention keeps keys and values of the whole sequence, or of its windows
    reached = reached_keys(shape, layout, batch.seq_length)
    merge = saved_bytes.rms_norm(tokens, h, a, batch.stream_bytes, shape.norm_vectors > 1)
    heads, groups = shape.num_attention_heads // tp, shape.num_query_groups // tp
    tensors = {
        "stream into the layer": merge["residual"],
        "statistics of both norms": 2 * merge["statistics"] * norms,
        "normed input of attention": a * h * whole * (tp > 1 or norms),
        "joined matrix of the projections": a * h * (q + 2 * k),
        **saved_bytes.cca_prologue(whole, heads, groups, shape.kv_channels, a),
        "keys of all context-parallel ranks": a * k * whole * reached * gathered,
        "values": a * k * whole * (reached if gathered else 1),
        "context": a * q * whole,
        "logsumexp": FLOAT32_BYTES * heads * whole * core,
        # without block_attention, as on AMD; with it this is the context itself
        "context of each chunk": a * q * whole * gathered,
        "output of attention": merge["output"],
        "stream between attention and experts": merge["residual"],
        "normed input of the experts": a * h * tokens * norms,
        "router state": a * shape.router_hidden_size * tokens,
        "output of the experts": merge["output"],
        "adapters": a * (shape.lora_rank or 0) * tokens * (5 * ("attention" in shape.lora_targets)),
        "adapters of the experts": a * (shape.lora_rank or 0) * tokens * (2 * ("experts" in shape.lora_targets) * moe),
        "random generators": (2 - core - moe) * RANDOM_STATE_BYTES,
    }
    of_experts = {
        **saved_bytes.router_mlp(tokens, shape.router_hidden_size, shape.num_experts + 1, a),
        **saved_bytes.expert_permutation(tokens),
        **saved_bytes.weighted_swiglu(tokens, shape.moe_ffn_hidden_size, shape.num_experts // layout.expert, a),
        **(saved_bytes.grouped_product(tokens, h, a) if rows else {}),
    }
    return {name: size for name, size in (tensors | (of_experts if moe else {})).items() if size}


def layers_bytes(
    shape: Shape, layout: ParallelSizes, batch: Batch, recompute: Recompute, layers: int, first: bool = True
) -> float:
    """Return bytes that `layers` layers keep of one micro-batch. first: the model's first layer is among them; its
    input counts with the embedding.
    """
    kept = sum(layer_tensors(shape, layout, batch, recompute.modules).values()) * (layers - recompute.full_layers)
    tokens = tokens_of_rank(layout, batch)
    state = batch.dtype_bytes * shape.router_hidden_size * tokens  # of the router, that a layer receives
    kept -= state * ("moe" in recompute.modules and first)  # the first layer receives none
    if recompute.full_layers:  # a unit keeps its input
        inputs, units = (
            batch.stream_bytes * shape.hidden_size * tokens + state,
            ceil(recompute.full_layers / recompute.unit),
        )
        kept += inputs * (units - first) + RANDOM_STATE_BYTES * units + state * (layers > recompute.full_layers)
    return kept


def ends_bytes(shape: Shape, layout: ParallelSizes, batch: Batch, first: bool = True, last: bool = True) -> float:
    """Return bytes that embedding, final norm and head keep of one micro-batch."""
    a, s, h, tp = batch.dtype_bytes, batch.stream_bytes, shape.hidden_size, layout.tensor
    tokens = tokens_of_rank(layout, batch)
    # RoPE's angles, of half the channels
    kept = s * h * tokens * first + FLOAT32_BYTES * shape.kv_channels // 2 * (batch.seq_length // layout.context)
    final_norm = (s * h + FLOAT32_BYTES * shape.norm_vectors) * tokens
    return kept + last * (final_norm + sum(saved_bytes.linear_cross_entropy(tokens * tp, h, a).values()))


def optimizer_bytes(shape: Shape, layout: ParallelSizes, optimizer: Optimizer, dtype_bytes: int) -> float:
    """Return bytes of the fp32 weights of a bf16 model and of the moments, on a rank of the first stage."""
    owned = sum(owned_parameters(shape, layout).values())
    adamw = adamw_elements(shape, layout) / layout.shards if optimizer.muon else owned
    master = FLOAT32_BYTES if dtype_bytes < FLOAT32_BYTES else 0
    return (owned - adamw) * (master + optimizer.momentum_bytes) + adamw * (master + 2 * FLOAT32_BYTES)


def adamw_elements(shape: Shape, layout: ParallelSizes) -> float:
    """Return elements under AdamW on a rank, with Muon on matrices: embedding, convolutions, norms, scales and the
    router's vectors.
    """
    parts = count_parameters(shape)
    matrices = shape.num_layers * sum(rows * columns for rows, columns in muon_matrices(shape)[1])
    vectors = parts["attention"] + parts["router"] + parts["norms"] + parts["residual_scaling"] - matrices
    return parts["embedding"] / layout.tensor + vectors / layout.pipeline


def padded_parameters(shape: Shape, layout: ParallelSizes, muon: bool = True) -> dict[str, float]:
    """Return elements of the gradient buffers of a rank, "experts" and "rest"."""
    trained, largest = trained_parameters(shape, layout), largest_matrices(shape, layout, muon)
    ranks = {"experts": layout.expert_shards, "rest": layout.shards}
    units = {part: ranks[part] * largest[part] if ranks[part] > 1 else 1 for part in trained}
    return {part: float(ceil(trained[part] / units[part]) * units[part]) for part in trained}


def in_flight(layout: ParallelSizes, micro_batches: int) -> float:
    """Return the micro-batches whose activations the first pipeline stage holds at once (1F1B and its interleaved form,
    arXiv 2104.04473).
    """
    if layout.virtual == 1:
        return float(min(micro_batches, layout.pipeline))
    chunks = (layout.virtual - 1) * layout.pipeline + 2 * (layout.pipeline - 1) + 1
    return min(micro_batches * layout.virtual, chunks) / layout.virtual


def memory_plan(
    shape: Shape,
    layout: ParallelSizes,
    batch: Batch,
    recompute: Recompute | None = None,
    optimizer: Optimizer | None = None,
    graph: bool = False,
) -> MemoryPlan:
    """Return the peak of the fullest rank: of the first pipeline stage, with most micro-batches in flight, or of the
    last, with the head.

    graph: forward and backward are one graph, which never frees its memory, so the optimizer's working memory is added.
    """
    arguments = shape, layout, batch, recompute or Recompute(), optimizer or Optimizer(), graph
    ends = ((True, True),) if layout.pipeline == 1 else ((True, False), (False, True))
    return max((_stage(*arguments, first=first, last=last) for first, last in ends), key=lambda plan: plan.total)


def _stage(
    shape: Shape,
    layout: ParallelSizes,
    batch: Batch,
    recompute: Recompute,
    optimizer: Optimizer,
    graph: bool,
    *,
    first: bool,
    last: bool,
) -> MemoryPlan:
    a, h, tp = batch.dtype_bytes, shape.hidden_size, layout.tensor
    parameters, trained = (sum(of(shape, layout).values()) for of in (local_parameters, trained_parameters))
    parameters += trained * (shape.lora_rank is not None)
    layers = shape.num_layers // layout.pipeline
    recompute = replace(recompute, full_layers=min(recompute.full_layers, layers))
    flights = in_flight(layout, batch.micro_batches) if first else 1.0
    whole = batch.seq_length * batch.micro_batch_size // layout.context  # tokens under tensor parallelism too
    kept = layers_bytes(shape, layout, batch, recompute, layers, first) * flights
    # Working memory peaks at the head, or in the backward pass of a layer with its recomputed tensors; at the
    # optimizer's step no activations are left.
    head = saved_bytes.linear_cross_entropy_work(whole, h, shape.vocab_size // tp, a, tp) if last else 0.0
    recomputed = layers_bytes(shape, layout, batch, Recompute(), 1)
    if recompute.full_layers:
        recomputed *= recompute.unit
    else:
        recomputed -= layers_bytes(shape, layout, batch, recompute, 1)
    work = whole / tp * (a * (2 * h + 4 * shape.moe_ffn_hidden_size) + batch.stream_bytes * h)
    ends = ends_bytes(shape, layout, batch, first, last) * flights
    # Of Muon, for a round of matrices in 16 bits: Newton-Schulz's input and output, its iterate before and after a step,
    # and square products of twice that size together.
    owned = owned_parameters(shape, layout)["experts"]
    update = 6 * 2 * min(owned, MUON_ROUND_ELEMENTS) if optimizer.muon else 0.0
    peak = max(kept + ends + max(head, work + max(0.0, recomputed)) + update * graph, update)
    return MemoryPlan(
        {
            "weights": float(a * parameters),
            "gradients": float(batch.gradient_bytes * trained),
            "padding of their buffers": (a + batch.gradient_bytes)
            * (sum(padded_parameters(shape, layout, optimizer.muon).values()) - trained),
            "optimizer": optimizer_bytes(shape, layout, optimizer, a),
            "activations of the layers": kept,
            "embedding, final norm and head": ends,
            "working memory at the peak": peak - kept - ends,
        },
        layer_tensors(shape, layout, batch, recompute.modules),
    )
