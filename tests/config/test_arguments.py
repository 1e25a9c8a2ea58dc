# SPDX-License-Identifier: Apache-2.0
"""From a recipe to Megatron arguments: Megatron's parser knows every name, and every value is passed on."""

import argparse

import pytest

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin.config.arguments import HOST, OWN_ARGUMENTS, ZAYA, megatron_arguments
from zaya_plugin.config.compose import compose
from zaya_plugin.config.entries import skipped_steps
from zaya_plugin.config.schema import leaves, megatron_argument

TOKENIZER = dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="somewhere")


@pytest.fixture(scope="module")
def known() -> set[str]:
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return {action.dest for action in parser._actions} | set(OWN_ARGUMENTS)


def test_every_name_is_known_to_megatron(known):
    names = {megatron_argument(field) for _, field in leaves()} - {None}
    assert names <= known and set(ZAYA) <= known and set(HOST) <= known
    for experiment in ("cpu_demo", "zaya1_base"):
        recipe = compose(
            [f"experiment={experiment}", "data.path=x", "profile.enabled=true", "profile.memory_snapshot=true"]
        )
        assert set(megatron_arguments(recipe, TOKENIZER)) <= known


def test_values_arrive():
    recipe = compose(["experiment=cpu_demo", "optim.lr=1e-4", "model.num_layers=6", "megatron.manual_gc=true"])
    values = megatron_arguments(recipe, TOKENIZER)
    assert values["lr"] == 1e-4 and values["num_layers"] == 6 and values["manual_gc"] is True
    assert values["optimizer"] == "adam" and values["bf16"] is False and values["use_cpu_initialization"] is True
    assert values["tokenizer_model"] == "somewhere" and values["ffn_hidden_size"] == values["moe_ffn_hidden_size"]
    assert "load" not in values and values["save"] == "runs/cpu_demo/checkpoints"
    assert not {"recompute_granularity", "recompute_modules", "exit_interval"} & set(values)


def test_graphs_are_megatrons():
    values = megatron_arguments(compose(["experiment=cpu_demo"]), TOKENIZER)
    assert not {"cuda_graph_impl", "cuda_graph_modules"} & set(values)
    asked = ["experiment=cpu_demo", "cluster=gpu", "cluster.graphs=full_iteration"]
    values = megatron_arguments(compose(asked), TOKENIZER)
    assert values["cuda_graph_impl"] == "full_iteration" and values["check_for_nan_in_loss_and_grad"] is False


def test_a_checkpoint_is_loaded_where_there_is_one(tmp_path):
    pretend_checkpoint(tmp_path, 5)
    values = megatron_arguments(compose(["experiment=cpu_demo", f"run_dir={tmp_path}"]), TOKENIZER)
    assert values["load"] == values["save"] and values["exit_on_missing_checkpoint"] is True


def test_unknown_megatron_arguments_are_refused():
    from zaya_plugin.hosts.stage_model import parse_arguments

    recipe = compose(["experiment=cpu_demo", "megatron_unchecked.no_such_thing=1"])
    with pytest.raises(ValueError, match="^megatron_unchecked.no_such_thing=.*: Megatron has no such argument"):
        parse_arguments(megatron_arguments(recipe, TOKENIZER))


def test_steps_to_skip_are_bounded_before_they_are_listed():
    recipe = compose(["experiment=cpu_demo", "stage.train_iters=9999999", "data.skip_steps=['5','10-9999998']"])
    with pytest.raises(ValueError, match=r"^data.skip_steps=.* '10-9999998' makes them more than 100,000 steps"):
        skipped_steps(recipe)
    recipe = compose(["experiment=cpu_demo", "stage.train_iters=9999999", "data.skip_steps=['1-99999','7-100000']"])
    assert skipped_steps(recipe) == list(range(1, 100_001))
