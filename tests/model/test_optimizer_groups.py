# SPDX-License-Identifier: Apache-2.0
"""The optimizer of every parameter of the real model."""

from zaya_plugin.optim.parameter_role import assign


def test_every_parameter_of_the_model_is_assigned(make_model):
    model = make_model()
    chosen = assign(model.named_parameters())
    muon = {name for name, a in chosen.items() if a.optimizer == "muon"}
    assert muon == {n for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n}
    assert sum("experts" in name for name in muon) == 2 * 4 * model.config.num_layers
    assert sum("router" in name for name in muon) == 4 * model.config.num_layers
