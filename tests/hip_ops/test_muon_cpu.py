# SPDX-License-Identifier: Apache-2.0
"""hip_ops/ops/muon/muon.hip on the CPU: three schedules, chunk sizes and grids that the operators do not use, wrong
variants, sanitizers.
"""

import pytest
import torch

from hip_ops.runtime.build import build
from tests.hip_ops import muon_native
from tests.hip_ops.cpu_kernels import SCHEDULES, CpuKernels, build_cpu_library, run_sanitized, schedule
from tests.hip_ops.muon_bugs import write_source
from tests.hip_ops.muon_oracle import check_momentum, check_update, guards_intact, make_lists

SHAPES = [(64, 96), (17, 33), (1, 1), (0, 8), (3, 5), (40, 256)]
OFFSETS = [0, 1, 3, 0, (0, 1, 2, 3, 4), 2]
SCALES = [0.5 + i for i in range(len(SHAPES))]


@pytest.fixture(scope="module")
def kernels():
    return CpuKernels(build("cpu"), ["muon"])


@pytest.mark.parametrize("order", SCHEDULES)
def test_schedules_chunks_and_grids(kernels, order):
    found = []
    with schedule(order):
        for chunk_elements, blocks in ((256, 1), (1024, 7), (4096, 3), (16384, 1000)):
            lists, before = make_lists(SHAPES, 1, offsets=OFFSETS), make_lists(SHAPES, 1)
            sums = torch.full((len(SHAPES),), float("nan"))
            named = dict(chunk_elements=chunk_elements, blocks=blocks)
            assert muon_native.momentum(kernels, lists, grad_scale=torch.tensor([0.37]), square_sums=sums, **named) == 0
            assert muon_native.update(kernels, lists, scales=SCALES, **named) == 0
            for i in range(len(SHAPES)):
                check_momentum(
                    before.gradients[i],
                    before.momenta[i],
                    lists.momenta[i],
                    lists.outputs[i],
                    grad_scale=0.37,
                    what=f"tensor {i}",
                )
                check_update(
                    lists.outputs[i],
                    before.masters[i],
                    lists.masters[i],
                    lr=0.02,
                    weight_decay=0.1,
                    scale=SCALES[i],
                    what=f"tensor {i}",
                )
                exact = lists.outputs[i].double().square().sum().item()
                assert abs(sums[i].item() - exact) <= 2e-6 * exact
            assert all(
                guards_intact(t) for name in ("momenta", "outputs", "masters", "params") for t in getattr(lists, name)
            )
            found.append([*lists.momenta, *lists.outputs, *lists.masters, *lists.params])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_variants_that_there_are_not(kernels):
    table = torch.zeros(6, dtype=torch.int64)
    assert kernels.ho_muon_momentum(table, 1, 0, 16, 1, 2, 8, 2, None, None, None, None, 0.9, 0.1, 1, 1, None) == -1
    assert kernels.ho_muon_update(table, 1, 0, 16, 1, 2, 2, 2, None, None, 0.1, 0.1, None) == -1  # a bf16 master
    assert kernels.ho_muon_update(table, 1, 0, 16, 1, 2, 4, 8, None, None, 0.1, 0.1, None) == -1
    # nothing to do
    assert kernels.ho_muon_momentum(table, 1, 0, 16, 1, 2, 4, 2, None, None, None, None, 0.9, 0.1, 1, 1, None) == 0


# Without torch, which does not run under a sanitizer. Arrays end where their allocation does, so that one element too
# many is detected.
PROGRAM = """
import struct, sys
import numpy as np
from pathlib import Path
from tests.hip_ops.cpu_kernels import CpuKernels

kernels = CpuKernels(sys.argv[1], [Path(sys.argv[2])])
sizes, chunk_elements, itemsizes = [6144, 561, 1, 0, 15, 4097], 1024, (2, 4, 2)
offsets = [(0, 0, 0), (3, 3, 3), (0, 0, 0), (0, 0, 0), (1, 0, 2), (2, 2, 2)]

def table(columns):
    rows, chunk_rows = b"", []
    for place, arrays in enumerate(zip(*columns)):
        addresses, n = [a.ctypes.data for a in arrays], arrays[0].size
        head = next((h for h in range(4) if all((a + h * s) % (4 * s) == 0 for a, s in zip(addresses, itemsizes))), -1)
        head = min(head, n)
        count = max(1, -(-(n - max(head, 0)) // chunk_elements)) if n else 0
        rows += struct.pack("<4qiifi", *addresses, n, len(chunk_rows), head, 1.5, place)
        chunk_rows += [place] * count
    return np.frombuffer(rows + struct.pack(f"<{len(chunk_rows)}i", *chunk_rows), np.uint8).copy(), len(chunk_rows)

def arrays(dtype, column):
    return [np.ones(o[column] + n, dtype)[o[column]:] if dtype is np.float32 else np.full(o[column] + n, 0x3F80,
        dtype)[o[column]:] for o, n in zip(offsets, sizes)]

for _ in range(2):
    columns = [arrays(np.uint16, 0), arrays(np.float32, 1), arrays(np.uint16, 2)]
    data, chunks = table(columns)
    partials, sums = np.zeros(chunks, np.float32), np.zeros(len(sizes), np.float32)
    assert kernels.ho_muon_momentum(data, len(sizes), chunks, chunk_elements, 3, 2, 4, 2, None, None, partials, sums,
        0.95, 0.05, 1, 1, None) == 0
    assert sums.tolist() == [float(n) for n in sizes], sums
    assert kernels.ho_muon_update(data, len(sizes), chunks, chunk_elements, 3, 2, 4, 2, None, None, 0.5, 0.0, None) == 0
    assert all((w == 0.25).all() for w in columns[1]) and all((p == 0x3E80).all() for p in columns[2])
print("right")
"""


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path):
    source = write_source(tmp_path)
    assert "right" in run_sanitized(PROGRAM, build_cpu_library(source, sanitize=True), source)


@pytest.mark.slow  # test_portable_faults.py shows the same of the sanitizers in general
def test_sanitizers_find_a_lost_mask(tmp_path):
    """Shows that the test above can fail, with one element too many."""
    source = write_source(tmp_path, "tail mask")
    assert "heap-buffer-overflow" in run_sanitized(
        PROGRAM, build_cpu_library(source, sanitize=True), source, expect_failure=True
    )
