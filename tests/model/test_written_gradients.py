# SPDX-License-Identifier: Apache-2.0
"""Gradients of the experts that a step's first micro-batch writes (zaya_plugin/optim/gradient_buffers.py), in a
model under Megatron's DDP.
"""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from zaya_plugin.model import experts
from zaya_plugin.optim.gradient_buffers import (
    ZeroOtherGradients,
    _separates_micro_batches,
    blocks_that_write,
    skip_zeroing_experts,
)
from zaya_plugin.optim.parameter_role import ExpertBlock, ParameterRole


def wrapped(make_model, overlap=False, **overrides):
    model = make_model(**overrides)
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=overlap,
        overlap_grad_reduce=overlap,
        bucket_size=20_000 if overlap else None,
        grad_reduce_in_fp32=True,
    )
    ddp = DistributedDataParallel(model.config, options, model)
    ddp.train()
    return ddp


def buffers(ddp):
    return ddp.buffers + ddp.expert_parallel_buffers


def step(ddp, batch, micro_batches) -> dict[str, torch.Tensor]:
    """Main gradients of a step."""
    ddp.zero_grad_buffer()
    ids, positions, labels = batch()
    with ddp.no_sync():
        for index in range(micro_batches - 1):
            ddp((ids + index) % 64, positions, None, labels=labels).mean().backward()
    ddp(ids, positions, None, labels=labels).mean().backward()
    ddp.finish_grad_sync()
    return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_give_the_same_gradients_whatever_lay_in_the_buffers(
    make_model, batch, micro_batches, overlap, recompute
):
    overrides = (
        {}
        if recompute is None
        else dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    )
    plain, spared = (wrapped(make_model, overlap, **overrides) for _ in range(2))
    skip_zeroing_experts([spared])
    assert all(isinstance(buffer.reset, ZeroOtherGradients) for buffer in spared.expert_parallel_buffers)
    for _ in range(2):  # the second on what the first left
        wanted = step(plain, batch, micro_batches)
        for buffer in buffers(spared):
            buffer.grad_data.fill_(float("nan"))
        found = step(spared, batch, micro_batches)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for a, b in zip(buffers(plain), buffers(spared), strict=True):
        assert torch.equal(a.grad_data, b.grad_data), "the padding is zero too"


def test_a_model_without_the_experts_blocks_is_reset_as_megatron_does(make_model):
    ddp = wrapped(make_model)
    before = [buffer.reset for buffer in ddp.buffers]
    skip_zeroing_experts([ddp, object()])
    assert [buffer.reset for buffer in ddp.buffers] == before


@pytest.mark.parametrize("graphs", ["local", "transformer_engine"])
def test_graphs_of_single_layers_cannot_tell_the_first_micro_batch(make_model, graphs):
    ddp = wrapped(make_model)
    ddp.config.cuda_graph_impl = graphs
    skip_zeroing_experts([ddp])
    assert not any(isinstance(buffer.reset, ZeroOtherGradients) for buffer in buffers(ddp))


@pytest.mark.parametrize("switch", [None, "enable_cuda_graph", "external_cuda_graph"])
def test_switches_of_older_hosts_count_too(switch):
    config = SimpleNamespace(**({switch: True} if switch else {}))
    assert _separates_micro_batches(config) is (switch is None)


def test_only_whole_blocks_in_order_without_gaps_write():
    def block(places, together=3, indices=None):
        params = [torch.nn.Parameter(torch.zeros(1)) for _ in places]
        members = ExpertBlock(1, together)
        for param, index in zip(params, indices or range(len(places)), strict=True):
            param.zaya_role = ParameterRole(members, index)
        return blocks_that_write({p: (*place, 0) for p, place in zip(params, places, strict=True)})

    assert [found[1:] for found in block([(8, 10), (10, 12), (12, 14)])] == [(8, 14)]
    assert block([(8, 10), (10, 12)]) == []  # one is frozen, or elsewhere
    assert block([(8, 10), (11, 13), (13, 15)]) == []
    assert block([(12, 14), (10, 12), (8, 10)]) == []
    assert blocks_that_write({torch.nn.Parameter(torch.zeros(1)): (0, 1, 0)}) == []


def test_a_block_that_writes_first_must_lie_in_one_piece():
    matrices = [torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]
    matrices[0].zaya_role = ParameterRole(ExpertBlock(1, 2, gradient_is_unwritten=True))
    with pytest.raises(AssertionError, match="lie apart"):
        experts.weight_gradients(
            matrices,
            torch.zeros(2, 2, 3),
            torch.zeros(4, 2),
            torch.zeros(4, 3),
            torch.tensor([2, 4], dtype=torch.int32),
        )
