# SPDX-License-Identifier: Apache-2.0
"""Affines of the residual stream and the norm: order of bias and scale, and which dtype goes where."""

import pytest
import torch

import hip_ops
from hip_ops import affine, rms_norm, scale_residual
from zaya_plugin.model.residual import InputAffine, ResidualScaling, ZayaRMSNorm


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


FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
# Each result is rounded once; sums in fp32 add a little.
BOUNDS = {FP64: 1e-14, FP32: 2e-6, BF16: 2.0**-9 + 2e-6}


def modules(make_config, dtype, stream_dtype, merge):
    """The merge or the affine at the start of the stream, and a norm; vectors off their initial values."""
    config = make_config(hidden_size=256, residual_in_fp32=stream_dtype != BF16, params_dtype=dtype)
    made = (ResidualScaling if merge else InputAffine)(config).to(dtype), ZayaRMSNorm(config, 256, 1e-3).to(dtype)
    with torch.no_grad():
        for parameter in (*made[0].parameters(), *made[1].parameters()):
            parameter.add_(0.3 * torch.randn(256))
    return made


@pytest.mark.parametrize("merge", [True, False], ids=["merge", "affine"])
@pytest.mark.parametrize("in_one", [True, False], ids=["with_norm", "norm_alone"])
@pytest.mark.parametrize("kernels", ["reference", "hip"])
@pytest.mark.parametrize("dtypes", [(FP64, FP64), (FP32, FP32), (BF16, FP32), (BF16, BF16)], ids=str)
def test_gradients_of_stream_and_norm(make_config, dtypes, kernels, in_one, merge):
    """Layers in one dtype, the stream in another; against autograd over the formulas in fp64, of the stream as it is
    stored.
    """
    dtype, stream_dtype = dtypes
    first, norm = modules(make_config, *dtypes, merge)
    given = [torch.randn(5, 2, 256).to(dtype), *([torch.randn(5, 2, 256).to(stream_dtype)] * merge)]
    names = ("output_bias", "output_scale", "residual_bias", "residual_scale") if merge else ("bias", "scale")
    leaves = [*(each.requires_grad_() for each in given), *(getattr(first, name) for name in names), norm.weight]
    upstream = torch.randn(5, 2, 256).to(stream_dtype), torch.randn(5, 2, 256).to(dtype)
    with hip_ops.use_kernels(kernels):
        if in_one:
            normed, stream = (first.merge_and_norm if merge else first.affine_and_norm)(*given, norm)
        else:
            stream = first(*given)
            normed = norm(stream)
        found = stream, normed, *torch.autograd.grad((stream, normed), leaves, upstream)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    if merge:
        o, x, b_o, s_o, b_x, s_x, weight = exact
        merged = (o + b_o) * s_o + (x + b_x) * s_x
    else:
        x, b_x, s_x, weight = exact
        merged = (x + b_x) * s_x
    stored = merged + (stream.detach().double() - merged).detach()
    want = merged, stored / (stored.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    wanted = *want, *torch.autograd.grad(want, exact, [each.double() for each in upstream])
    # Between formulas, autograd rounds both gradients of a bf16 stream and their sum.
    roundings = 2 if stream_dtype == BF16 and not (in_one and merge) else 1
    for place, (got, right, like) in enumerate(zip(found, wanted, (stream, normed, *leaves), strict=True)):
        assert got.dtype == like.dtype
        error = ((got.double() - right).norm() / right.norm()).item()
        assert error <= roundings * BOUNDS[got.dtype], f"{place}: {error:.3g}"
    assert (stream.dtype, normed.dtype) == (stream_dtype, dtype)
