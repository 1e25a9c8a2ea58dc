# SPDX-License-Identifier: Apache-2.0
"""One rank of tests/distributed/test_older_host.py, under torchrun: five Muon steps on made-up gradients; rank 0 writes the weights.

Weights and gradients follow from the parameters' names, so that every release of Megatron starts and steps alike.
"""

import sys
import zlib

import torch

from zaya_plugin import patches

patches.apply_torch()

import megatron.core  # noqa: E402

if not megatron.core.__version__.startswith("0.16"):
    patches.apply()  # our buffer layout, for which older releases have no seam

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from zaya_plugin.model.build import build_zaya_model  # noqa: E402
from zaya_plugin.model.config import ZayaConfig  # noqa: E402
from zaya_plugin.optim.build import muon_factory, tag_parameters  # noqa: E402
from zaya_plugin.optim.muon import MuonSettings  # noqa: E402


def main(version: str, path: str) -> None:
    assert megatron.core.__version__ == version, megatron.core.__version__
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    config = ZayaConfig(
        num_layers=3, hidden_size=64, num_attention_heads=8, num_query_groups=2, kv_channels=8, ffn_hidden_size=48,
        moe_ffn_hidden_size=48, num_moe_experts=8, router_hidden_size=16, use_cpu_initialization=True, bf16=True,
        params_dtype=torch.bfloat16,
    )
    model = build_zaya_model(config, vocab_size=192, max_sequence_length=32).bfloat16()
    tag_parameters(model)
    for name, p in model.named_parameters():
        p.data.copy_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))))
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=60_000, grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    ddp = DistributedDataParallel(config, options, model)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=True, clip_grad=0.0,
    )
    optimizer = muon_factory(get_megatron_optimizer, MuonSettings(momentum_dtype="bf16"), skip_non_finite=True)(settings, [ddp])
    for number in range(5):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        for _, p in sorted(ddp.module.named_parameters()):
            p.main_grad.copy_(torch.randn(p.shape, generator=generator).bfloat16().float())
        ddp.finish_grad_sync()
        assert optimizer.step()[0]
    cut = torch.tensor(sum(hasattr(main, "muon_cut") for inner in optimizer.chained_optimizers for _, main in inner._pairs()))
    torch.distributed.all_reduce(cut)
    if torch.distributed.get_rank() == 0:
        torch.save({"cut": cut.item(), "weights": {n: p.detach().clone() for n, p in ddp.module.named_parameters()}}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
