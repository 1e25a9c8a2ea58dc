# SPDX-License-Identifier: Apache-2.0
"""What a deterministic run costs that it need not."""

import torch

from zaya_plugin.hosts.pretrain import FILL_OF_NEW_MEMORY
from zaya_plugin.patches import hooks


def test_new_tensors_are_not_filled(monkeypatch):
    """cluster.deterministic switches torch's filling of new tensors off during the run, and restores it afterwards."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with hooks.replaced({FILL_OF_NEW_MEMORY: False}):
        assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert torch.utils.deterministic.fill_uninitialized_memory is True
