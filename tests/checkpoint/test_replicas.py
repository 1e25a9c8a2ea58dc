# SPDX-License-Identifier: Apache-2.0
"""The hash by which ranks compare their tensors (NVIDIA/Megatron-LM#6920: they differed after a load). tests/distributed/muon_state.py compares ranks."""

import pytest
import torch

from zaya_plugin.checkpoint import replicas


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_every_bit_and_every_place_counts(dtype, monkeypatch):
    x = torch.randint(1, 100, (6, 7)).to(dtype)
    hashed = replicas.content_hash(x)
    assert hashed.dtype == torch.int64 and replicas.content_hash(x.clone()) == hashed
    words = x.view(-1).view(replicas.INTEGERS[x.element_size()])
    for place in range(words.numel()):
        for bit in range(7 if dtype == torch.uint8 else 8 * x.element_size() - 1):
            words[place] ^= 1 << bit
            assert replicas.content_hash(x) != hashed, (place, bit)
            words[place] ^= 1 << bit
    swapped = x.clone()
    swapped[0, 0], swapped[5, 6] = 3, 4
    other = swapped.clone()
    other[0, 0], other[5, 6] = 4, 3
    assert replicas.content_hash(swapped) != replicas.content_hash(other)
    monkeypatch.setattr(replicas, "PIECE", 5)
    assert replicas.content_hash(x) == hashed, "the pieces do not matter"


def test_zeros_of_both_signs_and_not_a_number_are_bits():
    values = [torch.tensor([v]) for v in (0.0, -0.0, float("nan"), float("inf"))]
    assert len({replicas.content_hash(v).item() for v in values}) == 4
    assert replicas.content_hash(torch.empty(0)) == 0
