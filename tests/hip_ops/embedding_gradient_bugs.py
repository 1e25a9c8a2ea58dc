# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of hip_ops.embedding_gradient with one mistake each, made from the shipped source by substitution,
in Triton's interpreter.

`python -m tests.hip_ops.embedding_gradient_bugs FOLDER` runs the checks on the right source and on each mistake, and prints the
mistakes that were detected.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from tests.hip_ops.embedding_gradient_cases import CASES, check
from tests.hip_ops.injected_bug import triton_copy

# name: (right, wrong)
BUGS = {
    "what_came_in_is_taken_for_begun": (
        "(tl.load(ids + start - 1, mask=start > 0, other=-1) == id).to(tl.int32)",
        "(id == -7).to(tl.int32)",
    ),
    "every_id_came_in": ("continued *= 1 - ends", "continued *= 1"),
    "sums_go_on": ("sums = tl.where(ends > 0, 0.0, sums)", "sums = tl.where(ends > 0, 1.0, 1.0) * sums"),
    "order_forgotten": ("row = tl.load(order + at)", "row = tl.load(order + at) * 0 + at"),
    "total_overwritten": ("(now + sums).to(total", "sums.to(total"),
    "last_row_lost": ("for at in range(start, end):", "for at in range(start, min(end, count - 1)):"),
    "padding_of_rows_ignored": ("rows + row * rows_stride + column", "rows + row * width + column"),
    "padding_of_the_matrix_ignored": (
        "to = total + id * total_stride + column\n        now",
        "to = total + id * width + column\n        now",
    ),
    "padding_of_the_matrix_ignored_in_the_join": (
        "to = total + id * total_stride + column\n        tl",
        "to = total + id * width + column\n        tl",
    ),
    "head_of_the_first_part": ("of_part = part.to(tl.int64) * width + column", "of_part = column"),
    "tail_forgotten": (
        "sums = tl.load(tails + part.to(tl.int64) * width + column, mask=inside, other=0.0)",
        "sums = tl.zeros([BLOCK], tl.float32)",
    ),
    "one_round_of_parts": ("more = tl.min(mine.to(tl.int32), axis=0) > 0", "more = more & False"),
    "parts_of_other_ids": (
        "mask=mine[:, None] & inside[None, :]",
        "mask=(mine[:, None] | True) & (parts * RUN < count)[:, None] & inside[None, :]",
    ),
    "joined_by_every_part": ("if goes_on & (began_before == 0):", "if goes_on:"),
    "begins_at_the_border_only": (
        "(start > 0) & (tl.load(ids + start - 1, mask=start > 0, other=-3) == id)",
        "(tl.load(ids + start) == id)",
    ),
    "joined_sums_overwrite": ("other=0.0).to(tl.float32) + sums).to", "other=0.0).to(tl.float32) * 0.0 + sums).to"),
}


def kernels(folder: Path, name: str | None = None) -> ModuleType:
    """A copy of the module with bug `name`."""
    from hip_ops.ops.embedding_gradient import triton as embedding_gradient

    return triton_copy(folder, embedding_gradient, BUGS, name)


def main(folder: Path) -> None:
    for name in (None, *BUGS):
        module = kernels(folder, name)
        try:
            for case in CASES:
                check(module, case)
            found = "MISSED" if name else "right"
        except (AssertionError, IndexError) as error:
            found = "caught" if name else f"wrong: {error}"
        print(f"{found} {name}" if name else f"right source: {found}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
