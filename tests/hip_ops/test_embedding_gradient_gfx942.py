# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx942 code of the kernels that add rows by their ids, HIP's and Triton's, in the emulator: numbers,
bytes, transactions.
"""

import pytest
import torch

from tests.gfx942.budgets import kernels_of
from tests.gfx942.emulator import SCHEDULES, Device
from tests.hip_ops.embedding_gradient_cases import BF16, Rows, check, inputs
from tests.hip_ops.embedding_gradient_device import HipRows, TritonRows
from tests.hip_ops.kernel_files import kernel_source

KINDS = {"hip": HipRows, "triton": TritonRows}
CASES = [
    Rows(70, 9, 40, BF16, "half", pad=8),
    Rows(97, 20, 40, repeated="runs"),
    Rows(130, 4, 45, BF16),
    Rows(100, 7, 333, pad=3),
    Rows(160, 3, 8, repeated="one"),
    Rows(65, 2, 2056, BF16, "half"),
    Rows(33, 40, 1100, repeated="once"),
]


def cases_and_schedules() -> list:
    """All schedules of the first case, of Triton's one, and of HIP's others one; the others are marked slow."""

    def quick(kind: str, case: Rows, schedule: str) -> bool:
        return schedule == "lockstep" and (kind == "hip" or case is CASES[0]) or kind == "hip" and case is CASES[0]

    triples = [(kind, case, schedule) for kind in KINDS for case in CASES for schedule in SCHEDULES]
    return [
        pytest.param(*each, marks=() if quick(*each) else pytest.mark.slow, id="-".join(map(str, each)))
        for each in triples
    ]


@pytest.mark.parametrize("kind, case, schedule", cases_and_schedules())
def test_against_fp64(kind, case, schedule):
    on_device = KINDS[kind](Device(schedule))
    check(on_device, case)
    assert len(on_device.counters) == 2 and all(counters.atomics == 0 for counters in on_device.counters.values())
    if kind == "hip":  # Triton's join adds partial sums up across warps
        assert all(counters.lds_cycles == counters.lds_bank_conflicts == 0 for counters in on_device.counters.values())


@pytest.mark.parametrize("case", [Rows(64, 100, 2048, BF16, "once"), Rows(97, 20, 2048, BF16, "runs")], ids=str)
def test_everything_is_read_once_and_written_once(case):
    """Rows of the matrix that have an id, rows, and a partial sum for every part of an id that two runs share."""
    (total, ids, rows), path = inputs(case), HipRows()
    path.add_rows_(total, ids, rows)
    runs, joins = path.counters["ho_add_runs_bf16"], path.counters["ho_join_runs"]
    in_order = ids.sort().values
    before, first = in_order[31:-1:32], in_order[32::32]
    shared = first[before == first]
    whole, partial = len(ids.unique()), len(shared) + len(shared.unique())
    assert (partial > 0) == (case.repeated == "runs")
    sums = 4 * case.width * (whole + partial)
    assert runs.global_load_bytes + joins.global_load_bytes == rows.nbytes + sums
    assert runs.global_store_bytes + joins.global_store_bytes == sums
    minimum = rows.nbytes + 2 * sums + 2 * ids.nbytes
    moved = rows.nbytes + 2 * sums + runs.scalar_load_bytes + joins.scalar_load_bytes
    print(f"{moved / minimum:.4f} of the minimum")
    assert moved <= 1.1 * minimum
    # sums of a lane's eight columns are 32 bytes: each of its two accesses touches every piece of 64
    assert 64 * runs.global_transactions == rows.nbytes + 2 * (
        runs.global_load_bytes - rows.nbytes + runs.global_store_bytes
    )
    assert 64 * joins.global_transactions == joins.global_load_bytes + joins.global_store_bytes


def test_triton_and_hip_agree():
    found = []
    for path in (HipRows(), TritonRows()):
        total, ids, rows = inputs(CASES[0])
        path.add_rows_(total, ids, rows)
        found.append(total)
    torch.testing.assert_close(*found, rtol=3e-6, atol=3e-6)


def test_every_kernel_is_run_and_nothing_spills():
    path = HipRows()
    for case in (Rows(40, 3, 16, BF16), Rows(40, 3, 16), Rows(40, 3, 13, BF16), Rows(40, 3, 13)):
        check(path, case)
    built = kernels_of(kernel_source("embedding_gradient.hip"))
    assert set(built) == set(path.counters)
    assert all(found.scratch == found.vgpr_spills == found.sgpr_spills == 0 for found, _ in built.values())
    assert built["ho_add_runs_bf16"][0].waves_per_simd == built["ho_join_runs"][0].waves_per_simd == 8
