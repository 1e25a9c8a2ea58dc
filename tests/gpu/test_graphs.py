# SPDX-License-Identifier: Apache-2.0
"""Test training with forward and backward of a step as one CUDA graph: the same losses, and a checkpoint that a run
without a graph can continue.
"""

import pytest

STEPS = 12


@pytest.mark.parametrize("versions", [(), ("cluster.kernels=auto",)], ids=["of_the_recipe", "auto"])
def test_losses_are_the_same_with_graphs(demo, tmp_path, versions):
    recipe = [
        "cluster=gpu",
        "optim=muon",
        "cluster.deterministic=true",
        f"exit_interval={STEPS}",
        "checkpoint.save_interval=8",
        *versions,
    ]
    without = demo(tmp_path / "without", *recipe)
    graphs = demo(tmp_path / "graphs", *recipe, "cluster.graphs=full_iteration")
    assert list(without) == list(graphs) == list(range(1, STEPS + 1))
    assert without == graphs, "a replayed graph runs the same kernels on the same numbers"
    assert "CUDA graph capture done for training" in (tmp_path / "graphs" / "logs" / "rank0.log").read_text()
