# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the router, small: both routers that it times compute the same, and every row has its figure."""

import json
import sys
from argparse import Namespace

import pytest
import torch

CPU = torch.device("cpu")
DIRECTIONS = ("forward", "backward", "both")


@pytest.fixture
def router(script):
    return script("router")


def test_both_are_timed_and_agree(router):
    found = router.measure_router(64, CPU, Namespace(hidden=64, width=32, rep=1, copy=1e10))
    for direction in DIRECTIONS:
        assert list(found[direction]) == [
            f"{piece}, {name}" for piece in ("router", "behind the down projection") for name in ("hip_ops", "compiled")
        ]
        assert all(row["ms"] > 0 and row["gb_per_s"] > 0 and "error" not in row for row in found[direction].values()), (
            found[direction]
        )
    assert len(found["distance"]) == 4 + 9
    assert all(distance < 0.02 for distance in found["distance"].values()), found["distance"]
    assert any(found["distance"].values())


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


@pytest.mark.parametrize("figure", ["ms", pytest.param("graph_ms", marks=(pytest.mark.gpu, NEEDS_GPU))])
def test_the_script_times_every_row(router, figure, monkeypatch, tmp_path, capsys):
    """On a GPU as replayed graphs too, of the backward pass among them."""
    sizes = ("--tokens", "256", "--hidden", "128", "--width", "64", "--rep", "1")
    monkeypatch.setattr(sys, "argv", ["router.py", *sizes, "--results", str(tmp_path), "--commit", "0"])
    router.main()
    record = json.loads((tmp_path / "router.json").read_text())
    assert record == json.loads(capsys.readouterr().out)
    rows = [row for direction in DIRECTIONS for row in record["results"]["256x128, router of 64"][direction].values()]
    assert len(rows) == 12 and all(row.get(figure, 0) > 0 and "error" not in row for row in rows), rows
