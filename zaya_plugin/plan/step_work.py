# SPDX-License-Identifier: Apache-2.0
"""Operations and least memory traffic of one rank in a training step, by part; measured times are compared with them.

Operations are those of zaya_plugin.plan.flops, forward and twice that backward; recomputation is not counted. Bytes are
the least that a part must read and write on the device if its results go through memory: every operand of every product
and pass once, weights once for each micro-batch and pass, no intermediate of a pass that can stay in registers. No
torch import.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from hip_ops.newton_schulz_form import newton_schulz_flops
from zaya_plugin.config.schema import Recipe
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.flops import Shape, count_parameters, forward_flops_by_part, muon_matrices
from zaya_plugin.plan.memory import FLOAT32_BYTES, adamw_elements, tokens_of_rank
from zaya_plugin.plan.parallelism import ParallelSizes, largest_matrices, local_parameters, owned_parameters


@dataclass(frozen=True)
class Work:
    """Operations and bytes of a part in one step of one rank. weights: of the bytes, those of the experts' weights and fp32
    gradients, which every micro-batch moves whatever its tokens.
    """

    flops: float = 0.0
    bytes: float = 0.0
    weights: float = 0.0

    def seconds(self, gemm: float, copy: float) -> float:
        """Return the time of the roofline, at FLOP/s of a matrix product and bytes/s of a copy."""
        return max(self.flops / gemm, self.bytes / copy)


@dataclass(frozen=True)
class Rank:
    """One rank's share of a step.

    Attributes:
        layers, head: number of layers, and whether the rank holds the head. It holds the embedding in any case.
        tokens: computed in a step. With tensor parallelism a rank computes all tokens of its heads, and its share of
            the tokens outside attention: in both cases 1 / tensor-parallel size of the work.
        micro_batches: of a step.
        experts: of each layer on this rank.
        activation_bytes, stream_bytes: of an element of weights and activations, and of the residual stream.
        tensor: tensor-parallel ranks, which share the matrices of queries, keys, output and vocabulary.
        accumulated: elements of gradients that a part's own kernels add to the fp32 buffer, by part; under "gradients"
            those that a separate pass adds.
        written: the parts whose gradients are not zeroed, since a step's first micro-batch writes them.
    """

    layers: int
    tokens: int
    micro_batches: int
    experts: int
    head: bool = True
    activation_bytes: int = 2
    stream_bytes: int = 4
    accumulated: Mapping[str, int] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    tensor: int = 1


@dataclass(frozen=True)
class OptimizerShare:
    """Work of one rank's update: elements under Muon and under AdamW, bytes of a momentum's element, and operations of
    Newton-Schulz.
    """

    muon: float
    adamw: float
    momentum_bytes: int = 4
    newton_schulz_flops: float = 0.0


def step_work(shape: Shape, seq_length: int, rank: Rank, optimizer: OptimizerShare | None = None) -> dict[str, Work]:
    """Return the work of forward, backward and the optimizer by part; optimizer None: a step without one."""
    rank_shape = replace(shape, num_layers=rank.layers)
    flops = {part: 3.0 * rank.tokens * value for part, value in forward_flops_by_part(rank_shape, seq_length).items()}
    flops["head"] *= rank.head
    moved = {"gradients": 0.0, **_activation_bytes(shape, rank)}
    for part, elements in _weights(rank_shape, rank).items():  # read forward and backward, their gradient written
        moved[part] += 3.0 * rank.activation_bytes * elements * rank.micro_batches
    # each micro-batch reads and writes the fp32 buffer once, where it adds; a separate pass also reads the gradient
    for part, elements in rank.accumulated.items():
        gradient = rank.activation_bytes if part == "gradients" else -rank.activation_bytes
        moved[part] += (2.0 * FLOAT32_BYTES + gradient) * rank.micro_batches * elements
        # a buffer is zeroed before, or the first micro-batch does not read it
        moved["gradients" if part not in rank.written else part] += (
            FLOAT32_BYTES * elements * (1 if part not in rank.written else -1)
        )
    if optimizer is not None:
        flops["optimizer"] = optimizer.newton_schulz_flops
        # gradient read for the norm and again; fp32 weight read and written; the model's dtype written; the state.
        common = 2 * FLOAT32_BYTES + 2 * FLOAT32_BYTES + rank.activation_bytes
        moved["optimizer"] = optimizer.muon * (common + 3 * optimizer.momentum_bytes) + optimizer.adamw * (
            common + 4 * FLOAT32_BYTES
        )
    blocks = rank.micro_batches * rank.accumulated.get("experts", 0)
    weights = {"experts": 2.0 * (rank.activation_bytes + FLOAT32_BYTES) * blocks}
    return {part: Work(*(amounts.get(part, 0.0) for amounts in (flops, moved, weights))) for part in {**flops, **moved}}


def _projections(shape: Shape) -> int:
    """Return the parameters of queries, keys, both values and output of all layers."""
    return shape.num_layers * shape.hidden_size * 2 * (shape.query_channels + shape.key_channels)


def _weights(shape: Shape, rank: Rank) -> dict[str, float]:
    """Return elements of the weights that a micro-batch uses on this rank."""
    parts, projections = count_parameters(shape), _projections(shape)
    # of matrices that tensor parallelism does not cut (values, convolutions) a rank reads the rows of its heads
    return {
        "projections": projections / rank.tensor,
        "prologue": (parts["attention"] - projections) / rank.tensor,
        "router": parts["router"],
        "experts": parts["experts"] / shape.num_experts * rank.experts,
        "head": parts["embedding"] / rank.tensor if rank.head else 0.0,
    }


def _activation_bytes(shape: Shape, rank: Rank) -> dict[str, float]:
    """Return bytes of activations, forward and backward, of all layers and tokens of the rank. Comments: read ->
    written.
    """
    h, f, q, k = shape.hidden_size, shape.moe_ffn_hidden_size, shape.query_channels, shape.key_channels
    projected = q + 2 * k  # queries, keys, both values
    a, s = rank.activation_bytes, rank.stream_bytes
    per_token = {
        # x -> projected; context -> output. Backward, each: the gradient and the weight's operand twice read, one
        # gradient written.
        "projections": a * ((h + projected + q + h) + 2 * (h + projected + q + h)),
        # projected -> q, k, v. Backward: their gradients, and q and k again -> gradient of projected.
        "prologue": a * (2 * projected + (2 * projected + q + k)),
        # q, k, v -> context. Backward: q, k, v, context and its gradient -> three gradients.
        "attention": a * ((projected + q) + (2 * projected + 2 * q)),
        # x -> state, logits (small). Backward: x -> gradient of x.
        "router": a * (h + 2 * h + 3 * shape.router_hidden_size),
        # Permute and unpermute 2 x 2 h, gate and up, SwiGLU, down. Backward: both moves, the four products of dgrad and
        # wgrad, and of SwiGLU the gradient and gate and up -> their gradients, and the output again for wgrad.
        "experts": a * (4 * h + (h + 2 * f) + 3 * f + (f + h) + 4 * h + 2 * (h + f) + 2 * (2 * f + h) + 3 * f + 3 * f),
        # Two merges with the norm behind each: output and stream -> stream and normed. Backward: gradients of both,
        # output and stream again -> two gradients.
        "norms": 2 * h * ((2 * a + 2 * s) + (3 * a + 3 * s)),
    }
    ends = {
        # Hidden state in, its gradient out; the logits need no memory.
        "head": rank.head * a * 3 * h,
        # A row read and written; backward a row added to the fp32 gradient.
        "embedding": 2 * a * h + (a + 2 * FLOAT32_BYTES) * h,
    }
    moved = {part: float(rank.layers * rank.tokens * value) for part, value in per_token.items()}
    return moved | {part: float(rank.tokens * value) for part, value in ends.items()}


def work_of(
    recipe: Recipe,
    world: int,
    vocabulary: int | None = None,
    optimizer: bool = True,
    written: frozenset[str] = frozenset({"experts"}),
) -> dict[str, Work]:
    """Return the work of one rank of the first pipeline stage by part, from the recipe alone.

    written: the parts whose gradients the first micro-batch writes (zaya_plugin.optim.gradient_buffers).
    """
    shape, layout, batch = recipe_plan.sizes_of(recipe, world, vocabulary)
    rank = Rank(
        layers=shape.num_layers // layout.pipeline,
        head=layout.pipeline == 1,
        tokens=batch.micro_batches * tokens_of_rank(layout, batch),
        micro_batches=batch.micro_batches,
        experts=shape.num_experts // layout.expert,
        activation_bytes=batch.dtype_bytes,
        stream_bytes=batch.stream_bytes,
        accumulated=accumulated(shape, layout),
        written=written,
        tensor=layout.tensor,
    )
    return step_work(shape, batch.seq_length, rank, optimizer_share(shape, layout, recipe) if optimizer else None)


def accumulated(shape: Shape, layout: ParallelSizes) -> dict[str, int]:
    """Return elements of gradients by the part whose kernels add them to the fp32 buffer under Megatron's DDP;
    "gradients": by a separate pass.
    """
    local = local_parameters(shape, layout)
    embedding = 0 if layout.pipeline > 1 else count_parameters(shape)["embedding"] // layout.tensor
    own = {"experts": local["experts"], "head": embedding}
    own |= {"projections": _projections(shape) // layout.pipeline} if layout.tensor == 1 else {}
    return {**own, "gradients": sum(local.values()) - sum(own.values())}


def optimizer_share(shape: Shape, layout: ParallelSizes, recipe: Recipe) -> OptimizerShare:
    """Return the share of the busiest rank; matrices are never cut, so it has at least one of the largest ones."""
    optim, owned, ranks = recipe.optim, owned_parameters(shape, layout), layout.expert_shards
    layers, optimizer = shape.num_layers // layout.pipeline, recipe_plan.optimizer_of(recipe)
    momentum = optimizer.momentum_bytes
    if not optimizer.muon:
        return OptimizerShare(0.0, sum(owned.values()), momentum)
    of_an_expert, of_a_layer = muon_matrices(shape, optim.muon_split_gate_up)
    experts = layers * shape.num_experts / layout.expert / ranks
    flops = partial(newton_schulz_flops, steps=optim.muon_steps, bf16=optim.muon_dtype == "bf16")
    operations = max(experts * sum(flops(*size) for size in of_an_expert), flops(*of_an_expert[0]) * (ranks > 1))
    operations += layers * sum(flops(*size) for size in of_a_layer) / layout.shards
    adamw = adamw_elements(shape, layout) / layout.shards
    largest = largest_matrices(shape, layout)["experts"] * (ranks > 1)
    return OptimizerShare(max(owned["experts"], largest) + owned["rest"] - adamw, adamw, momentum, operations)
