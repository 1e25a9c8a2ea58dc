# SPDX-License-Identifier: Apache-2.0
"""The architecture of a device, as compilers, tables and libraries are named by it."""

from __future__ import annotations

import torch


def architecture(device: torch.device) -> str:
    """gfx942, ... of an AMD GPU, sm_90, ... of an NVIDIA one; else the type of device."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
