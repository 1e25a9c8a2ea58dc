# SPDX-License-Identifier: Apache-2.0
"""RMSNorm that reads the fp32 residual stream and writes the parameter dtype."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

import hip_ops
from zaya_plugin.model.initialization import constant_parameter


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
        return hip_ops.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
