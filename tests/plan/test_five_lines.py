# SPDX-License-Identifier: Apache-2.0
"""The lines about what a run takes: in a dry run, at a start, and where no time is predicted."""

import re
from dataclasses import replace

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import with_values
from zaya_plugin.ground.durations import duration
from zaya_plugin.plan.prediction import predict
from zaya_plugin.plan.run_costs import five_lines, stage_cost
from zaya_plugin.run import start_recipe
from zaya_plugin.run.rank_plan import make_plan, planned_ranks

README_COMMAND = ["experiment=zaya1_base", "cluster=mi300x_8", "data.path=data/corpus"]


def test_five_lines_of_the_command_in_the_readme():
    recipe = compose(README_COMMAND)
    step = predict(recipe, 8)
    stage = stage_cost(step)
    size, tokens, seconds, run, saves = five_lines(step)
    assert size.startswith("parameters   8,840,488,784, 753,608,528 of them active for a token")
    assert tokens == "tokens       7,999,997,345,792 in 476,837 steps"
    assert seconds == f"step         {step.seconds:.3g} s. {step.error}" and "PREDICTION" in seconds
    days, hours = re.match(r"stage        ([0-9.]+) days, ([0-9,]+) GPU hours \(prediction", run).groups()
    assert float(days) == pytest.approx((stage["hours"] + stage["lost"]) / 24, rel=0.002)
    assert stage["hours"] / 24 == pytest.approx(476_837 * step.seconds / 86_400) == pytest.approx(304, abs=10)
    assert int(hours.replace(",", "")) == pytest.approx(float(days) * 24 * 8, rel=0.002)
    assert re.fullmatch(
        r"saves        72\.9 GB every 15 h \d\d min \(prediction; checkpoint.save_interval=1000\)", saves
    )
    never = with_values(recipe, {"checkpoint.save_interval": None})
    assert five_lines(replace(step, recipe=never))[4] == (
        f"saves        72.9 GB every {duration(476_837 * step.seconds)} (prediction; checkpoint.save_interval=null)"
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["experiment=cpu_demo"], "unknown device"),
        ([*README_COMMAND[:2], "stage.micro_batch_size=32"], "the step does not fit into memory"),
        (["experiment=zaya1_base", "cluster=gpu"], "unknown device"),
        (["experiment=zaya1_base", "parallel=pipeline_parallel"], "parallel.pipeline_model_parallel_size=2: "),
    ],
)
def test_without_a_predicted_time_two_lines_are_left(words, why):
    recipe = compose([*words, "data.path=none"])
    world = planned_ranks(recipe)
    size, tokens = five_lines(predict(recipe, world))
    assert size.startswith("parameters   ") and f"; time not predicted: {why}" in tokens
    assert f"steps, a checkpoint every {recipe.checkpoint.save_interval:,};" in tokens


def test_a_start_prints_the_lines_and_the_number_of_findings():
    recipe = compose(README_COMMAND)
    lines = start_recipe.cost_lines(recipe, make_plan(recipe, {}))
    assert len(lines) == 6 and all(line.startswith("zaya: ") for line in lines)
    assert lines[-1] == "zaya: findings     1: `zaya plan check` with the same words prints them"
    recipe = compose(["experiment=cpu_demo", "data.path=none"])
    assert len(start_recipe.cost_lines(recipe, make_plan(recipe, {}))) == 2
