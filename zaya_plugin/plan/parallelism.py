# SPDX-License-Identifier: Apache-2.0
"""Parameters, state and traffic of one rank under a parallel layout. Plain arithmetic over a model's shape.

Bytes sent are those of ring algorithms, as NCCL and RCCL count bus traffic: a rank sends (n - 1) / n of the gathered
tensor in an all-gather, the same in a reduce-scatter, twice that in an all-reduce. Activations are counted by
zaya_plugin.plan.memory. docs/verification.md compares these figures with measured ones.
"""

from dataclasses import dataclass

from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.halo import halo
from zaya_plugin.plan.flops import Shape, adapter_parameters, count_parameters

GRADIENT_BYTES, WEIGHT_BYTES = 4, 2  # of an element: gradients in fp32, weights of a bf16 model


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes, in ranks. virtual: stages that a pipeline rank holds. instances: copies of the whole optimizer
    state.
    """

    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    zigzag: bool = True
    allgather_dispatcher: bool = False
    distributed_optimizer: bool = True
    instances: int = 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights outside the experts."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts; experts are never cut, so tensor-parallel ranks are replicas too."""
        return self.data * self.context * self.tensor // self.expert

    @property
    def shards(self) -> int:
        """Ranks that share the optimizer's state outside the experts; every instance holds all of it."""
        return self.replicas // self.instances if self.distributed_optimizer else 1

    @property
    def expert_shards(self) -> int:
        """Ranks that share the optimizer's state of the experts."""
        return self.expert_replicas // self.instances if self.distributed_optimizer else 1

    @property
    def reduced_over(self) -> dict[str, int]:
        """Ranks over which gradients of "experts" and of the "rest" are reduced, within an instance."""
        whole = {"experts": self.expert_replicas, "rest": self.replicas}
        return {"experts": self.expert_shards, "rest": self.shards} if self.distributed_optimizer else whole


@dataclass(frozen=True)
class Batch:
    """Work of one data-parallel rank and step.

    seq_length: of a whole sequence; dtype_bytes: of weights and activations; stream_bytes: of an element of the
    residual stream; gradient_bytes: of an accumulated and reduced gradient.
    """

    seq_length: int
    micro_batch_size: int = 1
    micro_batches: int = 1
    dtype_bytes: int = 2
    stream_bytes: int = 4
    gradient_bytes: int = GRADIENT_BYTES


def local_parameters(shape: Shape, layout: ParallelSizes) -> dict[str, int]:
    """Return parameters on a rank of the first pipeline stage: `experts`, and `rest` with the embedding."""
    parts, stages = count_parameters(shape), layout.pipeline
    final_norm = shape.norm_vectors * shape.hidden_size  # on the last stage
    uncut = sum(parts.values()) - parts["experts"] - final_norm - _cut_parameters(shape, ParallelSizes())
    rest = uncut // stages + final_norm * (stages == 1) + _cut_parameters(shape, layout)
    return {"experts": parts["experts"] // (stages * layout.expert), "rest": rest}


def trained_parameters(shape: Shape, layout: ParallelSizes) -> dict[str, int]:
    """Return parameters with gradients on that rank: all, or with adapters those alone, as in `local_parameters`."""
    if shape.lora_rank is None:
        return local_parameters(shape, layout)
    counts = {target: count // layout.pipeline for target, count in adapter_parameters(shape).items()}
    shared = shape.lora_experts == "shared"  # on all ranks, as the weights outside the experts
    rest = counts["attention"] + counts["router"] + counts["experts"] * shared
    return {"experts": (not shared) * counts["experts"] // layout.expert, "rest": rest}


def owned_parameters(shape: Shape, layout: ParallelSizes) -> dict[str, float]:
    """Return parameters whose optimizer state is on a rank, `experts` and `rest`."""
    trained = trained_parameters(shape, layout)
    return {"experts": trained["experts"] / layout.expert_shards, "rest": trained["rest"] / layout.shards}


def largest_matrices(shape: Shape, layout: ParallelSizes, muon: bool = True) -> dict[str, int]:
    """Return elements of the largest matrix of "experts" and "rest"; every shard of a buffer holds whole ones
    (zaya_plugin.optim.sharding.placement), but for adapters.
    """
    if shape.lora_rank is not None:
        return {"experts": 1, "rest": 1}
    queries = shape.query_channels // layout.tensor * shape.hidden_size if muon else 1
    return {"experts": 2 * shape.moe_ffn_hidden_size * shape.hidden_size, "rest": queries}


def _cut_parameters(shape: Shape, layout: ParallelSizes) -> int:
    """Return parameters of a stage's queries, keys, output projections and embedding, which tensor parallelism cuts."""
    heads = shape.num_layers * shape.hidden_size * (2 * shape.query_channels + shape.key_channels)
    return (heads // layout.pipeline + shape.vocab_size * shape.hidden_size) // layout.tensor


def reached_keys(shape: Shape, layout: ParallelSizes, seq_length: int) -> float:
    """Return the rows of keys that a context-parallel rank's attention has at most for each of its own rows, on average
    over the layers: all ranks' rows, or in layers with a sliding window those of its `Halo`.
    """
    cp, share = layout.context, shape.window_layers / shape.num_layers
    shard = ContextShard("zigzag" if layout.zigzag else "contiguous", cp)
    in_window = halo(shard, seq_length // shard.total_chunks, shape.sliding_window).reach if share else cp
    return share * in_window + (1 - share) * cp


def sent_bytes(shape: Shape, layout: ParallelSizes, batch: Batch) -> dict[str, float]:
    """Return the bytes that a rank sends in one step, by purpose, without recomputation and with even routing.

    Returns:
        key_values and boundary: context parallelism. dispatch: expert parallelism, rows and their gradients.
        activations and replicated: tensor parallelism, rows, and the gradients of uncut parameters. stages and tied:
        pipeline parallelism, a rank with both neighbours (the first and the last do not send past the ends), and the
        gradient of the embedding, which the first stage shares with the last one's head. gradients and weights: data
        parallelism, within an instance of the optimizer. instances: all-reduces of a shard's gradients between
        instances.
    """
    layers, h = shape.num_layers // layout.pipeline, shape.hidden_size
    rows = batch.seq_length // layout.context * batch.micro_batch_size  # of this rank's part of the sequences
    element, times, sharded = batch.dtype_bytes, batch.micro_batches * layers, layout.distributed_optimizer
    cp, tp, ep = layout.context, layout.tensor, layout.expert
    both_ways = 2  # the gradient of every exchange is an exchange of as many bytes
    chunks = (2 if layout.zigzag else 1) * batch.micro_batch_size
    channels = (2 * (shape.query_channels + shape.key_channels) + shape.key_channels // 2) // tp
    tokens = rows // tp
    # each token's row and its expert's output, to and from all ranks of the group
    moved = (ep - 1) * tokens if layout.allgather_dispatcher else (ep - 1) / ep * tokens
    local = local_parameters(shape, layout)
    received = reached_keys(shape, layout, batch.seq_length) - 1
    reduced = sum((n - 1) / n * local[part] for part, n in layout.reduced_over.items())
    shards, instances = sum(owned_parameters(shape, layout).values()), layout.instances
    boundaries = layout.virtual if layout.pipeline > 1 else 0
    # Attention gathers its input and scatters its output; the embedding scatters, the head gathers; both again
    # backward.
    attention, ends = 2 * both_ways * layers, 4 if layout.pipeline == 1 else 0
    return {
        "key_values": both_ways * times * received * rows * 2 * shape.key_channels // tp * element,
        "boundary": float(both_ways * times * (cp - 1) * chunks * channels * element),
        "dispatch": both_ways * times * 2 * moved * h * element,
        "activations": batch.micro_batches * (attention + ends) * (tp - 1) / tp * rows * h * element,
        "replicated": 2 * (tp - 1) / tp * (local["rest"] - _cut_parameters(shape, layout)) * batch.gradient_bytes,
        "stages": float(
            both_ways * batch.micro_batches * boundaries * tokens * (h + shape.router_hidden_size) * batch.stream_bytes
        ),
        "tied": float(shape.vocab_size * h // tp * batch.gradient_bytes) if layout.pipeline > 1 else 0.0,
        "gradients": reduced * batch.gradient_bytes * (1 if sharded else 2),
        "weights": reduced * element * sharded,
        "instances": 2 * (instances - 1) / instances * shards * batch.gradient_bytes * sharded,
    }


def ranks_to_build(layout: ParallelSizes, world: int) -> list[int]:
    """Return the first, a middle and the last rank, and ranks that hold every different part of the model."""
    stage = world // layout.pipeline
    parts = {
        first * stage + place for first in range(layout.pipeline) for place in range(max(layout.expert, layout.tensor))
    }
    return sorted({0, max(world // 2 - 1, 0), world - 1} | parts)


def faults_of(ranks: list[dict], shape: Shape, layout: ParallelSizes) -> list[str]:
    """Return what is wrong with the shards of `ranks`, as zaya_plugin.hosts.rank_layout describes them; empty if they hold
    every parameter exactly once, and none more than its share and one matrix.
    """
    faults, parts, largest = [], {}, largest_matrices(shape, layout)
    for rank in ranks:
        for row in rank["buffers"]:
            name, mean, most = (
                f"rank {rank['rank']}, {row['name']}",
                row["elements"] / row["shards"],
                row["shard_elements"][0],
            )
            if row["faults"]:
                faults.append(f"{name}: {row['faults']} parameters are not held exactly once")
            if most > mean + largest[row["name"].split()[0]]:
                faults.append(f"{name}: the fullest shard has {most:,} elements, {most / mean:.2f} of the mean")
        held, own = sum(row["elements"] for row in rank["buffers"]), rank["parameters"]
        if held != sum(own.values()):
            faults.append(f"rank {rank['rank']}: shards of {held:,} of {sum(own.values()):,} parameters")
        stage, expert = rank["groups"]["pipeline"][1], rank["groups"]["expert"][1]
        parts |= {("experts", stage, expert): own["experts"], ("rest", stage): own["rest"] - rank["tied"]}
    whole = sum(count_parameters(shape).values())
    if layout.tensor == 1 and sum(parts.values()) != whole:
        faults.append(f"all parts of the model have {sum(parts.values()):,} parameters, and the model {whole:,}")
    return faults
