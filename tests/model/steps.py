# SPDX-License-Identifier: Apache-2.0
"""A few steps of training for the tests of the model."""

import torch


def train(model, batch, steps, lr, **forward):
    """Losses of a few steps of plain gradient descent, and the last gradients."""
    losses = []
    for _ in range(steps):
        ids, positions, labels = batch()
        model.zero_grad(set_to_none=True)
        loss = model(ids, positions, None, labels=labels, **forward).float().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(lr * p.grad)
    return torch.stack(losses), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(ours, expected):
    (losses, gradients), (expected_losses, expected_gradients) = ours, expected
    assert torch.equal(losses, expected_losses)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert torch.equal(gradients[name], gradient), name
