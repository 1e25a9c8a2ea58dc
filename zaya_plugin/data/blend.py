# SPDX-License-Identifier: Apache-2.0
"""Entries of a blend as people write them: 'WEIGHT PATH', or a path alone."""


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
        raise ValueError(f"{entry!r}: a weight must be a positive number, as in '0.7 data/web'; leave out what is not wanted")
    return weight, rest.strip()
