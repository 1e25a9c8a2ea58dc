# SPDX-License-Identifier: Apache-2.0
"""The cost of a run in five lines: parameters, tokens, time of a step, of the run, and between checkpoints. No torch
import.
"""

from zaya_plugin.config.schedule import step_count, token_count
from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.errors import as_typed
from zaya_plugin.plan.setting import Setting


def lines(setting: Setting) -> list[str]:
    """Return the lines; where no time is predicted, two, and why."""
    recipe, prediction = setting.recipe, setting.prediction
    steps, interval, seconds = step_count(recipe), recipe.checkpoint.save_interval, prediction.seconds
    size = (
        f"parameters   {prediction.parameters:,}, {prediction.active:,} of them active for a token, without embedding"
    )
    length = f"tokens       {token_count(recipe):,} in {steps:,} steps"
    if not seconds:
        why = prediction.reason if recipe.parallel.pipeline_model_parallel_size > 1 else "unknown device"
        return [size, f"{length}, a checkpoint every {interval or steps:,}; time not predicted: {why}"]
    hours = steps * seconds / 3600
    return [
        size,
        length,
        f"step         {seconds:.3g} s. {prediction.error}",
        f"run          {hours / 24:,.3g} days, {hours * setting.world:,.0f} GPU hours (prediction)",
        f"saves        {setting.checkpoints.total / 1e9:.1f} GB every {duration((interval or steps) * seconds)} "
        f"(prediction; checkpoint.save_interval={as_typed(interval)})",
    ]
