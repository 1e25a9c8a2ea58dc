# SPDX-License-Identifier: Apache-2.0
"""The argument file for pretrain_gpt.py: Megatron's own parsing and validation make of it the namespace of `zaya
train`.
"""

import shlex
import sys

import pytest

from zaya_plugin import patches
from zaya_plugin.config.arguments import OWN_ARGUMENTS, arguments_with_event_files
from zaya_plugin.config.compose import compose
from zaya_plugin.data.sources import DataSources
from zaya_plugin.run import megatron_export

SOURCES = DataSources("data/train", [(0.5, "data/v1"), (1.5, "data/v2")], "some/tokenizer", "data/cache")
# What the two namespaces may differ in: our own names, which the host's parser cannot know, and what says where the
# data is.
OURS = set(OWN_ARGUMENTS)
DATA = {"spec", "train_data_path", "valid_data_path", "data_cache_path", "create_attention_mask_in_dataloader"}
CASES = {
    "demo": (["experiment=cpu_demo"], 2),
    "stage 1 on 128 nodes": (["experiment=zaya1_base", "cluster=mi300x_128x8", "optim=muon"], 1024),
    "32K with a batch ramp": (
        [
            "experiment=zaya1_base_32k",
            "cluster=mi300x_8",
            "parallel.recompute_granularity=selective",
            "parallel.recompute_modules=[moe,layernorm]",
            "stage.batch_size_ramp='0:256 1B:512'",
            "handover.from_run=null",
        ],
        8,
    ),
    "extra arguments": (["experiment=cpu_demo", "megatron.manual_gc=true", "megatron.logging_level=30"], 1),
}


@pytest.fixture(autouse=True)
def data(monkeypatch):
    from zaya_plugin.data import blend as prefixes

    monkeypatch.setattr(
        prefixes,
        "resolve_blend",
        lambda blend, split: (
            ([blend], None)
            if isinstance(blend, str)
            else ([path for _, path in blend], [weight for weight, _ in blend])
        ),
    )
    monkeypatch.setattr(prefixes, "content_name", lambda prefixes: "name")


@pytest.fixture
def parse(monkeypatch):
    """Megatron's parsing and validation, without the global state of a run."""
    patches.apply()
    from megatron.training import arguments

    monkeypatch.setattr(arguments, "set_global_variables", lambda args: None)

    def run(function, world_size, words=()):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        return function()

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_words_give_the_namespace_of_zaya_train(parse, name):
    from megatron.training.arguments import parse_and_validate_args

    from zaya_plugin.hosts.command_line import command_line
    from zaya_plugin.hosts.stage_model import parse_arguments

    overrides, world_size = CASES[name]
    recipe = compose([*overrides, "data.path=data/train", "run_dir=/nowhere"])
    lines = command_line(megatron_export.host_arguments(recipe, SOURCES))
    words = shlex.split("".join(shlex.join(line) + "\n" for line in lines))
    theirs = vars(parse(parse_and_validate_args, world_size, words))
    values = arguments_with_event_files(recipe, SOURCES.tokenizer_arguments())
    ours = vars(parse(lambda: parse_arguments(values), world_size))
    assert set(ours) - set(theirs) == OURS and not set(theirs) - set(ours)
    # A flag that no word has set is None with some arguments and False with the recipe.
    assert bool(theirs["use_cpu_initialization"]) == ours["use_cpu_initialization"]
    different = {key for key in theirs if theirs[key] != ours[key]} - {"use_cpu_initialization"}
    assert different == DATA - {"spec"}, {key: (theirs[key], ours[key]) for key in different - DATA}
    assert theirs["train_data_path"][0].endswith("/data/train")
    assert [word.rpartition("/")[2] for word in theirs["valid_data_path"]] == ["0.5", "v1", "1.5", "v2"]


def test_what_megatron_has_no_word_for_is_refused():
    from zaya_plugin.hosts.command_line import command_line

    with pytest.raises(
        ValueError, match="^megatron.manual_gc=maybe: .*cannot express .* another value of megatron.manual_gc"
    ):
        command_line({"manual_gc": "maybe"})
    with pytest.raises(
        ValueError,
        match="^model.router_hidden_size=32: megatron.core .* has no such argument. Fix: remove model.router_hidden_size",
    ):
        command_line({"router_hidden_size": 32})
    assert command_line({"apply_rope_fusion": False}) == [["--no-rope-fusion"]]
    assert command_line({"apply_rope_fusion": True}) == []


@pytest.mark.parametrize(
    "override, key",
    [
        ("data.packing=documents", "data.packing"),
        ("data.order=continuing", "data.order"),
        ("handover.first_sample=64", "handover.first_sample"),
        ("parallel.recompute_granularity=auto", "parallel.recompute_granularity"),
        ("parallel.recompute_modules=[moe,permute]", "parallel.recompute_modules"),
    ],
)
def test_what_a_host_cannot_do_is_refused(override, key):
    recipe = compose(["experiment=cpu_demo", "data.path=x", override])
    with pytest.raises(ValueError, match=f"{key}=.* Allowed: "):
        megatron_export.host_arguments(recipe, SOURCES)


def test_what_a_host_leaves_out_is_reported():
    recipe = compose(["experiment=cpu_demo", "data.path=x", "stage.eval_at_start=true", "logger=none"])
    assert [note.partition(":")[0] for note in megatron_export.left_out(recipe)] == ["stage.eval_at_start"]
    text = megatron_export.instructions(recipe, 2, megatron_export.Path("/runs/it/megatron.args"))
    assert "xargs -a /runs/it/megatron.args torchrun --nproc-per-node 2 pretrain_gpt.py" in text
    assert "export TORCHDYNAMO_DISABLE=1" in text and "# ignored by the host: stage.eval_at_start" in text


def test_registered_buffers_go_with_the_variable_that_has_them_copied():
    recipe = compose(["experiment=zaya1_base", "cluster=h200_8", "data.path=x", "logger=none", "parallel.nccl_ub=true"])
    assert "export NCCL_CTA_POLICY=2" in megatron_export.instructions(
        recipe, 8, megatron_export.Path("/runs/it/megatron.args")
    )
    assert any(note.startswith("parallel.nccl_ub: at the host's own end") for note in megatron_export.left_out(recipe))
