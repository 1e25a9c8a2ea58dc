# SPDX-License-Identifier: Apache-2.0
"""Bytes, copy, drain and interval of checkpoints; what a stage and a curriculum cost; and the lines about it in a dry
run and at a start. The expected figures of ZAYA1-base's checkpoints were derived apart from this code, from its
parameters by optimizer, the measured shards of docs/another-part.md, and Young's formula.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.shapes import ZAYA1_BASE
from zaya_plugin import cli
from zaya_plugin.commands.plan_report import stage_lines
from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import with_values
from zaya_plugin.ground.durations import duration
from zaya_plugin.plan.memory import Optimizer
from zaya_plugin.plan.parallelism import ParallelSizes
from zaya_plugin.plan.prediction import predict
from zaya_plugin.plan.run_costs import (
    ASYNC_COST_SECONDS,
    RARE_FAILURE_HOURS,
    RESTART_SECONDS,
    checkpoint_lines,
    checkpoint_plan,
    cost_lines,
    rank_bytes,
    stage_cost,
)
from zaya_plugin.run import dry_run, start_recipe
from zaya_plugin.run.rank_plan import make_plan, planned_ranks

README = Path(__file__).parents[2] / "README.md"
FP32, BF16 = Optimizer(), Optimizer(momentum_bytes=2)
OPTIMIZERS = {"fp32": {}, "bf16": {"optim.muon_momentum_dtype": "bf16"}, "adamw": {"optim.name": "adamw"}}
README_COMMAND = ["experiment=zaya1_base", "cluster=mi300x_8", "data.path=data/corpus"]


@pytest.fixture(scope="module")
def on_mi300x():
    return compose(README_COMMAND)


@pytest.fixture
def plan(on_mi300x):
    """The plan of `ranks` devices with 65,536 tokens a device; keywords are keys of machine."""

    def make(ranks=8, optimizer="fp32", **machine):
        rates = {"host_link_gb_per_s": 50.0, "storage_gb_per_s": 2.0, **machine}
        values = {f"machine.{key}": value for key, value in rates.items()} | OPTIMIZERS[optimizer]
        return checkpoint_plan(with_values(on_mi300x, {"stage.global_batch_size": 16 * ranks, **values}), ranks)

    return make


@pytest.mark.parametrize(
    ("optimizer", "total", "of_8", "of_64"),
    [("fp32", 72.9, 9.11, 1.14), ("bf16", 56.3, 7.04, 0.88), ("adamw", 106.1, 13.3, 1.66)],
)
def test_bytes(plan, optimizer, total, of_8, of_64):
    assert plan(optimizer=optimizer).total / 1e9 == pytest.approx(total, abs=0.06)
    assert plan(8, optimizer=optimizer).rank / 1e9 == pytest.approx(of_8, rel=0.005)
    assert plan(64, optimizer=optimizer).rank / 1e9 == pytest.approx(of_64, rel=0.005)


def test_the_fullest_of_1024_ranks_holds_1_30_of_the_mean(plan):
    for optimizer, megabytes in (("fp32", 93), ("bf16", 71)):
        assert plan(1024, optimizer=optimizer).rank / 1e6 == pytest.approx(megabytes, rel=0.04)


def test_copy_and_drain(plan):
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
def test_interval(plan, ranks, device_hours, hours, of_stall, of_10_seconds):
    saves = plan(ranks, device_hours_per_failure=device_hours)
    assert saves.failures / 3600 == pytest.approx(hours, rel=0.015)
    assert saves.best_interval(0.05) == pytest.approx(of_stall, abs=0.6)
    assert saves.best_interval(10) == pytest.approx(of_10_seconds, rel=3e-4)


def test_the_interval_with_the_least_loss_is_youngs(plan):
    """Saves every 1 % more or less cost more; and a restart costs the same at every interval."""
    saves = plan(1024)
    best, loss = saves.best_interval(ASYNC_COST_SECONDS), saves.lost_share
    assert loss(best, "async") < min(loss(0.99 * best, "async"), loss(1.01 * best, "async"))
    restarts = RESTART_SECONDS / saves.failures
    assert loss(best, "async") - restarts == pytest.approx(2 * ASYNC_COST_SECONDS / best)


def test_a_copy_longer_than_a_step_costs_the_difference(plan):
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
def test_the_shards_of_a_layout_hold_everything(plan, layout):
    shards = 8  # of 16 ranks in two instances, of which each holds everything
    assert 1.0 <= rank_bytes(ZAYA1_BASE, layout, FP32) * shards / plan().total < 1.1


def test_without_a_distributed_optimizer_each_rank_holds_everything(plan):
    alone = ParallelSizes(data=8, distributed_optimizer=False)
    assert rank_bytes(ZAYA1_BASE, alone, FP32) == plan().total


def test_a_verbose_dry_run_prints_the_plan_of_checkpoints():
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
    assert checkpoint_lines(compose(["experiment=cpu_demo"]), 2) == []


@pytest.fixture(scope="module")
def on_h200():
    return compose(["experiment=zaya1_base", "cluster=h200_8", "data.path=none", "stage.micro_batch_size=4"])


def test_hours_failures_and_checkpoints_follow_from_the_step(on_h200):
    recipe = on_h200
    step = predict(recipe, 8)
    cost = stage_cost(step, 2.0)
    hours = 476_837 * step.seconds / 3600
    assert (
        cost["hours"] == pytest.approx(hours)
        and cost["tokens"] == 476_837 * 4096 * 4096
        and cost["step"] == step.seconds
    )
    assert cost["failures"] == pytest.approx([8 * hours / 8090, 8 * hours / RARE_FAILURE_HOURS])
    assert RARE_FAILURE_HOURS == pytest.approx(50_677, abs=1)
    waits = ASYNC_COST_SECONDS * 476_837 / 200  # a step is longer than the copy
    lost = cost["failures"][0] * (100 * step.seconds + RESTART_SECONDS) + waits
    assert 3600 * cost["lost"] == pytest.approx(lost, rel=1e-9)
    assert cost["device_hours"] == pytest.approx(8 * (hours + cost["lost"]))
    assert (cost["kept"], cost["between"]) == (3, 200 * step.seconds)
    # 8 bytes an element under Muon, 12 under AdamW: the embedding and all that is no matrix
    matrices = 40 * (16 * 3 * 2048 * 2048 + 2048 * (2 * 1024 + 2 * 256) + 256 * (2048 + 2 * 256 + 17))
    assert cost["saved_bytes"] == pytest.approx(8 * matrices + 12 * (8_840_488_784 - matrices))
    kept = replace(recipe, checkpoint=replace(recipe.checkpoint, keep_every=100_000, save_interval=10_000))
    assert stage_cost(replace(step, recipe=kept))["kept"] == 3 + 4
    lines = "\n".join(stage_lines([cost, cost])).splitlines()
    assert f"{2 * cost['device_hours']:,.0f}" in lines[1] and f"{4 * cost['device_hours']:,.0f}" in lines[3]
    assert "storage: 0.44 TB" in lines[-1] and "arXiv 2410.21680" in lines[-2]


def test_the_command_has_every_stage_of_a_curriculum(capsys, tmp_path):
    out = tmp_path / "plan.json"
    words = ["experiment=zaya1_base", "cluster=mi300x_128x8", "--gpus=512", "--price=2.5", f"--output={out}"]
    assert cli.main(["plan", "run", *words]) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    stages = written["stages"]
    assert [stage["name"] for stage in stages] == ["pretrain_4k", "pretrain_4k_2", "midtrain_32k"]
    assert {stage["devices"] for stage in stages} == {512} and written["on"]["devices"] == 512
    assert stages[0]["cost"] == pytest.approx(2.5 * stages[0]["device_hours"])
    assert (
        f"{sum(stage['cost'] for stage in stages):,.0f}" in printed
        and f"{sum(stage['tokens'] for stage in stages):,}" in printed
    )
    assert "error: not measured on MI300X" in printed and "-9.2 %" in printed
    assert "verdict" not in printed
    words = ["experiment=zaya1_base", "cluster=mi300x_8", "stage.micro_batch_size=8"]
    assert cli.main(["plan", "run", *words]) == 2, "its last stage does not fit"
    printed = capsys.readouterr().out
    assert printed.startswith(
        "verdict      zaya1_base-midtrain_32k does not start: the step does not fit: 350.4 of 192"
    )
    assert printed.count("verdict") == 1 and "pretrain_4k_2" in printed


def test_on_a_cpu_sizes_and_checkpoints_are_printed(capsys):
    assert cli.main(["plan", "run", "experiment=cpu_demo"]) == 0
    printed = capsys.readouterr().out
    assert "step time: not predicted. cluster.device=cpu: no rates of a CPU are known" in printed
    header, row, *_ = (line for line in printed.splitlines() if line.startswith(("stage", "demo")))
    assert header.endswith("checkpoints") and " days " not in header and " GB x " in row
    assert "\nstorage: 3.6 GB of checkpoints" in printed
    assert "memory of the fullest rank" not in printed and " of them active for a token" in printed


def test_five_lines_of_the_command_in_the_readme(on_mi300x):
    recipe = on_mi300x
    step = predict(recipe, 8)
    stage = stage_cost(step)
    size, tokens, seconds, run, saves = cost_lines(step)
    assert size.startswith("parameters   8,840,488,784, 753,608,528 of them active for a token")
    assert tokens == "tokens       7,999,997,345,792 in 476,837 steps"
    assert seconds == f"step         {step.seconds:.3g} s. PREDICTION, {step.error}"
    days, hours = re.match(r"stage        ([0-9.]+) days, ([0-9,]+) GPU hours \(prediction", run).groups()
    assert float(days) == pytest.approx((stage["hours"] + stage["lost"]) / 24, rel=0.002)
    assert stage["hours"] / 24 == pytest.approx(476_837 * step.seconds / 86_400) == pytest.approx(280, abs=10)
    assert int(hours.replace(",", "")) == pytest.approx(float(days) * 24 * 8, rel=0.002)
    assert f"the first stage is {days} days and {hours} GPU hours" in " ".join(README.read_text().split())
    assert re.fullmatch(r"saves        72\.9 GB every 2 h \d\d min \(prediction; checkpoint.save_interval=200\)", saves)
    never = with_values(recipe, {"checkpoint.save_interval": None})
    assert cost_lines(replace(step, recipe=never))[4] == (
        f"saves        72.9 GB every {duration(476_837 * step.seconds)} (prediction; checkpoint.save_interval=null)"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["experiment=cpu_demo"], "cluster.device=cpu: no rates of a CPU are known"),
        (
            [*README_COMMAND[:2], "stage.micro_batch_size=32"],
            "the step does not fit into memory, 173% of cluster.memory_gib=192",
        ),
        (["experiment=zaya1_base", "cluster=gpu"], "machine.name=null: is not a device with known rates"),
        (["experiment=zaya1_base", "parallel=pipeline_parallel"], "parallel.pipeline_model_parallel_size=2: "),
    ],
)
def test_without_a_predicted_time_two_lines_are_left(words, why):
    recipe = compose([*words, "data.path=none"])
    world = planned_ranks(recipe)
    size, tokens = cost_lines(predict(recipe, world))
    assert size.startswith("parameters   ") and f"; time not predicted: {why}" in tokens
    assert f"steps, a checkpoint every {recipe.checkpoint.save_interval:,};" in tokens


def test_a_start_prints_the_lines_and_the_number_of_findings():
    recipe = compose(README_COMMAND)
    lines = start_recipe.cost_lines(recipe, make_plan(recipe, {}))
    assert len(lines) == 5 and all(line.startswith("zaya: ") for line in lines), "no finding"
    rare = with_values(recipe, {"checkpoint.save_interval": 1000})
    last = start_recipe.cost_lines(rare, make_plan(recipe, {}))[-1]
    assert last == "zaya: findings     1: `zaya plan check` with the same words prints them"
    recipe = compose(["experiment=cpu_demo", "data.path=none"])
    assert len(start_recipe.cost_lines(recipe, make_plan(recipe, {}))) == 2
