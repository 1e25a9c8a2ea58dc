# SPDX-License-Identifier: Apache-2.0
"""The host side of the Triton version, run on the CPU by Triton's interpreter; the compiled kernels are in
test_muon_gfx942.py.

fp32 only: the interpreter's bf16 rounding is its own.
"""

import pytest

from tests.hip_ops.cpu_kernels import run_python

PROGRAM = """
from unittest import mock
import torch
from hip_ops.ops.muon import multi_tensor
from hip_ops.ops.muon import triton as muon
from tests.hip_ops.muon_oracle import check_momentum, check_update, guards_intact, make_lists

FP32, shapes = torch.float32, [(70, 130), (17, 33), (1, 1), (0, 8), (3, 5)]
lists = make_lists(shapes, 1, FP32, FP32, FP32, FP32, FP32, offsets=[0, 3, 0, 0, (0, 1, 2, 0, 1)])
everything = [*lists.momenta, *lists.outputs, *lists.masters, *lists.params]
sums, off, on = torch.full((5,), float("nan")), torch.zeros(1), torch.ones(1)
scales = [1.0, 2.0, 3.0, 4.0, 5.0]

def update(weights, *arguments):
    before = [w.clone() for w in weights]
    muon.muon_update_(lists.outputs, *arguments)
    for i, (u, b, a) in enumerate(zip(lists.outputs, before, weights)):
        check_update(u, b, a, lr=0.02, weight_decay=0.1, scale=scales[i], what=f"tensor {i}")

with mock.patch.object(multi_tensor, "CHUNK_ELEMENTS", 8192):
    before = [b.clone() for b in lists.momenta]
    muon.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, sums, torch.tensor([0.37]), off, 0.95, True)
    for i, (g, b, a, o) in enumerate(zip(lists.gradients, before, lists.momenta, lists.outputs)):
        check_momentum(g, b, a, o, grad_scale=0.37, what=f"tensor {i}")
    assert torch.allclose(sums, torch.stack([o.square().sum() for o in lists.outputs]), rtol=1e-6)
    update(lists.masters, lists.masters, lists.params, scales, 0.02, None, 0.1, None)
    assert all(torch.equal(p, w) for p, w in zip(lists.params, lists.masters))
    update(lists.params, [], lists.params, scales, 0.0, torch.tensor(0.02), 0.1, off)
    before = [t.clone() for t in everything]
    muon.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, None, None, on, 0.9, False)
    muon.muon_update_(lists.outputs, lists.masters, lists.params, scales, 0.02, None, 0.1, on)
    assert all(torch.equal(a, b) for a, b in zip(everything, before)) and all(map(guards_intact, everything))
print("right")
"""


@pytest.mark.slow
def test_launchers_in_the_interpreter():
    pytest.importorskip("triton")
    done = run_python(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]
