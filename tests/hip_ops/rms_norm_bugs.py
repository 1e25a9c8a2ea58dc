# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm and LayerNorm kernels with one mistake each, made from the shipped sources by substitution, and the case that shows
it.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hip_ops.runtime.build import CSRC
from hip_ops.runtime.compilers import find_compiler
from hip_ops.runtime.launchers import declarations
from tests.hip_ops import injected_bug
from tests.hip_ops.injected_bug import Bug
from tests.hip_ops.rms_norm_cases import BF16, Case

FILES = ("rms_norm.h", "rms_norm_any.h", "rms_norm.hip", "rms_norm_backward.hip", "rms_norm_sum.hip")
TABLE = {256, 2048}  # rows of the table that the copies keep: half a wave a row, and four waves a row

ZAYA, PLAIN = Case(True, 5, 2048, pad=8), Case(False, 43, 256, residual_dtype=BF16)
CENTERED, ODD_CENTERED = (Case(True, n, h, centered=True, offset=3.0) for n, h in ((5, 2048), (3, 45)))
ODD = Case(False, 3, 45)  # what lies behind a row is the next row, not the end of a vector


BUGS = {
    "lost_barrier": Bug("rms_norm.h", "block_sync_lds();  // row sum", "", ZAYA),
    "one_side_of_lds": Bug("rms_norm.h", "slots + parity * (kThreads / kHalf)", "slots", ZAYA),
    "lanes_left_out": Bug("rms_norm.h", "int mask = kRowThreads / 2", "int mask = kRowThreads / 4", PLAIN),
    "lost_tail_mask": Bug("rms_norm_any.h", "if (k >= count) v[k] = 0.0f;\n      else v[k] =", "v[k] =", ODD),
    "bf16_truncation": Bug(
        "rms_norm.h", "out = float_to_bf16(v);", "ho::FloatBits x; x.value = v; out = bf16(x.bits >> 16);", PLAIN
    ),
    "statistics_before_rounding": Bug("rms_norm.hip", "value[k] = as_stored<R>(merged);", "value[k] = merged;", PLAIN),
    "eps_outside_the_root": Bug("rms_norm.hip", "rsqrtf(mean + eps)", "1.0f / (sqrtf(mean) + eps)", PLAIN),
    "wrong_row_stride": Bug(
        "rms_norm.hip", "residual + (row + step) * residual_stride", "residual + (row + step) * L::kHidden", ZAYA
    ),
    "bias_not_scaled": Bug("rms_norm.h", "return fmaf(b_x, s_x, b_r * s_r);", "return b_x + b_r;", ZAYA),
    "lost_residual_gradient": Bug(
        "rms_norm_backward.hip",
        "through - average : through, of_row, g[k]);",
        "through - average : through, of_row, 0.0f);",
        ZAYA,
    ),
    "sum_for_mean": Bug(
        "rms_norm_backward.hip",
        "slots, kCentered ? 1 : parity) * (1.0f / L::kHidden);",
        "slots, kCentered ? 1 : parity);",
        PLAIN,
    ),
    "scales_swapped": Bug(
        "rms_norm_backward.hip",
        "add_products(sum_gx, g, a), add_products(sum_gr, g, r);",
        "add_products(sum_gx, g, r), add_products(sum_gr, g, a);",
        ZAYA,
    ),
    "rows_taken_twice": Bug(
        "rms_norm_backward.hip",
        "const int64_t step = int64_t(gridDim.x) * L::kRows;",
        "const int64_t step = int64_t(gridDim.x);",
        PLAIN,
    ),
    "lost_barrier_between_rows_of_a_block": Bug(
        "rms_norm_backward.hip",
        "store_floats<L>(scratch + L::group() * L::kHidden, sum);\n    block_sync_lds();",
        "store_floats<L>(scratch + L::group() * L::kHidden, sum);",
        PLAIN,
    ),
    "last_block_not_summed": Bug("rms_norm_sum.hip", "block < blocks;", "block < blocks - 1;", ZAYA),
    "bias_left_out_of_scale": Bug(
        "rms_norm_sum.hip", "fmaf(total[0], load_as(x_bias, column, is_bf16), total[1])", "total[1]", ZAYA
    ),
    "both_sums_on_one_side_of_lds": Bug("rms_norm.hip", "(sum, slots, 0) * (1.0f", "(sum, slots, 1) * (1.0f", CENTERED),
    "norm_bias_left_out": Bug(
        "rms_norm.hip", "value[k] * scale, w[k], b[k])", "value[k] * scale, w[k], 0.0f)", CENTERED
    ),
    "masked_columns_in_the_variance": Bug("rms_norm.hip", "if (k < count) squares", "squares", ODD_CENTERED),
    "mean_left_in": Bug("rms_norm_backward.hip", "kCentered ? value - middle : value", "value", CENTERED),
    "average_left_out": Bug(
        "rms_norm_backward.hip", "kCentered ? through - average : through, of_row", "through, of_row", CENTERED
    ),
    "weight_for_norm_bias": Bug(
        "rms_norm_sum.hip",
        "store_as(d_bias, column, is_bf16, total[4]);",
        "store_as(d_bias, column, is_bf16, total[3]);",
        CENTERED,
    ),
}
RIGHT = "right"


def source(file: str, bug: Bug | None = None) -> str:
    """Text of a file, with `bug` if it is the one, and a short table."""
    text = injected_bug.source(file, bug)
    if file == "rms_norm.h":

        def short(row: re.Match) -> str:
            return row[0] if int(row[1]) in TABLE else "" if row[2] else "\n"  # the last row ends its macro

        kept, count = re.subn(r"  ROW\((\d+),.*\)( *\\)?\n", short, text)
        assert count == 6, "the table of rms_norm.h is not where it was"
        text = kept
    return text


def _copy(name: str) -> str:
    """Kernels and launchers of the files that the bug touches, in namespace `name`, their C names ho_<name>_..."""
    bug = BUGS.get(name)
    needed = FILES if bug is None or bug.file.endswith(".h") else [*FILES[:2], bug.file]
    text = "\n".join(source(file, bug) for file in needed)
    text = re.sub(r"#pragma once|#include .*", "", text)
    macros = set(re.findall(r"^#define (\w+)", text, re.M))
    text = re.sub(r"^(#define (\w+))", r"#undef \2\n\1", text, flags=re.M)
    for kernel in sorted(set(re.findall(r"\bho_(?:rms|layer|add|scaled)\w*", text)), key=len, reverse=True):
        text = re.sub(rf"\b{kernel}\b", kernel.replace("ho_", f"ho_{name}_", 1), text)
    ends = "\n".join(f"#undef {macro}" for macro in sorted(macros))
    return f"namespace {name} {{\n{text}\n}}\n{ends}\n"


def build(folder: Path) -> Path:
    """A CPU library of the right kernels and of each bug: two translation units, since the headers take most of the
    time.
    """
    compiler, made, names = find_compiler("cpu"), folder / "rms_norm_bugs.so", (RIGHT, *BUGS)
    flags = [flag for flag in compiler.compile_flags if not flag.startswith("-O")]

    def compile_part(part: int) -> str:
        file = folder / f"part{part}.hip"
        file.write_text('#include "portable.h"\n' + "".join(map(_copy, names[part::2])))
        subprocess.run([compiler.program, *flags, "-O0", f"-I{CSRC}", "-c", str(file), "-o", f"{file}.o"], check=True)
        return f"{file}.o"

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_part, range(2)))
    subprocess.run([compiler.program, "-shared", *objects, "-o", str(made)], check=True)
    return made


class Renamed:
    """The library as hip_ops.runtime.launchers.load gives it, but with the functions of copy `name`, and the right ones
    where it has none.
    """

    def __init__(self, loaded, name: str):
        self._loaded, self._name = loaded, name

    def __getattr__(self, function: str):
        name = self._name if hasattr(self._loaded, function.replace("ho_", f"ho_{self._name}_", 1)) else RIGHT
        found = getattr(self._loaded, function.replace("ho_", f"ho_{name}_", 1))
        found.restype, found.argtypes = declarations()[function]
        return found
