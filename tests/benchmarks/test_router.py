# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the router, small and on the CPU: both routers that it times compute the same."""

from argparse import Namespace

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def router(script):
    return script("router")


def test_both_are_timed_and_agree(router):
    found = router.measure_router(64, CPU, Namespace(hidden=64, width=32, rep=1, copy=1e10))
    for direction in ("forward", "backward", "both"):
        assert list(found[direction]) == [f"{piece}, {name}" for piece in ("router", "behind the down projection") for name in ("hip_ops", "compiled")]
        assert all(row["ms"] > 0 and row["gb_per_s"] > 0 and "error" not in row for row in found[direction].values()), found[direction]
    assert len(found["distance"]) == 4 + 9
    assert all(distance < 0.02 for distance in found["distance"].values()), found["distance"]
    assert any(found["distance"].values())
