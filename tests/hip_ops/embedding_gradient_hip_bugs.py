# SPDX-License-Identifier: Apache-2.0
"""The HIP kernels that add rows by their ids with one mistake each, made from the shipped source by substitution."""

from __future__ import annotations

from tests.hip_ops.embedding_gradient_cases import CASES, check
from tests.hip_ops.injected_bug import Bug


def in_source(right: str, wrong: str, file: str = "embedding_gradient.hip") -> Bug:
    return Bug(file, right, wrong, case=CASES)


BUGS = {
    "what_came_in_is_taken_for_begun": in_source(
        "bool came_in = start > 0 && load_global(ids + start - 1) == id;", "bool came_in = false;"
    ),
    "every_id_came_in": in_source("      came_in = false;\n", ""),
    "sums_go_on": in_source("      came_in = false;\n      sums.clear();\n", "      came_in = false;\n"),
    "every_id_ends_with_its_run": in_source(
        "at + p + 1 < count ? load_global(ids + at + p + 1) : -1",
        "at + p + 1 < end ? load_global(ids + at + p + 1) : -1",
    ),
    "order_forgotten": in_source("load_global(order + at + p) * stride", "(at + p) * stride"),
    "padding_of_rows_ignored": in_source("load_global(order + at + p) * stride", "load_global(order + at + p) * width"),
    "padding_of_the_matrix_ignored": in_source(
        "else if (ends) sums.add_to(total + id * total_stride", "else if (ends) sums.add_to(total + id * width"
    ),
    "padding_of_the_matrix_ignored_in_the_join": in_source(
        "  sums.add_to(total + id * total_stride + column);\n}", "  sums.add_to(total + id * width + column);\n}"
    ),
    "matrix_overwritten": in_source("    add_from(total);\n", "", "row_vectors.h"),
    "second_half_of_a_lane_over_the_first": in_source("store16(to + i, x);", "store16(to, x);", "row_vectors.h"),
    "columns_of_the_first_block": in_source("(int(blockIdx.y) * kWaves + wave_id())", "wave_id()"),
    "sums_of_the_first_run": in_source("of_run = int64_t(blockIdx.x) * width + column", "of_run = column"),
    "tail_forgotten": in_source("  sums.add_from(tails + run * width + column);\n", ""),
    "one_run_joined": in_source(
        "next * kRun < count && load_global(ids", "next < run + 2 && next * kRun < count && load_global(ids"
    ),
    "heads_of_other_ids": in_source(
        "next * kRun < count && load_global(ids + next * kRun) == id;", "next * kRun < count;"
    ),
    "joined_by_every_run": in_source(
        "if (load_global(ids + end) != id || (start > 0 && load_global(ids + start - 1) == id)) return;",
        "if (load_global(ids + end) != id) return;",
    ),
    "half_of_the_columns_joined": in_source(
        "ho_join_runs_any, grid(aligned ? 4 : 1)", "ho_join_runs_any, grid(aligned ? 8 : 1)"
    ),
}
# Not seen in the numbers: what follows the last id is not that id.
ONE_TOO_MANY = in_source("following[p] = at + p + 1 < count ?", "following[p] = at + p < count ?")
# Nor this one: the lane behind the last column reads and writes what belongs to the next row.
ONE_COLUMN_TOO_MANY = in_source("  if (column >= width) return;", "  if (column > width) return;")


def shows(module) -> None:
    for case in CASES:
        check(module, case)
