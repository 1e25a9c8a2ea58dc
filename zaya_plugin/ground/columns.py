# SPDX-License-Identifier: Apache-2.0
"""Rows of text as columns of equal width."""

import math
from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), widest: float = math.inf) -> str:
    """Return the rows as columns of equal width, at most `widest`, beyond which a cell moves the rest of its row; the
    columns whose numbers are in `right` are right-aligned.
    """
    widths = [min(widest, max(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
