# SPDX-License-Identifier: Apache-2.0
"""Training from buffers that are registered with NCCL, parameters gathered by copy engines: the same losses, and runs that end by themselves.

As many ranks as there are devices, four at most; alone there is nothing to gather, and what is left is memory, registration and its end.
"""

import pytest
import torch

STEPS = 12
RANKS = min(torch.cuda.device_count(), 4)


@pytest.mark.parametrize("graphs", ["none", "full_iteration"])
def test_losses_are_the_same_from_registered_buffers(demo, tmp_path, graphs):
    recipe = [
        "cluster=gpu", "optim=muon", f"cluster.graphs={graphs}", f"nproc={RANKS}", f"cluster.gpus_per_node={RANKS}", f"exit_interval={STEPS}",
        "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true", "parallel.ddp_bucket_size=200000",
    ]  # fmt: skip
    usual = demo(tmp_path / "usual", *recipe)
    registered = demo(tmp_path / "registered", *recipe, "parallel.nccl_ub=true")
    assert list(usual) == list(registered) == list(range(1, STEPS + 1))
    # Gradients are summed in another order, and the demo doubles a difference every few steps.
    assert registered[1] == pytest.approx(usual[1], rel=1e-5)
    assert registered == pytest.approx(usual, rel=5e-3)
    log = (tmp_path / "registered" / "logs" / "rank0.log").read_text()
    assert "Failed to register" not in log and "Failed in symmetric registration" not in log
