# SPDX-License-Identifier: Apache-2.0
"""Train published weights for three steps and hand each step's weights to a server, here a transformers model, without
a file: `python examples/refit_transformers.py exports/mine`. The server chooses the experts, and training replays them.
"""

import sys

from zaya_plugin import quiet_hosts

quiet_hosts()  # before Megatron is imported
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from transformers import AutoModelForCausalLM

from zaya_plugin import apply_patches, muon_optimizer, stream_hf, zaya_from_hf

apply_patches()
folder = sys.argv[1]
server = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
chosen = []  # of the server's routers, layer by layer: int64 [b * s, 1]
for layer in server.model.layers:
    layer.mlp.gate.register_forward_hook(lambda gate, _, out: chosen.append((out[2], out[1] == 0)))
model = zaya_from_hf(folder, params_dtype=torch.float32, moe_enable_routing_replay=True)
skip = model.config.num_moe_experts
model = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
optimizer = muon_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), [model])
weights, sent = server.state_dict(), {}


def update(bucket: dict[str, torch.Tensor]) -> None:
    """Copy one bucket of weights into the server."""
    for name, values in bucket.items():
        weights[name].copy_(values)


tokens = torch.arange(4 * 33).view(4, 33) % 97 + 1  # what an RL framework would have sampled from the server
positions = torch.arange(32).expand(4, -1)
for step in range(1, 4):
    chosen.clear()
    with torch.no_grad():
        logits = server(tokens[:, :-1]).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    routes = [ids.masked_fill(skipped, skip).view(4, 32).t().reshape(-1, 1) for ids, skipped in chosen]
    RouterReplay.set_replay_data(routes)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    model.zero_grad_buffer()
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([model])
    RouterReplay.clear_global_indices()  # set_replay_data also adds to a list that REPLAY_BACKWARD alone would empty
    optimizer.step()
    stream_hf(model, update, sent=sent)
    print(f"step {step}: loss {loss.item():.5f}, of the server {theirs.item():.5f}", flush=True)
torch.distributed.destroy_process_group()
