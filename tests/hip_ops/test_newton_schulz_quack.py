# SPDX-License-Identifier: Apache-2.0
"""Test the arguments of Newton-Schulz's calls of quack's GEMMs. Replacements in torch check the layout of every
operand and compute the results; quack itself needs Hopper.
"""

import sys
import types

import pytest
import torch

import hip_ops
from hip_ops.ops.newton_schulz import quack
from hip_ops.ops.newton_schulz.plan import coefficient_triples
from tests.hip_ops.newton_schulz_form import arguments, in_form, plan_of

pytest.importorskip("triton")  # its kernel scales the matrices


def _gemm(a, b, d, c, semaphore, *, alpha, beta, tile_M, tile_N, cluster_M, cluster_N, pingpong, persistent):
    """quack.gemm.gemm of 0.6.5: d = alpha a b^T + beta c, written in place."""
    assert semaphore is None and persistent
    for tensor in (a, b, c, d):
        if tensor is not None:
            row, column = tensor.stride()[1:]
            assert 1 in (row, column) and max(row, column) * tensor.itemsize % 16 == 0
    product = alpha * (a.float() @ b.float().mT)
    d.copy_(product if c is None else product + beta * c.float())


def _gemm_symmetric(a, b, d, c, semaphore, *, tile_M, tile_N, cluster_M, cluster_N, **named):
    assert tile_M * cluster_M == tile_N * cluster_N, "quack counts square tiles of clusters"
    tile = dict(tile_M=tile_M, tile_N=tile_N, cluster_M=cluster_M, cluster_N=cluster_N)
    _gemm(a, b, d, c, semaphore, **tile, **named)
    d.copy_(d.tril() + d.tril(-1).mT)


@pytest.fixture
def stand_ins(monkeypatch):
    for name, function in (("gemm", _gemm), ("gemm_symmetric", _gemm_symmetric)):
        module = types.ModuleType(f"quack.{name}")
        setattr(module, name, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("inside", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 40, 72), (2, 72, 40), (1, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operands_and_results(stand_ins, shape, dtype, inside, form):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    plan = plan_of(form, coefficient_triples("simple", 5), inside)
    got = quack.newton_schulz(x, None, *arguments(plan))
    with in_form(form):
        want = hip_ops.newton_schulz(x, dtype=inside)
    assert got.shape == x.shape and got.dtype == dtype and got.is_contiguous()
    assert (got - want).norm() <= 2.0**-5 * want.norm()


def test_which_matrices_it_takes_and_where_it_is_faster():
    """auto takes it where it was measured to be faster; a request by name takes it wherever rows are multiples of 16
    bytes.
    """
    cases = [((4, 1024, 2048), True), ((1, 1024, 2048), False), ((1, 2048, 4096), True), ((1, 256, 256), True)]
    cases += [((40, 128, 2048), False)]
    assert [quack.faster(torch.empty(shape)) for shape, _ in cases] == [taken for _, taken in cases]
    assert all(quack.fits(torch.empty(shape)) for shape, _ in cases) and not quack.fits(torch.empty(4, 1028, 2048))


@pytest.mark.parametrize(
    ("batch", "n", "square", "general"),
    [(16, 2048, 128, 192), (40, 1024, 128, 192), (120, 256, 128, 128), (1, 512, 64, 64), (1, 256, 64, 64)],
)
def test_tiles_of_the_measured_shapes(batch, n, square, general):
    chosen = quack.tiles(batch, n)
    assert [tile.m for tile in chosen] == [square, general]
    assert chosen[0].m * chosen[0].cluster_m == chosen[0].n * chosen[0].cluster_n, "quack does not check it"
