# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank, by component: state, tensors that a forward pass keeps for the backward pass, and working memory
at the peak.

Activations are counted tensor by tensor, as autograd keeps them on an accelerator, where the functions between matrix
products are compiled; `tests/plan/test_saved_tensors.py` compares this table with the tensors of a small model under
every choice, within 0.5 %. Not counted: memory of libraries (context, NCCL's or RCCL's buffers, workspaces) and the
allocator's fragmentation; docs/verification.md compares these figures with measured peaks. Plain arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hip_ops import saved_bytes
from zaya_plugin.plan.flops import Shape, count_parameters
from zaya_plugin.plan.parallelism import GRADIENT_BYTES, Batch, ParallelSizes, local_parameters

FLOAT32_BYTES, INT64_BYTES = 4, 8
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


@dataclass(frozen=True)
class Optimizer:
    """State of the optimizer. muon: whether matrices are under Muon. momentum_bytes: of an element of its momentum."""

    muon: bool = True
    momentum_bytes: int = 4


@dataclass(frozen=True)
class Saved:
    """A tensor that a layer keeps for its backward pass. part: of the step, as in zaya_plugin.bench.step_parts."""

    part: str
    name: str
    bytes: float


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of the fullest rank. components: by name; their sum is the peak. layer: tensors that one layer keeps."""

    components: dict[str, float]
    layer: tuple[Saved, ...] = field(default=(), repr=False)

    @property
    def total(self) -> float:
        return sum(self.components.values())


def tokens_of_rank(layout: ParallelSizes, batch: Batch) -> int:
    """Return the tokens of one rank and micro-batch outside attention."""
    return batch.seq_length * batch.micro_batch_size // (layout.context * layout.tensor)


def layer_tensors(
    shape: Shape, layout: ParallelSizes, batch: Batch, recompute: frozenset[str] = frozenset()
) -> Iterator[Saved]:
    """Return the tensors that one layer keeps of one micro-batch.

    Under tensor parallelism of t, attention has t times as many tokens, of 1 / t of the heads. h: hidden channels; q,
    k: channels of queries and keys (values have as many as keys); r: of the router; a: bytes of an activation; s: of
    the stream.
    """
    a, s, tp, cp = batch.dtype_bytes, batch.stream_bytes, layout.tensor, layout.context
    tokens = tokens_of_rank(layout, batch)
    whole = tokens * tp
    h, r = shape.hidden_size, shape.router_hidden_size
    q, k = shape.query_channels // tp, shape.key_channels // tp
    recompute_norms, recompute_moe, recompute_core = (name in recompute for name in ("layernorm", "moe", "core_attn"))

    merge = saved_bytes.rms_norm(tokens, h, a, s, shape.norm_vectors > 1)
    yield Saved("norms", "stream into the layer", merge["residual"])
    if not recompute_norms:
        yield Saved("norms", "statistics of both norms", 2 * merge["statistics"])
    if tp > 1 or not recompute_norms:
        yield Saved("projections", "normed input of attention" + (", gathered" if tp > 1 else ""), a * h * whole)
    yield Saved("projections", "joined matrix of the projections", a * h * (q + 2 * k))
    heads, groups = shape.num_attention_heads // tp, shape.num_query_groups // tp
    yield from _kept("prologue", saved_bytes.cca_prologue(whole, heads, groups, shape.kv_channels, a))
    keys = k * whole * (1 if recompute_core else cp)  # of the whole sequence, where attention gathers them
    if cp > 1 and not recompute_core:
        yield Saved("attention", "keys of all context-parallel ranks", a * keys)
    yield Saved("attention", "values", a * keys)
    yield Saved("attention", "context", a * q * whole)
    if not recompute_core:
        yield Saved("attention", "logsumexp", FLOAT32_BYTES * shape.num_attention_heads // tp * whole)
        if cp > 1:  # without block_attention, as on AMD; with it this is the context itself
            yield Saved("attention", "context of each chunk", a * q * whole)
    yield Saved("norms", "output of attention", merge["output"])
    yield Saved("norms", "stream between attention and experts", merge["residual"])
    if not recompute_norms:
        yield Saved("router", "normed input of the experts", a * h * tokens)
    yield Saved("router", "router state", a * r * tokens)
    if not recompute_moe:
        yield from _moe_tensors(shape, layout, a, tokens, "permute" in recompute)
    yield Saved("norms", "output of the experts", merge["output"])
    checkpoints = recompute_core + recompute_moe
    if checkpoints:
        yield Saved("other", "random generators", checkpoints * RANDOM_STATE_BYTES)


def _kept(part: str, sizes: dict[str, float]) -> Iterator[Saved]:
    """Return the tensors that an operator keeps for its backward pass (hip_ops/saved_bytes.py)."""
    return (Saved(part, name, size) for name, size in sizes.items())


def _moe_tensors(shape: Shape, layout: ParallelSizes, a: int, tokens: int, recompute_rows: bool) -> Iterator[Saved]:
    """Return the tensors of router and experts; with even loads and without the dispatcher's own copies."""
    yield from _kept("router", saved_bytes.router_mlp(tokens, shape.router_hidden_size, shape.num_experts + 1, a))
    yield from _kept("experts", saved_bytes.expert_permutation(tokens))
    if not recompute_rows:
        yield from _kept("experts", saved_bytes.grouped_product(tokens, shape.hidden_size, a))
    experts = shape.num_experts // layout.expert
    yield from _kept("experts", saved_bytes.weighted_swiglu(tokens, shape.moe_ffn_hidden_size, experts, a))


def whole_layer_tensors(shape: Shape, layout: ParallelSizes, batch: Batch) -> Iterator[Saved]:
    """Return the tensors that a unit of fully recomputed layers keeps."""
    tokens = tokens_of_rank(layout, batch)
    yield Saved("norms", "stream into the layer", batch.stream_bytes * shape.hidden_size * tokens)
    yield Saved("router", "router state", batch.dtype_bytes * shape.router_hidden_size * tokens)
    yield Saved("other", "random generators", RANDOM_STATE_BYTES)


def layers_bytes(
    shape: Shape, layout: ParallelSizes, batch: Batch, recompute: Recompute, layers: int, first: bool = True
) -> float:
    """Return bytes that `layers` layers keep of one micro-batch. first: the model's first layer is among them; its
    input counts with the embedding.
    """
    layer_bytes = sum(saved.bytes for saved in layer_tensors(shape, layout, batch, recompute.modules))
    kept = layer_bytes * (layers - recompute.full_layers)
    if "moe" in recompute.modules and first:
        # a layer keeps the router state that it receives; the first receives none
        kept -= batch.dtype_bytes * shape.router_hidden_size * tokens_of_rank(layout, batch)
    if recompute.full_layers:
        units = -(-recompute.full_layers // recompute.unit)
        unit = {saved.name: saved.bytes for saved in whole_layer_tensors(shape, layout, batch)}
        kept += sum(unit.values()) * units
        kept -= (sum(unit.values()) - unit["random generators"]) * first
        kept += unit["router state"] * (layers > recompute.full_layers)
    return kept


def ends_bytes(shape: Shape, layout: ParallelSizes, batch: Batch, first: bool = True, last: bool = True) -> float:
    """Return bytes that embedding, final norm and head keep of one micro-batch."""
    a, s, h, tp = batch.dtype_bytes, batch.stream_bytes, shape.hidden_size, layout.tensor
    tokens = tokens_of_rank(layout, batch)
    # RoPE's angles, of half the channels
    kept = s * h * tokens * first + FLOAT32_BYTES * shape.kv_channels // 2 * (batch.seq_length // layout.context)
    if last:
        kept += (s * h + FLOAT32_BYTES * shape.norm_vectors) * tokens  # the final norm's
        kept += sum(saved_bytes.linear_cross_entropy(tokens * tp, h, a).values())
    return kept


def optimizer_bytes(shape: Shape, layout: ParallelSizes, optimizer: Optimizer, dtype_bytes: int) -> float:
    """Return bytes of the fp32 weights of a bf16 model and of the moments, on a rank of the first stage."""
    local = local_parameters(shape, layout)
    owned = {"experts": local["experts"] / layout.expert_shards, "rest": local["rest"] / layout.shards}
    adamw = sum(owned.values()) if not optimizer.muon else _adamw_elements(shape, layout) / layout.shards
    muon = sum(owned.values()) - adamw
    master = FLOAT32_BYTES if dtype_bytes < FLOAT32_BYTES else 0
    return muon * (master + optimizer.momentum_bytes) + adamw * (master + 2 * FLOAT32_BYTES)


def _adamw_elements(shape: Shape, layout: ParallelSizes) -> float:
    """Return elements under AdamW on a rank, with Muon on matrices: embedding, convolutions, norms, scales and the
    router's vectors.
    """
    parts, stages = count_parameters(shape), layout.pipeline
    q, k, h, r = shape.query_channels, shape.key_channels, shape.hidden_size, shape.router_hidden_size
    matrices = shape.num_layers * (2 * h * (q + k) + h * r + 2 * r * r + (shape.num_experts + 1) * r)
    vectors = parts["attention"] + parts["router"] + parts["norms"] + parts["residual_scaling"] - matrices
    return parts["embedding"] / layout.tensor + vectors / stages


def padded_parameters(shape: Shape, layout: ParallelSizes, muon: bool = True) -> dict[str, float]:
    """Return elements of the gradient buffers of a rank, "experts" and "rest". Every shard holds whole matrices
    (zaya_plugin.optim.sharding.placement).
    """
    local = local_parameters(shape, layout)
    largest = (
        2 * shape.moe_ffn_hidden_size * shape.hidden_size,
        shape.query_channels // layout.tensor * shape.hidden_size if muon else 1,
    )
    counts = {}
    for (name, elements), ranks, matrix in zip(
        local.items(), (layout.expert_shards, layout.shards), largest, strict=True
    ):
        unit = ranks * matrix if ranks > 1 else 1
        counts[name] = float(-(-elements // unit) * unit)
    return counts


def in_flight(layout: ParallelSizes, micro_batches: int) -> float:
    """Return the micro-batches whose activations the first pipeline stage holds at once (1F1B and its interleaved form,
    arXiv 2104.04473).
    """
    if layout.pipeline == 1:
        return 1.0
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
    plans = [_stage(*arguments, first=True, last=layout.pipeline == 1)]
    if layout.pipeline > 1:
        plans.append(_stage(*arguments, first=False, last=True))
    return max(plans, key=lambda plan: plan.total)


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
    a, h = batch.dtype_bytes, shape.hidden_size
    parameters = sum(local_parameters(shape, layout).values())
    layers = shape.num_layers // layout.pipeline
    recompute = replace(recompute, full_layers=min(recompute.full_layers, layers))
    flights = in_flight(layout, batch.micro_batches) if first else 1.0
    whole = batch.seq_length * batch.micro_batch_size // layout.context  # tokens under tensor parallelism too
    layer = tuple(layer_tensors(shape, layout, batch, recompute.modules))
    kept = layers_bytes(shape, layout, batch, recompute, layers, first) * flights
    # Working memory peaks at the head, or in the backward pass of a layer with its recomputed tensors; at the
    # optimizer's step no activations are left.
    classes = shape.vocab_size // layout.tensor
    head = saved_bytes.linear_cross_entropy_work(whole, h, classes, a, layout.tensor) if last else 0.0
    modules = frozenset() if recompute.full_layers else recompute.modules
    recomputed = layers_bytes(shape, layout, batch, Recompute(), 1) * (recompute.unit if recompute.full_layers else 1)
    recomputed -= layers_bytes(shape, layout, batch, Recompute(modules), 1) * (not recompute.full_layers)
    backward = whole / layout.tensor * (a * (2 * h + 4 * shape.moe_ffn_hidden_size) + batch.stream_bytes * h) + max(
        0.0, recomputed
    )
    ends = ends_bytes(shape, layout, batch, first, last) * (flights if first else 1.0)
    step, update = kept + ends + max(head, backward), _optimizer_work(shape, layout, optimizer)
    step = step + update if graph else max(step, update)
    return MemoryPlan(
        {
            "weights": float(a * parameters),
            "gradients (fp32)": float(GRADIENT_BYTES * parameters),
            "padding of their buffers": (a + GRADIENT_BYTES)
            * (sum(padded_parameters(shape, layout, optimizer.muon).values()) - parameters),
            "optimizer": optimizer_bytes(shape, layout, optimizer, a),
            "activations of the layers": kept,
            "embedding, final norm and head": ends,
            "working memory at the peak": step - kept - ends,
        },
        layer,
    )


def _optimizer_work(shape: Shape, layout: ParallelSizes, optimizer: Optimizer) -> float:
    """Return bytes of Muon's working memory: for a round of matrices, in 16 bits, Newton-Schulz's input and output, its
    iterate before and after a step, and square products of twice that size together."""
    if not optimizer.muon:
        return 0.0
    owned = local_parameters(shape, layout)["experts"] / layout.expert_shards
    return 6 * 2 * min(owned, MUON_ROUND_ELEMENTS)
