# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx942 code of the kernels that add a gradient, in the emulator: numbers, bytes, transactions."""

import shutil
from dataclasses import dataclass

import numpy as np
import pytest
from torch import Tensor

from tests.gfx942.budgets import kernels_of
from tests.gfx942.emulator import SCHEDULES, Device
from tests.gfx942.emulator.faults import OutOfBounds
from tests.gfx942.toolchain import code_object
from tests.hip_ops.expert_path_device import HipOnDevice, to_torch
from tests.hip_ops.gradient_addition_cases import COUNTS, ONE_TOO_MANY, check
from tests.hip_ops.injected_bug import write_source
from tests.hip_ops.kernel_files import kernel_source

THREADS, PIECES = 256, 4


@dataclass
class Additions(HipOnDevice):
    """hip_ops/ops/gradient_addition/gradient_addition.hip, launched as ho_add_gradient does."""

    def add_gradient_(self, total: Tensor, part: Tensor) -> None:
        if not (count := total.numel()):
            return
        aligned = count % 8 == 0  # the emulator's arrays start at multiples of 16 bytes
        stored, arguments = self.put(total), [self.put(part), np.int64(count)]
        blocks = -(-count // (PIECES * THREADS * (8 if aligned else 1)))
        kernel = f"ho_add_gradient_{'' if aligned else 'any_'}bf16"
        self.launch("gradient_addition", kernel, blocks, THREADS, [stored, *arguments])
        total.copy_(to_torch(stored.read()))


@pytest.mark.parametrize("count", COUNTS)
def test_against_fp64(count):
    for schedule in SCHEDULES:
        check(Additions(Device(schedule)).add_gradient_, count)


def test_everything_is_read_once_and_written_once():
    path, count = Additions(), 20_000
    check(path.add_gradient_, count)
    (counters,) = path.counters.values()
    assert counters.global_load_bytes == 6 * count and counters.global_store_bytes == 4 * count
    assert counters.lds_cycles == counters.atomics == 0
    # eight elements of fp32 are 32 bytes of a lane: each of its two accesses touches every piece of 64
    assert 64 * counters.global_transactions == 2 * count + 2 * 8 * count
    built = kernels_of(kernel_source("gradient_addition.hip"))
    assert all(found.scratch == found.vgpr_spills == found.sgpr_spills == 0 for found, _ in built.values())
    assert [found.waves_per_simd for found, _ in built.values()] == [8, 8]


def test_one_too_many_is_out_of_bounds(tmp_path):
    source = write_source(tmp_path, ONE_TOO_MANY, "gradient_addition")
    shutil.copy(kernel_source("portable.h"), tmp_path)
    with pytest.raises(OutOfBounds):
        check(Additions(Device("lockstep"), objects=lambda name: code_object(source)).add_gradient_, 1032)
