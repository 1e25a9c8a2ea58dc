# SPDX-License-Identifier: Apache-2.0
"""The attention kernels of an accelerator against masks written out: chunks of a sequence, packed documents."""

import pytest
import torch

from zaya_plugin.model.core_attention import BACKENDS, PACKAGES, causal_backend, document_attention, lower_right_mask
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.packed_documents import PackedDocuments

SCALE = 128**-0.5


def random(rows: int, heads: int, seed: int, b: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, b, heads, 128, generator=generator).cuda().bfloat16().requires_grad_()


def written_out(query, key, value, mask):
    """softmax with `mask` in fp64; [s, b, n, d] and [t, b, g, d] -> [s, b, n * d]."""
    repeat = query.shape[2] // key.shape[2]
    key, value = (x.double().repeat_interleave(repeat, dim=2) for x in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query.double(), key) * SCALE
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", weights, value).flatten(2)


def compare(attend, mask, rows, keys):
    inputs = [random(rows, 8, 1), random(keys, 2, 2), random(keys, 2, 3)]
    weights = torch.randn(rows, 2, 1024, generator=torch.Generator().manual_seed(4)).cuda()
    got = attend(*inputs)
    grads = torch.autograd.grad((got.float() * weights).sum(), inputs)
    expected = written_out(*inputs, mask)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    for a, b in zip((got, *grads), (expected, *expected_grads), strict=True):
        assert (a.double() - b).norm() / b.norm() < 1e-2


@pytest.mark.parametrize("rows, keys", [(256, 256), (256, 1024), (96, 224), (2, 34)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_at_the_end_of_the_keys(backend, rows, keys):
    if backend in PACKAGES:
        pytest.importorskip(PACKAGES[backend])
    attend = causal_backend(backend)
    compare(lambda *qkv: attend(*qkv, SCALE), lower_right_mask(rows, keys, torch.device("cuda")), rows, keys)


@pytest.mark.parametrize("shard", [ContextShard(), ContextShard("zigzag", 2, 1), ContextShard("contiguous", 2, 1)])
def test_packed_documents(shard):
    tokens = torch.randint(0, 50, (2, 512), generator=torch.Generator().manual_seed(7)).cuda()
    packed = PackedDocuments.from_tokens(tokens, 0, shard)
    assert packed.document_ids.max() > 4
    compare(lambda *qkv: document_attention(*qkv, SCALE, packed), packed.dense_mask, 512 // shard.size, 512)


def test_other_documents_cannot_change_a_bit():
    tokens = torch.full((2, 384), 5).cuda()
    tokens[:, [99, 260]] = 0
    packed = PackedDocuments.from_tokens(tokens, 0)
    inputs = [random(384, heads, seed).detach() for seed, heads in enumerate((8, 2, 2))]
    before = document_attention(*inputs, SCALE, packed)
    for x in inputs:
        x[100:261] = torch.randn_like(x[100:261])
    after = document_attention(*inputs, SCALE, packed)
    assert torch.equal(after[:100], before[:100]) and torch.equal(after[261:], before[261:])
    assert not torch.equal(after[100:261], before[100:261])


@pytest.mark.parametrize("moved", [1, 5, 200])
def test_the_bits_of_an_experts_row_do_not_depend_on_the_others(moved):
    from zaya_plugin.model.grouped_gemm import grouped_rows

    generator = torch.Generator().manual_seed(9)
    x = torch.randn(768, 256, generator=generator).cuda().bfloat16()
    matrices = torch.randn(3, 256, 512, generator=generator).cuda().bfloat16()
    borders = torch.tensor([256, 512, 768], dtype=torch.int32).cuda()
    before = grouped_rows(x, matrices, borders)
    # `moved` rows of the first expert go to the second: the others of both lie elsewhere, in groups of other sizes.
    after = grouped_rows(x, matrices, borders - torch.tensor([moved, 0, 0], dtype=torch.int32).cuda())
    assert torch.equal(after[: 256 - moved], before[: 256 - moved]) and torch.equal(after[256:], before[256:])


def test_boundaries_are_made_without_waiting_for_the_device():
    from zaya_plugin.training.batches import micro_batch

    tokens = torch.randint(0, 50, (2, 512)).cuda()
    batch = dict(tokens=tokens, labels=tokens, position_ids=tokens, loss_mask=tokens.float())
    micro_batch(batch, "cuda", ContextShard("zigzag", 2, 1), 0, True).packed.block_mask  # noqa: B018, compiles the mask
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        part = micro_batch(batch, "cuda", ContextShard("zigzag", 2, 1), 0, True)
        assert part.packed.starts.shape == (2, 129, 2) and part.packed.block_mask is not None
    finally:
        torch.cuda.set_sync_debug_mode(mode)
