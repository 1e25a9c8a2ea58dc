# SPDX-License-Identifier: Apache-2.0
"""Bytes, copy, drain and interval of checkpoints. The expected figures of ZAYA1-base were derived apart from this code,
from its parameters by optimizer, the measured shards of docs/another-part.md, and Young's formula.
"""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import MachineConfig
from zaya_plugin.plan import checkpoint_plan
from zaya_plugin.plan.checkpoint_plan import ASYNC_COST_SECONDS, best_interval, rank_bytes
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.memory import Optimizer
from zaya_plugin.plan.parallelism import ParallelSizes
from zaya_plugin.run import dry_run
from zaya_plugin.run.rank_plan import make_plan

ZAYA1_BASE = Shape(40, 2048, 8, 2, 128, 16, 2048, 256, 262272)
FP32, BF16, ADAMW = Optimizer(), Optimizer(momentum_bytes=2), Optimizer(muon=False)


def plan(ranks=8, layout=None, optimizer=FP32, **machine):
    rates = {"host_link_gb_per_s": 50.0, "storage_gb_per_s": 2.0, **machine}
    layout = layout or ParallelSizes(data=ranks)
    return checkpoint_plan.checkpoint_plan(
        ZAYA1_BASE, layout, optimizer, MachineConfig(**rates), ranks, tokens=65536, seq=4096
    )


@pytest.mark.parametrize(
    ("optimizer", "total", "of_8", "of_64"),
    [(FP32, 72.9, 9.11, 1.14), (BF16, 56.3, 7.04, 0.88), (ADAMW, 106.1, 13.3, 1.66)],
)
def test_bytes(optimizer, total, of_8, of_64):
    assert plan(optimizer=optimizer).total / 1e9 == pytest.approx(total, abs=0.06)
    assert plan(8, optimizer=optimizer).rank / 1e9 == pytest.approx(of_8, rel=0.005)
    assert plan(64, optimizer=optimizer).rank / 1e9 == pytest.approx(of_64, rel=0.005)


def test_the_fullest_of_1024_ranks_holds_1_30_of_the_mean():
    for optimizer, megabytes in ((FP32, 93), (BF16, 71)):
        assert plan(1024, optimizer=optimizer).rank / 1e6 == pytest.approx(megabytes, rel=0.04)


def test_copy_and_drain():
    for ranks, milliseconds in ((8, 182), (64, 22.8), (1024, 1.9)):
        assert plan(ranks).copy * 1e3 == pytest.approx(milliseconds, rel=0.06)
    assert plan(1, host_link_gb_per_s=52.8).copy == pytest.approx(1.38, abs=0.005)
    for rate, seconds in ((1, 73), (2, 36), (5, 15), (25, 2.9), (46, 1.6)):
        assert plan(storage_gb_per_s=float(rate)).drain == pytest.approx(seconds, rel=0.03)


@pytest.mark.parametrize(
    ("ranks", "device_hours", "hours", "of_stall", "of_10_seconds"),
    [
        (64, 8090.0, 126, 213, 3017),
        (64, 50_700.0, 792, 534, 7551),
        (1024, 8090.0, 7.9, 53, 754),
        (1024, 50_700.0, 49.5, 133, 1888),
        (4096, 8090.0, 2.0, 27, 377),
        (4096, 50_700.0, 12.4, 67, 944),
    ],
)
def test_interval(ranks, device_hours, hours, of_stall, of_10_seconds):
    failures = plan(ranks, device_hours_per_failure=device_hours).failures
    assert failures / 3600 == pytest.approx(hours, rel=0.015)
    assert best_interval(0.05, failures) == pytest.approx(of_stall, abs=0.6)
    assert best_interval(10, failures) == pytest.approx(of_10_seconds, rel=3e-4)


def test_the_interval_is_not_shorter_than_the_drain():
    slow = plan(4096, storage_gb_per_s=0.5)
    assert slow.interval(ASYNC_COST_SECONDS) == slow.drain == pytest.approx(145.9, abs=0.1)
    fast = plan(4096, storage_gb_per_s=25.0)
    assert fast.interval(ASYNC_COST_SECONDS) == best_interval(ASYNC_COST_SECONDS, fast.failures) > fast.drain


def test_a_copy_longer_than_a_step_costs_the_difference():
    machine = {"gemm_tflops": 600.0}
    short = plan(8, **machine)
    assert short.hiding_tokens == pytest.approx(12_511, rel=0.001)
    assert short.costs == {"sync": short.copy + short.drain, "async": ASYNC_COST_SECONDS}
    long = plan(8, host_link_gb_per_s=5.0, **machine)
    assert long.copy == pytest.approx(1.823, abs=0.001) and long.least_step == pytest.approx(0.955, abs=0.001)
    assert long.costs["async"] == pytest.approx(ASYNC_COST_SECONDS + 1.823 - 0.955, abs=0.002)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelSizes(data=8, expert=8),
        ParallelSizes(data=4, pipeline=2),
        ParallelSizes(data=4, tensor=2),
        ParallelSizes(data=4, context=2),
        ParallelSizes(data=16, instances=2),
    ],
    ids=str,
)
def test_the_shards_of_a_layout_hold_everything(layout):
    shards = 8  # of 16 ranks in two instances, of which each holds everything
    assert 1.0 <= rank_bytes(ZAYA1_BASE, layout, FP32) * shards / plan().total < 1.1


def test_without_a_distributed_optimizer_each_rank_holds_everything():
    alone = ParallelSizes(data=8, distributed_optimizer=False)
    assert rank_bytes(ZAYA1_BASE, alone, FP32) == plan().total


def test_the_dry_run_prints_it():
    recipe = compose(["experiment=zaya1_base", "cluster=mi300x_128x8", "data.path=none", "machine.storage_gb_per_s=25"])
    place = {"RANK": "0", "WORLD_SIZE": "1024", "LOCAL_RANK": "0", "MASTER_ADDR": "node0", "MASTER_PORT": "20000"}
    text = "\n".join(dry_run.describe(recipe, make_plan(recipe, place), verbose=True))
    lines = text.split("\ncheckpoints  ")[1].split("\nfindings ")[0].splitlines()
    assert lines == [
        "(prediction) 72.9 GB: fp32 weights and the optimizer's state",
        "      1.14 GB  of the fullest rank; 9.1 GB of host memory in a node for the buffers of asynchronous saves",
        "     0.023 s   to copy them to the host at machine.host_link_gb_per_s=50,",
        "             hidden behind a step of 1,568 tokens a device or more (this recipe: 16,384)",
        "       2.9 s   to write them at machine.storage_gb_per_s=25",
        "  shortest sensible checkpoint.save_interval with a failure every 7.9 h (machine.device_hours_per_failure=8090);",
        "  in steps at most, because a step takes 0.24 s or more:",
        "       409 s   1,713 steps, synchronous: a cost of 2.94 s a save gives 409 s, the drain 3 s",
        "        53 s   224 steps, asynchronous: a cost of 0.05 s a save gives 53 s, the drain 3 s",
    ]
    assert checkpoint_plan.lines(compose(["experiment=cpu_demo"]), 2) == []
