# SPDX-License-Identifier: Apache-2.0
"""The CCA prologue's kernels with one mistake each, made from the shipped sources by substitution, and the case that
shows it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from hip_ops.runtime.build import CSRC
from tests.hip_ops.cca_prologue_cases import Case
from tests.hip_ops.injected_bug import Bug, source

FILES = (
    "cca_prologue.h",
    "cca_prologue_backward.h",
    "cca_prologue.hip",
    "cca_prologue_backward.hip",
    "cca_prologue_parameters.hip",
)
PLAIN, HALO = Case(70, 1, 2, 1), Case(20, 2, 2, 1, halo=True, document=6)
LONG, ENTRIES = Case(300, 1, 2, 1), Case(150, 3, 2, 1)  # several tiles a block, the second of several entries
WHOLE = Case(64, 1, 2, 1)  # tiles without a row of another one


HEADER, BACKWARD_HEADER, FORWARD, BACKWARD, PARAMETERS = FILES
BUGS = {
    "document_border_one_row_late": Bug(HEADER, "t + step + 1) * p.batch", "t + step) * p.batch", HALO),
    "second_quad_as_the_first": Bug(
        HEADER, "second = quad + (quad < half ? half : kHeadDim / 2);", "second = first + 4;", PLAIN
    ),
    "taps_swapped": Bug(
        FORWARD,
        "taps[2 * e] = float_to_bf16(fmaf(a0, two, fmaf(a1, one, b0)));",
        "taps[2 * e] = float_to_bf16(fmaf(a1, two, fmaf(a0, one, b0)));",
        PLAIN,
    ),
    "far_row_not_left_out": Bug(
        FORWARD, "two = far ? bf16_to_float(z2[e]) : 0.0f;", "two = near ? bf16_to_float(z2[e]) : 0.0f;", HALO
    ),
    "halo_rows_exchanged": Bug(FORWARD, "(row.t - back + 2)) * p.batch", "(back - row.t - 1)) * p.batch", HALO),
    "mean_without_its_half": Bug(
        FORWARD,
        "fmaf(0.5f, bf16_to_float(loaded.z[i][0][q][e])",
        "fmaf(1.0f, bf16_to_float(loaded.z[i][0][q][e])",
        PLAIN,
    ),
    "norm_of_half_a_row": Bug(
        FORWARD,
        "for (int mask = 8; mask > 0; mask >>= 1) square",
        "for (int mask = 4; mask > 0; mask >>= 1) square",
        PLAIN,
    ),
    "rotation_backwards": Bug(FORWARD, "fmaf(one, cos[e], -two * sin[e])", "fmaf(one, cos[e], two * sin[e])", PLAIN),
    "lost_barrier_before_the_product": Bug(
        FORWARD, "block_sync_lds();  // u is written, and the previous tile's y is read", "", PLAIN, True
    ),
    "lost_barrier_before_the_rows": Bug(FORWARD, "block_sync_lds();  // y is written, and u is read", "", PLAIN, True),
    "projection_not_removed": Bug(
        BACKWARD_HEADER,
        "d[q][e] = fmaf(-removed, unit[q][e], bf16_to_float(row.upstream[q][e])) * factor;",
        "d[q][e] = bf16_to_float(row.upstream[q][e]) * factor;",
        PLAIN,
    ),
    "last_row_keeps_what_it_had": Bug(BACKWARD_HEADER, "if (!tile.has(from, p) || ", "if (", PLAIN),
    "merged_taps_mixed_up": Bug(BACKWARD, "fmaf(a0, tap1, a1 * tap0)", "fmaf(a0, tap0, a1 * tap1)", PLAIN),
    "gradient_across_a_document": Bug(
        BACKWARD_HEADER, "row_at[row] = hides_one ? kZeroRow : row + 1;", "row_at[row] = row + 1;", HALO
    ),
    "one_border_hides_no_second_row": Bug(BACKWARD_HEADER, "hides_two = hides_one || ", "hides_two = ", HALO),
    **{
        f"lost_barrier_{name}": Bug(BACKWARD, f"block_sync_lds();  // {reason}", f"// {reason}", PLAIN, True)
        for name, reason in (
            ("before_the_operands", "dy is written, and the previous tile's operands are read"),
            ("before_the_sums", "the operands are written, and dy is read"),
            ("before_the_product_of_the_input", "dy is written, and the previous tile's dz is read"),
            ("before_the_rows_of_the_input", "dz is written, and dy is read"),
        )
    },
    "halo_gradient_one_row_off": Bug(
        BACKWARD,
        "at = unsigned(local * batch) * unsigned(channels);",
        "at = unsigned((1 - local) * batch) * unsigned(channels);",
        HALO,
    ),
    "rows_behind_the_tile_left_out": Bug(
        BACKWARD_HEADER, "constexpr int kBehind = 2,", "constexpr int kBehind = 1,", PLAIN
    ),
    "weights_of_the_row_before": Bug(
        BACKWARD, "local : row_at[(operand - 1) * kTile + local]", "local : row_at[local]", PLAIN
    ),
    "row_after_the_last_one": Bug(BACKWARD, "tile.has(kTile + row, p) ? behind : nothing", "behind", WHOLE),
    "tiles_of_one_entry_only": Bug(
        BACKWARD_HEADER,
        "if (++tile.entry == p.batch) tile.entry = 0, tile.first += kTile;",
        "tile.first += kTile;",
        ENTRIES,
    ),
    "means_of_the_first_query_head": Bug(
        BACKWARD, "load_dy(tile, local, other + k)", "load_dy(tile, local, other)", PLAIN
    ),
    "last_run_not_added": Bug(
        PARAMETERS, "for (int64_t run = 0; run < runs; ++run) {", "for (int64_t run = 0; run < runs - 1; ++run) {", LONG
    ),
    "bias_left_out_of_the_weights": Bug(
        PARAMETERS, "fmaf(a1, s[1], fmaf(a0, s[2], b0 * db[out]))", "fmaf(a1, s[1], a0 * s[2])", PLAIN
    ),
}

# What only a sanitizer is sure to see: the second quad of a head beyond its end.
OUTSIDE = {
    "second_quad_as_the_first": Bug(
        HEADER,
        "second = quad + (quad < half ? half : kHeadDim / 2);",
        "second = first + (quad < half ? half : kHeadDim / 2);",
        PLAIN,
    )
}


def copy(folder: Path, bug: Bug | None = None) -> list[Path]:
    """The sources in `folder`, with `bug`; the .hip files among them."""
    for file in FILES:
        (folder / file).write_text(source(file, bug))
    for header in CSRC.glob("portable*.h"):
        shutil.copy(header, folder)
    return [folder / file for file in FILES if file.endswith(".hip")]
