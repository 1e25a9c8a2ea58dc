# SPDX-License-Identifier: Apache-2.0
"""Test the compiled gfx942 kernels, clang's and Triton's, in the emulator, with mistakes that the test must find."""

import itertools
import re
import subprocess

import numpy as np
import pytest
import torch

from tests.gfx942.emulator import SCHEDULES, Device, EmulatorFault
from tests.gfx942.toolchain import code_object
from tests.hip_ops import muon_device as on_device
from tests.hip_ops.muon_bugs import BUGS, identifier, write_variants
from tests.hip_ops.muon_oracle import check_momentum, check_update, make_lists, numel
from tests.tool import require_tool

BF16, FP32 = torch.bfloat16, torch.float32
# Several chunks of 4096, a ragged end, one element, none, heads, and a place at which nothing can be aligned.
SHAPES = [(40, 112), (17, 33), (1, 1), (0, 8), (3, 5), (22, 66)]
OFFSETS = [(0, 0, 0), (3, 3, 3), (0, 0, 0), (0, 0, 0), (1, 0, 2), (5, 1, 5)]
SCALES = [0.5 + i for i in range(len(SHAPES))]
CHUNK = 4096


@pytest.fixture(scope="module")
def code():
    return code_object("muon")


def momentum_case(device, run, lists, momentum=0.95, nesterov=True, grad_scale=0.37, offsets=OFFSETS, **named):
    """Runs and checks one momentum launch with sums of squares; -> momenta, outputs, counters."""
    columns = on_device.momentum_columns(device, lists, CHUNK, offsets)
    counters, sums = run(
        columns, momentum=momentum, nesterov=nesterov, grad_scale=grad_scale, square_sums=True, **named
    )
    after, outputs = columns.read(1), columns.read(2)
    for i, (g, b) in enumerate(zip(lists.gradients, lists.momenta, strict=True)):
        check_momentum(
            g,
            b,
            after[i],
            outputs[i],
            momentum=momentum,
            nesterov=nesterov,
            grad_scale=grad_scale or 1.0,
            what=f"tensor {i}",
        )
        exact = outputs[i].double().square().sum().item()
        assert abs(sums[i] - exact) <= 2e-6 * exact, f"tensor {i}: sum of squares {sums[i]}, exact {exact}"
    return after, outputs, counters


def update_case(device, run, lists, with_masters=True, offsets=OFFSETS, **named):
    columns = on_device.update_columns(device, lists, SCALES, CHUNK, offsets, with_masters)
    counters = run(columns, lr=0.02, weight_decay=0.1, **named)
    before, after, params = lists.masters if with_masters else lists.params, columns.read(1), columns.read(-1)
    for i, u in enumerate(lists.outputs):
        check_update(u, before[i], after[i], lr=0.02, weight_decay=0.1, scale=SCALES[i], what=f"tensor {i}")
        assert torch.equal(params[i], after[i].to(params[i].dtype)), (
            f"tensor {i}: the parameter is not the rounded master"
        )
    return after, params, counters


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hip_kernels(code, schedule):
    lists = make_lists(SHAPES, 1)
    momentum_case(Device(schedule), lambda c, **k: on_device.hip_momentum(code, c, **k), lists)
    update_case(Device(schedule), lambda c, **k: on_device.hip_update(code, c, **k), lists, lr_on_device=True)


@pytest.mark.parametrize("dtypes", list(itertools.product((BF16, FP32), repeat=3)), ids=str)
def test_every_combination_of_dtypes(code, dtypes):
    momentum_case(
        Device(),
        lambda c, **k: on_device.hip_momentum(code, c, **k),
        make_lists(SHAPES, 2, *dtypes),
        0.9,
        dtypes[0] == BF16,
        None,
    )
    update, param, with_masters = dtypes[0], dtypes[1], dtypes[2] == BF16
    lists = make_lists(SHAPES, 3, output=update, param=param)
    update_case(Device(), lambda c, **k: on_device.hip_update(code, c, **k), lists, with_masters)


def test_result_does_not_depend_on_the_grid(code):
    lists = make_lists(SHAPES, 4)
    found = []
    for blocks in (1, 2, 100):
        columns = on_device.momentum_columns(Device(block_order="reverse"), lists, CHUNK, OFFSETS)
        _, sums = on_device.hip_momentum(code, columns, square_sums=True, blocks=blocks)
        found.append((columns.read(1), columns.read(2), sums))
    for after, outputs, sums in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(after + outputs, found[0][0] + found[0][1], strict=True))
        assert np.array_equal(sums, found[0][2])


def test_skip_flag_stores_nothing(code):
    lists = make_lists(SHAPES, 5)
    for flag in (1.0, float("nan")):
        columns = on_device.momentum_columns(Device(), lists, CHUNK)
        counters, sums = on_device.hip_momentum(code, columns, found_inf=flag, square_sums=True)
        assert counters.global_store_bytes == counters.global_load_bytes == 0 and (sums == 3).all()
        counters = on_device.hip_update(code, on_device.update_columns(Device(), lists, SCALES, CHUNK), found_inf=flag)
        assert counters.global_store_bytes == counters.global_load_bytes == 0


@pytest.mark.parametrize("back_end", ["hip", "triton"])
def test_bytes_and_transactions_are_the_least_possible(code, back_end):
    """12 bytes an element each: gradient 2, momentum 4 + 4, output 2; update 2, master 4 + 4, parameter 2."""
    shapes, chunk = [(128, 256), (64, 512), (40, 512)], 16384
    lists, least = make_lists(shapes, 6), 12 * numel(shapes)
    columns = on_device.momentum_columns(Device(), lists, chunk)
    run = on_device.triton_momentum if back_end == "triton" else lambda c: on_device.hip_momentum(code, c)
    momentum = run(columns)[0]
    columns = on_device.update_columns(Device(), lists, [1.0] * 3, chunk)
    update = on_device.triton_update(columns) if back_end == "triton" else on_device.hip_update(code, columns)
    for name, counters in (("momentum", momentum), ("update", update)):
        assert counters.global_store_bytes == least // 2, name
        if back_end == "hip":
            assert least // 2 <= counters.global_load_bytes <= 1.05 * least / 2, name
            assert counters.global_transactions <= 1.05 * least / 64, name
        else:  # every wave of Triton's reads the row of the table for itself, each lane all of it
            assert least // 2 <= counters.global_load_bytes <= 1.2 * least / 2, name
            assert counters.global_transactions <= 1.1 * least / 64, name
    assert momentum.lds_bank_conflicts == update.lds_bank_conflicts == 0


def test_loads_of_a_batch_are_in_flight_together(code):
    """The usual kernels have a stretch without a branch or a wait for memory in which all loads of a batch are
    issued.
    """
    text = subprocess.run(
        [require_tool("llvm-objdump-19"), "-d", "--no-show-raw-insn", "--mcpu=gfx942", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for kernel in ("ho_muon_momentum_bf16_fp32_bf16", "ho_muon_update_bf16_fp32_bf16"):
        body = re.search(rf"<{kernel}>:.*?s_endpgm", text, re.S).group()
        stretches = re.split(r"s_cbranch|s_branch|s_waitcnt vmcnt", body)
        loads = [(len(re.findall(r"global_load_dwordx4 .* nt", s)), s.count("global_load_dwordx2")) for s in stretches]
        assert (4, 4) in loads, f"{kernel}: {loads}"
        assert "flat_" not in body and "scratch_" not in body


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("schedule", ["lockstep", "reverse"])
def test_triton_agrees_with_hip(code, schedule):
    lists = make_lists(SHAPES, 7)
    hip = momentum_case(Device(schedule), lambda c, **k: on_device.hip_momentum(code, c, **k), lists, grad_scale=None)
    triton = momentum_case(Device(schedule), on_device.triton_momentum, lists, grad_scale=None)
    assert all(torch.equal(a, b) for a, b in zip(hip[0] + hip[1], triton[0] + triton[1], strict=True))
    hip = update_case(Device(schedule), lambda c, **k: on_device.hip_update(code, c, **k), lists)
    triton = update_case(Device(schedule), on_device.triton_update, lists)
    assert all(torch.equal(a, b) for a, b in zip(hip[0] + hip[1], triton[0] + triton[1], strict=True))


def test_triton_with_every_option():
    lists = make_lists(SHAPES, 8, FP32, BF16, FP32)
    momentum_case(Device("serial"), on_device.triton_momentum, lists, 0.9, False, 0.37, found_inf=0.0)
    update_case(Device("serial"), on_device.triton_update, lists, with_masters=False, lr_on_device=True, found_inf=0.0)
    for flag in (1.0, float("nan")):
        columns = on_device.momentum_columns(Device(), lists, CHUNK)
        counters, sums = on_device.triton_momentum(
            columns, momentum=0.9, nesterov=False, grad_scale=0.37, found_inf=flag, square_sums=True
        )
        assert counters.global_store_bytes == 0 and (sums == 3).all()
        columns = on_device.update_columns(Device(), lists, SCALES, CHUNK, with_masters=False)
        assert on_device.triton_update(columns, lr_on_device=True, found_inf=flag).global_store_bytes == 0


@pytest.fixture(scope="module")
def bugs(tmp_path_factory):
    return code_object(write_variants(tmp_path_factory.mktemp("bugs")))


def _check(kernel: str, bugs, code, name: str) -> None:
    """Run the checks of the tests above on the kernel of one variant."""
    lists, device = make_lists(SHAPES, 10), Device("serial")
    named = dict(kernel=f"ho_muon_{kernel}_{name}")
    if kernel == "momentum":
        columns = on_device.momentum_columns(device, lists, CHUNK, OFFSETS)
        on_device.hip_momentum(bugs, columns, found_inf=1.0, **named)
        unchanged = lists.momenta
    else:
        columns = on_device.update_columns(device, lists, SCALES, CHUNK, OFFSETS)
        on_device.hip_update(bugs, columns, found_inf=1.0, **named)
        unchanged = lists.masters
    assert all(torch.equal(a, b) for a, b in zip(columns.read(1), unchanged, strict=True)), "the skip flag was ignored"
    if kernel == "momentum":
        momentum_case(
            device, lambda c, **k: on_device.hip_momentum(bugs, c, found_inf=0.0, sums_code=code, **named, **k), lists
        )
    else:
        update_case(device, lambda c, **k: on_device.hip_update(bugs, c, found_inf=0.0, **named, **k), lists)


@pytest.mark.parametrize("kernel", ["momentum", "update"])
def test_variant_without_a_bug_passes(bugs, code, kernel):
    _check(kernel, bugs, code, "right")


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_detected(bugs, code, bug):
    with pytest.raises((AssertionError, EmulatorFault)):
        _check(BUGS[bug][0], bugs, code, identifier(bug))
