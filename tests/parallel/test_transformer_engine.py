# SPDX-License-Identifier: Apache-2.0
"""transformer_impl=transformer_engine in Megatron's own wrappers, over a stand-in for Transformer Engine on gloo ranks.

tests/gpu/test_transformer_engine.py runs the real package.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.tensor_expert_ranks import TRANSFORMER_ENGINE_LAYOUTS as LAYOUTS

STAND_IN = Path(__file__).parents[1] / "stand_ins" / "te_path"
RUN = """
import multiprocessing, pathlib, sys
from tests.parallel import tensor_expert_ranks as ranks
from megatron.core.extensions.transformer_engine import HAVE_TE
assert HAVE_TE
directory = pathlib.Path(sys.argv[1])
process = multiprocessing.get_context("fork").Process(target=ranks.twice, args=(directory,))
process.start()  # not in this process: after a backward pass it could not be forked
process.join(60)
assert process.exitcode == 0
sys.exit(ranks.main(directory, ranks.TRANSFORMER_ENGINE_LAYOUTS))
"""


@pytest.fixture(scope="module", params=["2.20.2", pytest.param("2.12", marks=pytest.mark.slow)])
def results(request, tmp_path_factory) -> dict[str, dict]:
    """Results of each layout, by its name."""
    directory = tmp_path_factory.mktemp("transformer_engine")
    path = os.pathsep.join(filter(None, (str(STAND_IN), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "STAND_IN_TE": request.param},
    )
    assert done.returncode == 0, done.stdout
    names = {layout.name for layout in LAYOUTS} | {"start", "start_muon", "twice"}
    return {name: torch.load(directory / f"{name}.pt") for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["te", "te_muon", "te_tp2"])
def test_losses_and_gradients_are_those_of_the_local_modules(results, name):
    for expected, step in zip(
        results["one_muon" if "muon" in name else "one"]["steps"], results[name]["steps"], strict=True
    ):
        assert torch.equal(step["counts"], expected["counts"]) and step["replicas"] == 0
        assert abs(step["loss"] - expected["loss"]) < 1e-5
        assert step["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert step["gradients"].keys() == expected["gradients"].keys()
        for key, gradient in expected["gradients"].items():
            assert (step["gradients"][key] - gradient).norm() <= 1e-4 * gradient.norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.copy], ids=lambda layout: layout.name)
def test_a_checkpoint_moves_both_ways_with_the_same_bits(results, layout):
    """local -> Transformer Engine -> local, on one and on two tensor-parallel ranks, optimizer included."""
    expected, copy = results["start_muon" if layout.muon else "start"], results[layout.name]["copy"]
    assert copy.keys() == expected.keys() and not any("_extra_state" in key for key in copy)
    for key, tensor in expected.items():
        assert not isinstance(tensor, torch.Tensor) or torch.equal(copy[key], tensor), key


@pytest.mark.slow
def test_losses_after_a_copy_back_are_those_of_the_run_that_was_never_copied(results):
    for expected, step in zip(results["one"]["steps"], results["local_again"]["steps"], strict=True):
        assert (step["loss"], step["norm"]) == (expected["loss"], expected["norm"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, after", [("te", "te_resumed"), ("te_tp2", "te_tp2_resumed"), ("one", "local_resumed")]
)
def test_a_run_resumes_with_the_same_bits(results, before, after):
    expected, (step,) = results[before]["steps"][-1], results[after]["steps"]
    assert (step["loss"], step["norm"]) == (expected["loss"], expected["norm"])
    for key, gradient in expected["gradients"].items():
        assert torch.equal(step["gradients"][key], gradient), key


@pytest.mark.slow
def test_the_first_micro_batch_adds_all_its_calls_to_the_fp32_gradient(results):
    """Two calls of one linear in one forward pass, as with context parallelism, with a bf16 weight."""
    assert results["twice"]["fused"] and results["twice"]["error"] < 1e-6  # rounded to bf16 it would be 4e-3
