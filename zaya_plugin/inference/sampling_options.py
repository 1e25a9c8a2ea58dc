# SPDX-License-Identifier: Apache-2.0
"""How tokens are drawn. Imports no torch, so that a wrong option is named at once."""

from __future__ import annotations

from dataclasses import dataclass

from zaya_plugin.ground.errors import mistake

WARM = "0 (greedy) or more; the least above 0 is 0.001"


@dataclass(frozen=True)
class Sampling:
    """temperature 0: the most probable token. top_k 0 and top_p 1 leave all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        rules = (
            # logits over less overflow fp32
            ("--temperature", self.temperature, self.temperature == 0 or 1e-3 <= self.temperature < 1e6, WARM),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        )
        for option, value, ok, allowed in rules:
            if not ok:
                raise mistake(option, value, problem="is out of range", allowed=allowed)
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise mistake(
                "--temperature",
                self.temperature,
                problem="takes the most probable token, so --top-k and --top-p have no effect",
                allowed="above 0 with --top-k or --top-p",
                fix="--temperature 1",
            )


GREEDY = Sampling()
