# SPDX-License-Identifier: Apache-2.0
"""Test the benchmark of the CCA block on the CPU at a small size: it times the model's block and transformers'
block.
"""

import json
import sys
from argparse import Namespace

import pytest
import torch

from zaya_plugin.plan.flops import Shape, forward_flops_by_part

CPU = torch.device("cpu")
DIRECTIONS = ("forward", "backward", "both")
PIECES = ("input projections", "prologue", "core attention", "output projection")


@pytest.fixture
def block(script):
    return script("cca_block")


def test_ours_and_transformers_compute_the_same(block):
    pytest.importorskip("transformers.models.zaya")
    found = block.measure_block(2, 48, CPU, Namespace(hidden=64, core_attention="sdpa", no_anchors=False, rep=1))
    for direction in DIRECTIONS:
        assert list(found[direction]) == ["ours", *(f"ours, {name}" for name in PIECES), "transformers"]
        assert all(row["ms"] > 0 and "error" not in row for row in found[direction].values()), found[direction]
    apart = found["distance"]["from transformers"]
    # little is left of a bf16 gradient behind a norm
    assert apart.pop("linear_q.weight") < 0.2 and apart.pop("linear_k.weight") < 0.2
    assert set(apart) == {
        "output",
        "input's gradient",
        "linear_v_current.weight",
        "linear_v_delayed.weight",
        "linear_proj.weight",
    }
    assert all(0 < distance < 0.02 for distance in apart.values()), apart


def test_in_fp32_they_agree_to_rounding(block, monkeypatch):
    pytest.importorskip("transformers.models.zaya")
    monkeypatch.setattr(block, "BF16", torch.float32)
    found = block.measure_block(1, 32, CPU, Namespace(hidden=64, core_attention="sdpa", no_anchors=False, rep=1))
    assert all(distance < 1e-4 for distance in found["distance"]["from transformers"].values()), found["distance"]


def test_weight_gradients_are_added_to_main_gradients(block):
    ddp, angles = block.attention_of_the_model(64, 16, "sdpa", CPU)
    x, upstream = (torch.randn(16, 1, 64).bfloat16() for _ in range(2))
    ways, weight = block.of_the_model(ddp.module, angles, x.requires_grad_(), upstream), ddp.module.linear_proj.weight
    sums, of_input = [], []
    for name in ("ours", "ours, output projection"):
        weight.main_grad.zero_()
        backward = ways[name].calls()["backward"]()
        for _ in range(2):
            backward()
            sums.append(weight.main_grad.clone())
            of_input.append(ways[name].inputs[0].grad.clone())
        assert weight.grad is None
    assert torch.equal(of_input[0], of_input[1]), "a gradient of the call before was kept, and added to"
    assert sums[0].dtype == torch.float32
    torch.testing.assert_close(sums[1], 2 * sums[0])
    assert sums[2].abs().sum() > 0


def test_operations_are_the_plan_s(block):
    shape = Shape(1, 2048, 8, 2, 128, 16, 2048, 256, 262_272)
    parts = forward_flops_by_part(shape, 4096)
    counted = block.operations(4, 4096, 2048)
    assert counted["all"]["forward"] == 16_384 * sum(parts[name] for name in ("projections", "prologue", "attention"))
    assert counted["core attention"] == {"forward": 2**37, "backward": 2.5 * 2**37, "both": 3.5 * 2**37}
    assert counted["input projections"]["backward"] == 2 * 2 * 16_384 * 2048 * 1536


def test_the_script_writes_its_record(block, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "cca_block.py",
            "--shapes",
            "1x32",
            "--hidden",
            "64",
            "--rep",
            "1",
            "--results",
            str(tmp_path),
            "--commit",
            "0",
            "--no-anchors",
        ],
    )
    block.main()
    record = json.loads((tmp_path / "cca_block.json").read_text())
    assert record == json.loads(capsys.readouterr().out)
    assert record["results"]["1x32"]["summary"] and record["results"]["1x32"]["forward"]
