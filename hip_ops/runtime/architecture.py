# SPDX-License-Identifier: Apache-2.0
"""Names the architecture of a device; compilers, tuning tables and libraries use this name."""

from __future__ import annotations

import torch


def architecture(device: torch.device) -> str:
    """Return the name: "gfx942" for an AMD GPU, "sm_90" for an NVIDIA one, otherwise the device's type."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
