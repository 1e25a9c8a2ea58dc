# SPDX-License-Identifier: Apache-2.0
"""Learned affines on the residual stream: one on the embedding, one pair at each merge. The scale comes after the bias.

The report's equation 6 (arXiv 2605.05365) adds the bias after the scale; the same functions, but other parameters. The
released weights are stored for the form used here.
"""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from zaya_plugin.model.fusion import fused_on_accelerator
from zaya_plugin.model.initialization import constant_parameter
from zaya_plugin.model.norm import ZayaRMSNorm, rms_norm
from zaya_plugin.model.parameter_gather import gathered
from zaya_plugin.model.small_gradients import Read, as_it_is


@fused_on_accelerator
def affine(x: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """(x + bias) * scale in fp32 or wider; x [s, b, h], bias and scale [h]."""
    compute = torch.promote_types(x.dtype, torch.float32)
    return (x.to(compute) + bias) * scale


@fused_on_accelerator
def affine_and_norm(
    x: Tensor, bias: Tensor, scale: Tensor, norm_weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """affine in dtype, and its RMSNorm in norm_weight's: one kernel, and the two gradients of the stream meet in one."""
    stream = affine(x, bias, scale).to(dtype)
    return stream, rms_norm(stream, norm_weight, eps)


@fused_on_accelerator
def scale_residual(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
) -> Tensor:
    """(output + output_bias) * output_scale + (residual + residual_bias) * residual_scale in fp32 or wider.

    Args: output [s, b, h] in the layer's dtype, residual [s, b, h] stream, four vectors [h]. Returns [s, b, h] in
    the wider of fp32 and residual's dtype.
    """
    compute = torch.promote_types(residual.dtype, torch.float32)
    vectors = (v.to(compute) for v in (output_bias, output_scale, residual_bias, residual_scale))
    output_bias, output_scale, residual_bias, residual_scale = vectors
    # Multiplied out, so that the biases meet as one vector and the stream is read once per operand.
    shift = output_bias * output_scale + residual_bias * residual_scale
    return torch.addcmul(torch.addcmul(shift, output.to(compute), output_scale), residual.to(compute), residual_scale)


@fused_on_accelerator
def scale_residual_and_norm(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """scale_residual in residual's dtype, and its RMSNorm in norm_weight's: one pass over the stream where it is fused."""
    stream = scale_residual(output, residual, output_bias, output_scale, residual_bias, residual_scale)
    stream = stream.to(residual.dtype)
    return stream, rms_norm(stream, norm_weight, eps)


class ResidualScaling(nn.Module):
    """Merge of a sublayer's output into the stream, transformers `ZayaResidualScaling`. Starts as plain sum."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.fused = getattr(config, "fused_residual_norm", False)
        shape = (config.hidden_size,)
        self.output_scale = constant_parameter(config, shape, 1.0)
        self.output_bias = constant_parameter(config, shape, 0.0)
        self.residual_scale = constant_parameter(config, shape, 1.0)
        self.residual_bias = constant_parameter(config, shape, 0.0)

    def vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All parameters, as `scale_residual` takes them."""
        return self.output_bias, self.output_scale, self.residual_bias, self.residual_scale

    def forward(self, output: Tensor, residual: Tensor, read: Read = as_it_is) -> Tensor:
        """output [s, b, h], residual [s, b, h] -> new stream [s, b, h] in residual's dtype. Parameters are used through `read`."""
        return scale_residual(output, residual, *map(read, self.vectors())).to(residual.dtype)

    def merge_and_norm(
        self, output: Tensor, residual: Tensor, norm: ZayaRMSNorm, read: Read = as_it_is
    ) -> tuple[Tensor, Tensor]:
        """The new stream and `norm` of it. Neither module is called."""
        gathered(self)
        gathered(norm)
        vectors = map(read, (*self.vectors(), norm.weight))
        if self.fused:
            from hip_ops import scaled_residual_rms_norm

            normed, stream = scaled_residual_rms_norm(output, residual, *vectors, norm.eps)
            return stream, normed
        return scale_residual_and_norm(output, residual, *vectors, norm.eps)


class InputAffine(nn.Module):
    """(embedding + bias) * scale, the start of the stream (`input_hidden_states_{scale,bias}` in transformers)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.in_fp32 = config.residual_in_fp32
        self.scale = constant_parameter(config, (config.hidden_size,), 1.0)
        self.bias = constant_parameter(config, (config.hidden_size,), 0.0)

    def forward(self, embedding: Tensor) -> Tensor:
        """embedding [s, b, h] -> stream [s, b, h], fp32 (or wider) if residual_in_fp32 else the embedding's dtype."""
        return affine(embedding, self.bias, self.scale).to(self._dtype(embedding))

    def affine_and_norm(self, embedding: Tensor, norm: ZayaRMSNorm) -> tuple[Tensor, Tensor]:
        """The same stream and `norm` of it. Neither module is called."""
        gathered(self)
        gathered(norm)
        return affine_and_norm(embedding, self.bias, self.scale, norm.weight, norm.eps, self._dtype(embedding))

    def _dtype(self, embedding: Tensor) -> torch.dtype:
        # By the parameters: Megatron's embedding is fp32 here whatever the model, of which the stream would lose half of fp64's digits.
        return torch.promote_types(self.bias.dtype, torch.float32) if self.in_fp32 else embedding.dtype
