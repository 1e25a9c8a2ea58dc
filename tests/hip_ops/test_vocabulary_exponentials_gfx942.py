# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx942 code of the kernels that make exponentials of rows of logits and gradients of these, HIP's and
Triton's, in the emulator: numbers, bytes, transactions.
"""

import pytest
import torch

from hip_ops.ops.linear_cross_entropy import reference
from tests.gfx942.budgets import kernels_of
from tests.gfx942.emulator import SCHEDULES, Device
from tests.gfx942.toolchain import ARCH
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.rms_norm_cases import FP32
from tests.hip_ops.vocabulary_exponentials_cases import check
from tests.hip_ops.vocabulary_exponentials_device import HipExponentials, TritonExponentials
from tests.hip_ops.vocabulary_exponentials_edges import EDGES
from tests.hip_ops.vocabulary_rows_cases import FIRST, Logits, inputs

KINDS = {"hip": HipExponentials, "triton": TritonExponentials}
# With this number of other ranks.
CASES = [
    (Logits(6, 2600, parts=4, shape="steps", z_loss=1e-2), 0),
    (Logits(3, 4232, FP32, parts=3, shape="rising"), 2),
    (Logits(5, 45, shape="confident"), 0),
    (Logits(4, 333, FP32, parts=3, pad=3, shape="far"), 3),
    (Logits(4, 640, parts=2, shape="nothing", pad=8), 0),
    (Logits(2, 1100, parts=70, shape="steps"), 1),
]


def cases_and_schedules() -> list:
    """All schedules of the first case, one of the others, of Triton's, where each case is a compilation, of the second
    alone; the others are marked slow.
    """

    def quick(kind: str, case: tuple, schedule: str) -> bool:
        return case is CASES[0] or schedule == "lockstep" and (kind == "hip" or case is CASES[1])

    found = [(kind, case, schedule) for kind in KINDS for case in CASES for schedule in SCHEDULES]
    return [
        pytest.param(
            kind,
            *case,
            schedule,
            marks=() if quick(kind, case, schedule) else pytest.mark.slow,
            id=f"{kind}-{case[0]}-{schedule}",
        )
        for kind, case, schedule in found
    ]


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("kind, case, other_ranks, schedule", cases_and_schedules())
def test_against_fp64(kind, case, other_ranks, schedule):
    check(KINDS[kind](Device(schedule)), case, other_ranks=other_ranks)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
def test_edges(kind, edge):
    edge(KINDS[kind]())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_read_once_and_written_once(kind):
    """16,384 of ZAYA1's 262,272 classes, in parts as large as its."""
    logits, labels, _ = inputs(Logits(2, 16384, parts=8))
    path = KINDS[kind]()
    path.overwrite_with_exponentials(logits, labels, FIRST, 8)
    (counters,) = path.counters.values()
    minimum = 2 * logits.nbytes
    moved, distinct = (
        counters.global_load_bytes + counters.global_store_bytes,
        counters.distinct_load_bytes + counters.distinct_store_bytes,
    )
    print(
        f"{moved / minimum:.4f} of the minimum, {64 * counters.global_transactions / minimum:.4f} in pieces of 64 bytes"
    )
    assert minimum <= distinct <= 1.01 * minimum
    # all lanes of Triton's load the label's number, each the same 8 bytes, and all four waves
    assert moved <= (1.05 if kind == "hip" else 1.15) * minimum
    assert 64 * counters.global_transactions <= (1.05 if kind == "hip" else 1.07) * minimum
    assert counters.lds_bank_conflicts == 0 and counters.atomics == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_exponential_but_the_labels_is_touched(kind):
    """Where no part has another reference: statistics of ZAYA1's 129 parts, of which these rows are the last
    eight.
    """
    case = Logits(8, 16384, parts=8)
    logits, _, upstream = inputs(case)
    labels = FIRST + torch.arange(8) * 2000
    statistics = reference.overwrite_with_exponentials(logits, labels, FIRST, 8)
    statistics = torch.cat((statistics[:1].repeat(121, 1, 1), statistics))
    path = KINDS[kind]()
    path.finish_gradient(logits, labels, FIRST, statistics, 121, 8, upstream, 0.0)
    (counters,) = path.counters.values()
    loads, stores, whole = (
        statistics.nbytes + labels.nbytes + upstream.nbytes,
        (2 * 4 + 2) * len(logits),
        2 * len(logits) * 2 * 262272,
    )
    print(
        f"{counters.global_load_bytes / loads:.3f} of the minimum, in pieces of 64 bytes "
        f"{64 * counters.global_transactions / whole:.4f} of the other pass"
    )
    assert statistics.nbytes <= counters.distinct_load_bytes <= loads and counters.global_store_bytes == stores
    # HIP's reads references twice; in Triton's all lanes of both waves load the numbers of a row
    assert counters.global_load_bytes <= (1.35 if kind == "hip" else 2.4) * loads
    # a piece of 64 bytes for each number of a part, of which HIP's reads the reference twice, and a few of the row's
    # own
    assert counters.global_transactions <= len(logits) * ((4 * 129 + 3) if kind == "hip" else (3 * 129 + 6))
    assert counters.lds_bank_conflicts == 0 and counters.atomics == 0


def test_triton_and_hip_agree():
    case, found = Logits(5, 2600, parts=2, shape="steps", z_loss=1e-3), []
    for path in (HipExponentials(), TritonExponentials()):
        logits, labels, upstream = inputs(case)
        statistics = path.overwrite_with_exponentials(logits, labels, FIRST, 2)
        found.append(
            (statistics, path.finish_gradient(logits, labels, FIRST, statistics, 0, 2, upstream, case.z_loss), logits)
        )
    (hip, hip_results, hip_rows), (triton, triton_results, triton_rows) = found
    torch.testing.assert_close(hip, triton, rtol=1e-5, atol=0)
    torch.testing.assert_close(hip_results, triton_results, rtol=1e-5, atol=0)
    torch.testing.assert_close(hip_rows, triton_rows, rtol=2**-7, atol=1e-30)


def test_every_kernel_is_run_and_nothing_spills():
    path = HipExponentials()
    for case in (Logits(2, 64), Logits(2, 64, FP32), Logits(2, 45), Logits(2, 45, FP32)):
        check(path, case)
    built = kernels_of(kernel_source("vocabulary_exponentials.hip"))
    assert set(built) == set(path.counters)
    assert all(found.scratch == found.vgpr_spills == found.sgpr_spills == 0 for found, _ in built.values())
    waves = {name: found.waves_per_simd for name, (found, _) in built.items()}
    assert (
        all(found == 8 for name, found in waves.items() if "exponentials" in name)
        and waves["ho_finish_gradient_bf16"] == {"gfx942": 7, "gfx950": 8}[ARCH]
    )
