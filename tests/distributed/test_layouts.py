# SPDX-License-Identifier: Apache-2.0
"""Every parallel layout gives the losses and gradients of one rank: three steps in fp32 over gloo, from one checkpoint."""

import copy
import json
import sysconfig
import warnings
from pathlib import Path

import pytest

from tests.distributed.layout_grid import Grid
from tests.distributed.layouts import PACKED, PLAIN, PLAIN_OPTIMIZER, QUICK, RECOMPUTED, SLOW, Layout
from tests.running import zaya

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
    lines = [
        line.strip()[:24] for name in ("ast.py", "argparse.py", "socket.py", "typing.py")
        for line in (Path(sysconfig.get_paths()["stdlib"]) / name).read_text().splitlines() if len(line.strip()) > 8
    ]
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    done = zaya("data", "prepare", "--input", str(folder / "short.jsonl"), "--output", str(folder / "data"), "--tokenizer",
                str(corpus / "tokenizer"), "--workers", "1", "--valid-fraction", "0")
    assert done.returncode == 0, done.stdout
    grid = Grid(folder / "runs", folder / "data", PACKED)
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def plain_grid(tmp_path_factory, corpus):
    grid = Grid(tmp_path_factory.mktemp("plain"), corpus, (PLAIN_OPTIMIZER,))
    yield grid
    grid.close()


def check(grid: Grid, layout: Layout) -> None:
    difference = grid.compare(grid.run(layout))
    if difference.flips:
        assert difference.near_ties, "an expert was chosen otherwise where the choice was not close"
        assert difference.flips <= FLIPS * difference.choices
        warnings.warn(
            f"{layout.name}: {difference.flips} of {difference.choices} expert choices fell otherwise; compared under the "
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
@named(QUICK + SLOW + RECOMPUTED)
def test_packed_documents_in_a_layout_equal_one_rank(packed_grid, layout):
    check(packed_grid, layout)


@pytest.mark.slow
@named(PLAIN)
def test_without_the_distributed_optimizer(plain_grid, layout):
    check(plain_grid, layout)
