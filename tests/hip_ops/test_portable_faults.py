# SPDX-License-Identifier: Apache-2.0
"""Test that the CPU build finds mistakes in kernels: by itself, or under AddressSanitizer and UBSan."""

import re

import numpy as np
import pytest

from tests.hip_ops.cpu_kernels import (
    KERNELS,
    SCHEDULES,
    build_cpu_library,
    cpu_kernels,
    run_python,
    run_sanitized,
    schedule,
)

FAULTS = KERNELS / "faults.hip"
LINE = {
    number: line
    for line, text in enumerate(FAULTS.read_text().splitlines(), 1)
    for number in re.findall(r"fault == (\d+)", text)
}

# ctypes alone: each case is a process, and importing numpy into a sanitized one takes a second.
PROGRAM = """
import ctypes, sys
out = (ctypes.c_float * 128)()
run = ctypes.CDLL(sys.argv[1]).ho_test_fault_run
assert run(out, ctypes.c_int64(int(sys.argv[2])), ctypes.c_int64(int(sys.argv[3])), None) == 0
print("sum", sum(out))
"""


@pytest.fixture(scope="module")
def plain():
    return build_cpu_library(FAULTS)


@pytest.fixture(scope="module")
def sanitized():
    return build_cpu_library(FAULTS, sanitize=True)


def aborts(path, fault: int, order: str, threads: int = 128) -> str:
    done = run_python(PROGRAM, path, fault, threads, HO_CPU_SCHEDULE=order)
    assert done.returncode == -6, done.stdout
    return done.stdout


# Who is named first is thread 0; the other side is the first in the order of threads, or of the schedule's within a
# wave.
@pytest.mark.parametrize(
    "fault, said",
    [
        (
            1,
            r"divergent barrier in block \(0, 0, 0\): thread 0 \(wave 0, lane 0\) waits in block_sync at .*faults.hip:(\d+), but thread 64 \(wave 1, lane 0\) waits in block_sync at .*faults.hip:{line}",
        ),
        (
            2,
            r"divergent collective within a wave in block \(0, 0, 0\): thread 0 \(wave 0, lane 0\) waits in block_sync .* but thread \d*[13579] .* waits in block_sync at .*faults.hip:{line}",
        ),
        (
            3,
            r"divergent collective within a wave .* but thread \d*[13579] \(wave 0, lane \d+\) waits in wave_xor at .*faults.hip:{line}",
        ),
        (
            4,
            r"divergent barrier .* thread 0 \(wave 0, lane 0\) waits in block_sync_lds at .*faults.hip:\d+, but thread 64 .* waits in block_sync_lds at .*faults.hip:\d+",
        ),
        (
            5,
            r"divergent collective within a wave .* thread 0 .* waits in block_sync at .*, but thread 5 \(wave 0, lane 5\) has returned",
        ),
    ],
)
def test_divergence_aborts_with_both_places(plain, fault, said):
    assert re.search(said.format(line=LINE[str(fault)]), aborts(plain, fault, "forward"))


@pytest.mark.parametrize("order", SCHEDULES[1:])
@pytest.mark.parametrize("fault", [1, 3])
def test_divergence_aborts_under_every_schedule(plain, fault, order):
    assert "hip_ops cpu: divergent" in aborts(plain, fault, order)


def test_a_wrong_schedule_or_block_is_named(plain):
    assert "HO_CPU_SCHEDULE=sideways: no such schedule. Allowed: forward, reverse, random:<seed>" in aborts(
        plain, 0, "sideways"
    )
    assert "block (100, 1, 1); a block is one-dimensional, a multiple of 64 threads" in aborts(
        plain, 0, "forward", threads=100
    )


@pytest.mark.parametrize("order", SCHEDULES)
def test_unwritten_lds_is_nan(order):
    out = np.zeros(128, np.float32)
    with schedule(order):
        kernels = cpu_kernels(FAULTS)
        assert kernels.ho_test_fault_run(out, 0, 128, None) == 0
        assert np.array_equal(out, np.arange(128))
        assert kernels.ho_test_fault_run(out, 10, 128, None) == 0
    assert np.isnan(out).all()


@pytest.mark.parametrize("order", SCHEDULES)
def test_sanitizers_find_nothing_in_a_right_kernel(sanitized, order):
    """Switches of fibers that are not reported to the sanitizer look like memory errors; uses after return are checked
    as well.
    """
    out = run_sanitized(
        PROGRAM, sanitized, 0, 128, HO_CPU_SCHEDULE=order, ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=1"
    )
    assert f"sum {sum(range(128))}" in out


@pytest.mark.parametrize(
    "fault, finding",
    [
        (6, "runtime error: index 128 out of bounds"),
        (12, "runtime error: load of address .* with insufficient space"),
        (7, "AddressSanitizer: heap-buffer-overflow"),
        (8, "runtime error: store to misaligned address"),
        (9, "runtime error: left shift of"),
        (11, "runtime error: .*misaligned address"),
    ],
)
def test_sanitizers_find(sanitized, fault, finding):
    out = run_sanitized(PROGRAM, sanitized, fault, 128, expect_failure=True)
    assert re.search(finding, out), out
