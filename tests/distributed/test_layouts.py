# SPDX-License-Identifier: Apache-2.0
"""Every parallel layout gives the losses and gradients of one rank: three steps in fp32 over gloo, from one
checkpoint.
"""

import copy
import functools
import warnings

import pytest
import torch

from tests.checkpoint.convert.published import publish, spread
from tests.distributed.layout_grid import COMMON, Grid
from tests.distributed.layouts import (
    ADAPTER_LAYOUTS,
    ADAPTERS,
    LAYOUTS_OF_74B,
    OF_74B,
    ONE,
    PACKED,
    PACKED_LAYOUTS,
    PLAIN,
    PLAIN_OPTIMIZER,
    QUICK,
    RECOMPUTED,
    SLOW,
    WINDOWS,
    Layout,
)
from tests.distributed.packed_corpus import boundaries, short_documents
from tests.hosts.test_routing import MODEL as BASE
from zaya_plugin.checkpoint.convert.adapters import Lora

LOSS, GRADIENT = 1e-5, 1e-4
FLIPS = 0.002  # share of expert choices that may fall otherwise


@pytest.fixture(scope="module")
def grid(tmp_path_factory, corpus):
    grid = Grid(tmp_path_factory.mktemp("layouts"), corpus)
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def packed_grid(tmp_path_factory, corpus):
    """On documents of a few tokens, so that a sequence of 32 holds several."""
    folder = tmp_path_factory.mktemp("packed")
    grid = Grid(folder / "runs", short_documents(folder, corpus / "tokenizer"), PACKED)
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def plain_grid(tmp_path_factory, corpus):
    grid = Grid(tmp_path_factory.mktemp("plain"), corpus, (PLAIN_OPTIMIZER,))
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def layer_norm_grid(tmp_path_factory, corpus):
    grid = Grid(tmp_path_factory.mktemp("layer_norm"), corpus, ("model.normalization=LayerNorm",))
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def adapter_grid(tmp_path_factory, corpus, grid):
    """A function of optim.lora.experts."""
    folder = tmp_path_factory.mktemp("adapters")
    base = publish(folder / "base", model=BASE, change=spread)
    words = (f"handover.from_hf={base}", f"stage.rotary_base={BASE.rotary_base}", *ADAPTERS)
    return functools.cache(
        lambda kind: Grid(folder / kind, corpus, (*words, f"optim.lora.experts={kind}"), servers=grid.servers)
    )


@pytest.fixture(scope="module")
def grid_of_74b(tmp_path_factory, corpus):
    grid = Grid(tmp_path_factory.mktemp("of_74b"), corpus, OF_74B)
    yield grid
    grid.close()


def check(grid: Grid, layout: Layout, save_at: int | None = None) -> None:
    difference = grid.compare(grid.run(layout, save_at=save_at))
    if difference.flips:
        assert difference.near_ties, "an expert was chosen otherwise where the choice was not close"
        assert difference.flips <= FLIPS * difference.choices
        warnings.warn(
            f"{layout.name}: {difference.flips} of {difference.choices} expert choices fell otherwise; compared under "
            "the "
            "routing of one rank",
            stacklevel=2,
        )
        difference = grid.compare(grid.run(layout, forced=True))
    assert difference.flips == 0
    assert difference.loss < LOSS
    worst, parameter = difference.worst()
    assert worst < GRADIENT, parameter
    assert difference.replicas < 1e-6, "ranks hold different gradients of one parameter"
    assert difference.balancing, "the routers' counts over the global batch differ"


def named(layouts):
    return pytest.mark.parametrize("layout", layouts, ids=lambda layout: layout.name)


@named(QUICK)
def test_a_layout_equals_one_rank(grid, layout):
    check(grid, layout)


def test_the_comparison_notices_what_it_is_for(grid):
    assert grid.compare(grid.one).worst()[0] == grid.compare(grid.one).loss == grid.compare(grid.one).flips == 0
    key = "decoder.layers.2.mlp.router.router_states_scale"
    other = copy.deepcopy(grid.one)
    other["gradients"][1][key] *= 1 + 2 * GRADIENT
    assert grid.compare(other).worst() == (pytest.approx(2 * GRADIENT, rel=1e-2), key)
    other["reported"][2]["loss"] += 2 * LOSS
    assert grid.compare(other).loss == pytest.approx(2 * LOSS, rel=0.1)
    other["reported"][0]["tokens_per_expert"][0, 0] += 1
    assert not grid.compare(other).balancing
    chosen, margins = (next(iter(other[kind].values())) for kind in ("ids", "margins"))
    sure = int(margins[0].argmax())
    chosen[0, sure] = (chosen[0, sure] + 1) % 16
    assert (grid.compare(other).flips, grid.compare(other).near_ties) == (1, False)


@pytest.mark.slow
@named(SLOW + RECOMPUTED)
def test_a_further_layout_equals_one_rank(grid, layout):
    check(grid, layout)


@pytest.mark.slow
def test_sequences_hold_several_documents_that_do_not_see_each_other(packed_grid, tmp_path):
    inside = boundaries(packed_grid.one, packed_grid.data)
    assert len(inside) == 3 * 8  # steps, sequences
    assert min(inside) >= 1 and sum(inside) >= 2 * len(inside)
    # The same sequences with every token in sight of all before it: another loss, so the boundaries are read.
    options = dict(servers=packed_grid.servers, last=COMMON + 1, gradients=False)
    seen = Grid(tmp_path / "seen", packed_grid.data, WINDOWS, **options)
    assert {key for step, key in seen.one["ids"] if step == 0} == {
        key for step, key in packed_grid.one["ids"] if step == 0
    }
    assert abs(seen.one["reported"][0]["loss"] - packed_grid.one["reported"][0]["loss"]) > 100 * LOSS


@pytest.mark.slow
@named(PACKED_LAYOUTS)
def test_packed_documents_in_a_layout_equal_one_rank(packed_grid, layout):
    check(packed_grid, layout)


@pytest.mark.slow
@named(PLAIN)
def test_without_the_distributed_optimizer(plain_grid, layout):
    check(plain_grid, layout)


@pytest.mark.slow
@named([each for each in QUICK if each.name in ("dp2", "tp2", "pp2")])
def test_layer_norm_in_a_layout_equals_one_rank(layer_norm_grid, layout):
    """Its bias is in the common checkpoint, and under tensor parallelism its gradient is summed over the ranks."""
    assert sum(key.endswith("norm.bias") for key in layer_norm_grid.one["gradients"][0]) == 2 * 4 + 1
    check(layer_norm_grid, layout)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, id=f"{kind}-{layout.name}", marks=() if fast else pytest.mark.slow)
        for kind in ("each", "shared")
        for layout in ADAPTER_LAYOUTS
        for fast in [(kind, layout.name) == ("shared", "cp2ep2")]
    ],
)
def test_adapters_in_a_layout_equal_one_rank(adapter_grid, kind, layout):
    """One rank's checkpoint of the adapters is continued in the layout; the gradients are those of the adapters alone, and
    the layout's checkpoint has the tensors of one rank's.
    """
    grid, lora = adapter_grid(kind), Lora(8, 16.0, ["attention", "experts", "router"], lora_experts=kind)
    shapes = lora.shapes(BASE) | {row.ours[0]: row.shape for row in lora.retrained(BASE)}
    assert {name: tuple(gradient.shape) for name, gradient in grid.one["gradients"][0].items()} == shapes
    counts = torch.stack([row["tokens_per_expert"][:, : BASE.num_experts] for row in grid.one["reported"]]).float()
    assert (counts.amax(-1) / counts.mean(-1)).mean() < 10, "most experts get no token, so their gradients are 0"
    check(grid, layout, save_at=2 * COMMON)
    assert grid.saved(layout, 2 * COMMON) == grid.saved(ONE, COMMON)


@pytest.mark.slow
@named(LAYOUTS_OF_74B)
def test_a_small_74b_in_a_layout_equals_one_rank(grid_of_74b, layout):
    """24 experts of which every rank holds six, 25 classes of the router, and windows across the ranks' chunks."""
    assert grid_of_74b.one["reported"][0]["tokens_per_expert"].shape == (4, 25)
    assert {int(table.max()) for table in grid_of_74b.one["ids"].values()} & {*range(17, 25)}, (
        "experts beyond 16 are chosen"
    )
    check(grid_of_74b, layout)
