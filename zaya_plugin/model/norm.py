# SPDX-License-Identifier: Apache-2.0
"""RMSNorm that reads the fp32 residual stream and writes the parameter dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from zaya_plugin.model.fusion import fused_on_accelerator
from zaya_plugin.model.initialization import constant_parameter


@fused_on_accelerator
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), statistics in fp32 or wider.

    Args: x [..., h] of any float dtype, weight [h]. Returns [..., h] in weight's dtype.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(compute), weight.shape, weight.to(compute), eps).to(weight.dtype)


class ZayaRMSNorm(nn.Module):
    """RMSNorm with weight w (not 1 + w), as transformers `ZayaRMSNorm`.

    transformers rounds the stream to the weight's dtype first; here the statistics see the fp32 stream. The two are
    equal in an fp32 model. Built by Megatron as `norm(config=, hidden_size=, eps=)`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = constant_parameter(config, (hidden_size,), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h] in the weight's dtype."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
