# SPDX-License-Identifier: Apache-2.0
"""The kernels of the expert path with one mistake each, made from the shipped sources by substitution, and the check
that shows it.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.hip_ops.expert_path_cases import BF16, Rows, Swiglu, check_rows, check_sort, check_swiglu, expert_ids
from tests.hip_ops.injected_bug import Bug

HEADER = "row_vectors.h"


def sorts(module) -> None:
    """Several blocks; and two tokens a thread."""
    check_sort(module, expert_ids("even", 600, 16), 16)
    check_sort(module, expert_ids("even", 4200, 40), 40)


def moves(module) -> None:
    for case in (Rows(6, 1032, BF16, pad=8), Rows(140, 24, BF16, BF16, mix="skewed"), Rows(5, 45)):
        check_rows(module, case)


def activates(module) -> None:
    for case in (Swiglu(6, 1032, pad=8), Swiglu(140, 24), Swiglu(5, 45)):
        check_swiglu(module, case)


CHECKS: dict[str, Callable] = {"expert_sort": sorts, "expert_rows": moves, "weighted_swiglu": activates}


def in_source(name: str, right: str, wrong: str, file: str = "") -> Bug:
    """A mistake that the check of source `name` shows, in that source or in `file`."""
    return Bug(file or f"{name}.hip", right, wrong, case=name)


BUGS = {
    "lost_barrier_after_counting": in_source(
        "expert_sort", "experts), thread);\n  block_sync_lds();", "experts), thread);"
    ),
    "lost_barrier_before_placing": in_source(
        "expert_sort", "      row += mine;\n    }\n  }\n  block_sync_lds();", "      row += mine;\n    }\n  }"
    ),
    "own_block_counted_twice": in_source("expert_sort", "other < block ? found", "other <= block ? found"),
    "no_expert_is_the_last_one": in_source("expert_sort", "int(id) : experts;", "int(id) : experts - 1;"),
    "piece_starts_at_its_end": in_source(
        "expert_sort", "kPieces + piece] = row;\n      row += mine;", "kPieces + piece] = row += mine;"
    ),
    "rows_of_no_expert_look_live": in_source("expert_sort", "cls < experts ? token : ~token", "token"),
    "not_stable": in_source(
        "expert_sort",
        "const int token = int(share.first) + i, cls",
        "const int token = int(share.first) + share.count - 1 - i, cls",
    ),
    "offsets_are_starts": in_source("expert_sort", "= start + own;", "= start;"),
    "lost_tail": in_source("expert_rows", "  for (; at < count; at += kStep) work.template run<1>(at);", "", HEADER),
    "bf16_truncation": in_source(
        "weighted_swiglu",
        "return float_to_bf16(value);",
        "return bf16(__builtin_bit_cast(uint32_t, value) >> 16);",
        HEADER,
    ),
    "rows_left_out": in_source(
        "expert_rows", "int64_t(gridDim.x) * kWaves;", "int64_t(gridDim.x) * kWaves + 1;", HEADER
    ),
    "no_expert_gets_the_first_row": in_source(
        "expert_rows", "else piece[p] = zeros<T, kWidth>();", "else piece[p].read(from + at + p * kStep);"
    ),
    "gate_without_silu": in_source("weighted_swiglu", "g * sigmoid(g) * to_float", "sigmoid(g) * to_float"),
    "wrong_derivative": in_source("weighted_swiglu", "fmaf(silu, 1.0f - s, s)", "fmaf(s, 1.0f - s, s)"),
    "gradient_of_prob_with_prob": in_source(
        "weighted_swiglu", "fmaf(dy, product, d_prob)", "fmaf(weighted, product, d_prob)"
    ),
    "a_row_of_no_expert_read": in_source(
        "weighted_swiglu",
        "    const bool live = row < end;\n    ForwardWork",
        "    const bool live = row <= end;\n    ForwardWork",
    ),
    "output_without_prob": in_source("weighted_swiglu", "rounded<T>(product * prob)", "rounded<T>(product)"),
    "halves_swapped": in_source(
        "weighted_swiglu",
        "gate[p].write(d_gate_up + at + p * kStep), up[p].write(d_gate_up + width + at + p * kStep);",
        "up[p].write(d_gate_up + at + p * kStep), gate[p].write(d_gate_up + width + at + p * kStep);",
    ),
}
# Not seen in the numbers: one element beyond the row's end is the next row's first, which is written again.
ONE_TOO_MANY = in_source(
    "expert_rows", "  for (; at < count; at += kStep)", "  for (; at <= count; at += kStep)", HEADER
)
