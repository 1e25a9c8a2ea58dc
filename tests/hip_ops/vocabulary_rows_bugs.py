# SPDX-License-Identifier: Apache-2.0
"""The kernels on rows of logits with one mistake each, made from the shipped source by substitution."""

from __future__ import annotations

from tests.hip_ops.injected_bug import Bug
from tests.hip_ops.rms_norm_cases import BF16, FP32
from tests.hip_ops.vocabulary_rows_cases import Logits, check

HEADER, SHARED, SOURCE = "row_vectors.h", "vocabulary.h", "vocabulary_rows.hip"
CASES = (
    Logits(7, 2600, BF16, parts=2, z_loss=1e-2),
    Logits(7, 2600, BF16, parts=2, shape="confident", pad=8),
    Logits(6, 640, parts=2, shape="nothing"),
    Logits(9, 333, FP32, parts=3, shape="far"),
    Logits(4, 2048, shape="rising"),
    Logits(300, 64, FP32),  # more rows than a CPU's waves
)


def in_source(right: str, wrong: str, file: str = SOURCE) -> Bug:
    return Bug(file, right, wrong, case=CASES)


BUGS = {
    "total_not_rescaled": in_source("float sum = total * exponential(largest - shift);", "float sum = total;"),
    "nothing_minus_nothing": in_source("return largest == kNothing ? 0.0f : largest;", "return largest;", SHARED),
    "lanes_keep_their_own_maximum": in_source(
        "wave_sum(work.total * exponential(work.largest - shift_of(largest)))", "wave_sum(work.total)"
    ),
    "maximum_of_half_a_wave": in_source(
        "for (int mask = kWave / 2; mask > 0; mask >>= 1) v = fmaxf",
        "for (int mask = kWave / 4; mask > 0; mask >>= 1) v = fmaxf",
        SHARED,
    ),
    "label_of_every_part": in_source(
        "label >= part.start && label < part.end ? to_float", "label >= 0 && label < classes ? to_float"
    ),
    "label_at_the_end_belongs_to_no_part": in_source(
        "const bool here = label >= part.start && label < part.end;",
        "const bool here = label >= part.start && label < part.end - 1;",
    ),
    "label_counted_from_the_row": in_source("here ? int(label) - part.start : -1", "here ? int(label) : -1"),
    "first_class_forgotten": in_source(
        "load_global(labels + row) - first_class;\n    const bool", "load_global(labels + row);\n    const bool"
    ),
    "label_not_weighted": in_source("rounded<T>(d * upstream)", "rounded<T>(d)"),
    "z_loss_halved": in_source("fmaf(2.0f * z_loss,", "fmaf(z_loss,"),
    "sum_forgotten": in_source("(to_float(x[p].get(i)) - top) - log_sum)", "(to_float(x[p].get(i)) - top))"),
    "normalizer_of_another_token": in_source("normalizer + normalizer_stride + row", "normalizer + count + row"),
    "padding_ignored": in_source(
        "work{logits + row * stride + part.start, here", "work{logits + row * classes + part.start, here"
    ),
    "lost_tail": in_source("  for (; at < count; at += kStep) work.template run<1>(at);", "", HEADER),
    "rows_left_out": in_source("int64_t(gridDim.x) * kWaves;", "int64_t(gridDim.x) * kWaves + 1;", HEADER),
}
# Not seen in the numbers of the statistics kernel: the element behind a part's end counts in the next one.
ONE_TOO_MANY = in_source("  for (; at < count; at += kStep)", "  for (; at <= count; at += kStep)", HEADER)


def shows(module) -> None:
    for case in CASES:
        check(module, case)
