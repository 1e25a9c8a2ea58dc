# SPDX-License-Identifier: Apache-2.0
"""Validation of several domains in one pass over one data set, in Megatron's loop.

Megatron 0.19 refuses --multiple-validation-sets without --full-validation, that is without reading every set to its end in
every validation. Here a validation is `eval_iters` batches of the first domain, then as many of the second, and so on: what is
evaluated is told apart by its place, and a run that is resumed finds that place by the one count that Megatron keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.utils.data import Dataset


class InTurn(Dataset):
    """`period` samples of each part in turn, over and over; every part begins where it stopped the time before.

    Args:
        parts: data sets of one length, a multiple of `period`, or longer.
    """

    def __init__(self, parts: Sequence, period: int):
        assert parts and period > 0
        self.parts, self.period = parts, period
        self.rounds = min(map(len, parts)) // period
        self.split = getattr(parts[0], "index_split", getattr(parts[0], "split", None))  # Megatron's loader asks for it

    def __len__(self) -> int:
        return self.rounds * self.period * len(self.parts)

    def __getitem__(self, index: int):
        turn, at = divmod(index, self.period)
        round_, part = divmod(turn, len(self.parts))
        return self.parts[part][round_ * self.period + at]


def mean_loss(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Loss of the blend: of its domains' losses the mean by weight."""
    return sum(weights[name] * loss for name, loss in losses.items()) / sum(weights[name] for name in losses)
