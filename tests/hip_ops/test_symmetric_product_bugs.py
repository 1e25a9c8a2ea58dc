# SPDX-License-Identifier: Apache-2.0
"""Each known mistake, put into a copy of the source of the symmetric product, must make a comparison fail."""

import pytest
import torch

from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import EmulatorFault
from tests.gfx942.toolchain import code_object
from tests.hip_ops.product_cases import ROUNDED_ONCE, symmetric_case
from tests.hip_ops.product_device import run_symmetric, variant

KERNEL = "ho_symmetric_bf16_64"
TILE, EPILOGUE, ORDER = "product_tile.h", "product_epilogue.h", "tile_order.h"

BUGS = {
    "a lost barrier between two slabs": (
        TILE,
        "stage_barrier();\n        if (slab + 1 < slabs) get",
        "if (slab + 1 < slabs) get",
    ),
    "rows of the MFMA result as if lanes 32-63 held rows 16-31": (EPILOGUE, "lane / 32 * 4;", "lane / 32 * 16;"),
    "k permuted in one operand alone": (TILE, "ho::half_of(f.b[j], q)", "ho::half_of(f.b[j], 1 - q)"),
    "the mask of the last slab one chunk too far": (
        TILE,
        "value[e] = column < k ? value[e] : 0;",
        "value[e] = column <= k ? value[e] : 0;",
    ),
    "stages of the double buffer exchanged": (
        TILE,
        "if (slab + 1 < slabs) put(staged, 1 - stage);",
        "if (slab + 1 < slabs) put(staged, stage);",
    ),
    "bf16 truncated": ("portable_bf16.h", "x.bits + 0x7fffu + ((x.bits >> 16) & 1u)", "x.bits"),
    "no mirror image": (EPILOGUE, "if (on_diagonal || !p.transposed) return;", "return;"),
    "beta ignored": (EPILOGUE, "value += p.beta * ", "value += "),
    "a lost barrier between writing and storing the result tile": (
        EPILOGUE,
        "block_sync_lds();\n        tile.template store<kVector>(p.c",
        "tile.template store<kVector>(p.c",
    ),
    "the main loop one slab too long": (TILE, "slab + 5 <= full", "slab + 4 <= full"),
    "a slab fetched twice": (TILE, "fetch(staged, slab + 3);", "fetch(staged, slab + 2);"),
    "LDS written without the swizzle": (TILE, "(chunk ^ (thread / 8 % 4)) * 8", "chunk * 8"),
    "rows past the end read": (TILE, "row < rows_left ? row : rows_left - 1", "row"),
    "rows past the end written": (EPILOGUE, "if (row0 + row >= rows) continue;", ""),
    "a tile computed twice and one never": (ORDER, "(xcd < longer ? xcd : longer)", "0"),
}


LARGE = "ho_symmetric_bf16_256"
BUGS_OF_THE_LARGE_TILE = {
    "one row of waves writes both halves of the tile": (EPILOGUE, "|| wave_row == part", "|| wave_row == 0"),
    "the mirror image of a half from the wrong waves": (EPILOGUE, "wave_column / 2 == part", "wave_column % 2 == part"),
    "the second half written while the first is stored": (
        EPILOGUE,
        "HO_OPAQUE(column_here);\n        if (part > 0) block_sync_lds();",
        "HO_OPAQUE(column_here);",
    ),
    "the last row of threads copies nothing": (TILE, "kLoads = kSide * (kSlab / 8) / kThreads;", "kLoads = 1;"),
}


def caught(code, kernel: str = KERNEL) -> str | None:
    """Return the errors that the checks find under two schedules, or None."""
    case = symmetric_case(1, 264 if kernel == LARGE else 72, 200, "bf16")
    for schedule in ("serial", "reverse"):
        try:
            got, _ = run_symmetric(Device(schedule=schedule), kernel, case, code)
        except EmulatorFault as fault:
            return f"{type(fault).__name__}: {fault}"
        if not got.isfinite().all():
            return "elements never written"
        if not torch.equal(got, got.mT):
            return "not symmetric"
        if case.worst_ulps(got) > ROUNDED_ONCE:
            return f"{case.worst_ulps(got):.3g} ULP"
    return None


@pytest.mark.parametrize("kernel", [KERNEL, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_the_copy_without_a_bug_passes(tmp_path, kernel):
    assert caught(code_object(variant(tmp_path, [kernel])), kernel) is None


# Each costs a build of the source.
FAST = ("a lost barrier between two slabs", "k permuted in one operand alone", "no mirror image")


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[] if bug in FAST else pytest.mark.slow) for bug in BUGS])
def test_bug_is_caught(bug, tmp_path):
    found = caught(code_object(variant(tmp_path, [KERNEL], [BUGS[bug]])))
    print(f"{bug}: {found}")
    assert found is not None


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS_OF_THE_LARGE_TILE)
def test_bug_of_the_large_tile_is_caught(bug, tmp_path):
    found = caught(code_object(variant(tmp_path, [LARGE], [BUGS_OF_THE_LARGE_TILE[bug]])), LARGE)
    print(f"{bug}: {found}")
    assert found is not None
