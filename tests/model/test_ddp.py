# SPDX-License-Identifier: Apache-2.0
"""Megatron's DDP moves all weights into its own flat buffer; the experts must still be read in place there."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from zaya_plugin.model.experts import GroupedExperts, as_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_size", [None, 20_000])
def test_experts_are_one_block_in_the_ddp_buffer(make_model, batch, dtype, bucket_size):
    model = make_model(params_dtype=dtype, bf16=dtype == torch.bfloat16)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=bucket_size is not None,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=True,
    )
    ddp = DistributedDataParallel(model.config, options, model)
    if bucket_size is not None:
        assert sum(len(buffer.buckets) for buffer in ddp.buffers) > 1
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name]), name

    blocks = 0
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            for weight in (module.linear_fc1, module.linear_fc2):
                matrices = weight.matrices()
                block = as_block(matrices)
                assert block.data_ptr() == matrices[0].data_ptr(), "the experts were copied instead of read in place"
                buffer = {p.untyped_storage().data_ptr() for p in model.parameters()}
                assert block.untyped_storage().data_ptr() in buffer
                grads = [p.main_grad for p in matrices]
                step = grads[0].nbytes
                assert [g.data_ptr() for g in grads] == [grads[0].data_ptr() + i * step for i in range(len(grads))]
                blocks += 1
    assert blocks == 2 * model.config.num_layers

    ids, positions, labels = batch()
    ddp(ids, positions, None, labels=labels).mean().backward()
    gradients = [m.main_grad for e in model.modules() if isinstance(e, GroupedExperts) for m in e.linear_fc1.matrices()]
    assert sum(float(g.abs().sum()) for g in gradients) > 0
