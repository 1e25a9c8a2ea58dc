# SPDX-License-Identifier: Apache-2.0
"""Norms that read the fp32 residual stream and write the parameter dtype: `model.normalization`."""

from __future__ import annotations

import torch
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
        self.recompute = False  # whether the backward pass computes it again; set by the layer
        self.weight = constant_parameter(config, (hidden_size,), 1.0)

    def vectors(self) -> tuple[Tensor, ...]:
        """All parameters, as the operators take them."""
        return (self.weight,)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., h] in the weight's dtype."""
        return hip_ops.rms_norm(x, *self.vectors(), self.eps)

    def merge_then_norm(self, output: Tensor, residual: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed stream and the new stream of a merge. vectors: the merge's, then this norm's."""
        return hip_ops.scaled_residual_rms_norm(output, residual, *vectors, self.eps)

    def affine_then_norm(
        self, embedding: Tensor, bias: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the normed stream, and the stream: the affine of the embedding in `dtype`."""
        return hip_ops.affine_rms_norm(embedding, bias, scale, *self.vectors(), self.eps, dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class ZayaLayerNorm(ZayaRMSNorm):
    """LayerNorm with weight and bias, for models other than ZAYA1; otherwise as ZayaRMSNorm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(config, hidden_size, eps)
        self.bias = constant_parameter(config, (hidden_size,), 0.0)

    def vectors(self) -> tuple[Tensor, ...]:
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return hip_ops.layer_norm(x, *self.vectors(), self.eps)

    def merge_then_norm(self, output: Tensor, residual: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        return hip_ops.scaled_residual_layer_norm(output, residual, *vectors, self.eps)

    def affine_then_norm(
        self, embedding: Tensor, bias: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return hip_ops.affine_layer_norm(embedding, bias, scale, *self.vectors(), self.eps, dtype)


def norm_class(config: TransformerConfig) -> type[ZayaRMSNorm]:
    """Return the class of the layers' norms and the final norm, by config.normalization."""
    return {"RMSNorm": ZayaRMSNorm, "LayerNorm": ZayaLayerNorm}[config.normalization]
