# SPDX-License-Identifier: Apache-2.0
"""Parts added up in the order of ranks on an accelerator by Triton: the bits of the torch reference, as called and from a graph."""

import pytest
import torch

import hip_ops
from hip_ops import backend, parts_sum
from hip_ops.operator import OPERATORS
from hip_ops.reference import parts_sum as reference
from tests.hip_ops.parts_sum_cases import BF16, CASES, FP16, FP32, Parts, check, inputs, same_bits
from tests.no_waiting import no_waiting

DEVICE = torch.device("cuda")
LARGE = [Parts(8 * 2**20 + 24, 2, 1), Parts(3 * 2**20 + 1, 8, 5, BF16, pad=7)]


@pytest.fixture
def triton():
    """In use; skips where it cannot be had here. There is no other version."""
    reason = backend.unavailable("triton", DEVICE)
    if reason:
        pytest.skip(reason)
    with backend.use_backend("triton"):
        from hip_ops.triton_kernels import parts_sum as kernels

        yield kernels


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_against_fp64_and_to_the_bit(triton, case):
    check(triton, case, "cuda")


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("special", [False, True])
def test_the_reference_has_the_same_bits_there(triton, dtype, special):
    rows = inputs(Parts(10_000, 8, 3, dtype, special=special)).cuda()
    found = [torch.empty(10_000, dtype=dtype, device=DEVICE) for _ in range(2)]
    triton.add_up_parts_(found[0], rows[3].clone(), rows, 3)
    reference.add_up_parts_(found[1], rows[3].clone(), rows, 3)
    assert same_bits(*found)


def test_rows_further_apart_than_32_bits_tell(triton):
    """Six rows of 2^29 elements, so that the last ones lie beyond 2^31."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB")
    parts = torch.empty(6, 2**29, dtype=FP16, device=DEVICE)[:, -1000:]
    for row in range(6):
        parts[row] = 2.0**row
    out = torch.zeros(1000, dtype=FP16, device=DEVICE)
    triton.add_up_parts_(out, out, parts, 0)
    assert out.tolist() == [62.0] * 1000


def test_the_self_check_passes_nothing_waits_and_a_graph_takes_it(triton):
    device = torch.device("cuda", torch.cuda.current_device())
    assert parts_sum.adder_on(device) is hip_ops.add_up_parts_
    assert OPERATORS["add_up_parts"].results[device, "triton"] == "passed"
    parts, own = torch.full((4, 5000), 1.0, device=device), torch.full((5000,), 2.0, device=device)
    parts[1] = torch.nan
    with no_waiting():
        hip_ops.add_up_parts_(own, own, parts, 1)
    assert bool((own == 5).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hip_ops.add_up_parts_(own, own, parts, 1)
    for _ in range(2):
        parts += 1
        graph.replay()
    assert bool((own == 5 + 3 * 2 + 3 * 3).all())
