# SPDX-License-Identifier: Apache-2.0
"""Affines of the residual stream and the norm: order of bias and scale, and which dtype goes where."""

import pytest
import torch

from hip_ops import affine, rms_norm, scale_residual
from zaya_plugin.model.norm import ZayaRMSNorm
from zaya_plugin.model.residual import InputAffine, ResidualScaling


def test_scale_comes_after_bias():
    o, x = torch.randn(3, 2, 4, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    bo, so, bx, sx = torch.randn(4, 4, dtype=torch.float64)
    torch.testing.assert_close(scale_residual(o, x, bo, so, bx, sx), (o + bo) * so + (x + bx) * sx)
    torch.testing.assert_close(affine(x, bx, sx, x.dtype), (x + bx) * sx)


def test_gradients_of_the_merge():
    tensors = [torch.randn(2, 2, 3), torch.randn(2, 2, 3), *torch.randn(4, 3)]
    tensors = [t.double().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(scale_residual, tensors)


def test_merge_at_start_is_a_plain_sum(make_config):
    o, x = torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    assert torch.equal(ResidualScaling(make_config())(o, x), o + x)
    assert torch.equal(InputAffine(make_config())(x), x)


def test_stream_is_fp32_under_bf16_layers(make_config):
    merge, start = ResidualScaling(make_config()).bfloat16(), InputAffine(make_config()).bfloat16()
    embedding = torch.randn(3, 2, 32).bfloat16()
    stream = start(embedding)
    assert stream.dtype == torch.float32 and torch.equal(stream, embedding.float())
    small = torch.full_like(embedding, 2.0**-12)  # lost if the sum were in bf16
    merged = merge(small, torch.ones(3, 2, 32))
    assert merged.dtype == torch.float32 and (merged == 1 + 2.0**-12).all()


def test_stream_may_be_bf16(make_config):
    config = make_config(residual_in_fp32=False, params_dtype=torch.bfloat16)
    embedding = torch.randn(3, 2, 32).bfloat16()
    stream = InputAffine(config)(embedding)
    assert stream.dtype == torch.bfloat16
    assert ResidualScaling(config)(embedding, stream).dtype == torch.bfloat16


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_norm_reads_fp32_and_writes_the_weights_dtype(make_config, weight_dtype):
    x = torch.randn(5, 2, 32) * 100
    norm = ZayaRMSNorm(make_config(), 32, 1e-5).to(weight_dtype)
    y = norm(x)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert y.dtype == weight_dtype
    assert (y.double() - exact).norm() < {torch.float32: 1e-6, torch.bfloat16: 3e-3}[weight_dtype] * exact.norm()


def test_norm_epsilon_and_weight():
    x, weight = torch.full((1, 4), 1e-3), torch.tensor([1.0, 2.0, -1.0, 0.0])
    torch.testing.assert_close(rms_norm(x, weight, 3e-6), 0.5 * weight.unsqueeze(0))
