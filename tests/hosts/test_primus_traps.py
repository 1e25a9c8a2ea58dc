# SPDX-License-Identifier: Apache-2.0
"""What Primus lets pass silently is an error of ours: each trap by a namespace as Primus makes it, with one thing
wrong.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zaya_plugin.config.compose import compose
from zaya_plugin.hosts.primus import traps
from zaya_plugin.optim.parameter_role import ParameterRole
from zaya_plugin.run import primus_export

RECIPE = compose(["experiment=cpu_demo", "optim=muon", "run_dir=/runs/team/demo"])
DATA = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "t"}


@pytest.fixture
def args():
    overrides = primus_export.experiment(RECIPE, DATA, 1)["modules"]["pre_trainer"]["overrides"]
    return SimpleNamespace(**overrides, model_type="gpt", rank=0, world_size=1, model="language_model.yaml")


def check(args, failed=(), known=None):
    known = set(vars(args)) if known is None else known
    traps.check(args, RECIPE, known, failed)


def test_an_experiment_as_exported_passes(args):
    check(args)


@pytest.mark.parametrize(
    "key, value, words",
    [
        (
            "auto_continue_train",
            True,
            "no code reads it since Primus #851; the plugin itself resumes from the newest checkpoint. Allowed: false",
        ),
        ("disable_primus_topk_router", False, "puts another router into every MoE layer. Allowed: true"),
        ("use_turbo_grouped_gemm", True, "3-D tensor, which Primus' Muon leaves to Adam"),
        ("moe_router_force_load_balancing", True, "tokens go to experts at random"),
        ("mock_data", True, "random tokens"),
        ("dataloader_type", "cyclic", "Allowed: single"),
        ("finetune", True, "drops the optimizer's state"),
        ("optimizer", "dist_muon", "Allowed: adam"),
        ("model_type", "mamba", "Allowed: gpt"),
        ("stage", "pretrain", "Allowed: zaya_pretrain"),
        ("save", "/elsewhere/checkpoints", "Allowed: /runs/team/demo/checkpoints"),
        ("save", None, "Allowed: /runs/team/demo/checkpoints"),
    ],
)
def test_a_value_that_trains_something_else_is_refused(args, key, value, words):
    setattr(args, key, value)
    with pytest.raises(ValueError, match=f"^{key}=") as refused:
        check(args)
    assert words in str(refused.value)


def test_a_key_that_nothing_reads_is_refused_with_the_nearest_one(args):
    known = set(vars(args))
    args.moe_router_topkk = 2
    with pytest.raises(
        ValueError,
        match=(
            "moe_router_topkk=2: neither Megatron nor Primus nor the plugin reads it. Allowed: moe_router_topk is the "
            "nearest"
        ),
    ):
        check(args, known=known)


def test_a_patch_that_primus_only_logs_as_failed_ends_the_run(args):
    with pytest.raises(ValueError, match="Primus' patch megatron.te.spec failed"):
        check(args, failed=["megatron.te.spec"])
    args.zaya_tolerated_patches = ["megatron.te.spec"]
    check(args, failed=["megatron.te.spec"])


def test_all_that_is_wrong_is_reported_at_once(args):
    args.mock_data, args.stage = True, "pretrain"
    with pytest.raises(ValueError) as refused:
        check(args, failed=["x"])
    assert len(str(refused.value).splitlines()) == 3


def test_another_flops_formula_is_refused():
    from zaya_plugin.patches.megatron_flops import zaya_flops

    traps.check_flops(zaya_flops)
    with pytest.raises(ValueError, match="TFLOP/s would be of another model"):
        traps.check_flops(lambda args, batch_size: 0.0)


def test_experts_that_fall_out_of_muon_are_detected():
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.experts = nn.Module()
    model.mlp.experts.weights = nn.Parameter(torch.zeros(4, 8, 8))
    wrapped = nn.Sequential(model)
    with pytest.raises(ValueError, match=r"0.mlp.experts.weights of shape \(4, 8, 8\) would be trained by AdamW"):
        traps.check_assignments(wrapped, RECIPE)
    traps.check_assignments(
        wrapped, compose(["experiment=cpu_demo", "optim.overrides=['*experts* optimizer=adamw']", "optim=muon"])
    )
    traps.check_assignments(wrapped, compose(["experiment=cpu_demo", "optim=adamw"]))
    model.mlp.experts.weights.zaya_role = ParameterRole(matrices=(4, 8, 8))
    traps.check_assignments(wrapped, RECIPE)


def test_a_recipe_that_is_not_there_is_named(tmp_path):
    for path in (None, str(tmp_path / "recipe.yaml")):
        with pytest.raises(ValueError, match="zaya_recipe=.*Allowed: the recipe.yaml"):
            traps.recipe_path(SimpleNamespace(zaya_recipe=path))
