# SPDX-License-Identifier: Apache-2.0
"""Inputs of `hip_ops.cca_prologue` in CCA (arXiv 2510.04476): the keys' length and RoPE's table."""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import hip_ops


def key_scale(temperature: Tensor, form: str) -> Tensor:
    """Return the length of the keys relative to sqrt(d); temperature [g] -> [g]. `form` as
    ZayaConfig.temperature_form.
    """
    if form == "linear":
        return temperature
    temperature = temperature.to(hip_ops.wide(temperature.dtype))
    if form == "exp":
        return temperature.exp()
    assert form == "clamped_exp", form
    return temperature.clamp(1e-7, 2.0).exp()


_rope_tables = WeakTensorKeyDictionary()


def rope_table(angles: Tensor) -> Tensor:
    """Return (cos, sin) of angles [s, 1 or b, 1, r] as `hip_ops.cca_prologue` takes them; computed once for all layers
    that get the same angles.
    """
    table = _rope_tables.get(angles)
    if table is None:
        table = _rope_tables[angles] = hip_ops.rope_table(angles)
    return table
