# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with sequence parallelism and expert parallelism against one rank, on gloo ranks in fp32."""

import subprocess
import sys

import pytest
import torch

from tests.parallel.tensor_expert_ranks import LAYOUTS

pytestmark = pytest.mark.slow  # tests/distributed/test_layouts.py has tp2 and ep2 among its quick ones

RUN = """
import sys, pathlib
from tests.parallel import tensor_expert_ranks
sys.exit(tensor_expert_ranks.main(pathlib.Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """Results of each layout, by its name."""
    directory = tmp_path_factory.mktemp("layouts")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    names = {layout.name for layout in LAYOUTS} | {layout.start for layout in LAYOUTS}
    return {name: torch.load(directory / f"{name}.pt") for name in names}


def one_rank(results, layout):
    return results["one_muon" if layout.muon else "one"]


SPLIT = pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout.ranks > 1], ids=lambda layout: layout.name
)


def test_the_reference_uses_every_part(results):
    """Without this check the comparisons below would also hold for a model whose parts have no effect."""
    for name in ("one", "one_muon"):
        for step in results[name]["steps"]:
            assert all(step["gradients"][key].norm() > 0 for key in step["gradients"] if "experts" not in key)
            assert (step["counts"][:, -1] > 0).all(), "no token skipped"
            assert ((step["counts"][:, :-1] > 0).sum(-1) >= 4).all(), "fewer than four experts were used"


@SPLIT
def test_expert_choices_losses_and_gradients_are_those_of_one_rank(results, layout):
    for expected, step in zip(one_rank(results, layout)["steps"], results[layout.name]["steps"], strict=True):
        # Choices first, because a different choice changes all later values.
        assert torch.equal(step["counts"], expected["counts"])
        assert abs(step["loss"] - expected["loss"]) < 1e-5
        assert step["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert step["replicas"] == 0, "ranks that hold one parameter have different gradients for it"
        assert step["gradients"].keys() == expected["gradients"].keys()
        for key, gradient in expected["gradients"].items():
            error = (step["gradients"][key] - gradient).norm()
            assert error <= 1e-4 * gradient.norm(), (key, error.item(), gradient.norm().item())


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.copy], ids=lambda layout: layout.name)
def test_a_checkpoint_moves_with_the_same_bits(results, layout):
    """A checkpoint of one rank, with the optimizer's state, is loaded in another layout and saved from there."""
    expected, copy = results[layout.start], results[layout.name]["copy"]
    assert copy.keys() == expected.keys()
    tensors = {key: value for key, value in expected.items() if isinstance(value, torch.Tensor)}
    moments = [key for key in tensors if key.startswith("optimizer.state.exp_avg")]
    assert len(moments) > 50 and all(tensors[key].abs().sum() > 0 for key in moments if "experts" not in key)
    for key, tensor in tensors.items():
        assert torch.equal(copy[key], tensor), key
