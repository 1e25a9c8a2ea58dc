# SPDX-License-Identifier: Apache-2.0
"""Every recipe file: short, opened by a command that really composes, and valid with every cluster."""

import re
import shlex
from pathlib import Path

import pytest

import zaya_plugin.recipes
from zaya_plugin.config.compose import compose
from zaya_plugin.config.train_help import comments, options
from zaya_plugin.config.validate import validate

ROOT = Path(zaya_plugin.recipes.__file__).parent
FILES = sorted(ROOT.glob("*/*.yaml"))
IDS = [str(path.relative_to(ROOT)) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_recipe_is_short_and_its_command_composes_it(path):
    assert len(path.read_text().splitlines()) < 60
    group, option = path.parent.name, path.stem
    words = shlex.split(comments(group, option)[0])
    assert words[:2] == ["zaya", "train"]
    assert f"{group}={option}" in words
    recipe = compose(words[2:])
    validate(recipe, recipe.nproc or recipe.cluster.gpus_per_node)


@pytest.mark.parametrize("cluster", options("cluster"))
@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_composes_and_is_valid_on_every_cluster(experiment, cluster):
    recipe = compose([f"experiment={experiment}", f"cluster={cluster}", "data.path=data/corpus"])
    assert recipe.cluster.name == cluster
    validate(recipe, recipe.nproc or recipe.cluster.gpus_per_node)


def test_zaya1_base_is_the_published_model():
    model = compose(["experiment=zaya1_base", "data.path=x"]).model
    hidden, channels = model.hidden_size, model.kv_channels
    query, key = model.num_attention_heads * channels, model.num_query_groups * channels
    heads = model.num_attention_heads + model.num_query_groups
    attention = hidden * (2 * query + 2 * key) + (query + key) * (2 + 1) + heads * channels * channels * 2 + (query + key)
    attention += model.num_query_groups  # temperatures
    router, classes = model.router_hidden_size, model.num_experts + 1
    routing = hidden * router + router + router + 2 * (router * router + router) + router * classes
    experts = model.num_experts * 3 * hidden * model.moe_ffn_hidden_size
    layers = model.num_layers
    total = layers * (attention + routing + experts + 2 * hidden + 8 * hidden) + (layers - 1) * router
    total += hidden + 2 * hidden  # final norm, input affine
    assert total == 8_303_355_728
    assert total + 262_272 * hidden == 8_840_488_784


def test_the_tiny_model_keeps_the_proportions():
    model = compose(["experiment=cpu_demo"]).model
    assert model.hidden_size == 2 * model.num_attention_heads * model.kv_channels
    assert model.hidden_size == 8 * model.num_query_groups * model.kv_channels
    assert model.router_hidden_size * 8 == model.hidden_size and model.num_experts == 16


def test_stage_one_is_eight_trillion_tokens():
    stage = compose(["experiment=zaya1_base", "data.path=x"]).stage
    tokens = stage.train_iters * stage.global_batch_size * stage.seq_length
    assert abs(tokens - 8e12) < stage.global_batch_size * stage.seq_length


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim:\n  weight_decy: 0.1\n", "experiment/mine.yaml: optim.weight_decy: no such key; did you mean optim.weight_decay"),
        ("optim:\n  lr: fast\n", "experiment/mine.yaml: optim.lr = 'fast': allowed: a number"),
        ("resume: maybe\n", "resume = 'maybe': allowed: never, auto, must"),
        ("optim: [\n", "not YAML"),
    ],
)
def test_a_mistake_in_a_recipe_file_is_named(tmp_path, text, message):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from zaya_plugin.config.compose import readable_errors, register, to_recipe

    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nname: mine\n{text}")
    register()
    overrides = [f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine", "data.path=x"]
    with pytest.raises(ValueError, match=re.escape(message)):
        with readable_errors(), initialize_config_module("zaya_plugin.recipes", version_base="1.3"):
            to_recipe(hydra_compose("train", overrides))
