# SPDX-License-Identifier: Apache-2.0
"""What a deterministic run costs that it need not."""

from types import SimpleNamespace

import pytest
import torch

from zaya_plugin.hosts.pretrain import leave_new_memory_alone


@pytest.mark.parametrize("deterministic", [False, True])
def test_new_tensors_are_not_filled(monkeypatch, deterministic):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    leave_new_memory_alone(SimpleNamespace(cluster=SimpleNamespace(deterministic=deterministic)))
    assert torch.utils.deterministic.fill_uninitialized_memory is not deterministic
