# SPDX-License-Identifier: Apache-2.0
"""Memory and traffic of layouts: hand-counted figures of ZAYA1-base. tests/distributed counts what is really sent."""

from dataclasses import replace

import pytest

from tests.plan.shapes import ZAYA1_BASE
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.halo import halo
from zaya_plugin.plan.memory import Optimizer, layer_tensors, memory_plan, optimizer_bytes
from zaya_plugin.plan.parallelism import Batch, ParallelSizes, local_parameters, sent_bytes

ADAMW = Optimizer(muon=False)


def adamw_bytes(sizes: ParallelSizes) -> float:
    """Return the bytes of AdamW's state on a rank, with fp32 weights in addition to bf16 ones."""
    return optimizer_bytes(ZAYA1_BASE, sizes, ADAMW, 2)


def test_one_rank_holds_the_model():
    assert sum(local_parameters(ZAYA1_BASE, ParallelSizes()).values()) == 8_840_488_784
    plan = memory_plan(ZAYA1_BASE, ParallelSizes(), Batch(4096), optimizer=ADAMW).components
    # 2 + 4 + 12 bytes: bf16, fp32 gradient, fp32 weight and two moments
    assert plan["weights"] + plan["gradients"] + plan["optimizer"] == 18 * 8_840_488_784
    assert adamw_bytes(ParallelSizes(data=8)) == 12 * 8_840_488_784 / 8
    assert adamw_bytes(ParallelSizes(data=8, distributed_optimizer=False)) == 12 * 8_840_488_784


def test_experts_and_heads_are_dealt_out():
    experts = 40 * 16 * 3 * 2048 * 2048
    assert local_parameters(ZAYA1_BASE, ParallelSizes(data=8, expert=8)) == {
        "experts": experts // 8,
        "rest": 8_840_488_784 - experts,
    }
    tensor = local_parameters(ZAYA1_BASE, ParallelSizes(tensor=2))
    cut = 262_272 * 2048 + 40 * 2048 * (1024 + 256 + 1024)  # embedding; queries, keys and output of every layer
    assert tensor == {"experts": experts, "rest": 8_840_488_784 - experts - cut // 2}
    # Every replica of an expert shares its optimizer state: 8 ranks, 2 of which hold an expert.
    expected = 12 * (experts / 4 / 2 + (8_840_488_784 - experts) / 8)
    assert adamw_bytes(ParallelSizes(data=8, expert=4)) == pytest.approx(expected)


@pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks, window", [(8, 4096), (8, 1000), (4, 30_000), (2, 100)])
def test_a_window_sends_what_the_exchange_of_its_halo_sends(ranks, window, zigzag):
    """In half of the layers the rows that the rank with most of them receives, or all ranks' where these are fewer."""
    windowed = replace(ZAYA1_BASE, sliding_window=window, window_attn_skip_freq=2)
    layout, batch = ParallelSizes(context=ranks, zigzag=zigzag), Batch(32_768)
    order, rows = ("zigzag", 32_768 // ranks // 2) if zigzag else ("contiguous", 32_768 // ranks)
    exchanges = [halo(ContextShard(order, ranks, rank), rows, window) for rank in range(ranks)]
    most, gathered = max(sum(each.received) for each in exchanges), (ranks - 1) * 32_768 // ranks
    expected = (20 * gathered + 20 * (most if exchanges[0].is_shorter else gathered)) * 512 * 2 * 2
    assert sent_bytes(windowed, layout, batch)["key_values"] == pytest.approx(expected, rel=1e-12)
    kept = layer_tensors(windowed, layout, batch)
    assert kept["keys of all context-parallel ranks"] == kept["values"]
    assert kept["values"] == pytest.approx(256 * 2 * (expected / 2048 / 40 + 32_768 / ranks))


def test_keys_and_values_are_512_numbers_a_token_and_layer():
    sent = sent_bytes(ZAYA1_BASE, ParallelSizes(context=2), Batch(32_768))
    # 16,384 tokens to the one other rank, and their gradients back, in bf16.
    assert sent["key_values"] == 2 * 40 * 16_384 * 512 * 2
    # Two chunks; two steps of 1280 channels and one of the 128 delayed values.
    assert sent["boundary"] == 2 * 40 * 2 * (2 * 1280 + 128) * 2
    assert sent["boundary"] < 7e-4 * sent["key_values"]
    assert (
        sent_bytes(ZAYA1_BASE, ParallelSizes(context=2, zigzag=False), Batch(32_768))["boundary"]
        == sent["boundary"] / 2
    )
    assert sent["dispatch"] == sent["activations"] == sent["stages"] == 0


def test_what_the_other_layouts_send():
    batch = Batch(4096, micro_batches=4)
    token = 4 * 4096 * 2048 * 2  # bytes of all normed rows of a step in bf16
    # There and back, and the gradients: half of the rows leave a rank.
    assert sent_bytes(ZAYA1_BASE, ParallelSizes(data=2, expert=2), batch)["dispatch"] == 40 * 4 * token / 2
    # An all-gather of all rows and a reduce-scatter, over the expert-parallel ranks alone: experts are never cut.
    gathered = ParallelSizes(data=2, tensor=2, expert=4, allgather_dispatcher=True)
    assert sent_bytes(ZAYA1_BASE, gathered, batch)["dispatch"] == 40 * 4 * 3 * token / 2
    assert sent_bytes(ZAYA1_BASE, ParallelSizes(tensor=2), batch)["activations"] == (40 * 4 + 4) * token / 2
    assert (
        sent_bytes(ZAYA1_BASE, ParallelSizes(pipeline=2), batch)["tied"] == 4 * 262_272 * 2048
    )  # half of an all-reduce twice
    assert sent_bytes(ZAYA1_BASE, ParallelSizes(pipeline=2), batch)["stages"] == 2 * 4 * 4096 * (2048 + 256) * 4
    assert (
        sent_bytes(ZAYA1_BASE, ParallelSizes(pipeline=2, virtual=4), batch)["stages"]
        == 4 * 2 * 4 * 4096 * (2048 + 256) * 4
    )
    data = sent_bytes(ZAYA1_BASE, ParallelSizes(data=8), batch)
    assert (data["gradients"], data["weights"]) == (7 / 8 * 4 * 8_840_488_784, 7 / 8 * 2 * 8_840_488_784)


def test_instances_of_the_optimizer():
    """64 of 1,024 ranks share the state; a rank sends less within its instance than within all ranks, and its shard's
    all-reduce between instances.
    """
    one, many = ParallelSizes(data=1024), ParallelSizes(data=1024, instances=16)
    assert (many.shards, many.expert_shards, one.shards) == (64, 64, 1024)
    assert adamw_bytes(many) == pytest.approx(16 * adamw_bytes(one))
    batch = Batch(4096)
    alone, together = sent_bytes(ZAYA1_BASE, one, batch), sent_bytes(ZAYA1_BASE, many, batch)
    parameters = alone["gradients"] / 4 * 1024 / 1023
    assert together["gradients"] == pytest.approx(63 / 64 * 4 * parameters) and together["weights"] == pytest.approx(
        63 / 64 * 2 * parameters
    )
    assert alone["instances"] == 0 and together["instances"] == pytest.approx(2 * 15 / 16 * 4 * parameters / 64)
