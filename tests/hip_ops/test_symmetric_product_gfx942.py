# SPDX-License-Identifier: Apache-2.0
"""The gfx942 code objects of the matrix products, byte for byte, in the emulator: numbers, memory traffic, MFMA, banks,
XCDs, inner loop.
"""

import re

import numpy as np
import pytest
import torch

from hip_ops.ops.newton_schulz.plan import TILE_SIDES, tile_side
from tests.gfx942.emulator import SCHEDULES, Device
from tests.gfx942.inner_loop import inner_loop, machine_code_analysis
from tests.gfx942.toolchain import ARCH, code_object
from tests.hip_ops.product_cases import DTYPES, ROUNDED_ONCE, bits, from_bits, general_case, symmetric_case
from tests.hip_ops.product_device import product_lds_time, run_general, run_symmetric, tiles, variant

DEPTH = {"gfx942": 8, "gfx950": 16}[ARCH]  # of a matrix instruction
MFMA_FLOPS = 2 * 32 * 32 * DEPTH


def under(all_schedules: list[tuple], one: list[tuple]) -> list:
    """The first cases under the three schedules, the others under the one that finds most."""
    return [pytest.param(schedule, *case) for case in all_schedules for schedule in SCHEDULES] + [
        pytest.param("reverse", *case) for case in one
    ]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    "schedule, kernel, batch, n, k, with_d, gamma",
    under(
        [
            ("ho_symmetric_bf16_128", 1, 136, 168, True, 0.0),  # main loop, drain, tail of k and of n
            ("ho_symmetric_bf16_256", 1, 328, 168, True, 2.0),
        ],
        [("ho_symmetric_fp16_64", 2, 72, 168, True, 2.0), ("ho_symmetric_bf16_any", 1, 77, 45, False, 0.0)],
    ),
)
def test_symmetric_product_is_right_and_symmetric(schedule, kernel, batch, n, k, with_d, gamma):
    case = symmetric_case(batch, n, k, kernel.split("_")[2], with_d=with_d, gamma=gamma)
    got, _ = run_symmetric(Device(schedule=schedule), kernel, case)
    assert torch.equal(got, got.mT)
    assert case.worst_ulps(got) <= ROUNDED_ONCE


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    "schedule, kernel, batch, m, n, k, bf16_result",
    under(
        [("ho_general_fp16_64", 1, 72, 136, 40, True)],
        [
            ("ho_general_bf16_128", 1, 136, 72, 168, False),
            ("ho_general_fp16_any", 1, 35, 71, 33, False),
            ("ho_general_fp16_256", 1, 264, 200, 168, True),
        ],
    ),
)
def test_general_product_and_its_transpose(schedule, kernel, batch, m, n, k, bf16_result):
    case = general_case(batch, m, n, k, kernel.split("_")[2])
    got, turned, _ = run_general(Device(schedule=schedule), kernel, case, bf16_result=bf16_result)
    assert torch.equal(turned, got.mT)
    assert case.worst_ulps(got) <= ROUNDED_ONCE


def test_two_commuting_factors_give_an_exactly_symmetric_result():
    """R and p(R) commute, but rounding makes their product symmetric only nearly: the kernel completes it from the
    lower triangle.
    """
    r = symmetric_case(1, 136, 64, "bf16", with_d=False)
    gram, _ = run_symmetric(Device(), "ho_symmetric_bf16_64", r)
    square = symmetric_case(1, 136, 136, "bf16")
    square.a, square.b, square.d = gram, (0.01 * gram.float() @ gram.float()).bfloat16(), gram
    got, _ = run_symmetric(Device(), "ho_symmetric_bf16_64", square)
    exact, _ = square.exact()
    assert not torch.equal(exact, exact.mT) and torch.equal(got, got.mT)
    assert (got.double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_the_side_of_the_tiles_depends_on_rounds_over_304_compute_units():
    # 16 matrices of side 2048: 576 tiles of 256 in 2 rounds, 2176 of 128 in 8
    assert tile_side(True, 16, 2048, 2048) == 256 and tile_side(False, 16, 4096, 2048) == 256
    # one: 36 tiles of 256, or 136 of 128 in one round, or 528 of 64 in two
    assert tile_side(True, 1, 2048, 2048) == 64 and tile_side(False, 1, 2048, 2048) == 128
    assert tile_side(True, 16, 256, 256) == 64
    # the 256 units of an MI355X: 576 tiles of 256 take 3 rounds, the last nearly empty, and 2176 of 128 take 9; the 2048
    # tiles of 256 of 16 products of 4096 x 2048 take 8 whole rounds
    assert tile_side(True, 16, 2048, 2048, "gfx950") == 128 and tile_side(False, 16, 4096, 2048, "gfx950") == 256


@pytest.mark.parametrize("tile", [128, 256])
def test_matrix_instructions_bytes_and_bank_conflicts(tile):
    n, k = 1024, 32
    kernel = f"ho_symmetric_bf16_{tile}"
    case = symmetric_case(1, n, k, "bf16", with_d=False)
    _, counters = run_symmetric(Device(), kernel, case)
    # half of 2 n^2 k, and the upper half of the diagonal's tiles
    half_and_diagonal = (n * n * k + tile * n * k) / MFMA_FLOPS
    assert counters.mfma == half_and_diagonal  # the limit is 1.1 times that
    assert counters.mfma <= (0.5 + tile / n / 2) * 2 * n * n * k / MFMA_FLOPS
    rows = tiles(n, kernel)
    assert counters.global_load_bytes == rows * (rows + 1) // 2 * 2 * tile * k * 2
    # every 64-byte segment that is touched is used whole
    assert counters.global_load_transactions * 64 == counters.global_load_bytes
    assert counters.global_store_bytes == counters.distinct_store_bytes == n * n * 2  # each element once
    assert counters.global_store_transactions * 64 == counters.global_store_bytes
    wide = [count for count in counters.per_pc.values() if re.match(r"ds_(read|write)_b(64|128)", count.text)]
    assert len(wide) > 20 and sum(count.lds_bank_conflicts for count in wide) == 0
    # What is left is the completion of diagonal tiles, 2 bytes at a time, once a tile.
    assert all(count.text.startswith("ds_write_b16") for count in counters.per_pc.values() if count.lds_bank_conflicts)
    assert counters.lds_underaligned == 0


def test_general_product_moves_each_byte_of_the_result_once():
    case = general_case(1, 256, 128, 64, "fp16")
    _, _, counters = run_general(Device(), "ho_general_fp16_128", case)
    assert counters.global_store_bytes == counters.distinct_store_bytes == 2 * 256 * 128 * 2
    assert counters.global_load_bytes == 2 * (2 * 128 * 64 * 2) + 256 * 128 * 2
    assert counters.lds_bank_conflicts == 0
    assert counters.mfma == 2 * 256 * 128 * 64 / MFMA_FLOPS


@pytest.mark.slow
def test_tiles_of_one_matrix_stay_on_one_xcd(tmp_path):
    """Distinct operand bytes that each XCD loads, blocks handed to XCDs in turn: with the mapping of tile_order.h and
    without it.
    """
    batch, n, k = 8, 256, 32
    case = symmetric_case(batch, n, k, "bf16", with_d=False)
    kernel = "ho_symmetric_bf16_64"
    _, mapped = run_symmetric(Device(), kernel, case)
    plain = variant(
        tmp_path,
        [kernel],
        [("tile_order.h", "return xcd * share + (xcd < longer ? xcd : longer) + id / kXcds;", "return id;")],
    )
    result, unmapped = run_symmetric(Device(), kernel, case, code_object(plain))
    assert case.worst_ulps(result) <= ROUNDED_ONCE
    one_matrix = n * k * 2
    print(
        f"operand bytes an XCD: {max(mapped.xcd_bytes())} mapped, {max(unmapped.xcd_bytes())} in id order, one matrix "
        f"is {one_matrix}"
    )
    code_bytes = 64  # a block reads its arguments too
    assert all(one_matrix <= loaded <= one_matrix + code_bytes for loaded in mapped.xcd_bytes())
    assert min(unmapped.xcd_bytes()) >= 4 * one_matrix


@pytest.mark.parametrize("side", [128, 256])
@pytest.mark.parametrize("kernel", ["ho_symmetric_bf16", "ho_symmetric_fp16", "ho_general_bf16", "ho_general_fp16"])
def test_inner_loop_keeps_the_matrix_units_busy(kernel, side):
    """MFMA passes are at least 4 times all other issue slots (on gfx950, whose passes multiply twice as much, twice) from header to back edge; each barrier is followed by
    products with no wait in between; global loads are never drained; LDS is read and written 16 bytes at a time. The
    rule for the tile knows the slots.
    """
    kernel = f"{kernel}_{side}"
    loop = inner_loop(code_object("symmetric_product"), kernel)
    print(f"{kernel}: {loop.mfma_passes} passes, {loop.other_slots} other slots, {loop.passes_per_slot:.2f}")
    accumulators = {128: 2 * 2, 256: 4 * 2}[side]
    assert loop.mfma_passes == 2 * 32 // DEPTH * accumulators * 8  # two slabs of 32
    assert loop.passes_per_slot >= {8: 4, 16: 2}[DEPTH]
    assert 256 / loop.passes_per_slot <= TILE_SIDES[ARCH][side][0]
    assert len(loop.named("s_barrier")) == 2 and loop.full_waits_after_barriers() == []
    code = [instruction.text for instruction in loop.instructions] * 2
    for start in (i for i, text in enumerate(code[: len(code) // 2]) if text.startswith("s_barrier")):
        first = next(i for i in range(start, len(code)) if code[i].startswith("v_mfma"))
        assert not [text for text in code[start:first] if text.startswith("s_waitcnt")]
    drained = [int(match[1]) for text in code if (match := re.search(r"vmcnt\((\d+)\)", text))]
    assert drained and min(drained) >= 7  # of 8 loads in flight
    assert [i.opcode for i in loop.named("(global|buffer|flat|scratch)_")] == ["global_load_dwordx4"] * 8
    assert (
        sorted(i.opcode for i in loop.named("ds_"))
        == ["ds_read_b128"] * {128: 16, 256: 24}[side] + ["ds_write_b128"] * 8
    )
    assert not loop.named("v_accvgpr")


@pytest.mark.skipif(ARCH != "gfx942", reason="llvm-mca 19 does not know gfx950")
def test_matrix_pipe_bounds_the_inner_loop():
    """llvm-mca without memory: the loop takes no more than 5 % longer than its 32 MFMA of 8 passes."""
    report = machine_code_analysis(inner_loop(code_object("symmetric_product"), "ho_symmetric_bf16_128"))
    assert report.block_throughput == 32 * 8
    assert report.cycles_an_iteration <= 1.05 * 32 * 8


@pytest.mark.parametrize("side", TILE_SIDES[ARCH])
def test_lds_time(side):
    """What the rule for the tile knows of LDS: time of a loop step relative to its MFMAs, without conflicts."""
    assert product_lds_time(side) * 256 == TILE_SIDES[ARCH][side][1]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("symmetric", [True, False])
def test_triton_objects_for_gfx942_agree(symmetric):
    pytest.importorskip("triton")
    from hip_ops.ops.newton_schulz.triton import pointer_product_kernel
    from tests.gfx942.triton_objects import triton_code_object

    batch, m, k, dtype = 1, 200, 72, "bf16"
    case = symmetric_case(batch, m, k, dtype) if symmetric else general_case(batch, m, 104, k, dtype)
    n = m if symmetric else 104
    sizes = ["m", "n", "k", "a_stride", "b_stride", "d_stride", "c_stride", "a_batch", "b_batch", "d_batch", "c_batch"]
    flags = dict(
        SYMMETRIC=symmetric,
        A_BY_COLUMNS=False,
        B_BY_COLUMNS=False,
        HAS_D=True,
        EVEN_K=False,
        BLOCK_M=64,
        BLOCK_N=64,
        BLOCK_K=64,
        GROUP=8,
        XCDS=8,
    )
    signature = (
        {f"{name}_pointer": "*bf16" for name in "abdc"}
        | dict.fromkeys(sizes, "i32")
        | dict.fromkeys(("alpha", "beta"), "fp32")
    )
    compiled = triton_code_object(
        pointer_product_kernel, signature, flags, divisible_by_16=[f"{name}_pointer" for name in "abdc"]
    )
    device = Device(schedule="serial")
    a = device.put(bits(case.a))
    b = a if case.b is None else device.put(bits(case.b))
    c = device.alloc((batch, m, n), np.uint16)
    rows = -(-m // 64)
    programs = rows * (rows + 1) // 2 if symmetric else rows * -(-n // 64)
    numbers = (m, n, k, k, k, n, n, m * k, n * k, m * n, m * n)
    factors = [np.float32(v) for v in (case.alpha, case.beta)]
    compiled.launch(device, (programs,), [a, b, device.put(bits(case.d)), c, *map(np.int32, numbers), *factors])
    got = from_bits(c.read(), DTYPES[dtype])
    assert case.worst_ulps(got) <= ROUNDED_ONCE
    mine = (
        run_symmetric(Device(), "ho_symmetric_bf16_64", case)[0]
        if symmetric
        else run_general(Device(), "ho_general_bf16_64", case)[0]
    )
    # where fp32 sums of another order fall on the other side of a rounding
    assert (got != mine).double().mean() <= 1e-3
