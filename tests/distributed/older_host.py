# SPDX-License-Identifier: Apache-2.0
"""One rank of tests/distributed/test_older_host.py, under torchrun: five Muon steps on made-up gradients; rank 0 writes
the weights.

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

from tests.distributed.muon_model import build_model, with_optimizer  # noqa: E402


def main(version: str, path: str) -> None:
    # behind it stands the checkout's commit, which may move
    found, wanted = (v.partition("+")[0] for v in (megatron.core.__version__, version))
    assert found == wanted, found
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model = build_model()
    for name, p in model.named_parameters():
        p.data.copy_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))))
    ddp, optimizer = with_optimizer(model)
    for number in range(5):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        for _, p in sorted(ddp.module.named_parameters()):
            p.main_grad.copy_(torch.randn(p.shape, generator=generator).bfloat16().float())
        ddp.finish_grad_sync()
        assert optimizer.step()[0]
    exchanges = [part.exchange for part in optimizer.chained_optimizers]
    cut = torch.tensor(sum(len(exchange.cut) for exchange in exchanges if exchange is not None))
    torch.distributed.all_reduce(cut)
    if torch.distributed.get_rank() == 0:
        torch.save(
            {"cut": cut.item(), "weights": {n: p.detach().clone() for n, p in ddp.module.named_parameters()}}, path
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
