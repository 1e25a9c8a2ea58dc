# SPDX-License-Identifier: Apache-2.0
"""The operators of the residual stream: norms, merges of a sublayer's output, and the affine on the embedding.

Norms read the fp32 stream and write the parameters' dtype. A merge scales and shifts both of its inputs by learned
vectors. The scale comes after the bias; the report's equation 6 (arXiv 2605.05365) adds the bias after the scale: the
same functions with other parameter values. The released weights are stored for the form of this module.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

import hip_ops
from zaya_plugin.model.parameters import ParameterView, constant_parameter, direct, gathered


class ZayaRMSNorm(nn.Module):
    """RMSNorm with weight w (not 1 + w), as transformers `ZayaRMSNorm`.

    transformers rounds the stream to the weight's dtype first; in this module the statistics see the fp32 stream. The
    two are equal in an fp32 model. Built by Megatron as `norm(config=, hidden_size=, eps=)`.
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


class ResidualScaling(nn.Module):
    """Merge of a sublayer's output into the stream, transformers `ZayaResidualScaling`. It starts as a plain sum."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        shape = (config.hidden_size,)
        self.output_scale = constant_parameter(config, shape, 1.0)
        self.output_bias = constant_parameter(config, shape, 0.0)
        self.residual_scale = constant_parameter(config, shape, 1.0)
        self.residual_bias = constant_parameter(config, shape, 0.0)

    def vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All parameters, as `hip_ops.scale_residual` takes them."""
        return self.output_bias, self.output_scale, self.residual_bias, self.residual_scale

    def forward(self, output: Tensor, residual: Tensor, view: ParameterView = direct) -> Tensor:
        """Merge without a norm: output and residual [s, b, h] -> new stream [s, b, h] in residual's dtype. Parameters
        are used through `view`.
        """
        return hip_ops.scale_residual(output, residual, *map(view, self.vectors()))

    def merge_and_norm(
        self, output: Tensor, residual: Tensor, norm: ZayaRMSNorm, view: ParameterView = direct
    ) -> tuple[Tensor, Tensor]:
        """Return the normed stream and the new stream, by one operator.

        The forward of neither module is called, so `gathered` waits for the parameters of both.
        """
        gathered(self)
        gathered(norm)
        return norm.merge_then_norm(output, residual, *map(view, (*self.vectors(), *norm.vectors())))


class InputAffine(nn.Module):
    """(embedding + bias) * scale, the start of the stream (`input_hidden_states_{scale,bias}` in transformers)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.in_fp32 = config.residual_in_fp32
        self.scale = constant_parameter(config, (config.hidden_size,), 1.0)
        self.bias = constant_parameter(config, (config.hidden_size,), 0.0)

    def forward(self, embedding: Tensor) -> Tensor:
        """embedding [s, b, h] -> stream [s, b, h], fp32 (or wider) if residual_in_fp32 else the embedding's dtype."""
        return hip_ops.affine(embedding, self.bias, self.scale, self._dtype(embedding))

    def affine_and_norm(self, embedding: Tensor, norm: ZayaRMSNorm) -> tuple[Tensor, Tensor]:
        """Return the normed stream and the stream, otherwise as merge_and_norm."""
        gathered(self)
        gathered(norm)
        return norm.affine_then_norm(embedding, self.bias, self.scale, self._dtype(embedding))

    def _dtype(self, embedding: Tensor) -> torch.dtype:
        # From the parameters: with an fp32 residual Megatron's embedding returns fp32 in every model, and an fp64 model
        # would lose precision.
        return hip_ops.wide(self.bias.dtype) if self.in_fp32 else embedding.dtype
