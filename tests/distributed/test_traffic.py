# SPDX-License-Identifier: Apache-2.0
"""What ranks really send in a step, counted at torch.distributed, against zaya_plugin.plan.parallelism."""

from collections import Counter

import pytest

from tests.distributed.layout_grid import Grid
from tests.distributed.layouts import QUICK, SLOW
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.parallelism import Batch, Layout, sent_bytes

MICRO_SHAPE = Shape(4, 64, 8, 2, 8, 16, 48, 16, 512)
BY_NAME = {layout.name: layout for layout in QUICK + SLOW}
SMALL = 6000  # bytes of norms, counts, flags and of the loss over a split vocabulary

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


def predicted(micro_batches: int, **sizes) -> dict[str, float]:
    return sent_bytes(MICRO_SHAPE, Layout(**sizes), Batch(32, 2, micro_batches, dtype_bytes=4))


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
        # Buckets are padded so that shards end between matrices.
        assert rank.total() == pytest.approx(expected, rel=0.02, abs=SMALL)


def test_experts_get_the_rows_of_their_tokens(grid):
    expected = predicted(2, data=2, expert=2)
    ranks = measured(grid, "ep2")
    # Both ranks together: how many of a rank's tokens leave is up to the router.
    sent = sum(rank["alltoall_base_"] for rank in ranks) / 2
    assert sent == pytest.approx(expected["dispatch"], rel=0.15)
    assert ranks[0].total() - ranks[0]["alltoall_base_"] == pytest.approx(
        expected["gradients"] + expected["weights"], rel=0.03, abs=SMALL
    )


@pytest.mark.parametrize(("name", "virtual"), [("pp2", 1), ("pp2-interleaved", 2)])
def test_stages_send_the_stream_and_the_router_state(grid, name, virtual):
    expected = predicted(4, pipeline=2, virtual=virtual)
    for rank in measured(grid, name):
        beyond = expected["stages"] / (2 * virtual)  # nothing is sent before the first stage or after the last
        assert rank["send"] == expected["stages"] - beyond
        assert rank["allreduce_"] == pytest.approx(expected["tied"], abs=SMALL)
