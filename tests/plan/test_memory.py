# SPDX-License-Identifier: Apache-2.0
"""The memory plan against measured peaks, its parts against hand counts, and what is recomputed to fit.
tests/plan/test_saved_tensors.py counts tensors.
"""

from dataclasses import replace

import pytest

from hip_ops.saved_bytes import chunk_for
from tests.plan.shapes import ZAYA1_BASE
from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import with_values
from zaya_plugin.plan import memory
from zaya_plugin.plan.expected_step import between_instances, collective_seconds
from zaya_plugin.plan.memory import Optimizer, Recompute, in_flight, layer_tensors, memory_plan, padded_parameters
from zaya_plugin.plan.parallelism import Batch, ParallelSizes
from zaya_plugin.plan.recipe_plan import RESERVED_SHARE, choices_of, recompute_of, with_recompute

GIB = 2**30
TWELVE, FOUR = replace(ZAYA1_BASE, num_layers=12), replace(ZAYA1_BASE, num_layers=4, vocab_size=65_536)
GOAL = (ZAYA1_BASE, ParallelSizes(data=8), Batch(4096, 4), Optimizer())  # 8 H200s, 16,384 tokens a device


def machine(cluster):
    return compose([f"cluster={cluster}", "data.path=none"]).machine


@pytest.fixture(scope="module")
def goal():
    """The recipe of GOAL."""
    words = ["stage.micro_batch_size=4", "stage.global_batch_size=32", "cluster.graphs=none"]
    recipe = compose(["experiment=zaya1_base", "cluster=h200_8", "data.path=none", *words])
    return with_values(recipe, {"parallel.recompute_granularity": "auto"})


def test_the_measured_peak_on_one_h100():
    """benchmarks/results/step12-h100.json: 12 layers, Muon, 4 x 4096 tokens."""
    planned = memory_plan(TWELVE, ParallelSizes(), Batch(4096, 4)).total / GIB
    assert 0.98 < planned / 53.71 < 1


@pytest.mark.parametrize(
    ("recompute", "optimizer", "measured_gib"),
    [(Recompute(), Optimizer(), 133.61), (Recompute(frozenset({"permute"})), Optimizer(momentum_bytes=2), 122.66)],
    ids=["nothing recomputed", "permute, bf16 momentum"],
)
def test_what_two_h200s_reserved_for_a_step_as_a_graph(monkeypatch, recompute, optimizer, measured_gib):
    """benchmarks/results/step40-2xh200-{graphs,fused_router}.json; Muon took rounds of 2^30 elements then."""
    monkeypatch.setattr(memory, "MUON_ROUND_ELEMENTS", 2**30)
    planned = (
        memory_plan(ZAYA1_BASE, ParallelSizes(data=2), Batch(4096, 4, 4), recompute, optimizer, graph=True).total / GIB
    )
    assert 0.97 < planned / measured_gib < 1
    alone = memory_plan(ZAYA1_BASE, ParallelSizes(data=2), Batch(4096, 4, 4), recompute, optimizer).total / GIB
    assert planned - alone == pytest.approx(12)


def test_components_by_hand():
    plan = memory_plan(ZAYA1_BASE, ParallelSizes(data=8), Batch(4096, 4))
    assert plan.components["weights"] == 2 * 8_840_488_784 and plan.components["gradients (fp32)"] == 4 * 8_840_488_784
    # 8 bytes an element under Muon, 12 under AdamW: embedding and all that is no matrix.
    matrices = 40 * (16 * 3 * 2048 * 2048 + 2048 * (2 * 1024 + 2 * 256) + 256 * (2048 + 2 * 256 + 17))
    assert plan.components["optimizer"] == pytest.approx((8 * matrices + 12 * (8_840_488_784 - matrices)) / 8)
    # Experts fill their shards; the rest ends in whole matrices of queries.
    assert padded_parameters(ZAYA1_BASE, ParallelSizes(data=8)) == {
        "experts": 40 * 16 * 3 * 2048**2,
        "rest": 47 * 8 * 1024 * 2048,
    }
    assert padded_parameters(ZAYA1_BASE, ParallelSizes(data=1024)) == {
        "experts": 1024 * 4096 * 2048,
        "rest": 1024 * 1024 * 2048,
    }
    tensors = plan.layer
    assert tensors["gate and up"] == 16_384 * 2 * 4096 and tensors["stream into the layer"] == 16_384 * 4 * 2048
    assert sum(tensors.values()) / 16_384 == pytest.approx(54_948 + 6_291_456 / 16_384, abs=1)  # and the joined matrix
    assert chunk_for(16_384, 262_272, 2) == 2048 and chunk_for(16_384, 65_536, 2) == 10_240


def test_pipeline_stages_hold_several_micro_batches():
    assert (
        in_flight(ParallelSizes(), 8) == 1
        and in_flight(ParallelSizes(pipeline=4), 8) == 4
        and in_flight(ParallelSizes(pipeline=4), 2) == 2
    )
    assert in_flight(ParallelSizes(pipeline=2, virtual=4), 8) == (3 * 2 + 2 + 1) / 4


def test_context_parallel_ranks_keep_the_keys_of_all():
    alone, shared = (layer_tensors(ZAYA1_BASE, ParallelSizes(context=ranks), Batch(8192)) for ranks in (1, 2))
    assert shared["gate and up"] == alone["gate and up"] / 2
    assert shared["keys of all context-parallel ranks"] == shared["values"] == alone["values"]
    again = layer_tensors(ZAYA1_BASE, ParallelSizes(context=2), Batch(8192), frozenset({"core_attn"}))
    assert again["values"] == alone["values"] / 2


def test_the_goal_of_90_gib_is_met_by_recomputing_norms_and_sorted_rows(goal):
    by_name = {choice.recompute.name: choice for choice in choices_of(goal, 8)}
    assert by_name["nothing"].plan.total / GIB == pytest.approx(93.1, abs=0.5)
    both = by_name["layernorm + permute"]
    assert both.plan.total / GIB == pytest.approx(85.6, abs=0.5) and both.milliseconds < 12
    # Rows sorted by expert: 2.5 GiB for a copy of them; the experts themselves: 8.5 GiB, for their products.
    assert (by_name["nothing"].plan.total - by_name["permute"].plan.total) == 40 * 16_384 * 2 * 2048
    assert by_name["permute"].milliseconds == pytest.approx(1e3 * 40 * 16_384 * 2 * 2 * 2048 / 4.2e12)
    per_gib = {
        name: by_name[name].milliseconds / (93.1 - by_name[name].plan.total / GIB)
        for name in ("permute", "layernorm", "40 whole layers", "moe")
    }
    assert sorted(per_gib, key=per_gib.get) == list(per_gib)


def test_the_cheapest_that_fits_is_chosen(goal):
    options = choices_of(goal, 8)
    assert [choice.milliseconds for choice in options] == sorted(choice.milliseconds for choice in options)
    plans = {choice.recompute: choice for choice in options}
    names = {}
    for memory_gib in (140, 100, 98, 95, 80):
        chosen = plans[recompute_of(with_recompute(with_values(goal, {"cluster.memory_gib": memory_gib}), 8)[0])]
        assert chosen.plan.total <= (1 - RESERVED_SHARE) * memory_gib * GIB
        cheaper = [choice for choice in options if choice.milliseconds < chosen.milliseconds]
        assert all(choice.plan.total > (1 - RESERVED_SHARE) * memory_gib * GIB for choice in cheaper)
        names[memory_gib] = chosen.recompute.name
    assert names.pop(80).endswith("whole layers")
    assert names == {140: "nothing", 100: "permute", 98: "layernorm", 95: "layernorm + permute"}
    with pytest.raises(ValueError, match="recompute_granularity=auto: the step needs"):
        with_recompute(with_values(goal, {"cluster.memory_gib": 60}), 8)


def test_whole_layers_keep_their_inputs():
    none, half, whole = (
        memory_plan(*GOAL[:3], Recompute(full_layers=layers)).components["activations of the layers"]
        for layers in (0, 20, 40)
    )
    stream = 16_384 * (4 * 2048 + 2 * 256)
    assert whole == pytest.approx(39 * stream, rel=1e-3) and half == pytest.approx((none + whole) / 2, rel=0.02)
    pairs = memory_plan(*GOAL[:3], Recompute(full_layers=40, unit=2)).components["activations of the layers"]
    assert pairs == pytest.approx(19 * stream, rel=1e-3)


def test_collectives():
    h200, mi300x = machine("h200_8"), machine("mi300x_128x8")
    assert collective_seconds(h200, 1, 1e9) == 0
    # NCCL's all-reduce of 16 MiB on eight H200s reached 255 GB/s, that of 1 GiB 360: twice 7 / 8 of the size leave a
    # device.
    for mebibytes, reached in ((16, 255e9), (256, 348e9)):
        sent = 2 * 7 / 8 * mebibytes * 2**20
        assert collective_seconds(h200, 8, sent) == pytest.approx(sent / reached, rel=0.2)
    # 7 links of 48 GB/s within a node; between nodes a hop a rank, and eight NICs a node are no narrower.
    assert collective_seconds(mi300x, 8, 336e9) == pytest.approx(1, rel=1e-3)
    assert collective_seconds(mi300x, 1024, 336e9) == pytest.approx(1.01, rel=1e-2)


def test_between_instances():
    h200, mi300x = machine("h200_8"), machine("mi300x_128x8")
    assert between_instances(mi300x, 64, 1, 1e9) == 0
    # All-reduce of a shard: twice (n - 1) / n of it leave a device, by its own 400 Gb/s NIC, or within a node by its
    # links.
    assert between_instances(mi300x, 64, 16, 50e9) == pytest.approx(2 * 15 / 16, rel=1e-3)
    assert between_instances(h200, 4, 2, 344e9) == pytest.approx(1, rel=1e-3)
