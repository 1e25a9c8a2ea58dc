# SPDX-License-Identifier: Apache-2.0
"""One gloo rank with Megatron's groups, and small models on it."""

import pytest
import torch

from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this folder)


@pytest.fixture
def make_config():
    """Small ZayaConfig; keywords override fields."""
    from zaya_plugin.model.config import ZayaConfig

    def make(**overrides):
        fields = dict(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=8,
            ffn_hidden_size=24,
            moe_ffn_hidden_size=24,
            num_moe_experts=4,
            router_hidden_size=16,
            use_cpu_initialization=True,
        )
        return ZayaConfig(**(fields | overrides))

    return make


@pytest.fixture
def make_model(make_config):
    """Small model whose vectors are off their initial ones and zeros; keywords override fields of the config."""
    from zaya_plugin.model.build import build_zaya_model

    def make(**overrides):
        torch.manual_seed(99)
        model = build_zaya_model(make_config(**overrides), vocab_size=64, max_sequence_length=64)
        perturb(model)
        return model

    return make


@pytest.fixture
def batch():
    """input_ids, position_ids and labels, int64 [b, s]."""

    def make(b=2, s=12):
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(1, 64, (b, s), generator=generator)
        return ids, torch.arange(s).expand(b, -1), torch.randint(1, 64, (b, s), generator=generator)

    return make


@torch.no_grad()
def perturb(model):
    """Weights large enough that every part of the model matters."""
    generator = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator).to(p)
        if p.dim() == 1:
            p.add_(0.2 * noise)
        elif "embedding" not in name:
            p.copy_(noise / p.shape[1:].numel() ** 0.5)
