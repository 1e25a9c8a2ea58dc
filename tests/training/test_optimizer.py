# SPDX-License-Identifier: Apache-2.0
"""The recipe's settings reach the optimizer. tests/optim/ tests the optimizer."""

from types import SimpleNamespace

import pytest
import torch

from tests.megatron_rank import single_rank  # noqa: F401  (a fixture of every test of this file)

import megatron.core.optimizer as megatron_optimizer  # isort: skip

from zaya_plugin.config.compose import compose
from zaya_plugin.optim import factory
from zaya_plugin.optim.muon import MuonSettings
from zaya_plugin.training import optimizer

DEMO = MuonSettings(dtype="fp32")
SET = ["muon_momentum=0.9", "muon_nesterov=false", "muon_steps=3", "muon_coefficients=quintic", "muon_dtype=fp16"]
SET += ["muon_rms_scale=0.3", "muon_momentum_dtype=bf16"]


@pytest.mark.parametrize(
    "overrides, muon, non_finite",
    [
        ([], DEMO, "stop"),
        (["optim.non_finite_gradients=skip", "optim.max_non_finite_steps=7"], DEMO, "skip"),
        (["parallel.use_distributed_optimizer=false"], DEMO, None),
        ([f"optim.{each}" for each in SET], MuonSettings(0.9, False, 3, "quintic", "fp16", 0.3, "bf16"), "stop"),
    ],
    ids=["defaults", "skip", "not_distributed", "muon"],
)
def test_what_a_recipe_sets_reaches_the_optimizer(monkeypatch, overrides, muon, non_finite):
    """The recipe's settings reach the optimizer. A function stands for Megatron's factory. It builds Megatron's
    Adam, which is MuonAdamW during the call.

    The layers' buckets are grouped before the call.
    """
    happened = []
    monkeypatch.setattr(factory, "group_layers", lambda chunks: happened.append(("grouped", chunks)))

    def get_megatron_optimizer(config, chunks, config_overrides, **named):
        happened.append(("built", chunks, config, named))
        happened.append(megatron_optimizer.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.5))
        return SimpleNamespace(chained_optimizers=[])

    recipe = compose(["experiment=cpu_demo", "optim=muon", "parallel.use_distributed_optimizer=true", *overrides])
    chained = optimizer.build_optimizer(recipe, get_megatron_optimizer, "config", [], use_gloo_process_groups=True)
    inner = happened.pop()
    assert happened == [("grouped", []), ("built", [], "config", {"use_gloo_process_groups": True})]
    assert inner.muon == muon and inner.defaults["lr"] == 0.5
    assert chained.non_finite == non_finite and chained.max_non_finite == (7 if non_finite == "skip" else None)


def test_a_recipe_can_choose_every_set_of_coefficients():
    from hip_ops.ops.newton_schulz.plan import COEFFICIENT_SETS
    from zaya_plugin.config.messages import schema

    assert schema()["optim.muon_coefficients"].metadata["choices"] == tuple(COEFFICIENT_SETS)
