# SPDX-License-Identifier: Apache-2.0
"""Documents packed into one sequence: each is computed as if it were alone, and none sees a change in another."""

import pytest
import torch

from zaya_plugin.parallel.packed_documents import PackedDocuments

EOD = 0
LENGTHS = (7, 1, 2, 12, 3, 15)  # tokens of the documents of one sequence, the eod token included
RECOMPUTE = {
    "nothing": {},
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe"]),
}


def document(length: int, seed: int) -> torch.Tensor:
    """int64 [length], the last one the eod token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat((torch.randint(1, 64, (length - 1,), generator=generator), torch.tensor([EOD])))


@pytest.fixture
def lively(make_model):
    """A small model whose tokens differ by more than what all of them get added; all classes are in use."""

    def make(**overrides):
        model = make_model(**overrides).train()
        with torch.no_grad():
            model.embedding.word_embeddings.weight.mul_(10.0)
            for layer in model.decoder.layers:
                layer.mlp.router.balancing_biases.zero_()
                layer.mlp.router.fc1.bias.zero_()
                layer.mlp.router.fc2.bias.zero_()
        return model

    return make


def logits(model, tokens: torch.Tensor, packed=None) -> torch.Tensor:
    """[b, s, v] for tokens [b, s]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None, packed_seq_params=packed)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_packed_sequence_equals_its_documents_alone(lively, recompute, reset):
    model = lively(**RECOMPUTE[recompute])
    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    other = torch.cat([document(length, 50 + length) for length in (20, 20)])  # a second sequence in the micro-batch
    tokens = torch.stack((torch.cat(documents), other))
    weights = torch.randn(1, 64, generator=torch.Generator().manual_seed(3))

    alone = []
    for tokens_alone in (*documents, other[:20], other[20:]):
        out = logits(model, tokens_alone.unsqueeze(0))
        (out * weights).sum().backward()
        alone.append(out[0].detach())
    expected = gradients(model)

    packed = logits(model, tokens, PackedDocuments.from_ends(tokens == EOD, reset_positions=reset))
    (packed * weights).sum().backward()
    together = torch.cat(alone)
    assert together.std() > 0.5
    assert (packed.detach().flatten(0, 1) - together).norm() / together.norm() < 1e-5
    assert (packed.detach().flatten(0, 1) - together).abs().max() < 1e-5 * together.abs().max()
    for name, gradient in gradients(model).items():
        scale = expected[name].norm()
        assert (gradient - expected[name]).norm() <= 1e-5 * scale, name


def test_without_boundaries_documents_do_see_each_other(lively):
    model = lively()
    tokens = torch.cat([document(12, 1), document(12, 2)]).unsqueeze(0)
    kept_apart = logits(model, tokens, PackedDocuments.from_ends(tokens == EOD))
    mixed = logits(model, tokens)
    assert torch.equal(kept_apart[:, :12], mixed[:, :12])
    assert (kept_apart[:, 12:] - mixed[:, 12:]).abs().mean() > 0.1


@pytest.mark.parametrize("reset", [False, True])
def test_changing_one_document_leaves_every_other_one_bit_identical(lively, reset):
    model = lively()
    ids = []
    for layer in model.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda module, inputs, output: ids.append(output[1].clone()))

    def run(documents):
        ids.clear()
        tokens = torch.cat(documents).unsqueeze(0)
        out = logits(model, tokens, PackedDocuments.from_ends(tokens == EOD, reset_positions=reset))
        return out[0].detach().split(LENGTHS), torch.stack(ids)[:, :, 0].split(LENGTHS, dim=1)

    documents = [document(length, seed) for seed, length in enumerate(LENGTHS)]
    before, routed_before = run(documents)
    moved = False
    for changed in range(len(LENGTHS)):
        if LENGTHS[changed] == 1:  # nothing but the eod token
            continue
        edited = list(documents)
        edited[changed] = document(LENGTHS[changed], 100 + changed)
        after, routed = run(edited)
        moved |= not torch.equal(routed[changed], routed_before[changed])
        for i in range(len(LENGTHS)):
            if i != changed:
                assert torch.equal(after[i], before[i]), f"document {i} saw a change in document {changed}"
            else:
                assert not torch.equal(after[i], before[i])
    assert moved, "no token changed its expert, so the experts' groups never had another size"


def test_boundaries_positions_and_masks_of_a_batch():
    tokens = torch.tensor([[5, EOD, 6, 7, EOD, EOD, 8], [5, 5, 5, 5, 5, 5, EOD]])
    packed = PackedDocuments.from_ends(tokens == EOD)
    assert packed.document_ids.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0] * 7]
    assert packed.positions.t().tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert packed.starts.shape == (1, 8, 2)
    assert packed.starts[0, :, 0].tolist() == [True, True, False, True, False, False, True, True]
    assert packed.starts[0, :, 1].tolist() == [True, True, False, False, False, False, False, False]
    mask = packed.mask(False)[:, 0]
    assert mask[0].sum(1).tolist() == [1, 2, 1, 2, 3, 1, 1] and mask[1].sum(1).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert not mask[0, 2, 1] and not mask[0, 2, 3] and mask[0, 4, 2]


def test_the_block_mask_says_what_the_dense_mask_says():
    from torch.nn.attention.flex_attention import create_mask, flex_attention

    from zaya_plugin.model.core_attention import document_attention

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 40, (2, 300), generator=generator)
    packed = PackedDocuments.from_ends(tokens == EOD)
    assert packed.document_ids.max() > 3
    made = create_mask(packed.mask(True).mask_mod, 2, 1, 300, 300, device="cpu")
    assert torch.equal(made, packed.mask(False))
    query, key, value = (torch.randn(300, 2, heads, 16, generator=generator) for heads in (4, 2, 2))
    expected = document_attention(query, key, value, 0.25, packed)
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    flex = flex_attention(query, key, value, block_mask=packed.mask(True), scale=0.25, enable_gqa=True)
    assert (flex.permute(2, 0, 1, 3).flatten(2) - expected).abs().max() < 1e-5


def test_a_part_of_the_mask_with_a_window():
    from torch.nn.attention.flex_attention import create_mask

    tokens = torch.randint(0, 9, (2, 40), generator=torch.Generator().manual_seed(3))
    packed = PackedDocuments.from_ends(tokens == EOD)
    distance = torch.arange(40).unsqueeze(1) - torch.arange(40)
    expected = packed.mask(False) & (distance <= 4)
    assert expected.sum() < packed.mask(False).sum()
    assert torch.equal(packed.mask(False, None, 4), expected)
    part = packed.mask(False, (20, 30, 16), 4)
    assert torch.equal(part, expected[:, :, 20:30, 16:30]) and packed.mask(False, (20, 30, 16), 4) is part
    blocks = packed.mask(True, (20, 30, 16), 4)
    assert torch.equal(create_mask(blocks.mask_mod, 2, 1, 10, 14, device="cpu"), part)


def test_other_packed_sequences_are_refused(lively):
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens = document(8, 1).unsqueeze(0)
    with pytest.raises(
        ValueError,
        match="packed_seq_params=PackedSeqParams: the convolutions would mix documents. Allowed: .*PackedDocuments",
    ):
        logits(lively(), tokens, PackedSeqParams(qkv_format="sbhd", max_seqlen_q=8, max_seqlen_kv=8))
