# SPDX-License-Identifier: Apache-2.0
"""The script that times other launches of the router's kernels: what it compares, and which launches it tries."""

import sys

import pytest
import torch


@pytest.fixture
def tune(script):
    pytest.importorskip("triton")
    return script("tune_router_mlp")


def test_it_tries_launches_that_divide_the_router_and_not_the_present_one(tune):
    assert tune.kernels.launch(tune.WIDTH, warp_size=32) not in tune.TRIALS and len(set(tune.TRIALS)) == len(
        tune.TRIALS
    )
    assert all(tune.WIDTH % trial.part == 0 for trial in tune.TRIALS)
    with tune.launched_as(tune.TRIALS[0]):
        assert tune.kernels.launch(tune.WIDTH) == tune.TRIALS[0]


def test_what_is_timed_is_both_directions_of_the_operators(tune):
    given, upstream = tune.inputs(48, 32, torch.device("cpu"))
    kept = tune.reference.router_mlp(*given)
    found = {direction: call() for direction, call in tune.calls(tune.reference, given, upstream, kept).items()}
    assert list(found) == list(tune.DIRECTIONS) and len(found["forward"]) == 7 and len(found["backward"]) == 9
    assert tune.distance(found["forward"], kept) == 0.0
    worse = tuple(t * 1.01 if t.is_floating_point() else t for t in kept)
    assert tune.distance(worse, kept) == pytest.approx(0.01, rel=0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_the_script_times_every_launch(tune, monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys,
        "argv",
        ["tune_router_mlp.py", "--tokens", "512", "--rep", "1", "--results", str(tmp_path), "--commit", "0"],
    )
    tune.main()
    assert (tmp_path / "router_mlp_launches.json").is_file()
