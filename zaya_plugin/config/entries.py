# SPDX-License-Identifier: Apache-2.0
"""Entries of keys that are lists of texts: datasets of a blend (data/blend.py opens them), settings of parameters by
name pattern (`optim.overrides`), and steps to skip.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import mistake

LARGEST_WEIGHT = 1e12  # such as a number of tokens
WEIGHTS = (
    f"weights above 0, at most {LARGEST_WEIGHT:g}, for every dataset or for none, "
    "as in ['0.7 data/web','0.3 data/code']"
)
OPTIMIZERS = ("muon", "adamw")
LARGEST_FACTOR = 1e6  # a larger one is a mistake of typing
MOST_SKIPPED_STEPS = 100_000  # Megatron holds each, and every checkpoint keeps them


class BlendEntry(NamedTuple):
    """One dataset of a blend. Weights are relative: their sum is free. weight None: the dataset's number of tokens."""

    weight: float | None
    path: str


# One path, or several entries: 'WEIGHT PATH' texts, paths or (weight, path) pairs.
Blend = str | os.PathLike | Sequence[str | os.PathLike | tuple[float, str | os.PathLike]]


def parse_blend(blend: Blend | None, key: str = "blend", weighted: bool = False) -> list[BlendEntry]:
    """Return the entries of a blend in any of its forms; none for None.

    Args:
        key: the recipe key or option that errors name.
        weighted: whether every entry needs a weight.

    Raises:
        ValueError: a weight is not positive and finite, or only some entries have one.
    """
    if blend is None or isinstance(blend, str | os.PathLike):
        return [] if blend is None else [BlendEntry(None, os.fspath(blend))]
    entries = [_entry(item) for item in blend]
    bad = [entry for entry in entries if entry.weight is not None and not 0 < entry.weight <= LARGEST_WEIGHT]
    if bad:
        raise mistake(
            key,
            list(blend),
            problem=f"a weight must be a positive number, and that of {bad[0].path} is {bad[0].weight:g}",
            allowed=WEIGHTS,
            fix="leave out a dataset that is not used",
        )
    allowed = "'<weight above 0> <path>' for every dataset" if weighted else WEIGHTS
    without = [entry.path for entry in entries if entry.weight is None]
    if without and (weighted or len(without) < len(entries)):
        raise mistake(key, list(blend), problem=f"{without[0]!r} has no weight", allowed=allowed)
    return entries


def _entry(entry: str | os.PathLike | tuple[float, str | os.PathLike]) -> BlendEntry:
    if isinstance(entry, tuple):
        return BlendEntry(None if entry[0] is None else float(entry[0]), os.fspath(entry[1]))
    text = os.fspath(entry).strip()
    weight, _, path = text.partition(" ")
    try:
        return BlendEntry(float(weight), path.strip()) if path else BlendEntry(None, text)
    except ValueError:
        return BlendEntry(None, text)


@dataclass(frozen=True)
class Override:
    """Settings of the parameters whose name matches `pattern`. None keeps the default.

    Attributes:
        pattern: parameter name with shell wildcards.
        optimizer: one of OPTIMIZERS.
        lr_mult: factor of the shared learning rate.
        weight_decay_mult: factor of `optim.weight_decay`.
    """

    pattern: str
    optimizer: str | None = None
    lr_mult: float | None = None
    weight_decay_mult: float | None = None

    @classmethod
    def parse(cls, text: str) -> Override:
        """Parse 'PATTERN key=value ...', such as '*.router.* optimizer=adamw lr_mult=0.5'.

        Raises:
            ValueError: the pattern is missing, there is no key or an unknown one, or a value is not allowed.
        """
        pattern, *pairs = text.split() or [""]
        values: dict[str, str | float] = {}
        if not pattern or "=" in pattern or not pairs:
            raise _malformed(text, "has no pattern or no key")
        for pair in pairs:
            key, _, value = pair.partition("=")
            if key == "optimizer" and value in OPTIMIZERS:
                values[key] = value
            elif key in ("lr_mult", "weight_decay_mult") and _is_zero_or_more(value):
                values[key] = float(value)
            else:
                raise _malformed(text, f"{pair!r} is not allowed")
        return cls(pattern, **values)


def _malformed(text: str, problem: str) -> ValueError:
    return mistake(
        "optim.overrides",
        problem=f"the entry {text!r}: {problem}",
        allowed=f"a pattern, then optimizer={'|'.join(OPTIMIZERS)}, or lr_mult or weight_decay_mult with a number from "
        f"0 to {LARGEST_FACTOR:g}",
        fix="optim.overrides=['*.router.* optimizer=adamw lr_mult=0.5 weight_decay_mult=0']",
    )


def _is_zero_or_more(text: str) -> bool:
    try:
        return 0 <= float(text) <= LARGEST_FACTOR
    except ValueError:
        return False


def skipped_steps(recipe: Recipe) -> list[int]:
    """Return the steps of data.skip_steps, ascending.

    Raises:
        ValueError: an entry is malformed, or names a step that is not between the first and the last.
    """
    steps: set[int] = set()
    for entry in recipe.data.skip_steps:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", entry.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last < recipe.stage.train_iters:
            raise mistake(
                "data.skip_steps",
                recipe.data.skip_steps,
                problem=f"{entry!r} is not a step or range of steps of this stage before its last",
                allowed=f"'120' or '120-140', from 1 to {recipe.stage.train_iters - 1}",
            )
        steps |= set(range(first, min(last, first + MOST_SKIPPED_STEPS) + 1))
        if len(steps) > MOST_SKIPPED_STEPS:
            raise mistake(
                "data.skip_steps",
                recipe.data.skip_steps,
                problem=f"{entry!r} makes them more than {MOST_SKIPPED_STEPS:,} steps, whose batches are read and not "
                "used",
                allowed=f"at most {MOST_SKIPPED_STEPS:,} steps",
                fix="fewer steps",
            )
    return sorted(steps)


def assigns_muon(entry: str) -> bool:
    """Return whether an entry of optim.overrides assigns parameters to Muon."""
    return "optimizer=muon" in entry.split()
