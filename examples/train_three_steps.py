# SPDX-License-Identifier: Apache-2.0
"""Train a small ZAYA on megatron-core alone, by `python` or by `torchrun --nproc-per-node 2`."""

import os

from zaya_plugin import quiet_hosts

quiet_hosts()  # before Megatron is imported, which warns about each package that it lacks
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from zaya_plugin import ZayaConfig, apply_patches, build_zaya_model, muon_optimizer

apply_patches()  # without a GPU, Megatron then runs on the CPU, and .cuda() and set_device() do nothing
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
alone = {} if "RANK" in os.environ else dict(store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **alone)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
bf16 = dict(bf16=True, params_dtype=torch.bfloat16)
shape = dict(num_layers=4, hidden_size=128, num_attention_heads=4, num_query_groups=2, kv_channels=32)
experts = dict(num_moe_experts=8, moe_ffn_hidden_size=128, router_hidden_size=32)
config = ZayaConfig(**shape, **experts, **bf16)
model = build_zaya_model(config, vocab_size=256, max_sequence_length=64).cuda()  # a GPTModel from zaya_block_spec
zero = dict(use_distributed_optimizer=True)  # ZeRO-1: every rank keeps a share of the optimizer's state
model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **zero), model)
optimizer = muon_optimizer(OptimizerConfig(lr=5e-3, weight_decay=0.1, **bf16, **zero), [model])
tokens = (torch.arange(8 * 65).view(8, 65).cuda() + torch.distributed.get_rank()) % 97 + 1  # [b, s + 1]
positions = torch.arange(64).cuda().expand(8, -1)
for step in range(1, 4):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()  # losses [b, s]
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()  # balances the experts; Muon for matrices, AdamW for all other parameters
    print(f"step {step}: loss {loss.item():.4f}", flush=True)
torch.distributed.destroy_process_group()
