# SPDX-License-Identifier: Apache-2.0
"""Entries of `optim.overrides`: optimizer, learning rate and weight decay of parameters by name pattern."""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class Override:
    """What a recipe says of the parameters whose name matches `pattern` (shell wildcards); None leaves the default.

    optimizer: one of OPTIMIZERS. lr_mult: times the shared learning rate. weight_decay_mult: times `weight_decay`.
    """

    pattern: str
    optimizer: str | None = None
    lr_mult: float | None = None
    weight_decay_mult: float | None = None

    @classmethod
    def parse(cls, text: str) -> Override:
        """'PATTERN key=value ...', as in '*.router.* optimizer=adamw lr_mult=0.5'.

        Raises:
            ValueError: no pattern, no or an unknown key, a value that is not allowed.
        """
        pattern, *pairs = text.split() or [""]
        example = "'*.router.* optimizer=adamw lr_mult=0.5 weight_decay_mult=0'"
        values: dict[str, str | float] = {}
        if not pattern or "=" in pattern or not pairs:
            raise ValueError(
                f"optim.overrides: {text!r} has no pattern or says nothing; allowed: entries like {example}"
            )
        for pair in pairs:
            key, _, value = pair.partition("=")
            if key == "optimizer" and value in OPTIMIZERS:
                values[key] = value
            elif key in ("lr_mult", "weight_decay_mult") and _is_zero_or_more(value):
                values[key] = float(value)
            else:
                raise ValueError(
                    f"optim.overrides: {pair!r} in {text!r}; allowed: optimizer={'|'.join(OPTIMIZERS)}, lr_mult and "
                    f"weight_decay_mult with a number of 0 or more, as in {example}"
                )
        return cls(pattern, **values)


def _is_zero_or_more(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False
