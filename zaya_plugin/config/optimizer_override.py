# SPDX-License-Identifier: Apache-2.0
"""Parse entries of `optim.overrides`: optimizer, learning rate and weight decay of parameters by name pattern."""

from __future__ import annotations

from dataclasses import dataclass

from zaya_plugin.ground.errors import mistake

OPTIMIZERS = ("muon", "adamw")
LARGEST = 1e6  # a larger factor is a mistake of typing


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
        allowed=f"a pattern, then optimizer={'|'.join(OPTIMIZERS)}, or lr_mult or weight_decay_mult with a number from 0 "
        f"to {LARGEST:g}",
        fix="optim.overrides=['*.router.* optimizer=adamw lr_mult=0.5 weight_decay_mult=0']",
    )


def _is_zero_or_more(text: str) -> bool:
    try:
        return 0 <= float(text) <= LARGEST
    except ValueError:
        return False
