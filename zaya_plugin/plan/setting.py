# SPDX-License-Identifier: Apache-2.0
"""A recipe on a number of ranks with its predictions, and the form of a rule that reads it. No torch import.

The rules are in zaya_plugin.plan.check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from zaya_plugin.config.schema import Recipe, with_values
from zaya_plugin.config.validate import validate
from zaya_plugin.ground.errors import as_typed
from zaya_plugin.plan import checkpoint_plan, recipe_plan
from zaya_plugin.plan.checkpoint_plan import CheckpointPlan
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.parallelism import Batch, ParallelSizes
from zaya_plugin.plan.prediction import Prediction, predict
from zaya_plugin.plan.recipe_plan import GIB, RESERVED_SHARE

DOES_NOT_FIT, ADVICE = "does not fit", "advice"  # severities
# Of predicted TFLOP/s: what a finding's change gains, which is how far predictions are off on a known device
# (docs/plan.md); and the difference below which the first of two changes is taken.
MIN_GAIN, EQUAL_GAIN = 0.03, 0.01
Values = Mapping[str, object]  # recipe keys and other values for them


@dataclass(frozen=True)
class Setting:
    """A recipe on a number of ranks, as the rules read it.

    asked: the recipe as composed; recipe: with the recomputation for `auto`.
    """

    asked: Recipe
    recipe: Recipe
    world: int
    prediction: Prediction
    shape: Shape
    layout: ParallelSizes
    batch: Batch
    checkpoints: CheckpointPlan

    @classmethod
    def of(cls, asked: Recipe, world: int) -> Setting:
        """Return the setting of a valid recipe; raises ValueError if no recomputation makes it fit."""
        recipe, _ = recipe_plan.with_recompute(asked, world)
        return cls(
            asked,
            recipe,
            world,
            predict(recipe, world),
            recipe_plan.shape_of(recipe),
            recipe_plan.layout_of(recipe, world),
            recipe_plan.batch_of(recipe, world),
            checkpoint_plan.plan_of(recipe, world),
        )

    @property
    def accelerated(self) -> bool:
        return self.recipe.cluster.device != "cpu"

    @property
    def unit(self) -> int:
        """The smallest tile of a matrix unit; on a CPU the fp32 numbers of a cache line of 64 bytes."""
        return 64 if self.accelerated else 16

    @property
    def several_nodes(self) -> bool:
        return self.accelerated and self.world > self.recipe.machine.devices_per_node

    @property
    def memory_share(self) -> float:
        """Share of the device's memory that the plan takes; 0 on a CPU, and where cluster.memory_gib is null."""
        plan = self.prediction.memory
        return recipe_plan.memory_share(plan, self.recipe.cluster.memory_gib) if plan else 0.0

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step; on an unknown device a lower bound."""
        return self.prediction.seconds or self.checkpoints.least_step

    @property
    def tflops(self) -> float:
        """Predicted TFLOP/s of a device, 0 on an unknown one."""
        seconds = self.prediction.seconds
        return self.prediction.flops / seconds / self.world / 1e12 if seconds else 0.0

    def changed(self, values: Values) -> Setting | None:
        """Return the setting with other values of the recipe, None if they are invalid or fit less."""
        try:
            recipe = with_values(self.asked, values)
            validate(recipe, self.world)
            setting = Setting.of(recipe, self.world)
        except ValueError:
            return None
        return setting if setting.memory_share <= max(1 - RESERVED_SHARE, self.memory_share) else None

    def best(self, options: Iterable[Values], gain: float) -> Values | None:
        """Return the first of the values within EQUAL_GAIN of the highest predicted rate (on an unknown device the
        first), {} if none is valid; with a `gain` above 0 None if they gain less.
        """
        candidates = [(after.tflops, values) for values in options if (after := self.changed(values))]
        most = max((rate for rate, _ in candidates), default=0.0)
        if gain > 0 and most < (1 + gain) * self.tflops:
            return None
        return next((values for rate, values in candidates if rate >= (1 - EQUAL_GAIN) * most), {})

    def compared(self, after: Setting) -> list[str]:
        """Return the figures of another setting that differ from this one's."""
        now, then, figures = self.prediction, after.prediction, []
        if now.memory and then.memory and abs(then.memory.total - now.memory.total) > 0.05 * GIB:
            figures = [f"{then.memory.total / GIB:.1f} GiB instead of {now.memory.total / GIB:.1f}"]
        if not now.seconds or not then.seconds or then.seconds == now.seconds:
            return figures
        if after.shape != self.shape:
            return [f"{after.tflops:,.0f} TFLOP/s a device instead of {self.tflops:,.0f}", *figures]
        share = then.seconds / now.seconds - 1
        return [f"{1e3 * then.seconds:,.0f} ms a step instead of {1e3 * now.seconds:,.0f} ({share:+.1%})", *figures]


@dataclass(frozen=True)
class Rule:
    """A rule, and a row of docs/plan.md.

    Attributes:
        what: returns what is remarkable about a setting, or nothing.
        options: returns the changes that may help, the smallest first.
        gain: least gain of the fastest one for a finding; 0: a finding in any case.
        figures: returns computed figures of a change that the prediction of a step does not have.
    """

    name: str
    looks_at: str
    why: str
    source: str
    what: Callable[[Setting], str | None | bool]
    options: Callable[[Setting], Iterable[Values]]
    gain: float = 0.0
    figures: Callable[[Setting, Values], str] = lambda setting, values: ""
    severity: str = ADVICE

    def finding(self, setting: Setting) -> dict[str, str] | None:
        """Return the finding about a setting: rule, severity, what, why, source, change (overrides), effect."""
        if self.gain > 0 and not setting.tflops or not (what := self.what(setting)):
            return None
        if (values := setting.best(self.options(setting), self.gain)) is None:
            return None
        words = (
            f"{key}={as_typed(value)}"
            for key, value in values.items()
            if with_values(setting.asked, {key: value}) != setting.asked
        )
        after = setting.changed(values) if values else None
        effect = [self.figures(setting, values), *(setting.compared(after) if after else [])]
        return {
            "rule": self.name,
            "severity": self.severity,
            "what": str(what),
            "why": self.why,
            "source": self.source,
            "change": " ".join(words),
            "effect": ", ".join(filter(None, effect)),
        }
