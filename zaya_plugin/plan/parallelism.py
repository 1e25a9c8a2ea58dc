# SPDX-License-Identifier: Apache-2.0
"""Parameters, state and traffic of one rank under a parallel layout. Plain arithmetic over a model's shape.

Bytes sent are those of ring algorithms, as NCCL and RCCL count bus traffic: a rank sends (n - 1) / n of the gathered
tensor in an all-gather, the same in a reduce-scatter, twice that in an all-reduce. Activations are counted by
zaya_plugin.plan.memory. docs/verification.md compares these figures with measured ones.
"""

from dataclasses import dataclass

from zaya_plugin.plan.flops import Shape, adapter_parameters, count_parameters

GRADIENT_BYTES = 4  # gradients are accumulated and reduced in fp32


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


@dataclass(frozen=True)
class Batch:
    """Work of one data-parallel rank and step.

    seq_length: of a whole sequence; dtype_bytes: of weights and activations; stream_bytes: of an element of the
    residual stream.
    """

    seq_length: int
    micro_batch_size: int = 1
    micro_batches: int = 1
    dtype_bytes: int = 2
    stream_bytes: int = 4


def local_parameters(shape: Shape, layout: ParallelSizes) -> dict[str, int]:
    """Return parameters on a rank of the first pipeline stage: `experts`, and `rest` with the embedding."""
    parts = count_parameters(shape)
    stage = layout.pipeline
    whole = (
        parts["attention"]
        - _heads(shape)
        + parts["router"]
        + parts["norms"]
        - shape.norm_vectors * shape.hidden_size
        + parts["residual_scaling"]
    )
    rest = whole // stage + _cut_parameters(shape, layout)
    if stage == 1:
        rest += shape.norm_vectors * shape.hidden_size  # the final norm is on the last stage
    return {"experts": parts["experts"] // (stage * layout.expert), "rest": rest}


def trained_parameters(shape: Shape, layout: ParallelSizes) -> dict[str, int]:
    """Return parameters with gradients on that rank: all, or with adapters those alone, as in `local_parameters`."""
    if shape.lora_rank is None:
        return local_parameters(shape, layout)
    counts = {target: count // layout.pipeline for target, count in adapter_parameters(shape).items()}
    return {"experts": counts["experts"] // layout.expert, "rest": counts["attention"] + counts["router"]}


def _heads(shape: Shape) -> int:
    """Parameters of all layers that tensor parallelism cuts: queries, keys and the output projection."""
    return shape.num_layers * shape.hidden_size * (2 * shape.query_channels + shape.key_channels)


def _cut_parameters(shape: Shape, layout: ParallelSizes) -> int:
    return (_heads(shape) // layout.pipeline + shape.vocab_size * shape.hidden_size) // layout.tensor


def sent_bytes(shape: Shape, layout: ParallelSizes, batch: Batch) -> dict[str, float]:
    """Return the bytes that a rank sends in one step, by purpose, without recomputation and with even routing.

    Returns:
        key_values and boundary: context parallelism. dispatch: expert parallelism, rows and their gradients.
            activations
        and replicated: tensor parallelism, rows, and the gradients of uncut parameters. stages and tied: pipeline
        parallelism, a rank with both neighbours (the first and the last do not send past the ends), and the gradient of
        the embedding, which the first stage shares with the last one's head. gradients and weights: data parallelism,
        within an instance of the optimizer. instances: all-reduces of a shard's gradients between instances.
    """
    layers, h = shape.num_layers // layout.pipeline, shape.hidden_size
    rows = batch.seq_length // layout.context * batch.micro_batch_size  # of this rank's part of the sequences
    element, times = batch.dtype_bytes, batch.micro_batches * layers
    cp, tp, ep = layout.context, layout.tensor, layout.expert
    both_ways = 2  # the gradient of every exchange is an exchange of as many bytes
    chunks = (2 if layout.zigzag else 1) * batch.micro_batch_size
    channels = (2 * (shape.query_channels + shape.key_channels) + shape.key_channels // 2) // tp
    tokens = rows // tp
    # each token's row and its expert's output, to and from all ranks of the group
    moved = (ep - 1) * tokens if layout.allgather_dispatcher else (ep - 1) / ep * tokens
    local = local_parameters(shape, layout)

    def reduced(share_of: int, parameters: int, size: int) -> float:
        return (share_of - 1) / share_of * parameters * size

    sharded = layout.distributed_optimizer
    ranks = (layout.shards, layout.expert_shards) if sharded else (layout.replicas, layout.expert_replicas)
    replicas = tuple(zip(ranks, (local["rest"], local["experts"]), strict=True))
    gradients = sum(reduced(n, parameters, GRADIENT_BYTES) for n, parameters in replicas)
    weights = sum(reduced(n, parameters, element) for n, parameters in replicas)
    shards = sum(parameters / n for n, parameters in replicas)
    boundaries = layout.virtual if layout.pipeline > 1 else 0
    state = shape.router_hidden_size
    # Attention gathers its input and scatters its output; the embedding scatters, the head gathers; both again
    # backward.
    attention, ends = 2 * both_ways * layers, 4 if layout.pipeline == 1 else 0
    whole = local["rest"] - _cut_parameters(shape, layout)
    return {
        "key_values": float(both_ways * times * (cp - 1) * rows * 2 * shape.key_channels // tp * element),
        "boundary": float(both_ways * times * (cp - 1) * chunks * channels * element),
        "dispatch": both_ways * times * 2 * moved * h * element,
        "activations": batch.micro_batches * (attention + ends) * (tp - 1) / tp * rows * h * element,
        "replicated": 2 * reduced(tp, whole, GRADIENT_BYTES),
        "stages": float(both_ways * batch.micro_batches * boundaries * tokens * (h + state) * batch.stream_bytes),
        "tied": float(shape.vocab_size * h // tp * GRADIENT_BYTES) if layout.pipeline > 1 else 0.0,
        "gradients": gradients * (1 if sharded else 2),
        "weights": weights if sharded else 0.0,
        "instances": 2 * reduced(layout.instances, shards, GRADIENT_BYTES) if sharded else 0.0,
    }
