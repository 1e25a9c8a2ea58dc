# SPDX-License-Identifier: Apache-2.0
"""Entries of a blend of datasets, as recipes and options write them. data/blend.py resolves them to datasets."""

import os
from collections.abc import Sequence
from typing import NamedTuple

from zaya_plugin.ground.errors import mistake

LARGEST = 1e12  # such as a number of tokens
WEIGHTS = f"weights above 0, at most {LARGEST:g}, for every dataset or for none, as in ['0.7 data/web','0.3 data/code']"


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
    bad = [entry for entry in entries if entry.weight is not None and not 0 < entry.weight <= LARGEST]
    if bad:
        raise mistake(
            key,
            list(blend),
            problem=f"a weight must be a positive number, and that of {bad[0].path} is {bad[0].weight:g}",
            allowed=WEIGHTS,
            fix="leave out a dataset that is not wanted",
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
