# SPDX-License-Identifier: Apache-2.0
"""A recipe's memory plan, and what `parallel.recompute_granularity=auto` becomes when a run starts."""

import copy
import re

import pytest

from tests.running import without_phases
from zaya_plugin import cli
from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.compose import compose
from zaya_plugin.config.validate import validate
from zaya_plugin.plan import recipe_plan
from zaya_plugin.run import dry_run, surroundings
from zaya_plugin.run.rank_plan import make_plan

ON_H200 = [
    "experiment=zaya1_base",
    "cluster=h200_8",
    "data.path=none",
    "stage.micro_batch_size=4",
    "stage.global_batch_size=128",
    "cluster.graphs=none",
]


@pytest.fixture(scope="module")
def composed():
    return compose(ON_H200)


@pytest.fixture
def on_h200(composed):
    """Eight H200s and 65,536 tokens a device; keywords override keys of parallel and cluster."""

    def make(auto=True, **keys):
        recipe = copy.deepcopy(composed)
        recipe.parallel.recompute_granularity = "auto" if auto else None
        for key, value in keys.items():
            setattr(recipe.parallel if hasattr(recipe.parallel, key) else recipe.cluster, key, value)
        return recipe

    return make


def test_auto_takes_what_fits_and_says_so(on_h200):
    recipe, line = recipe_plan.with_recompute(on_h200(), 8)
    assert recipe.parallel.recompute_granularity is None and recipe.parallel.recompute_modules == []
    assert line.startswith(
        "recomputed: nothing, about 0.0 ms a step; memory plan 93.1 of 140 GiB a device (weights 16.47, gradients 32.93"
    )
    recipe, line = recipe_plan.with_recompute(on_h200(memory_gib=95), 8)
    assert (recipe.parallel.recompute_granularity, recipe.parallel.recompute_modules) == (
        "selective",
        ["layernorm", "permute"],
    )
    assert "layernorm + permute" in line and "memory plan 85.6 of 95 GiB" in line
    validate(recipe, 8)
    assert megatron_arguments(recipe, {})["recompute_modules"] == ["layernorm", "permute"]
    recipe, _ = recipe_plan.with_recompute(on_h200(memory_gib=80), 8)
    assert (recipe.parallel.recompute_granularity, recipe.parallel.recompute_method) == ("full", "block")
    validate(recipe, 8)
    with pytest.raises(
        ValueError,
        match=r"recompute_granularity=auto: the step needs 64\.7 GiB a device even with 40 whole layers .*weights "
        r"16\.47.*55\.2 of "
        r"cluster\.memory_gib=60 are available",
    ):
        recipe_plan.with_recompute(on_h200(memory_gib=60), 8)


def test_with_a_graph_the_optimizers_work_needs_room_of_its_own(on_h200):
    plain, graph = (
        recipe_plan.plan_of(on_h200(auto=False, graphs=graphs), 8).total / 2**30 for graphs in ("none", "auto")
    )
    assert graph - plain == pytest.approx(12 * 2**27 / 2**30) and graph == pytest.approx(94.56, abs=0.01)
    _, line = recipe_plan.with_recompute(on_h200(graphs="auto", memory_gib=97), 8)
    assert "layernorm + permute" in line and "memory plan 87.1 of 97 GiB" in line
    _, line = recipe_plan.with_recompute(on_h200(memory_gib=97), 8)
    assert "recomputed: layernorm," in line


def test_without_auto_nothing_changes(on_h200):
    recipe = on_h200(auto=False)
    assert recipe_plan.with_recompute(recipe, 8) == (recipe, None)
    with pytest.raises(ValueError, match="recompute_granularity=auto: .* Allowed: null, full, selective"):
        megatron_arguments(on_h200(), {})


def test_rows_of_other_ranks_are_not_sorted_again(on_h200):
    # permute alone would do
    recipe, line = recipe_plan.with_recompute(on_h200(memory_gib=58, expert_model_parallel_size=8), 8)
    assert (
        recipe.parallel.recompute_modules == []
        and recipe.parallel.recompute_granularity == "full"
        and "whole layers" in line
    )


@pytest.mark.parametrize(
    ("experiment", "cluster", "tokens", "gib"),
    [
        ("zaya1_base", "mi300x_8", 32_768, 127.0),
        ("zaya1_base", "mi355x_8", 32_768, 127.0),
        ("zaya1_base_32k", "mi300x_128x8", 16_384, 87.9),
        *(
            pytest.param(f"zaya1_base{stage}", "mi300x_128x8", 16_384, gib, marks=pytest.mark.slow)
            for stage, gib in (("", 85.7), ("_131k", 91.7))
        ),
    ],
)
def test_the_mi300x_recipes_fit_without_recomputation(experiment, cluster, tokens, gib):
    recipe = compose([f"experiment={experiment}", f"cluster={cluster}", "data.path=none", "handover.from_run=none"])
    world = recipe.cluster.num_nodes * recipe.cluster.gpus_per_node
    batch = recipe_plan.batch_of(recipe, world)
    assert batch.seq_length * batch.micro_batch_size // recipe.parallel.context_parallel_size == tokens
    plan = recipe_plan.plan_of(recipe, world)
    assert recipe.parallel.recompute_granularity is None
    assert plan.total / 2**30 == pytest.approx(gib, abs=0.1) and gib < 0.92 * recipe.cluster.memory_gib


def test_a_dry_run_shows_the_plan(on_h200):
    recipe = on_h200(memory_gib=95)
    text = "\n".join(dry_run.describe(recipe, make_plan(recipe, {}), verbose=True))
    assert "memory plan  GiB of the fullest device (prediction); sum 85." in text and "of 95 (8% of them" in text
    assert "  gradients" in text and "  gate and up" in text and "rows sorted by expert" not in text
    assert '--recompute-modules ["layernorm", "permute"]' in text
    on_cpu = compose(["experiment=cpu_demo", "dry_run=true"])
    assert not any("memory plan" in line for line in dry_run.describe(on_cpu, make_plan(on_cpu, {})))


def test_a_step_that_does_not_fit_is_refused_by_a_dry_run_and_a_start_with_the_same_words(
    capsys, monkeypatch, tmp_path
):
    """On a machine without devices and without the data, which the dry run says too."""
    monkeypatch.chdir(tmp_path)
    words = ["train", "experiment=zaya1_base", "cluster=mi300x_8", "data.path=data/corpus"]
    fits, too_large = cli.main([*words, "--dry-run"]), cli.main([*words, "--dry-run", "stage.micro_batch_size=32"])
    assert (fits, too_large) == (0, 2)
    told = capsys.readouterr()
    one, other = told.out.split("verdict      ")[1:]
    assert one.startswith("can start (not checked: devices and packages of the nodes, and data)\n")
    assert (
        "\nnot checked: data, which this machine lacks: data/corpus: there is no dataset at this path\n" in one
        and one.count("\n") < 25
    )
    problem = (
        "cluster.memory_gib=192: the step does not fit: the memory plan needs 332.9 GiB of a device, 268.5 of them"
    )
    assert other.startswith(f"does not start: {problem}")
    assert (
        "\n  memory: the step does not fit: 332.9 of 192 GiB" in other
        and "  change  stage.micro_batch_size=8\n" in other
    )
    (refusal,) = without_phases(told.err).splitlines()  # a slow machine also prints lines on what it waits for
    assert refusal.startswith(f"zaya: {problem}") and "Fix: parallel.recompute_granularity=auto" in refusal
    recipe = compose([*words[1:], "stage.micro_batch_size=32"])
    with pytest.raises(ValueError, match=re.escape(problem)):
        surroundings.check_sizes(recipe, make_plan(recipe, {}))
    recipe = compose([*words[1:], "stage.micro_batch_size=32", "cluster.memory_gib=null"])
    surroundings.check_sizes(recipe, make_plan(recipe, {}))
