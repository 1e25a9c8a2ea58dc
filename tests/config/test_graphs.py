# SPDX-License-Identifier: Apache-2.0
"""cluster.graphs=auto becomes full_iteration if the recipe allows it, else none."""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.validate import validate, with_graphs

BASE = ("experiment=zaya1_base", "data.path=none")


@pytest.mark.parametrize(
    ("overrides", "graphs", "why"),
    [
        (["cluster=h200_8", "cluster.graphs=auto"], "full_iteration", None),
        (["cluster=h200_8", "cluster.graphs=none"], "none", None),
        (
            ["cluster=h200_8", "cluster.graphs=auto", "data.packing=documents"],
            "none",
            "data.packing=documents: the host computes the blocks of documents. Allowed: none with "
            "cluster.graphs=full_iteration",
        ),
        (
            ["cluster=h200_8", "cluster.graphs=auto", "parallel=expert_parallel"],
            "none",
            "parallel.expert_model_parallel_size=",
        ),
        (["experiment=cpu_demo", "nproc=1", "cluster.graphs=auto"], "none", "cluster.device=cpu"),
    ],
)
def test_a_graph_where_the_recipe_allows_one(overrides, graphs, why):
    recipe, line = with_graphs(compose([*BASE, *overrides]))
    assert recipe.cluster.graphs == graphs
    assert line is None if why is None else line.startswith(f"no graph of a step: {why}")
    validate(recipe, recipe.nproc or 8)
