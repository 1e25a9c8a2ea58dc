# SPDX-License-Identifier: Apache-2.0
"""The optimizer of each parameter: the published rule, overrides, and refused overrides."""

import pytest
import torch

from zaya_plugin.config.entries import Override
from zaya_plugin.optim.parameter_role import ParameterRole, assign


def parameters(**shapes):
    return [
        (name.replace("__", "."), torch.nn.Parameter(torch.empty(shape, device="meta")))
        for name, shape in shapes.items()
    ]


MODEL = parameters(
    embedding__word_embeddings__weight=(64, 32),
    layers__0__input_layernorm__weight=(32,),
    layers__0__self_attention__temperature=(2,),
    layers__0__self_attention__linear_q__weight=(32, 32),
    layers__0__self_attention__conv_qk_depthwise__weight=(48, 1, 2),
    layers__0__self_attention__conv_qk_grouped__weight=(48, 8, 2),
    layers__0__self_attention__conv_qk_grouped__bias=(48,),
    layers__0__mlp__router__out_proj__weight=(17, 16),
    layers__0__mlp__experts__linear_fc1__weight0=(48, 32),
    layers__0__mlp__experts__linear_fc2__weight0=(32, 24),
    layers__0__post_mlp_residual__output_scale=(32,),
)


def test_matrices_go_to_muon_and_the_rest_to_adamw():
    chosen = assign(MODEL)
    assert {name for name, a in chosen.items() if a.optimizer == "muon"} == {
        "layers.0.self_attention.linear_q.weight",
        "layers.0.mlp.router.out_proj.weight",
        "layers.0.mlp.experts.linear_fc1.weight0",
        "layers.0.mlp.experts.linear_fc2.weight0",
    }
    assert set(chosen) == {name for name, _ in MODEL}
    assert chosen["layers.0.mlp.router.out_proj.weight"].matrices == (1, 17, 16)
    # Vectors do not decay, matrices, convolutions and the embedding do.
    assert {name for name, a in chosen.items() if a.weight_decay_mult == 0} == {
        name for name, p in MODEL if p.dim() == 1
    }


def test_stacked_experts_are_matrices_and_not_adamws():
    (stack,) = assign(parameters(mlp__experts__weight1=(16, 48, 32))).values()
    assert stack == ParameterRole(optimizer="muon", matrices=(16, 48, 32))


def test_gate_and_up_can_be_orthogonalised_separately():
    chosen = assign(MODEL, split_gate_up=True)
    assert chosen["layers.0.mlp.experts.linear_fc1.weight0"].matrices == (2, 24, 32)
    assert chosen["layers.0.mlp.experts.linear_fc2.weight0"].matrices == (1, 32, 24)


def test_an_unknown_shape_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"mixer.kernel has shape \(4, 5, 6\).*optim.overrides"):
        assign(parameters(mixer__kernel=(4, 5, 6)))
    (chosen,) = assign(parameters(mixer__kernel=(4, 5, 6)), [Override("mixer.*", "adamw")]).values()
    assert chosen.optimizer == "adamw"


def test_overrides_by_pattern():
    overrides = [
        Override.parse("*.router.* optimizer=adamw lr_mult=0.5"),
        Override.parse("*.linear_q.weight weight_decay_mult=0"),
        Override.parse("*.router.out_proj.weight lr_mult=2"),
    ]
    chosen = assign(MODEL, overrides)
    assert chosen["layers.0.mlp.router.out_proj.weight"] == ParameterRole(optimizer="adamw", lr_mult=2.0)
    assert chosen["layers.0.self_attention.linear_q.weight"] == ParameterRole(
        optimizer="muon", weight_decay_mult=0.0, matrices=(1, 32, 32)
    )


@pytest.mark.parametrize(
    "entry, message",
    [
        ("", "no pattern"),
        ("*.router.*", "no key"),
        ("*.router.* optimizer=sgd", r"'optimizer=sgd'.*Allowed: a pattern, then optimizer=muon\|adamw"),
        ("*.router.* lr=1", "'lr=1'"),
        ("*.router.* lr_mult=-1", "'lr_mult=-1'"),
        ("*.router.* lr_mult=inf", "'lr_mult=inf'"),
        ("lr_mult=1", "no pattern"),
    ],
)
def test_malformed_overrides_are_named(entry, message):
    with pytest.raises(ValueError, match=message):
        Override.parse(entry)


def test_an_override_that_fits_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"no parameter matches \*.linear_qkv.weight"):
        assign(MODEL, [Override("*.linear_qkv.weight", "adamw")])
    with pytest.raises(ValueError, match="Muon takes matrices"):
        assign(MODEL, [Override("*.temperature", "muon")])
    with pytest.raises(
        ValueError, match=r"matches embedding.word_embeddings.weight, a table of rows, of shape \(64, 32\)"
    ):
        assign(MODEL, [Override("*embedding*", "muon")])


def test_without_muon_everything_is_adamws():
    assert {a.optimizer for a in assign(MODEL, default="adamw").values()} == {"adamw"}
