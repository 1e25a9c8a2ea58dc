# SPDX-License-Identifier: Apache-2.0
"""The rows that a context-parallel rank holds."""

import pytest
import torch

from zaya_plugin import patches
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.halo import Halo

patches.apply()


def test_positions_in_both_orders():
    assert ContextShard("zigzag", 2, 0).positions(8).tolist() == [0, 1, 6, 7]
    assert ContextShard("zigzag", 2, 1).positions(8).tolist() == [2, 3, 4, 5]
    assert ContextShard("contiguous", 2, 1).positions(8).tolist() == [4, 5, 6, 7]
    assert ContextShard("zigzag", 1, 0).positions(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_zigzag_is_megatrons_order(size):
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    class Group:
        def __init__(self, rank):
            self.rank, self.size = lambda: rank, lambda: size

    rows = torch.arange(12.0 * size).view(-1, 1, 1, 1)
    for rank in range(size):
        theirs = get_pos_emb_on_this_cp_rank(rows, 0, Group(rank))
        assert torch.equal(ContextShard("zigzag", size, rank).take(rows, 0), theirs)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [1, 3, 4, 11, 100])
def test_a_halo_has_the_rows_of_the_window(order, window):
    """The pieces that four ranks send each other by their plans: each chunk of 4 rows gets `window` rows before it."""
    size, rows = 4, 4
    halos = [Halo(ContextShard(order, size, rank), rows, window) for rank in range(size)]
    length = rows * halos[0].shard.total_chunks
    held = [halo.shard.take(torch.arange(length), 0) for halo in halos]
    sent = []
    for halo, x in zip(halos, held, strict=True):
        counts, _, parts, _ = halo.plan
        sent.append(torch.cat([x[:0], *(x[part] for part in parts)]).split(counts))
    for rank, (halo, x) in enumerate(zip(halos, held, strict=True)):
        _, received, _, chunks = halo.plan
        arrived = [of_sender[rank] for of_sender in sent]
        assert [len(part) for part in arrived] == received
        both = torch.cat((x, *arrived))
        for chunk, parts in zip(halo.shard.chunks, chunks, strict=True):
            got = torch.cat([both[part] for part in parts]).tolist()
            assert got == list(range(max(chunk * rows - window, 0), (chunk + 1) * rows))
        most = {"contiguous": {1: 1, 3: 3, 4: 4, 11: 11, 100: 12}, "zigzag": {1: 2, 3: 6, 4: 8}}[order].get(window)
        if most is not None:  # rows that a rank in the middle receives; gathering: 12 or 24
            assert max(sum(each.received) for each in halos) == most
        assert halo.is_shorter == (window < 100)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_join_undoes_take_and_neighbours_are_neighbours(order, size):
    x = torch.arange(24 * 2).view(24, 2)
    shards = [ContextShard(order, size, rank) for rank in range(size)]
    parts = [shard.take(x, 0) for shard in shards]
    assert torch.equal(shards[0].join(parts, 0), x)
    chunks = torch.cat(parts).chunk(shards[0].total_chunks)
    for shard, part in zip(shards, parts, strict=True):
        own = part.chunk(len(shard.chunks))
        for chunk, previous, following in zip(own, shard.previous_slots, shard.next_slots, strict=True):
            before = chunks[previous][-1, 0].item() if previous is not None else -2
            behind = chunks[following][0, 0].item() if following is not None else 48
            assert (chunk[0, 0].item() - 2, chunk[-1, 0].item() + 2) == (before, behind)
        assert [chunk[0, 0].item() // 2 for chunk in own] == list(shard.starts(len(part)))


def test_zigzag_shares_the_causal_triangle_evenly():
    shards = [ContextShard("zigzag", 4, rank) for rank in range(4)]
    assert len({(shard.positions(64) + 1).sum().item() for shard in shards}) == 1


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(
        ValueError, match=r"context_parallel_size=4: 20 rows .* \(zigzag order\)\. Allowed: a multiple of 8 rows"
    ):
        ContextShard("zigzag", 4, 0).take(torch.zeros(2, 20), 1)
    with pytest.raises(ValueError, match="context_parallel_order=ring: not a valid order. Allowed: zigzag, contiguous"):
        ContextShard("ring", 2, 0)
