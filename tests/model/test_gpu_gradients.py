# SPDX-License-Identifier: Apache-2.0
"""Gradients that skip autograd's accumulation must be those that take it, but for its rounding to bf16."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from hip_ops.runtime import main_grad
from zaya_plugin.model import experts, gpt_model, parameters

pytestmark = pytest.mark.gpu


def _main_grads(make_model, batch, overlap: bool) -> dict[str, torch.Tensor]:
    model = make_model(
        hidden_size=256,
        kv_channels=32,
        moe_ffn_hidden_size=128,
        ffn_hidden_size=128,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
    ).cuda()
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=200_000
    )
    ddp = DistributedDataParallel(model.config, options, model)
    ddp.zero_grad_buffer()
    for step in range(2):
        with ddp.no_sync() if step == 0 else torch.enable_grad():
            ids, positions, labels = (x.cuda() for x in batch(2, 64))
            ddp(ids.roll(step, 1), positions, None, labels=labels).mean().backward()
    ddp.finish_grad_sync()
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("overlap", [False, True])
def test_main_gradients_are_autograds_without_its_rounding(make_model, batch, monkeypatch, overlap):
    torch._dynamo.reset()  # else its limit of versions a function may be reached between the two runs
    ours = _main_grads(make_model, batch, overlap)
    for module in (main_grad, experts, parameters, gpt_model):
        monkeypatch.setattr(module, "main_grad_of", lambda weight: None)
    plain = _main_grads(make_model, batch, overlap)
    for name in plain:
        assert (ours[name] - plain[name]).norm() <= 4e-3 * plain[name].norm(), name
    assert sum(float(g.abs().sum()) for name, g in ours.items() if "linear_fc1" in name) > 0
