# SPDX-License-Identifier: Apache-2.0
"""What ranks really send in a step, counted at torch.distributed, against zaya_plugin.plan.parallelism."""

from collections import Counter

import pytest

from tests.distributed.layout_grid import Grid
from tests.distributed.layouts import QUICK, SLOW
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.parallelism import Batch, ParallelSizes, local_parameters, sent_bytes

MICRO_SHAPE = Shape(4, 64, 8, 2, 8, 16, 48, 16, 512)
BY_NAME = {layout.name: layout for layout in QUICK + SLOW}
ALIGNMENT = 64  # elements: Megatron's buffers start every parameter at a multiple of it
BUCKET_ALIGNMENT = 128  # and end at one of this
FLAGS = 64  # bytes: the loss and its tokens, the gradient's norm, whether to stop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grid(tmp_path_factory, corpus):
    grid = Grid(tmp_path_factory.mktemp("traffic"), corpus, gradients=False)
    yield grid
    grid.close()


def measured(grid: Grid, name: str) -> list[Counter]:
    """Bytes sent in the last step by kind, a counter for each rank."""
    totals = []
    for steps in grid.run(BY_NAME[name], traffic=True)["sent"]:
        total = Counter()
        for (kind, _), sent in steps[-1].items():
            total[kind] += sent
        totals.append(total)
    return totals


def gaps() -> int:
    """Elements that stay free in the buffer of all parameters outside the experts, whose own need none."""
    h, q, k, r = (
        MICRO_SHAPE.hidden_size,
        MICRO_SHAPE.query_channels,
        MICRO_SHAPE.key_channels,
        MICRO_SHAPE.router_hidden_size,
    )
    layers, groups, channels = MICRO_SHAPE.num_layers, MICRO_SHAPE.num_query_groups, q + k
    depthwise, grouped = (
        channels * MICRO_SHAPE.conv_taps[0],
        channels * MICRO_SHAPE.kv_channels * MICRO_SHAPE.conv_taps[1],
    )
    attention = [h * q, h * k, h * k // 2, h * k // 2, q * h, depthwise, channels, grouped, channels, groups]
    router = [h * r, r, r, r * r, r, r * r, r, (MICRO_SHAPE.num_experts + 1) * r]
    vectors = [h] * (2 * layers + 1 + 8 * layers + 2) + [r] * (layers - 1)
    sizes = [MICRO_SHAPE.vocab_size * h, *layers * (attention + router), *vectors]
    assert sum(sizes) == local_parameters(MICRO_SHAPE, ParallelSizes())["rest"]
    aligned = sum(size + -size % ALIGNMENT for size in sizes)
    return aligned + -aligned % BUCKET_ALIGNMENT - sum(sizes)


def predicted(micro_batches: int, **sizes) -> dict[str, float]:
    """As sent_bytes, with the gaps of the buffers and what is too small to plan for; two ranks."""
    layout, batch = ParallelSizes(**sizes), Batch(32, 2, micro_batches, dtype_bytes=4)
    sent = sent_bytes(MICRO_SHAPE, layout, batch)
    for kind in ("gradients", "weights"):
        sent[kind] += (layout.replicas - 1) / layout.replicas * 4 * gaps()
    # Choices of each expert and of the skip class, and the router's entropy, in fp64.
    sent["routers"] = MICRO_SHAPE.num_layers * (MICRO_SHAPE.num_experts + 2) * 8
    # Largest logit, the label's logit and the sum of exponents of each token, in fp32.
    sent["loss"] = 3 * micro_batches * batch.micro_batch_size * batch.seq_length * 4 if layout.tensor > 1 else 0
    # Each rank's tokens for each expert, a layer and micro-batch, in int64.
    sent["expert_counts"] = (
        micro_batches * MICRO_SHAPE.num_layers * MICRO_SHAPE.num_experts * 8 if layout.expert > 1 else 0
    )
    return sent


@pytest.mark.parametrize(
    ("name", "micro_batches", "sizes"),
    [
        ("dp2", 2, {"data": 2}),
        ("cp2", 4, {"context": 2}),
        ("cp2-contiguous", 4, {"context": 2, "zigzag": False}),
        ("tp2", 4, {"tensor": 2}),
    ],
)
def test_all_that_is_sent_is_what_was_predicted(grid, name, micro_batches, sizes):
    expected = sum(predicted(micro_batches, **sizes).values())
    for rank in measured(grid, name):
        assert expected <= rank.total() <= expected + FLAGS


def test_experts_get_the_rows_of_their_tokens(grid):
    expected = predicted(2, data=2, expert=2)
    ranks = measured(grid, "ep2")
    # Both ranks together: how many of a rank's tokens leave is up to the router.
    sent = sum(rank["alltoall_base_"] for rank in ranks) / 2
    # of either rank that leaves: input with weight and output, or their gradients
    row = 2 * MICRO_SHAPE.hidden_size * 4 + 4
    assert sent % row == 0
    assert sent / row == pytest.approx(expected["dispatch"] / (row - 4), rel=0.15)
    rest = sum(expected.values()) - expected["dispatch"]
    for rank in ranks:
        assert rank["_reduce_scatter_base_"] == expected["gradients"]
        assert rest <= rank.total() - rank["alltoall_base_"] <= rest + FLAGS


@pytest.mark.parametrize(("name", "virtual"), [("pp2", 1), ("pp2-interleaved", 2)])
def test_stages_send_the_stream_and_the_router_state(grid, name, virtual):
    expected = predicted(4, pipeline=2, virtual=virtual)
    for rank in measured(grid, name):
        beyond = expected["stages"] / (2 * virtual)  # nothing is sent before the first stage or after the last
        assert rank["send"] == expected["stages"] - beyond
        rest = expected["tied"] + expected["routers"]
        assert rest <= rank.total() - rank["send"] <= rest + FLAGS
