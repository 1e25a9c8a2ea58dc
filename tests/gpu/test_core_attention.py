# SPDX-License-Identifier: Apache-2.0
"""Test the attention kernels of an accelerator against explicit masks: chunks of a sequence, packed documents."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hip_ops.runtime.launch import architecture
from tests.no_waiting import no_waiting
from zaya_plugin.model.block_attention import block_attention, takes_blocks
from zaya_plugin.model.core_attention import (
    AUTO_ORDER,
    FORMS,
    VERSIONS,
    attention_of,
    causal_attention,
    core_attention,
    document_attention,
    lower_right_mask,
)
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


def skip_without_package(backend, form="whole"):
    """Skip if the package of `backend` is not installed."""
    try:
        core_attention(backend, form, torch.bfloat16, 8, 2, 128, False).choice(torch.device("cuda", 0), check=False)
    except ValueError as missing:
        assert "failed its self-check" not in str(missing), missing
        pytest.skip(str(missing))


@pytest.mark.parametrize("rows, keys", [(256, 256), (256, 1024), (96, 224), (2, 34)])
@pytest.mark.parametrize("backend", VERSIONS)
def test_queries_at_the_end_of_the_keys(backend, rows, keys):
    skip_without_package(backend)
    attend = attention_of(backend)
    compare(lambda *qkv: attend(*qkv, SCALE), lower_right_mask(rows, keys, torch.device("cuda")), rows, keys)


@pytest.mark.parametrize("rows, keys", [(256, 256), (256, 1024), (96, 224)])
@pytest.mark.parametrize("backend", FORMS["window"])
def test_a_sliding_window(backend, rows, keys):
    skip_without_package(backend, "window")
    attend, mask = attention_of(backend), lower_right_mask(rows, keys, torch.device("cuda"), 100)
    compare(lambda *qkv: attend(*qkv, SCALE, 100), mask, rows, keys)


@pytest.mark.parametrize("backend", VERSIONS)
def test_the_check_before_the_first_use_accepts_it(backend):
    skip_without_package(backend)
    device = torch.device("cuda", torch.cuda.current_device())
    for form in ("whole", "chunks"):
        versions = core_attention(backend, form, torch.bfloat16, 8, 2, 128, False).running(device)
        # cuDNN computes chunks in blocks alone; a call that does not fit them is sdpa's, with a warning.
        others = "sdpa" if (form, backend) == ("chunks", "cudnn") else backend
        assert [version for version in versions if version != "blocks"] == [others]


def test_auto_takes_the_fastest_that_was_measured():
    device = torch.device("cuda", torch.cuda.current_device())
    (version,) = core_attention("auto", "whole", torch.bfloat16, 8, 2, 128, False).running(device)
    for faster in (*AUTO_ORDER.get(architecture(device), ()), "sdpa"):
        if faster == version:
            return
        with pytest.raises(pytest.skip.Exception):
            skip_without_package(faster)
    raise AssertionError(version)


@pytest.mark.parametrize("backend", [version for version in VERSIONS if version != "cudnn"])
def test_deterministic_gradients_have_the_same_bits(backend):
    skip_without_package(backend)
    inputs = [random(2048, 8, 1), random(2048, 2, 2), random(2048, 2, 3)]
    weights = torch.randn(2048, 2, 1024, generator=torch.Generator().manual_seed(4)).cuda().bfloat16()
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            torch.autograd.grad((attention_of(backend)(*inputs, SCALE) * weights).sum(), inputs) for _ in range(4)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=["flash", "cudnn"])
def test_a_whole_sequence_with_each_kernel_of_torch(kernel):
    query, key, value = (random(256, heads, seed).permute(1, 2, 0, 3) for seed, heads in enumerate((8, 2, 2)))
    usable = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.can_use_flash_attention,
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.can_use_cudnn_attention,
    }[kernel]
    if not usable(torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, True, True)):
        pytest.skip("torch has no such kernel for this device and shape")
    with sdpa_kernel(kernel):
        compare(lambda *qkv: causal_attention(*qkv, SCALE), lower_right_mask(256, 256, torch.device("cuda")), 256, 256)


@pytest.mark.parametrize(
    "shard", [ContextShard("zigzag", 2, 0), ContextShard("zigzag", 2, 1), ContextShard("contiguous", 2, 1)]
)
@pytest.mark.parametrize("rows", [1024, 100])
def test_chunks_in_blocks(shard, rows):
    if not takes_blocks(random(rows, 8, 1), random(2 * rows, 2, 2)):
        pytest.skip("torch would not choose cuDNN's attention")
    mask = torch.arange(2 * rows, device="cuda") <= shard.positions(2 * rows, "cuda")[:, None]
    compare(lambda *qkv: block_attention(*qkv, SCALE, shard.starts(rows)), mask, rows, 2 * rows)


def test_deterministic_algorithms_take_no_blocks():
    torch.use_deterministic_algorithms(True)
    try:
        assert not takes_blocks(random(64, 8, 1), random(128, 2, 2))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shard", [ContextShard(), ContextShard("zigzag", 2, 1), ContextShard("contiguous", 2, 1)])
def test_packed_documents(shard):
    tokens = torch.randint(0, 50, (2, 512), generator=torch.Generator().manual_seed(7)).cuda()
    packed = PackedDocuments.from_ends(tokens == 0, shard)
    assert packed.document_ids.max() > 4
    compare(lambda *qkv: document_attention(*qkv, SCALE, packed), packed.mask(False), 512 // shard.size, 512)


def test_other_documents_cannot_change_a_bit():
    tokens = torch.full((2, 384), 5).cuda()
    tokens[:, [99, 260]] = 0
    packed = PackedDocuments.from_ends(tokens == 0)
    inputs = [random(384, heads, seed).detach() for seed, heads in enumerate((8, 2, 2))]
    before = document_attention(*inputs, SCALE, packed)
    for x in inputs:
        x[100:261] = torch.randn_like(x[100:261])
    after = document_attention(*inputs, SCALE, packed)
    assert torch.equal(after[:100], before[:100]) and torch.equal(after[261:], before[261:])
    assert not torch.equal(after[100:261], before[100:261])


@pytest.mark.parametrize("moved", [1, 5, 200])
def test_the_bits_of_an_experts_row_do_not_depend_on_the_others(moved):
    from hip_ops import grouped_rows

    generator = torch.Generator().manual_seed(9)
    x = torch.randn(768, 256, generator=generator).cuda().bfloat16()
    matrices = torch.randn(3, 256, 512, generator=generator).cuda().bfloat16()
    borders = torch.tensor([256, 512, 768], dtype=torch.int32).cuda()
    before = grouped_rows(x, matrices, borders)
    # `moved` rows of the first expert go to the second: the others of both lie elsewhere, in groups of other sizes.
    after = grouped_rows(x, matrices, borders - torch.tensor([moved, 0, 0], dtype=torch.int32).cuda())
    assert torch.equal(after[: 256 - moved], before[: 256 - moved]) and torch.equal(after[256:], before[256:])


@pytest.fixture
def boundaries_in_turn():
    """Return a function that gives a zig-zag rank the boundaries of another batch at each call, computed on the
    device.
    """
    from zaya_plugin.hosts.adapter import micro_batch

    generator = torch.Generator().manual_seed(8)
    tokens = iter(torch.randint(0, 50, (4, 2, 512), generator=generator).cuda())

    def make() -> PackedDocuments:
        row = next(tokens)
        batch = dict(tokens=row, labels=row, position_ids=row, loss_mask=row.float())
        return micro_batch(batch, "cuda", ContextShard("zigzag", 2, 1), 0, True).packed

    return make


def test_boundaries_are_made_without_waiting_for_the_device(boundaries_in_turn):
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        torch.ones(1, device="cuda").item()
    with no_waiting():
        packed = boundaries_in_turn()
        shapes = packed.starts.shape, packed.positions.shape, packed.mask(False).shape
    assert shapes == ((2, 129, 2), (256, 2), (2, 1, 256, 512))


def test_the_block_mask_is_made_without_waiting_for_the_device(boundaries_in_turn):
    for _ in range(2):  # compiles, and compiles again should a second batch not fit the first one's assumptions
        assert boundaries_in_turn().mask(True) is not None
    with no_waiting():
        packed = boundaries_in_turn()
        mask = packed.mask(True)
    # Blocks of 128 rows and columns: this rank's rows are the second and third quarter of the sequence.
    blocks = packed.mask(False).unflatten(2, (2, 128)).unflatten(4, (4, 128)).any(dim=5).any(dim=3)
    assert torch.equal(mask.to_dense().bool(), blocks)
