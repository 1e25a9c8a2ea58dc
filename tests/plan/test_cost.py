# SPDX-License-Identifier: Apache-2.0
"""The lines about what a run takes: in a dry run, at a start, and where no time is predicted."""

import re

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import with_values
from zaya_plugin.plan import cost
from zaya_plugin.plan.check import setting_of
from zaya_plugin.run import start_recipe
from zaya_plugin.run.rank_plan import make_plan

README_COMMAND = ["experiment=zaya1_base", "cluster=mi300x_8", "data.path=data/corpus"]


def test_five_lines_of_the_command_in_the_readme():
    setting = setting_of(compose(README_COMMAND), 8)
    seconds = setting.prediction.seconds
    size, tokens, step, run, saves = cost.lines(setting)
    assert size.startswith("parameters   8,840,488,784, 753,608,528 of them active for a token")
    assert tokens == "tokens       7,999,997,345,792 in 476,837 steps"
    assert step == f"step         {seconds:.3g} s. {setting.prediction.error}" and "PREDICTION" in step
    days, hours = re.fullmatch(r"run          ([0-9.]+) days, ([0-9,]+) GPU hours \(prediction\)", run).groups()
    assert float(days) == pytest.approx(476_837 * seconds / 86_400, rel=0.002) == pytest.approx(304, abs=10)
    assert int(hours.replace(",", "")) == pytest.approx(float(days) * 24 * 8, rel=0.002)
    assert re.fullmatch(
        r"saves        72\.9 GB every 15 h \d\d min \(prediction; checkpoint.save_interval=1000\)", saves
    )
    assert cost.lines(setting_of(with_values(setting.asked, {"checkpoint.save_interval": None}), 8))[4] == (
        f"saves        72.9 GB every {days.partition('.')[0]} d "
        f"{checkpoint_hours(476_837 * seconds)} h (prediction; checkpoint.save_interval=null)"
    )


def checkpoint_hours(seconds: float) -> str:
    return f"{round(seconds / 60) // 60 % 24:02d}"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["experiment=cpu_demo"], "unknown device"),
        (["experiment=zaya1_base", "cluster=gpu"], "unknown device"),
        (["experiment=zaya1_base", "parallel=pipeline_parallel"], "parallel.pipeline_model_parallel_size=2: "),
    ],
)
def test_without_a_predicted_time_two_lines_are_left(words, why):
    recipe = compose([*words, "data.path=none"])
    size, tokens = cost.lines(setting_of(recipe, 2 if "cpu_demo" in words[0] else 8))
    assert size.startswith("parameters   ") and f"; time not predicted: {why}" in tokens
    assert f"steps, a checkpoint every {recipe.checkpoint.save_interval:,};" in tokens


def test_a_start_prints_the_lines_and_the_number_of_findings():
    recipe = compose(README_COMMAND)
    lines = start_recipe.cost_lines(recipe, make_plan(recipe, {}))
    assert len(lines) == 6 and all(line.startswith("zaya: ") for line in lines)
    assert lines[-1] == "zaya: findings     1: `zaya plan check` with the same words prints them"
    recipe = compose(["experiment=cpu_demo", "data.path=none"])
    assert len(start_recipe.cost_lines(recipe, make_plan(recipe, {}))) == 2
