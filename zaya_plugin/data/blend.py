# SPDX-License-Identifier: Apache-2.0
"""Entries of a blend as people write them: 'WEIGHT PATH', or a path alone."""

from collections.abc import Sequence
from pathlib import Path


def parse_entry(entry: str) -> tuple[float | None, str]:
    """Weight and path; the weight is None where only a path was given.

    Raises:
        ValueError: the weight is not positive and finite.
    """
    first, _, rest = entry.strip().partition(" ")
    try:
        weight = float(first)
    except ValueError:
        return None, entry.strip()
    if not rest.strip():
        return None, entry.strip()
    if not 0 < weight < float("inf"):
        raise ValueError(
            f"{entry!r}: a weight must be a positive number, as in '0.7 data/web'; leave out what is not wanted"
        )
    return weight, rest.strip()


def domain_names(paths: Sequence[str]) -> list[str]:
    """A name for each source of a validation blend: as many of the last parts of its path as tell it from the others.

    Raises:
        ValueError: a path comes twice, or two names come out the same.
    """
    parts = [Path(path).parts for path in paths]
    if len(set(parts)) < len(parts):
        raise ValueError(f"{', '.join(paths)}: a source comes twice; add up its weights")
    names = []
    for path in parts:
        count = 1
        while sum(other[-count:] == path[-count:] for other in parts) > 1:
            count += 1
        names.append("_".join(path[-count:]).strip("/"))
    if len(set(names)) < len(names):
        raise ValueError(
            f"{', '.join(paths)}: sources would share the names {', '.join(sorted(names))}; rename a folder"
        )
    return names
