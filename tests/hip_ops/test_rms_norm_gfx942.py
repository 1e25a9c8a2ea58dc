# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx942 code of the RMSNorm and LayerNorm kernels, HIP's and Triton's, in the emulator: numbers, bytes, transactions,
LDS banks.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.gfx942.budgets import kernels_of
from tests.gfx942.emulator import SCHEDULES, Device
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.rms_norm_cases import BF16, FP32, Case, check, exact_backward, exact_forward, make, ulp
from tests.hip_ops.rms_norm_device import Emulated, geometry, table
from tests.hip_ops.rms_norm_triton_device import EmulatedTriton

ZAYA, PLAIN, ODD = Case(True, 5, 2048), Case(False, 5, 1024, d_new_residual=False), Case(True, 3, 45, pad=1)
# A case of every kernel; those beyond QUICK and other schedules for them are slow.
QUICK = [
    ZAYA,
    PLAIN,
    ODD,
    Case(False, 19, 256, residual_dtype=BF16, pad=8),
    Case(False, 4, 37, FP32, FP32, FP32),
    Case(True, 2, 264, BF16, BF16, BF16),
]
SLOW = [
    Case(True, 2, 8192),
    Case(False, 2, 8192, residual_dtype=BF16),
    Case(True, 3, 4096),
    Case(False, 3, 4096, residual_dtype=BF16, pad=8),
    Case(False, 7, 2048, residual_dtype=BF16),
    Case(False, 4, 2048),
    Case(True, 19, 512),
    Case(False, 19, 512, residual_dtype=BF16),
    Case(True, 37, 256, d_new_residual=False),
    Case(True, 9, 1024, pad=8),
    Case(False, 9, 1024, residual_dtype=BF16),
    Case(True, 3, 2051),
    Case(False, 3, 2056, FP32, BF16, FP32),
    Case(False, 3, 8192),
    Case(False, 5, 4096),
    Case(False, 40, 256),
    Case(False, 12, 512),
]
CENTERED = [replace(case, centered=True) for case in (ZAYA, replace(ODD, offset=30.0), *QUICK[3:])]
SLOW += [replace(case, centered=True) for case in (PLAIN, *SLOW)]


def schedules_of(quick: list[Case], slow: list[Case]) -> list:
    """(case, schedule): two schedules of the first two, one of the other quick ones; the others are marked slow."""
    pairs = []
    for case in (*quick, *slow):
        for schedule in SCHEDULES:
            fast = (case in quick[:2] and schedule == "reverse") or (case in quick and schedule == "lockstep")
            pairs.append(pytest.param(case, schedule, marks=() if fast else pytest.mark.slow, id=f"{case}-{schedule}"))
    return pairs


@pytest.mark.parametrize(
    "case, schedule", schedules_of([ZAYA, ODD, *(case for case in QUICK if case not in (ZAYA, ODD)), *CENTERED], SLOW)
)
def test_hip_against_fp64(case, schedule):
    emulated = Emulated(Device(schedule))
    check(emulated.implementation, case)
    assert len(emulated.counters) == 3
    assert all(counters.atomics == 0 for counters in emulated.counters.values())


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    "case, schedule", schedules_of([ODD, CENTERED[1]], [ZAYA, *QUICK[3:], *SLOW[2:8], CENTERED[0], *CENTERED[2:]])
)
def test_triton_against_fp64(case, schedule):
    check(EmulatedTriton(Device(schedule)).implementation, case)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("case", [ZAYA, PLAIN, replace(PLAIN, centered=True)], ids=str)
def test_triton_and_hip_agree(case):
    """Within one ULP of the dtype, or of fp32 of the terms: and a merge of few roundings bit for bit."""
    inputs, found = make(case), []
    for emulated in (Emulated(Device()), EmulatedTriton(Device())):
        y, new_residual, *rest = emulated.forward(inputs)
        statistics = dict(zip(("rstd", "mean"), reversed(rest), strict=False))
        gradients = emulated.backward(inputs, new_residual, *rest)
        found.append({"y": y, "new_residual": new_residual} | statistics | gradients)
    hip, triton = found
    assert torch.equal(hip["new_residual"], triton["new_residual"])
    exact = exact_forward(inputs, hip["new_residual"]) | exact_backward(inputs, hip["new_residual"])
    for name, want in exact.items():
        allowed = ulp(want.value, hip[name].dtype) + 8 * ulp(want.terms, FP32)
        assert ((hip[name].double() - triton[name].double()).abs() <= allowed).all(), name


@pytest.mark.slow  # what differs between schedules is caught above; this is that nothing does
def test_the_same_bits_under_all_schedules():
    for case in (ODD, CENTERED[1]):
        inputs, found = make(case), []
        for schedule in SCHEDULES:
            emulated = Emulated(Device(schedule))
            y, new_residual, *rest = emulated.forward(inputs)
            found.append([y, new_residual, *rest, *emulated.backward(inputs, new_residual, *rest).values()])
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# Bytes an element that must move, each tensor once: x + residual + new_residual + y; and dy + d_new_residual + what is
# merged or was saved + d_x (+ d_residual). The vectors once, the statistics once.
PRODUCTION = (32768, 304)  # rows of 8 sequences of 4096, compute units of an MI300X


def moved_and_minimum(case: Case, backward: bool) -> tuple[int, int, Emulated]:
    """Bytes of all launches, with as many rows a block as PRODUCTION has, and the minimum by the formula above."""
    elements, vectors = case.rows * case.hidden, ((5 if case.scaled else 1) + case.centered) * 2 * case.hidden
    residual = 4 if case.residual_dtype == FP32 else 2
    emulated, inputs = Emulated(Device()), make(case)
    y, new_residual, *rest = emulated.forward(inputs)
    statistics = 4 * case.rows * (1 + case.centered)
    minimum = elements * (2 + residual + residual + 2) + vectors + statistics
    if backward:
        emulated.counters.clear()
        emulated.backward(inputs, new_residual, *rest)
        streams = (
            2
            + residual
            + (2 + residual if case.scaled else residual)
            + residual
            + (2 if case.scaled or residual == 4 else 0)
        )
        minimum = (
            elements * streams + 2 * vectors + statistics
        )  # LayerNorm's bias is not read, but its gradient written
        minimum -= 2 * case.hidden * case.centered
    return sum(c.global_load_bytes + c.global_store_bytes for c in emulated.counters.values()), minimum, emulated


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "scaled, residual_dtype, centered",
    [
        (False, BF16, False),
        (True, FP32, False),
        pytest.param(False, BF16, True, marks=pytest.mark.slow),
        pytest.param(True, FP32, True, marks=pytest.mark.slow),
    ],
    ids=["plain", "zaya", "plain-layer_norm", "zaya-layer_norm"],
)
def test_bytes_are_within_five_percent_of_the_minimum(scaled, residual_dtype, centered, backward):
    """2048 columns. What is above the minimum is paid once a block - the vectors, and in the backward its partial sums,
    written and read - so in this test a block has as many rows as in PRODUCTION, on one compute unit.
    """
    whole = geometry(
        Case(scaled, PRODUCTION[0], 2048, residual_dtype=residual_dtype), backward=backward, processors=PRODUCTION[1]
    )
    rows_a_block = PRODUCTION[0] // (whole.blocks * whole.rows_per_block)
    most = table()[2048][2 * backward + scaled]
    case = Case(scaled, rows_a_block * most, 2048, residual_dtype=residual_dtype, centered=centered)
    moved, minimum, emulated = moved_and_minimum(case, backward)
    # LayerNorm writes and reads the partial sums of its bias besides.
    most_moved, most_pieces = (1.065, 1.03) if centered and backward else (1.05, 1.02)
    assert minimum <= moved <= most_moved * minimum, f"{moved} bytes moved, {minimum} needed: {moved / minimum:.3f}"
    for name, counters in emulated.counters.items():
        if "_sum_" not in name:
            assert counters.lds_bank_conflicts == 0
            # whole 64-byte pieces, but for the statistics (4 bytes a row forward, and a wave backward) and the partial
            # sums of bf16 rows
            of_rstd = case.rows * (4 if backward else 1) * (1 + centered)
            streamed = counters.global_load_bytes + counters.global_store_bytes - 4 * of_rstd
            assert counters.global_transactions <= most_pieces * streamed / 64 + of_rstd


FORMS = ("add_{}", "scaled_residual_{}")


def kernels(source: str) -> dict:
    return {name: resources for name, (resources, _) in kernels_of(kernel_source(f"{source}.hip")).items()}


def test_no_spills_and_the_table_fits_the_registers():
    """The blocks that the table starts on a compute unit are resident at once."""
    found = kernels("rms_norm") | kernels("rms_norm_backward")
    for kernel in found.values():
        assert kernel.vgpr_spills == kernel.scratch == 0
    for form, norm, backward in itertools.product(FORMS, ("rms_norm", "layer_norm"), (False, True)):
        for hidden, blocks in table(norm == "layer_norm").items():
            name = f"ho_{form.format(norm)}{'_backward' if backward else ''}_{hidden}"
            waves = blocks[2 * backward + form.startswith("scaled")] * (max(256, hidden // 8) // 64)
            assert waves <= 4 * found[name].waves_per_simd, (
                f"{name}: {waves} waves a compute unit, four SIMDs hold {found[name].waves_per_simd} each"
            )


def test_every_kernel_is_run_by_a_case():
    """Each name in the sources belongs to a case above, or is one of the two sums."""
    named = set()
    for case in (*QUICK, *CENTERED, *SLOW):
        for backward in (False, True):
            named.add("ho_" + geometry(case, backward=backward, processors=1).suffix)
    built = set(kernels("rms_norm") | kernels("rms_norm_backward"))
    assert built == named, f"without a case: {built - named}; without a kernel: {named - built}"
    sums = {f"ho_{norm}_sum_{of}" for norm in ("rms_norm", "layer_norm") for of in ("weight", "vectors")}
    assert set(kernels("rms_norm_sum")) == sums
