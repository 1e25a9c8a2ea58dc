# SPDX-License-Identifier: Apache-2.0
"""Runs the gfx942 code objects of hip_ops/ops/newton_schulz/symmetric_product.hip in the emulator, and makes small variants
of the source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from hip_ops.runtime.build import CSRC
from tests.gfx942.emulator import Counters, Device
from tests.gfx942.toolchain import code_object
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.product_cases import DTYPES, Case, bits, from_bits, general_case

SOURCE = "symmetric_product"


def side(kernel: str) -> int:
    return int(found[1]) if (found := re.search(r"_(256|128|64)$", kernel)) else 64


def threads(kernel: str) -> tuple[int]:
    return (512 if side(kernel) == 256 else 256,)


def tiles(rows: int, kernel: str) -> int:
    return -(-rows // side(kernel))


def run_symmetric(device: Device, kernel: str, case: Case, code: Path | None = None) -> tuple[Tensor, Counters]:
    """kernel: ho_symmetric_<dtype>_<tile>."""
    batch, n, k = case.a.shape
    rows = tiles(n, kernel)
    a = device.put(bits(case.a))
    b = a if case.b is None else device.put(bits(case.b))
    d = None if case.d is None else device.put(bits(case.d))
    c = device.alloc((batch, n, n), np.uint16)
    counters = device.launch(
        code or code_object(SOURCE),
        kernel,
        (batch * rows * (rows + 1) // 2,),
        threads(kernel),
        [a, b, d, c, np.int32(n), np.int32(k), np.float32(case.alpha), np.float32(case.beta), np.float32(case.gamma)],
    )
    return from_bits(c.read(), case.a.dtype), counters


def run_general(
    device: Device,
    kernel: str,
    case: Case,
    *,
    transposed: bool = True,
    bf16_result: bool = False,
    code: Path | None = None,
) -> tuple[Tensor, Tensor | None, Counters]:
    """The result and its transpose, as the kernel writes it."""
    (batch, m, k), n = case.a.shape, case.b.shape[1]
    c = device.alloc((batch, m, n), np.uint16)
    t = device.alloc((batch, n, m), np.uint16) if transposed else None
    counters = device.launch(
        code or code_object(SOURCE),
        kernel,
        (batch * tiles(m, kernel) * tiles(n, kernel),),
        threads(kernel),
        [
            device.put(bits(case.a)),
            device.put(bits(case.b)),
            None if case.d is None else device.put(bits(case.d)),
            c,
            t,
            np.int32(m),
            np.int32(n),
            np.int32(k),
            np.float32(case.alpha),
            np.float32(case.beta),
            np.int32(bf16_result),
        ],
    )
    dtype = DTYPES["bf16"] if bf16_result else case.a.dtype
    return from_bits(c.read(), dtype), from_bits(t.read(), dtype) if transposed else None, counters


def product_lds_time(side: int) -> float:
    """Returns the LDS cycles of a step of a general product's inner loop relative to its MFMA time, from two products of
    one tile that differ in their steps. No access has bank conflicts.
    """
    totals = []
    for k in (256, 512):
        case = general_case(1, side, side, k, "bf16", with_d=False)
        _, _, counters = run_general(Device(), f"ho_general_bf16_{side}", case, transposed=False)
        assert counters.lds_bank_conflicts == 0
        # an MFMA takes 8 passes of 4 cycles, on one of four SIMDs
        totals.append((counters.lds_cycles, 8 * counters.mfma))
    (few, short), (many, long) = totals
    return (many - few) / (long - short)


def variant(folder: Path, kernels: Iterable[str], substitutions: Iterable[tuple[str, str, str]] = ()) -> Path:
    """A copy of the source in `folder` with only `kernels` in it and no launchers, which compiles in a second, after
    textual substitutions (file, old, new), each of which must occur exactly once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernels = set(kernels)
    shipped = kernel_source(f"{SOURCE}.hip")
    files = (*CSRC.glob("*.h"), *shipped.parent.glob("*.h"), shipped)
    texts = {file.name: file.read_text() for file in files}
    for file, old, new in substitutions:
        assert texts[file].count(old) == 1, f"{file} holds {old!r} {texts[file].count(old)} times"
        texts[file] = texts[file].replace(old, new)
    source, found = texts[f"{SOURCE}.hip"], set()
    kept = []
    for line in source[: source.index("\nstatic bool aligned16")].splitlines():
        instance = re.match(r"(?:SYMMETRIC|GENERAL)_KERNEL\((\w+), \w+, \d", line)
        if instance is None or instance[1] in kernels:
            kept.append(line)
            found |= {instance[1]} if instance else set()
    assert found == kernels, f"{SOURCE}.hip has no kernel {sorted(kernels - found)}"
    texts[f"{SOURCE}.hip"] = "\n".join(kept) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / f"{SOURCE}.hip"
