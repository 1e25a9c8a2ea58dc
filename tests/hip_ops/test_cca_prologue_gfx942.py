# SPDX-License-Identifier: Apache-2.0
"""The compiled gfx942 code of the CCA prologue, HIP's and Triton's, in the emulator: numbers, bytes, transactions, LDS
banks.
"""

import pytest
import torch

from tests.gfx942.budgets import kernels_of
from tests.gfx942.emulator import SCHEDULES, Device
from tests.gfx942.predictions import HBM_BYTES_A_SECOND, instruction_seconds
from tests.gfx942.toolchain import ARCH
from tests.hip_ops.cca_prologue_cases import Case, backward, check, make
from tests.hip_ops.cca_prologue_device import Emulated, tiles_of
from tests.hip_ops.cca_prologue_triton_device import EmulatedTriton
from tests.hip_ops.kernel_files import kernel_source

PLAIN, HALO = Case(37, 1, 2, 1), Case(20, 2, 2, 1, halo=True, document=6, zero=True)
MORE = [
    Case(1, 35, 2, 1, halo=True, document=2),
    Case(2, 9, 2, 2, rotary=128, delayed=20),
    Case(37, 1, 3, 3, rotary=0, pad=8),
    Case(40, 1, 5, 1, at=(15, 31, 32)),
    Case(65, 1, 8, 2),
    Case(37, 1, 16, 2),  # ZAYA1-74B's heads
]
KERNELS = ("forward", "backward_weights", "backward_input", "backward_temperature", "backward_sum")


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "case, schedule",
    [
        (HALO, "reverse"),
        (PLAIN, "lockstep"),
        *(pytest.param(HALO, schedule, marks=pytest.mark.slow) for schedule in SCHEDULES if schedule != "reverse"),
        *(pytest.param(PLAIN, schedule, marks=pytest.mark.slow) for schedule in SCHEDULES[1:]),
        *(pytest.param(case, "lockstep", marks=pytest.mark.slow) for case in MORE),
    ],
    ids=str,
)
def test_hip_against_fp64(case, schedule):
    emulated = Emulated(Device(schedule))
    check(emulated, case)
    assert set(emulated.counters) == {f"ho_cca_prologue_{name}" for name in KERNELS}
    assert all(counters.atomics == 0 for counters in emulated.counters.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, processors",
    [
        (Case(20, 1, 2, 1, 32, rotary=16), 8),
        (Case(9, 2, 2, 1, 32, halo=True, document=4, rotary=16), 8),
        (Case(37, 1, 2, 1), 8),
        (Case(9, 2, 6, 2, 32, halo=True, document=4, rotary=16, zero=True), 8),
        (Case(35, 2, 2, 1, 32, rotary=16), 64),
        (Case(9, 1, 16, 2, 32, rotary=16), 8),  # ZAYA1-74B's groups of eight query heads
    ],
    ids=str,
)
def test_triton_against_fp64(case, processors):
    """Three query heads of a group, a temperature that is zero, and several runs of tiles among them."""
    check(EmulatedTriton(Device(), processors), case)


@pytest.mark.slow
def test_the_same_bits_under_all_schedules():
    inputs, found = make(HALO), []
    for schedule in SCHEDULES:
        emulated = Emulated(Device(schedule))
        results = dict(
            zip(("query", "key", "value", "inverse_norm"), emulated.cca_prologue(*inputs.arguments), strict=True)
        )
        found.append([*results.values(), *backward(emulated, inputs, results).values()])
    assert all(map(torch.equal, found[0], other) for other in found[1:])


# Bytes a token that each launch must move, with ZAYA1's heads in bf16 and a micro batch of four that shares the table
# of the rotation.
TABLE, NORMS, Z, ALL = 256 // 4, 4 * 10, 2 * 1280, 2 * 1536
NEEDED = {
    "forward": 2 * ALL + NORMS + TABLE,
    "backward_weights": 4 * Z + NORMS + TABLE,  # gradients, query and key, z in; dy out
    "backward_input": 2 * ALL,  # dy and the values' gradients in; gradients out
}
PREDICTED = {"backward_weights": [0.0391, 0.0281, 0.0404], "backward_input": [0.0232, 0.0202, 0.0325]}


def moved(counters) -> int:
    """Bytes that reach the caches of the XCDs, each XCD's once, and that are written."""
    return sum(counters.xcd_bytes(8)) + counters.distinct_store_bytes


@pytest.mark.slow
def test_bytes_are_within_five_percent_of_the_minimum():
    """Of both passes, by what twice as many tokens move more: weights, partial sums and the borders of the runs are
    paid once.

    What is paid once is 2.7 MB in the forward: the weights of a query group, 328 KB, come to each XCD. The backward
    writes and reads 2 MB of partial sums a run besides, 10 heads of 3 x 128 x 128: on 304 compute units, whose blocks
    all have sums of their own, 28 runs.
    """
    found, opcodes = [], []
    for rows in (32, 64):
        emulated, inputs = Emulated(Device()), make(Case(rows, 4, 8, 2))
        results = dict(
            zip(("query", "key", "value", "inverse_norm"), emulated.cca_prologue(*inputs.arguments), strict=True)
        )
        backward(emulated, inputs, results)
        found.append({name: moved(emulated.counters[f"ho_cca_prologue_{name}"]) for name in NEEDED})
        opcodes.append({name: emulated.counters[f"ho_cca_prologue_{name}"].per_opcode for name in PREDICTED})
        assert emulated.counters["ho_cca_prologue_forward"].lds_bank_conflicts == 0
        depth = {"gfx942": 8, "gfx950": 16}[ARCH]
        for name, deep in (("backward_weights", 8), ("backward_input", depth)):
            counters = emulated.counters[f"ho_cca_prologue_{name}"]
            assert counters.lds_bank_conflicts == 0
            products = 4 * tiles_of(rows) * 10 * 3 * 4 * 128 // deep
            assert counters.mfma_by_opcode == {f"v_mfma_f32_32x32x{deep}_bf16": products}, "three products, once"
        mfma = emulated.counters["ho_cca_prologue_forward"].mfma_by_opcode
        products = tiles_of(4 * rows) * 32 * 10 * 128 * 256 // (32 * 32 * depth)
        assert mfma == {f"v_mfma_f32_32x32x{depth}_bf16": products}, "each product once"
    for name, needed in NEEDED.items():
        share = (found[1][name] - found[0][name]) / (32 * 4 * needed)
        assert 1.0 <= share <= 1.05, f"{name}: {share:.3f} of what must move"
    # The predictions of docs/kernels.md for 16,384 tokens, in milliseconds: bytes, instructions with and without overlap.
    # They are of an MI300X (its bandwidth, clock and units), so only gfx942's instructions have them.
    for name, predicted in PREDICTED.items() if ARCH == "gfx942" else ():
        tokens = 16384 / (4 * 32)
        more = {each: tokens * (count - opcodes[0][name].get(each, 0)) for each, count in opcodes[1][name].items()}
        seconds = (
            16384 * NEEDED[name] / HBM_BYTES_A_SECOND,
            *(instruction_seconds(more, overlap) for overlap in (True, False)),
        )
        assert [1e3 * each for each in seconds] == pytest.approx(predicted, abs=1e-4), name
    at_production = found[0]["forward"] + (16384 - 128) * (found[1]["forward"] - found[0]["forward"]) / 128
    assert at_production <= 1.05 * 16384 * NEEDED["forward"], f"{at_production / 16384 / NEEDED['forward']:.3f}"


def test_no_spills_and_every_kernel_is_run():
    found = {}
    for source in ("cca_prologue", "cca_prologue_backward", "cca_prologue_parameters"):
        found |= {name: resources for name, (resources, _) in kernels_of(kernel_source(f"{source}.hip")).items()}
    assert set(found) == {f"ho_cca_prologue_{name}" for name in KERNELS}
    assert all(kernel.vgpr_spills == kernel.scratch == 0 for kernel in found.values())
    assert {name for name, kernel in found.items() if kernel.sgpr_spills} <= {"ho_cca_prologue_backward_weights"}, (
        "outside of its loop"
    )
    assert all(kernel.waves_per_simd >= 2 for kernel in found.values())
