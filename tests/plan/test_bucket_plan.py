# SPDX-License-Identifier: Apache-2.0
"""Test the recommendation of buckets and instances, and `parallel.bucket_plan`."""

import json

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.resume import values_of
from zaya_plugin.plan.bucket_plan import recommended, saturation, seconds_of, with_bucket_plan
from zaya_plugin.run import start_recipe
from zaya_plugin.run.start_recipe import settled

MIB = 2**20


def rows(name: str, ranks: int, latency_us: float, gb_per_s: float, stride: int = 1) -> list[dict]:
    """Rows of a link with a latency and a rate."""
    factor = (2 if name == "AllReduce" else 1) * (ranks - 1) / ranks
    sizes = [2**power for power in range(10, 34)]
    times = [latency_us + factor * size / gb_per_s / 1e3 for size in sizes]
    return [
        {"name": name, "gpus": ranks, "stride": stride, "size": size, "time": us, "busBw": factor * size / us / 1e3}
        for size, us in zip(sizes, times, strict=True)
    ]


def sweep(latency: float = 40.0, slow: float = 344.0) -> list[dict]:
    """Groups of 2 and 4 in a node; the group of 4 has its own rate."""
    made = []
    for name in ("ReduceScatter", "AllGather", "AllReduce"):
        made += rows(name, 2, latency, 344.0) + rows(name, 4, latency, slow)
    return made


def test_a_size_is_saturated_at_nine_tenths_of_the_best_rate():
    # the share of the rate is x / (x + latency), so 0.9 needs 9 latencies of transfer: 9 * 40 us * 344 GB/s * 4 / 3
    assert 9 * 40e-6 * 344e9 * 4 / 3 == pytest.approx(157.5 * MIB, rel=1e-3)
    assert saturation(rows("ReduceScatter", 4, 40.0, 344.0)) == 256 * MIB
    assert saturation(rows("ReduceScatter", 4, 4.0, 344.0)) == 16 * MIB and saturation([]) is None
    line = rows("ReduceScatter", 4, 40.0, 300.0)
    assert seconds_of(line, 3 * MIB) == pytest.approx(0.75 * (40e-6 + 0.75 * 4 * MIB / 300e9))  # as of 4 MiB
    assert seconds_of(line, 2**34) == pytest.approx(2 * seconds_of(line, 2**33))


def test_instances_are_recommended_where_the_larger_group_is_slow():
    (two, four) = recommended(sweep(), 4)
    assert (two["ranks"], four["ranks"]) == (2, 4) and four["num_distributed_optimizer_instances"] == 1
    assert (four["bucket_bytes"], four["ddp_bucket_size"]) == (256 * MIB, 64 * MIB) and not four["still_rising"]
    assert four["ms_per_gb_by_instances"].keys() == {"1", "2"} and two["ms_per_gb_by_instances"].keys() == {"1"}
    (_, four) = recommended(sweep(slow=50.0), 4)
    assert (four["num_distributed_optimizer_instances"], four["bucket_bytes"]) == (2, 256 * MIB)
    # over two nodes of two ranks the gradients of a shard go between ranks with a distance of 2
    assert recommended(sweep(slow=50.0), 2)[1]["num_distributed_optimizer_instances"] == 1
    over_nodes = sweep(slow=50.0) + rows("AllReduce", 2, 40.0, 300.0, stride=2)
    assert recommended(over_nodes, 2)[1]["num_distributed_optimizer_instances"] == 2


def test_a_rate_that_still_rises_is_said():
    (plan,) = recommended([row for row in sweep() if row["size"] <= 2**20 and row["gpus"] == 2], 4)
    assert plan["still_rising"] and plan["bucket_bytes"] == 2**20


RECIPE = ("experiment=zaya1_base", "cluster=h200_8", "nproc=4", "data.path=none", "stage.global_batch_size=64")


@pytest.fixture
def plan(tmp_path):
    """Write a record, and return the override that names it."""

    def write(device: str = "NVIDIA H200", slow: float = 344.0, **more) -> str:
        record = {
            "schema": "zaya bench collectives/1",
            "device": device,
            "bucket_plan": recommended(sweep(20, slow), 4),
        }
        path = tmp_path / "collectives.json"
        path.write_text(json.dumps(record | more))
        return f"parallel.bucket_plan={path}"

    return write


def test_a_plan_takes_the_place_of_the_recipes_values_and_says_so(plan):
    recipe = compose([*RECIPE, plan()])
    assert recipe.parallel.ddp_bucket_size == 67_108_864
    chosen, lines = settled(recipe, 4)
    assert chosen.parallel.ddp_bucket_size == 32 * MIB and chosen.parallel.num_distributed_optimizer_instances == 1
    assert (
        ": ddp_bucket_size=33554432 in place of 67108864, num_distributed_optimizer_instances=1; reduce-scatters of 4 "
        "ranks reach 90% of their best rate at 128 MiB on NVIDIA H200" in lines[0]
    )
    assert settled(chosen, 4)[0] == chosen  # a rank's recipe gives the same
    in_bf16, _ = settled(compose([*RECIPE, plan(), "optim.grad_reduce_in_fp32=false"]), 4)
    assert in_bf16.parallel.ddp_bucket_size == 64 * MIB
    two, _ = settled(compose([*RECIPE, plan(slow=50.0)]), 4)
    assert two.parallel.num_distributed_optimizer_instances == 2


@pytest.mark.parametrize(
    ("changes", "words", "text"),
    [
        ({"device": "NVIDIA H100"}, (), "was measured on NVIDIA H100. Allowed: a record of the recipe's device"),
        ({}, ("machine.name=null",), "was measured on NVIDIA H200, and machine.name is null"),
        ({}, ("nproc=8",), "8 ranks share the recipe's weights .*, and the file is for 2, 4"),
        ({"schema": "zaya bench step/1"}, (), "is not a record of `zaya bench collectives`"),
        ({"bucket_plan": [{}]}, (), "is not a record of `zaya bench collectives`"),
    ],
)
def test_a_file_for_something_else_is_refused(plan, changes, words, text):
    recipe = compose([*RECIPE, *words, plan(**changes)])
    with pytest.raises(ValueError, match=f"parallel.bucket_plan=.*{text}"):
        with_bucket_plan(recipe, recipe.nproc)


def test_a_missing_file_and_a_key_that_is_typed_too_are_refused(plan, tmp_path):
    recipe = compose([*RECIPE, f"parallel.bucket_plan={tmp_path / 'none.json'}"])
    with pytest.raises(
        ValueError, match=r"none.json: is not a record .*No such file.*Fix: zaya bench collectives --output"
    ):
        settled(recipe, 4)
    with pytest.raises(ValueError, match=r"parallel.ddp_bucket_size=5000: parallel.bucket_plan is typed too"):
        compose([*RECIPE, plan(), "parallel.ddp_bucket_size=5000"])
    with pytest.raises(ValueError, match="parallel.use_distributed_optimizer=false"):
        from zaya_plugin.config.validate import validate

        validate(compose([*RECIPE, plan(), "parallel.use_distributed_optimizer=false"]), 4)


def test_a_resume_with_other_buckets_of_a_plan_is_said(plan, tmp_path, monkeypatch):
    """The file may have changed; a changed key that was typed needs no word."""
    recipe = compose([*RECIPE, "resume=auto", plan()])
    before = values_of(settled(recipe, 4)[0])
    monkeypatch.setattr(start_recipe, "has_checkpoint", lambda folder: True)
    monkeypatch.setattr(start_recipe.on_disk, "newest_facts", lambda folder: (folder, {}))
    monkeypatch.setattr(start_recipe, "values_in", lambda folder: before)
    assert start_recipe.changed_keys(settled(recipe, 4)[0]) == ([], [])
    (tmp_path / "collectives.json").unlink()
    again = settled(compose([*RECIPE, "resume=auto", plan(slow=50.0)]), 4)[0]
    refused, warned = start_recipe.changed_keys(again)
    assert refused == [] and warned == [
        "zaya: resume: parallel.num_distributed_optimizer_instances: was 1, is 2; the steps to come are rounded in "
        "another way"
    ]
