# SPDX-License-Identifier: Apache-2.0
"""A small ZAYA in bf16 under Muon with sharded state, for the ranks of muon_state.py and older_host.py.

To be imported once the patches are applied: it imports Megatron.
"""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from zaya_plugin.model.build import build_zaya_model
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.optim.factory import build_muon_adamw
from zaya_plugin.optim.muon import MuonSettings
from zaya_plugin.optim.parameter_role import tag_parameters


def build_model():
    """Three layers of eight experts, the same weights on every rank."""
    torch.manual_seed(11)
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    config = ZayaConfig(
        num_layers=3,
        hidden_size=64,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=48,
        moe_ffn_hidden_size=48,
        num_moe_experts=8,
        router_hidden_size=16,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    model = build_zaya_model(config, vocab_size=192, max_sequence_length=32).bfloat16()
    tag_parameters(model)
    return model


def with_optimizer(model):
    """The model under DDP and its optimizer: bf16 weights and momentum, fp32 main weights."""
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, bucket_size=60_000, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    ddp = DistributedDataParallel(model.config, options, model)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=0.0,  # the norm would be summed in another order with other ranks, and bf16 momentum would show it
    )
    muon = MuonSettings(momentum_dtype="bf16")
    return ddp, build_muon_adamw(get_megatron_optimizer, optimizer_config, [ddp], muon, non_finite="skip")
