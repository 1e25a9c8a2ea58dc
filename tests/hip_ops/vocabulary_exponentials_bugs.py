# SPDX-License-Identifier: Apache-2.0
"""The kernels that make exponentials of rows of logits, and gradients of these, with one mistake each, made from the
shipped source by substitution.
"""

from __future__ import annotations

from tests.hip_ops.injected_bug import Bug
from tests.hip_ops.rms_norm_cases import BF16, FP32
from tests.hip_ops.vocabulary_exponentials_cases import check
from tests.hip_ops.vocabulary_exponentials_edges import EDGES
from tests.hip_ops.vocabulary_rows_cases import Logits

ROWS, HEADER, SOURCE = "row_vectors.h", "vocabulary.h", "vocabulary_exponentials.hip"
CASES = (
    Logits(7, 2600, BF16, parts=2, z_loss=1e-2),
    Logits(7, 2600, BF16, parts=2, shape="confident", pad=8),
    Logits(6, 640, parts=2, shape="nothing"),
    Logits(9, 333, FP32, parts=3, shape="steps", pad=3),
    Logits(8, 2048, parts=4, shape="rising"),
    Logits(5, 37, FP32, shape="far"),
    Logits(3, 1100, FP32, parts=70),  # more parts than a wave has lanes
    Logits(300, 64, FP32),  # more rows than a CPU's waves
)
OF_SEVERAL_RANKS = Logits(6, 640, parts=4, shape="steps")


def in_source(right: str, wrong: str, file: str = SOURCE, **more) -> Bug:
    return Bug(file, right, wrong, case=CASES, **more)


BUGS = {
    "nothing_minus_nothing": in_source("return largest == kNothing ? 0.0f : largest;", "return largest;", HEADER),
    "maximum_of_half_a_wave": in_source(
        "for (int mask = kWave / 2; mask > 0; mask >>= 1) v = fmaxf",
        "for (int mask = kWave / 4; mask > 0; mask >>= 1) v = fmaxf",
        HEADER,
    ),
    "label_of_another_lane": in_source(
        "label % size / kWidth % kWave", "label / kWidth % kWave", HEADER, schedule=True
    ),
    "reference_rounded_down": in_source("ceilf((", "floorf(("),
    "label_of_every_part": in_source("label >= part.start && label < part.end;", "label >= 0 && label < classes;"),
    "label_read_after_the_stores": in_source(
        "to + 2 * count, of_label)",
        "to + 2 * count, here ? to_float(load_global(values + (label - part.start))) : 0.0f)",
    ),
    "sum_of_rounded_exponentials": in_source(
        "total += e;\n          x[p].set(i, rounded<T>(e));",
        "x[p].set(i, rounded<T>(e));\n          total += to_float(x[p].get(i));",
    ),
    "padding_ignored": in_source("logits + row * stride + part.start;", "logits + row * classes + part.start;"),
    "first_class_forgotten": in_source(
        "load_global(labels + row) - first_class;\n    const bool", "load_global(labels + row);\n    const bool"
    ),
    "sums_not_scaled": in_source("load_global(at + count) * exponential(reference - shift)", "load_global(at + count)"),
    "parts_beyond_a_wave_forgotten": in_source(
        "p < parts.all; p += kWave) {", "p < kWave && p < parts.all; p += kWave) {"
    ),
    "difference_of_logarithms": in_source(
        "most ? logf(total / of_label) : log_total", "most && false ? 0.0f : log_total"
    ),
    "parts_not_scaled": in_source("reference != shift) moved = 1.0f", "reference != shift) moved = 0.0f"),
    "parts_of_the_first_rank": in_source("int64_t(parts.first + p) * 3 * count", "int64_t(p) * 3 * count"),
    "label_without_the_factor": in_source("of_label - total / factor", "of_label - total"),
    "upstream_forgotten": in_source("load_global(grad + row) * factor / total", "factor / total"),
    "lost_tail": in_source("  for (; at < count; at += kStep) work.template run<1>(at);", "", ROWS),
    "rows_left_out": in_source("int64_t(gridDim.x) * kWaves;", "int64_t(gridDim.x) * kWaves + 1;", ROWS),
}
# Not seen in the numbers: what is read behind a part's end is not used.
ONE_TOO_MANY = in_source("if (mine + p * kStep < length) x[p].read", "if (mine + p * kStep <= length) x[p].read")


def shows(module) -> None:
    for case in CASES:
        check(module, case)
    for other_ranks in (1, 2):
        check(module, OF_SEVERAL_RANKS, other_ranks=other_ranks)
    for edge in EDGES:
        edge(module)
