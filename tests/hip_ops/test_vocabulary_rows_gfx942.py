# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx942 code of the kernels on rows of logits, HIP's and Triton's, in the emulator: numbers, bytes,
transactions.
"""

import pytest
import torch

from hip_ops.ops.linear_cross_entropy import reference
from tests.gfx942.budgets import kernels_of
from tests.gfx942.emulator import SCHEDULES, Device
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.rms_norm_cases import FP32
from tests.hip_ops.vocabulary_rows_cases import FIRST, Logits, check, inputs
from tests.hip_ops.vocabulary_rows_device import HipRows, TritonRows

KINDS = {"hip": HipRows, "triton": TritonRows}
CASES = [
    Logits(6, 2600, parts=2, z_loss=1e-2),
    Logits(3, 4232, FP32, shape="rising"),
    Logits(5, 45, shape="confident"),
    Logits(4, 333, FP32, parts=3, pad=3, shape="far"),
    Logits(4, 640, parts=2, shape="nothing", pad=8),
]


def cases_and_schedules() -> list:
    """All schedules of the first case, one of the others, of Triton's, where each case is a compilation, of the second
    alone; the others are marked slow.
    """

    def quick(kind: str, case: Logits, schedule: str) -> bool:
        return case is CASES[0] or schedule == "lockstep" and (kind == "hip" or case is CASES[1])

    triples = [(kind, case, schedule) for kind in KINDS for case in CASES for schedule in SCHEDULES]
    return [
        pytest.param(*each, marks=() if quick(*each) else pytest.mark.slow, id="-".join(map(str, each)))
        for each in triples
    ]


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("kind, case, schedule", cases_and_schedules())
def test_against_fp64(kind, case, schedule):
    check(KINDS[kind](Device(schedule)), case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradient", [False, True], ids=["statistics", "gradient"])
def test_bytes_are_within_five_percent_of_the_minimum(kind, gradient):
    """Logits read once, and with the gradient written once. 16,384 of ZAYA1's 262,272 classes, two rows."""
    logits, labels, upstream = inputs(Logits(2, 16384))
    path = KINDS[kind]()
    if gradient:
        normalizer, _ = reference.combined(reference.row_statistics(logits, labels, FIRST, 1))
        path.overwrite_with_gradient(logits, labels, FIRST, normalizer, upstream, 0.0)
    else:
        path.row_statistics(logits, labels, FIRST, 1)
    (counters,) = path.counters.values()
    minimum = (1 + gradient) * logits.nbytes
    moved, distinct = (
        counters.global_load_bytes + counters.global_store_bytes,
        counters.distinct_load_bytes + counters.distinct_store_bytes,
    )
    print(
        f"{moved / minimum:.4f} of the minimum, {64 * counters.global_transactions / minimum:.4f} in pieces of 64 bytes"
    )
    assert minimum <= distinct <= 1.01 * minimum
    # all lanes of Triton's load the numbers of a row, each the same 28 bytes
    assert moved <= (1.05 if kind == "hip" else 1.1) * minimum
    assert 64 * counters.global_transactions <= 1.05 * minimum
    assert counters.lds_bank_conflicts == 0 and counters.atomics == 0


def test_triton_and_hip_agree():
    case, found = Logits(5, 2600, parts=2), []
    for path in (HipRows(), TritonRows()):
        logits, labels, upstream = inputs(case)
        statistics = path.row_statistics(logits, labels, FIRST, 2)
        path.overwrite_with_gradient(logits, labels, FIRST, reference.combined(statistics)[0], upstream, 0.0)
        found.append((statistics, logits))
    (hip, hip_gradient), (triton, triton_gradient) = found
    torch.testing.assert_close(hip, triton, rtol=1e-5, atol=0)
    torch.testing.assert_close(hip_gradient, triton_gradient, rtol=2**-7, atol=1e-30)


def test_every_kernel_is_run_and_nothing_spills():
    path = HipRows()
    for case in (Logits(2, 64), Logits(2, 64, FP32), Logits(2, 45), Logits(2, 45, FP32)):
        check(path, case)
    built = kernels_of(kernel_source("vocabulary_rows.hip"))
    assert set(built) == set(path.counters)
    assert all(found.scratch == found.vgpr_spills == found.sgpr_spills == 0 for found, _ in built.values())
    assert (
        built["ho_row_statistics_bf16"][0].waves_per_simd
        == built["ho_overwrite_with_gradient_bf16"][0].waves_per_simd
        == 8
    )
