# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx942 code of the expert path, HIP's and Triton's, in the emulator: numbers, bytes, transactions,
LDS.
"""

import pytest
import torch

from tests.gfx942.budgets import kernels_of
from tests.gfx942.emulator import SCHEDULES, Device
from tests.hip_ops.expert_path_cases import (
    BF16,
    FP32,
    MIXES,
    Rows,
    Swiglu,
    check_rows,
    check_sort,
    check_swiglu,
    exact_order,
    expert_ids,
    swiglu_inputs,
)
from tests.hip_ops.expert_path_device import HipOnDevice, TritonOnDevice
from tests.hip_ops.kernel_files import kernel_source

KINDS = {"hip": HipOnDevice, "triton": TritonOnDevice}
ROWS = [
    Rows(11, 2048),
    Rows(9, 4096, num_experts=24),  # ZAYA1-74B
    Rows(9, 45, BF16, BF16, mix="skewed"),
    Rows(9, 260, FP32),
    Rows(5, 37, FP32, BF16, mix="no_expert", pad=3),
    Rows(9, 512, pad=8),
]
SWIGLU = [
    Swiglu(9, 2048),
    Swiglu(9, 4096),
    Swiglu(5, 45, BF16, BF16),
    Swiglu(9, 260, FP32, offsets="none"),
    Swiglu(5, 37, FP32, BF16, pad=3),
    Swiglu(5, 512, offsets="no_expert", pad=8),
]


def every_schedule(cases: list) -> list:
    """All schedules of the first case, one of the others; the others are marked slow."""
    pairs = [(case, schedule) for case in cases for schedule in SCHEDULES]
    return [
        pytest.param(
            *pair,
            marks=() if pair[0] is cases[0] or pair[1] == "lockstep" else pytest.mark.slow,
            id=f"{pair[0]}-{pair[1]}",
        )
        for pair in pairs
    ]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_sort(kind, schedule):
    path = KINDS[kind](Device(schedule))
    for mix in MIXES[:3] if schedule == "lockstep" else MIXES[-1:]:
        check_sort(path, expert_ids(mix, 700, 16), 16)
    for experts in (7, 24):
        check_sort(path, expert_ids("even", 90, experts, torch.int32), experts)
    assert all(counters.atomics == 0 for counters in path.counters.values())


@pytest.mark.parametrize("kind", KINDS)
def test_sort_of_many_experts(kind):
    check_sort(KINDS[kind](), expert_ids("even", 200, 256), 256)


def test_triton_sort_with_several_tiles_a_program():
    path = TritonOnDevice()
    ids = expert_ids("skewed", 1100, 5)
    for got, want in zip(path.sort_by_expert(ids, 5, programs=2), exact_order(ids, 5), strict=True):
        assert torch.equal(got, want)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("case, schedule", every_schedule(ROWS))
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, case, schedule):
    check_rows(KINDS[kind](Device(schedule)), case)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("case, schedule", every_schedule(SWIGLU))
@pytest.mark.parametrize("kind", KINDS)
def test_swiglu(kind, case, schedule):
    check_swiglu(KINDS[kind](Device(schedule)), case)


def held_to(path, minimum: int, entries: int) -> None:
    """Bytes of the one launch within 5 % of the minimum, and whole 64-byte pieces but for `entries`, loads and stores
    of a row's single number. All lanes of Triton's load those, each its 4 bytes of the same address: there what differs
    between addresses is held to 5 %.
    """
    (counters,) = path.counters.values()
    path.counters.clear()
    moved, distinct = (
        counters.global_load_bytes + counters.global_store_bytes,
        counters.distinct_load_bytes + counters.distinct_store_bytes,
    )
    print(
        f"{moved / minimum:.4f} of the minimum, {64 * counters.global_transactions / minimum:.4f} in pieces of 64 bytes"
    )
    assert minimum <= distinct <= 1.05 * minimum, f"{distinct} bytes, {minimum} needed: {distinct / minimum:.3f}"
    assert minimum <= moved <= (1.05 if isinstance(path, HipOnDevice) else 1.2) * minimum, (
        f"{moved} bytes moved, {minimum} needed: {moved / minimum:.3f}"
    )
    assert counters.global_transactions <= 1.02 * minimum / 64 + entries
    assert counters.lds_bank_conflicts == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_rows_are_within_five_percent_of_the_minimum(kind):
    """ZAYA1's hidden size: each travelling row read once, each row written once; of a padding row nothing is read."""
    tokens, row = 24, 2 * 2048
    order = exact_order(expert_ids("even", tokens, 4), 4)
    live = int(order[3][-1])
    assert 0 < live < tokens
    source, probs = torch.randn(tokens, 2048).to(BF16), torch.rand(tokens)
    path = KINDS[kind]()
    maps = order[:2]
    for index, inverse in (maps, maps[::-1]):
        path.gather_rows(source, index, inverse, None)
        held_to(path, row * (live + tokens), 2 * tokens)
    path.gather_rows(source, *maps, probs)
    held_to(path, row * (live + tokens), 4 * tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_swiglu_are_within_five_percent_of_the_minimum(kind):
    case = Swiglu(24, 2048)
    inputs, path, row = swiglu_inputs(case), KINDS[kind](), 2 * 2048
    path.weighted_swiglu(inputs.gate_up, inputs.probs, inputs.offsets)
    held_to(path, row * (2 * case.live + case.rows), 3 * case.rows)
    for with_output in (True, False):
        path.weighted_swiglu_backward(inputs.grad, inputs.gate_up, inputs.probs, inputs.offsets, with_output)
        held_to(path, row * (3 * case.live + (2 + with_output) * case.rows), 4 * case.rows)


def test_bytes_of_the_sort():
    """8 bytes an id three times - to count, and in the second launch to count again and to place -, two maps of 4, and
    the blocks' counts.
    """
    tokens, path = 4096, HipOnDevice()
    check_sort(path, expert_ids("even", tokens, 16), 16)
    blocks = tokens // 256
    count, place = path.counters["ho_expert_count_32"], path.counters["ho_expert_place_32"]
    assert count.global_load_bytes == 8 * tokens and count.global_store_bytes == 4 * 17 * blocks
    assert place.global_store_bytes == 8 * tokens + 2 * 4 * 16
    assert place.global_load_bytes == 2 * 8 * tokens + 4 * 17 * blocks * blocks


def test_triton_and_hip_agree():
    case = Swiglu(6, 512)
    inputs, found = swiglu_inputs(case), []
    for path in (HipOnDevice(), TritonOnDevice()):
        found.append(
            [
                path.weighted_swiglu(inputs.gate_up, inputs.probs, inputs.offsets),
                *path.weighted_swiglu_backward(inputs.grad, inputs.gate_up, inputs.probs, inputs.offsets, True),
            ]
        )
    for hip, triton in zip(*found, strict=True):
        assert (
            hip.dtype == triton.dtype
            and (hip.double() - triton.double()).abs().max() <= 2**-8 * hip.double().abs().max()
        )


def test_every_kernel_is_run_and_nothing_spills():
    ran = set()
    path = HipOnDevice()
    for case in ROWS:
        check_rows(path, case)
    for case in SWIGLU:
        check_swiglu(path, case)
    for experts in (3, 256):
        check_sort(path, expert_ids("even", 70, experts), experts)
    ran = set(path.counters)
    built = {
        name: found
        for source in ("expert_sort", "expert_rows", "weighted_swiglu")
        for name, (found, _) in kernels_of(kernel_source(f"{source}.hip")).items()
    }
    assert set(built) == ran, f"without a case: {set(built) - ran}; without a kernel: {ran - set(built)}"
    assert all(found.scratch == found.vgpr_spills == found.sgpr_spills == 0 for found in built.values())
