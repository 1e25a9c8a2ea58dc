# SPDX-License-Identifier: Apache-2.0
"""MFMA register layouts against the matrix product, element by element, and where C comes from."""

import numpy as np
import pytest

from tests.gfx942 import assembly_kernel
from tests.gfx942.emulator import Device
from tests.gfx942.toolchain import assemble

CASES = [("32x32x8", "bf16"), ("16x16x16", "bf16"), ("32x32x8", "f16"), ("16x16x16", "f16")]
WIDE = [("32x32x16", "bf16"), ("16x16x32", "bf16"), ("32x32x16", "f16"), ("16x16x32", "f16")]  # gfx950


def to_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """Small integers are exact in both formats."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def multiply(shape: str, kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, accumulators: str) -> np.ndarray:
    """D = A B + C by one instruction; a [m, k], b [k, n], c [m, n]. Loads and stores spell the layout lane by lane: a
    lane's register pair holds k = 4 * (lane // m) + 0..3 of row (or column) lane % m, on gfx950 four registers hold
    k = 8 * (lane // m) + 0..7, and D's place is determined below by formula.
    """
    m, k = a.shape
    registers, each = m * m // 64, k * m // 64
    lane = np.arange(64)
    ks = each * (lane // m)[:, None] + np.arange(each)
    a_words = to_bits(a[(lane % m)[:, None], ks], kind).copy().view(np.uint32)  # [64, each / 2]
    b_words = to_bits(b.T[(lane % m)[:, None], ks], kind).copy().view(np.uint32)
    where = [
        (8 * (r // 4) + 4 * (lane // 32) + r % 4 if m == 32 else 4 * (lane // 16) + r, lane % m)
        for r in range(registers)
    ]
    c_words = np.stack([c[i, j] for i, j in where], axis=1).astype(np.float32).view(np.uint32)  # [64, registers]
    device = Device()
    source = device.put(np.concatenate([a_words, b_words, c_words], axis=1))
    target = device.alloc((64, registers), np.float32)
    stride = 4 * (each + registers)
    body = [
        f"v_mul_u32_u24 v1, {stride}, v0",
        f"v_mul_u32_u24 v2, {4 * registers}, v0",
        *(f"global_load_dwordx4 v[{4 + 4 * n}:{7 + 4 * n}], v1, s[4:5] offset:{16 * n}" for n in range(each // 4)),
    ]
    body += [f"global_load_dword v{16 + r}, v1, s[4:5] offset:{4 * each + 4 * r}" for r in range(registers)]
    body += ["s_waitcnt vmcnt(0)"]
    kind_in = "v"
    if accumulators == "a":
        kind_in = "a"
        body += [f"v_accvgpr_write_b32 a{16 + r}, v{16 + r}" for r in range(registers)]
    tile = f"{kind_in}[16:{15 + registers}]"
    body += [
        "s_nop 7",
        f"v_mfma_f32_{shape}_{kind} {tile}, v[4:{3 + each // 2}], v[{4 + each // 2}:{3 + each}], "
        f"{'0' if accumulators == 'none' else tile}",
        "s_nop 15",
        "s_nop 15",
    ]
    if accumulators == "a":
        body += [f"v_accvgpr_read_b32 v{16 + r}, a{16 + r}" for r in range(registers)]
    body += [f"global_store_dword v2, v{16 + r}, s[6:7] offset:{4 * r}" for r in range(registers)]
    head = assembly_kernel.HEAD.split("  v_lshlrev_b32_e32 v1")[0]
    text = head + "".join(f"  {line}\n" for line in body) + assembly_kernel.TAIL
    path = assemble(text, "mfma", "gfx950" if each == 8 else "gfx942")
    counters = device.launch(path, "snippets", 1, 64, [source, target])
    assert counters.mfma_by_opcode == {f"v_mfma_f32_{shape}_{kind}": 1}
    out, d = np.zeros((m, m), np.float32), target.read()
    for r, (i, j) in enumerate(where):
        out[i, j] = d[:, r]
    return out


@pytest.mark.parametrize(("shape", "kind"), CASES + WIDE)
@pytest.mark.parametrize("accumulators", ["v", "a", "none"])
def test_product(shape, kind, accumulators):
    m, _, k = (int(side) for side in shape.split("x"))
    rng = np.random.default_rng(m + k)
    a, b, c = rng.integers(-8, 9, (m, k)), rng.integers(-8, 9, (k, m)), rng.integers(-100, 100, (m, m))
    want = a @ b + (0 if accumulators == "none" else c)
    assert np.array_equal(multiply(shape, kind, a, b, c, accumulators), want)


@pytest.mark.parametrize(("shape", "kind"), CASES[:2] + WIDE[:2])
def test_one_element_at_a_time(shape, kind):
    """A single product reaches the one place that it should, which a symmetric mistake in both operands could not
    hide.
    """
    m, _, k = (int(side) for side in shape.split("x"))
    for i, p, j in ((0, 0, 0), (m - 1, k - 1, 0), (5, k - 3, m - 2), (m // 2 + 1, 1, 3)):
        a, b = np.zeros((m, k), int), np.zeros((k, m), int)
        a[i, p], b[p, j] = 3, 5
        want = np.zeros((m, m))
        want[i, j] = 15
        assert np.array_equal(multiply(shape, kind, a, b, np.zeros((m, m)), "v"), want), (i, p, j)
