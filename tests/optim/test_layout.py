# SPDX-License-Identifier: Apache-2.0
"""The buffer layout against its promises, on ZAYA1-base's real shapes (meta tensors) and on small ones."""

from types import SimpleNamespace

import pytest
import torch

from zaya_plugin.optim.layout import MAX_PADDING, compute_expert_block_layout

NO_PADDING = SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)


def _model(layers, hidden, ffn, experts, dense, vocab):
    """Parameters in forward order: embedding, then per layer dense parameters and two expert blocks."""
    params = [torch.nn.Parameter(torch.empty(vocab, hidden, device="meta"))]
    for layer in range(layers):
        params += [torch.nn.Parameter(torch.empty(numel, device="meta")) for numel in dense]
        for name, shape in (("fc1", (2 * ffn, hidden)), ("fc2", (hidden, ffn))):
            for index in reversed(range(experts)):
                p = torch.nn.Parameter(torch.empty(shape, device="meta"))
                p.expert_block = (f"{layer}.{name}", index)
                params.append(p)
    return params


BASE = dict(layers=40, hidden=2048, ffn=2048, experts=16, dense=(5_575_682, 660_992, 2048 * 10), vocab=262_272)
TINY = dict(layers=3, hidden=48, ffn=32, experts=16, dense=(1234, 77, 5), vocab=640)


@pytest.mark.parametrize("shape", [BASE, TINY], ids=["zaya1_base", "tiny"])
@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16, 64, 1024])
@pytest.mark.parametrize("bucket_size", [None, 40_000_000])
def test_blocks_are_unbroken_and_no_expert_is_cut(shape, shards, bucket_size):
    params = _model(**shape)
    layout = compute_expert_block_layout(params, bucket_size, shards, NO_PADDING)

    assert set(layout.param_index_map) == set(params)
    used = []
    blocks = {}
    for p, (start, end, bucket) in layout.param_index_map.items():
        low, high = layout.bucket_indices[bucket]
        assert end - start == p.numel() and low <= start and end <= high
        used.append((start, end))
        if hasattr(p, "expert_block"):
            blocks.setdefault(p.expert_block[0], {})[p.expert_block[1]] = start
            shard = (high - low) // shards
            assert (start - low) // shard == (end - 1 - low) // shard, "a shard border falls inside an expert"
    used.sort()
    assert all(a[1] <= b[0] for a, b in zip(used, used[1:], strict=False)), "parameters overlap"
    for name, starts in blocks.items():
        numel = next(p.numel() for p in params if getattr(p, "expert_block", (None,))[0] == name)
        assert [starts[i] for i in range(16)] == [starts[0] + i * numel for i in range(16)]

    # A checkpoint keeps a bucket's first numel_unpadded elements: every parameter has to lie in them.
    for bucket, (low, _) in enumerate(layout.bucket_indices):
        ends = [end for _, end, of in layout.param_index_map.values() if of == bucket]
        assert layout.per_bucket_numel_unpadded[bucket] == max(ends) - low

    # What DDP demands: buckets are neighbours, divisible, and follow the order of the backward pass.
    previous_end, order = 0, [layout.param_index_map[p][2] for p in reversed(params)]
    for low, high in layout.bucket_indices:
        assert low == previous_end and (high - low) % shards == 0
        previous_end = high
    assert order == sorted(order)


@pytest.mark.parametrize("shards, allowed", [(2, MAX_PADDING), (8, MAX_PADDING), (16, MAX_PADDING), (64, MAX_PADDING)])
def test_padding_of_the_full_model_is_small(shards, allowed):
    params = _model(**BASE)
    layout = compute_expert_block_layout(params, 40_000_000, shards, NO_PADDING)
    padding = layout.bucket_indices[-1][1] / sum(p.numel() for p in params) - 1
    assert padding <= allowed


def test_buckets_close_early_enough_to_overlap():
    layout = compute_expert_block_layout(_model(**BASE), 40_000_000, 8, NO_PADDING)
    assert len(layout.bucket_indices) >= 10  # 40 layers: gradients of the last ones travel while the first are computed


def test_shared_embedding_is_alone_in_its_bucket():
    params = _model(**TINY)
    params[0].shared_embedding = True
    layout = compute_expert_block_layout(params, None, 2, NO_PADDING)
    bucket = layout.param_index_map[params[0]][2]
    assert [p for p, place in layout.param_index_map.items() if place[2] == bucket] == [params[0]]


def _stock_layout():
    """Megatron's own function, from a second copy of its module: the first may be patched in this process."""
    import importlib.util

    spec = importlib.util.find_spec("megatron.core.optimizer.distrib_optimizer")
    copy = importlib.util.spec_from_file_location("megatron.core.optimizer.distrib_optimizer_copy", spec.origin)
    module = importlib.util.module_from_spec(copy)
    copy.loader.exec_module(module)
    return module.DistributedOptimizer._compute_per_buffer_param_layout


@pytest.mark.parametrize("bucket_size", [None, 1500])
@pytest.mark.parametrize("shards", [1, 4])
def test_without_experts_it_places_as_megatron_does(shards, bucket_size):
    params = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in (1000, 70, 3, 999, 1280)]
    ours = compute_expert_block_layout(params, bucket_size, shards, NO_PADDING)
    theirs = _stock_layout()(params, bucket_size, shards, NO_PADDING)
    assert ours == theirs
