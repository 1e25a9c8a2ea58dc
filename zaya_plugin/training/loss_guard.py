# SPDX-License-Identifier: Apache-2.0
"""Loss spikes: a loss far above those of the last steps, by a robust z score, and what is done about it.

z = (value - median) / (1.4826 * MAD) over the last `guard.window` steps that were no spike; MAD is the median of the
distances from the median. One outlier changes neither, while it would double a mean and a standard deviation. A step is
a spike if the loss has z >= `guard.threshold`, or half of it while the norm of the gradients has z >=
`guard.threshold`: the norm alone often spikes without harm, since gradients are clipped. Only the upward side counts.
After `guard.patience` such steps in a row the guard acts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import RunEndedError, message
from zaya_plugin.ground.exit_codes import ROLL_BACK
from zaya_plugin.handover.predecessor import metric_rows

DEVIATIONS_IN_MAD = 1.4826  # standard deviations of a normal distribution in one MAD
MIN_DEVIATION = 1e-3  # of the median: the least deviation, for losses that hardly vary


class RollBackError(RunEndedError):
    """All ranks leave together because the loss has spiked, in `first_step` first; the weights before that step gave
    this loss, so checkpoints from the step before on hold a spoiled state.
    """

    exit_code = ROLL_BACK

    def __init__(self, text: str, first_step: int):
        super().__init__(text)
        self.first_step = first_step


@dataclass(frozen=True)
class Spike:
    """One spiked step.

    first_step: of the spikes in a row. in_a_row: their number. acts: it is the one with which patience ends.
    loss_z, norm_z: of this step; norm_z is 0 without a norm. usual: the median loss before.
    """

    step: int
    first_step: int
    in_a_row: int
    acts: bool
    loss: float
    loss_z: float
    norm_z: float
    usual: float

    @property
    def text(self) -> str:
        """The sentence for the console and for the supervisor."""
        return (
            f"step {self.step}: the loss {self.loss:.4f} is {self.loss_z:.1f} robust standard deviations above its "
            f"median {self.usual:.4f}, and the norm of the gradients {self.norm_z:.1f}; spikes since step "
            f"{self.first_step}: {self.in_a_row} in a row"
        )


class LossGuard:
    """Finds spikes on the rank that reports the steps. It is silent until `window` steps have been seen."""

    def __init__(self, window: int, threshold: float, patience: int):
        self.window, self.threshold, self.patience = window, threshold, patience
        self._usual: deque[tuple[float, float | None]] = deque(maxlen=window)
        self._spiked: list[tuple[float, float | None]] = []
        self._first = 0

    def fill(self, rows: Iterable[Mapping]) -> None:
        """Take the rows of metrics.jsonl up to the step from which a run resumes: else the guard would be silent just
        after it has rolled back.
        """
        for row in rows:
            self.add(row["step"], row["loss"], row.get("grad_norm"))
        self._spiked.clear()

    def add(self, step: int, loss: float, norm: float | None) -> Spike | None:
        """Take the numbers of a step, and return them if it is a spike. Values that are not finite are left out: other
        guards act on those.
        """
        if not math.isfinite(loss):
            return None
        norm = norm if norm is not None and math.isfinite(norm) else None
        losses = [loss for loss, _ in self._usual]
        norms = [norm for _, norm in self._usual if norm is not None]
        loss_z = robust_z(loss, losses)
        norm_z = robust_z(norm, norms) if norm is not None and 2 * len(norms) >= self.window else 0.0
        factor = 0.5 if norm_z >= self.threshold else 1.0
        if len(self._usual) < self.window or loss_z < factor * self.threshold:
            self._usual.append((loss, norm))
            self._spiked.clear()
            return None
        if not self._spiked:
            self._first = step
        self._spiked.append((loss, norm))
        count = len(self._spiked)
        spike = Spike(step, self._first, count, count == self.patience, loss, loss_z, norm_z, median(losses))
        if count == self.window:  # the loss stays there, as with other data: it is the usual one now
            self._usual.extend(self._spiked)
            self._spiked.clear()
        return spike


def robust_z(value: float, values: list[float]) -> float:
    """Return by how many robust standard deviations `value` lies above the median of `values`."""
    if not values:
        return 0.0
    middle = median(values)
    deviation = DEVIATIONS_IN_MAD * median(abs(other - middle) for other in values)
    return (value - middle) / max(deviation, MIN_DEVIATION * abs(middle), 1e-12)


def make_guard(recipe: Recipe, resumed_at: int) -> LossGuard | None:
    """Return the guard of the recipe, None for `guard.loss_spike=off`. resumed_at: step that the run resumes from."""
    guard = recipe.guard
    if guard.loss_spike == "off":
        return None
    loss_guard = LossGuard(guard.window, guard.threshold, guard.patience)
    if resumed_at:
        steps = (row for row in metric_rows(Path(recipe.run_dir)) if isinstance(row.get("loss"), float))
        loss_guard.fill(deque((row for row in steps if row["step"] <= resumed_at), maxlen=guard.window))
    return loss_guard


def roll_back(first_step: int, step: int, last_good: str) -> RollBackError:
    """Return the error with which all ranks leave after `step`."""
    text = message(
        "guard.loss_spike",
        "roll_back",
        problem=f"the loss has spiked since step {first_step}; later checkpoints than of step {max(0, first_step - 2)} "
        f"are not used. {last_good}",
        fix=f"the same command with resume=auto; data.skip_steps=[{max(1, first_step - 1)}-{step}] leaves out the "
        "batches of these steps",
    )
    return RollBackError(text, first_step)
