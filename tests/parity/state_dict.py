# SPDX-License-Identifier: Apache-2.0
"""State dicts in memory: of this package's model in one process, to and from the published layouts, for comparisons.

The skip class's balancing bias is carried as it is: `load_state_dict` takes it, and transformers' `from_pretrained` sets
it to -1, for which `zaya checkpoint export` refuses a native file where it changes the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.exporting import check_expressible
from zaya_plugin.checkpoint.convert.tables import (
    BIASES,
    EMBEDDING,
    SKIP_OUTPUT,
    TIED_HEAD,
    balancing_state,
    check_cover,
    recognise,
    rows,
    skip_is_reachable,
)
from zaya_plugin.config.messages import check_transformers_has
from zaya_plugin.ground.errors import mistake


def to_hf(state_dict: Mapping[str, Tensor], config, layout: str = "native") -> dict[str, Tensor]:
    """Return the tensors of a layout for those of our GPTModel. Nothing is folded: for that there is the export.

    Args:
        state_dict: as `model.state_dict()` of an unwrapped model; `_extra_state` entries are ignored.
        config: ZayaConfig.

    Raises:
        ValueError: names are missing or unknown, and the message lists all of them; the layout cannot express the
            model as it is.
    """
    model = Description.of_config(config, len(state_dict.get(EMBEDDING, ())))
    check_expressible(model)
    plain = Description(
        **{**vars(model), "temperature_form": "linear", "router_eda": True, "router_norm_epsilon": None}
    )
    if different := model.differences(plain):
        raise mistake("state dict", problem=f"the layouts have no {different}", fix="`zaya checkpoint export`")
    _check_skip(layout, model, state_dict)
    beside = {name for name, _, _ in balancing_state(model)}
    given = {k: v for k, v in state_dict.items() if not k.endswith("_extra_state") and k not in beside}
    wanted = list(rows(layout, model))
    _check_names(given, [name for row in wanted for name in row.ours])
    return {
        row.name: torch.stack([given[name] for name in row.ours]) if row.stacked else given[row.ours[0]]
        for row in wanted
    }


def from_hf(state_dict: Mapping[str, Tensor], config) -> dict[str, Tensor]:
    """Return the state dict for our GPTModel of a published layout's tensors. Expert matrices may be views.

    Errors as in to_hf; raises ValueError if `lm_head.weight` is present and differs from the embedding. Names say
    nothing about the form of legacy temperatures and the router norm's epsilon: there the configuration is trusted.
    """
    check_transformers_has(config.normalization)
    layout = recognise(state_dict)
    embedding = next(row.name for row in rows(layout, Description.of_config(config, 0)))
    model = Description.of_config(config, len(state_dict.get(embedding, ())))
    check_expressible(model)
    if layout == "native" and model.temperature_form != "linear":
        problem = f"native temperatures are linear, and the configuration has temperature_form={model.temperature_form}"
        raise mistake("state dict", problem=problem, fix="temperature_form=linear")
    wanted = check_cover(layout, model, {name: tuple(tensor.shape) for name, tensor in state_dict.items()})
    head = state_dict.get(TIED_HEAD)
    if head is not None and not torch.equal(head, state_dict[embedding]):
        raise mistake(TIED_HEAD, problem=f"differs from {embedding}", allowed="models with a tied head")
    found: dict[str, Tensor] = {}
    for row in wanted:
        tensor = state_dict[row.name]
        found |= dict(zip(row.ours, tensor.unbind() if row.stacked else (tensor,), strict=True))
    _check_skip(layout, model, found)
    for name, dtype, shape in balancing_state(model):
        found[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=found[EMBEDDING].device)
    return found


def _check_skip(layout: str, model: Description, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if tokens may choose the skip class, and loaders of the layout compute another output of it."""
    biases = (tensors.get(BIASES.format(l=layer)) for layer in range(model.num_layers))
    if model.skip_output != SKIP_OUTPUT[layout] and any(b is not None and skip_is_reachable(b) for b in biases):
        raise mistake(
            "model.skip_output",
            model.skip_output,
            problem=f"tokens may choose the skip class, and loaders of {layout} compute {SKIP_OUTPUT[layout]}",
            allowed=SKIP_OUTPUT[layout],
        )


def _check_names(given: Mapping[str, Tensor], expected: list[str]) -> None:
    missing, unknown = sorted(set(expected) - given.keys()), sorted(given.keys() - set(expected))
    if missing or unknown:
        problem = f"not one of this package's ZAYA model with this configuration: missing {missing}, unknown {unknown}"
        raise mistake("state dict", problem=problem)
