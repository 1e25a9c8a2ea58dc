# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from zaya_plugin.model.loss import cross_entropy


@pytest.mark.parametrize("shape", [(7, 3, 11), (1, 1, 2), (5, 2, 1000)])
def test_equals_torch_with_gradients(shape):
    s, b, v = shape
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, v, (b, s), generator=generator)
    weights = torch.rand((b, s), generator=generator, dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), logits)
    ours = logits.detach().clone().requires_grad_()
    losses = cross_entropy(ours * 1, labels)
    (grad,) = torch.autograd.grad((losses * weights).sum(), ours)
    assert torch.allclose(losses, expected, rtol=1e-12) and torch.allclose(grad, expected_grad, rtol=1e-10, atol=1e-13)


def test_large_logits_in_bf16_are_summed_in_fp32():
    logits = torch.full((1, 1, 4096), 80.0, dtype=torch.bfloat16)
    loss = cross_entropy(logits, torch.zeros((1, 1), dtype=torch.int64))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(8.317766, abs=1e-4)  # ln 4096
