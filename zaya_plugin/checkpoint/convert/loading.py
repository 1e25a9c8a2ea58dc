# SPDX-License-Identifier: Apache-2.0
"""From a description and tensors to a model in this process, for evaluation. Needs no other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.tables import balancing_state
from zaya_plugin.checkpoint.convert.values import Values, whole
from zaya_plugin.model.build import build_zaya_model, groups_of_one
from zaya_plugin.model.config import ZayaConfig


def configuration(described: Description, options: dict[str, Any]) -> tuple[ZayaConfig, dict[str, Any]]:
    """Return the configuration of a model, and the further arguments of `build_zaya_model`.

    options: fields of ZayaConfig that the description does not decide.
    """
    return ZayaConfig(**described.config_fields() | options), dict(
        vocab_size=described.vocab_size,
        max_sequence_length=described.max_position_embeddings,
        rotary_base=described.rotary_base,
        rotary_percent=described.rotary_percent,
    )


@torch.no_grad()
def load_model(
    described: Description,
    tensors: Mapping[str, Values],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda count: None,
):
    """Return the model in evaluation mode. Tensors are read one by one, so that memory holds the weights once.

    Args:
        tensors: by this package's names, as of an opened checkpoint or a published model.
        dtype: of the parameters; balancing biases stay fp32.
        progress: called with the elements of each tensor that is loaded.
    """
    groups_of_one()
    options = dict(
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=torch.device(device).type == "cpu",
        perform_initialization=False,
    )
    config, sizes = configuration(described, options)
    model = build_zaya_model(config, **sizes).eval()
    left = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    for name, values in tensors.items():
        target = left.pop(name).copy_(whole(values))
        progress(target.numel())
    missing = left.keys() - {name for name, _, _ in balancing_state(described)}
    assert not missing, missing
    return model.requires_grad_(False)
