# SPDX-License-Identifier: Apache-2.0
"""Test the benchmark of the router at a small size: the timed versions compute the same, and every row has its
figure.
"""

import json
import sys
from argparse import Namespace

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.ops.router_mlp import _backward, _forward, reference
from hip_ops.versions import selection

CPU = torch.device("cpu")
DIRECTIONS = ("forward", "backward", "both")


@pytest.fixture
def router(script):
    return script("router")


def test_each_version_is_timed_and_compared(router):
    options = Namespace(hidden=64, width=32, rep=1, copy=1e10, versions=["reference"])
    found = router.measure_router(64, CPU, options)
    for direction in DIRECTIONS:
        assert list(found[direction]) == ["router, reference", "behind the down projection, reference"]
        assert all(row["ms"] > 0 and row["gb_per_s"] > 0 and "error" not in row for row in found[direction].values()), (
            found[direction]
        )
    assert len(found["distance"]) == 4 + 9 and not any(found["distance"].values()), "nothing is left of the step before"


def test_the_distance_is_that_of_the_first_version(router, monkeypatch):
    """A version with deliberate errors replaces Triton's: weights 1.5 times as large, and a doubled gradient of the
    state.
    """

    def forward(*arguments):
        state, weights, *others = reference.router_mlp(*arguments)
        return state, 1.5 * weights, *others

    def backward(*arguments):
        d_projected, d_previous, *others = reference.router_mlp_backward(*arguments)
        return d_projected, 2.0 * d_previous, *others

    with use_kernels(router_mlp="triton"):
        asked = CPU, selection().of("router_mlp")
    for operator, function in ((_forward, forward), (_backward, backward)):
        monkeypatch.setitem(operator._chosen, asked, [(None, function)])
    options = Namespace(hidden=64, width=32, rep=1, copy=1e10, versions=["triton", "reference"])
    found = router.measure_router(64, CPU, options)
    far = {label: distance for label, distance in found["distance"].items() if distance}
    assert far == {
        "weights": pytest.approx(0.5, abs=1e-6),
        "gradient of the state before": pytest.approx(1.0, abs=1e-6),
    }
    for direction in DIRECTIONS:
        assert [label.rpartition(", ")[2] for label in found[direction]] == [*["triton"] * 2, *["reference"] * 2]


def test_distances_show_another_weight(router):
    module = router.router_of_the_model(64, 32, CPU)
    inputs = torch.randn(8, 4, 64).bfloat16().requires_grad_(), torch.randn(8, 4, 32).bfloat16().requires_grad_()
    way = router.ways_of(module, inputs, (torch.randn(8, 4), torch.randn(8, 4, 32).bfloat16()))["router"]
    before = router.step(way)
    with torch.no_grad():
        module.module.fc1.weight.mul_(1.1)
    found = router.distances(module, router.step(way), before)
    assert found["state"] == 0.0 and 0.0 < found["fc1.weight"] < 1.0 and found["weights"] > 0.0


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


@pytest.mark.parametrize("figure", ["ms", pytest.param("graph_ms", marks=(pytest.mark.gpu, NEEDS_GPU))])
def test_the_script_times_every_row(router, figure, monkeypatch, tmp_path, capsys):
    """On a GPU graphs are replayed too, including those of the backward pass."""
    sizes = ("--tokens", "256", "--hidden", "128", "--width", "64", "--rep", "1")
    monkeypatch.setattr(sys, "argv", ["router.py", *sizes, "--results", str(tmp_path), "--commit", "0"])
    router.main()
    record = json.loads((tmp_path / "router.json").read_text())
    assert record == json.loads(capsys.readouterr().out)
    rows = [row for direction in DIRECTIONS for row in record["results"]["256x128, router of 64"][direction].values()]
    assert len(rows) == 3 * 2 * (2 if torch.cuda.is_available() else 1) and all(
        row.get(figure, 0) > 0 and "error" not in row for row in rows
    ), rows
