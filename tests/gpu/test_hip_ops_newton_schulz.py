# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz and its products on an accelerator: Triton with every configuration of its table, and
symmetric_product.hip as built for it (by nvcc on NVIDIA, where a wave is two warps and slow: small shapes).
"""

import itertools
import json

import pytest
import torch

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.newton_schulz import hip, quack
from hip_ops.ops.newton_schulz.plan import COEFFICIENT_SETS, TILE_SIDES, coefficient_triples, make_plan
from hip_ops.ops.newton_schulz.product_configs import TABLE, ProductConfig, choose_config
from hip_ops.ops.newton_schulz.reference import normalised
from hip_ops.runtime.quack_tiles import available
from tests.hip_ops.newton_schulz_bounds import singular_value_interval
from tests.hip_ops.newton_schulz_form import arguments, in_form
from tests.hip_ops.product_cases import DTYPES, ROUNDED_ONCE, Case, general_case, symmetric_case

pytest.importorskip("triton")

from hip_ops.ops.newton_schulz import triton  # noqa: E402
from hip_ops.ops.newton_schulz.triton import AMD, empty_rows, product  # noqa: E402

DEVICE = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16


def cuda(case: Case) -> Case:
    return Case(*(None if x is None else x.to(DEVICE) for x in (case.a, case.b, case.d)), case.alpha, case.beta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, n, k", [(1, 1, 1), (3, 17, 256), (1, 256, 40), (2, 136, 72), (1, 65, 33), (2, 300, 520)]
)
def test_symmetric_product(chosen, dtype, batch, n, k):
    case = cuda(symmetric_case(batch, n, k, dtype))
    if chosen == "hip":
        products, layouts = hip.HipProducts(False, DTYPES[dtype]), [case.a]
    else:
        products = triton.TritonProducts(batch, n, k, False, DTYPES[dtype])
        layouts = [case.a, case.a.mT.contiguous().mT]
    for a in layouts:
        got = products.symmetric(a, a, case.d, case.alpha, case.beta)
        assert torch.equal(got, got.mT)
        assert case.worst_ulps(got) <= ROUNDED_ONCE


@pytest.mark.parametrize("tile", TILE_SIDES["gfx942"])
def test_every_tile_of_the_hip_products(tile):
    """Built by nvcc on NVIDIA, so small sizes: tiles past the end, one tile on the diagonal and one below it."""
    case = cuda(symmetric_case(2, tile + 72, 168, "bf16"))
    with use_kernels(newton_schulz="hip"):
        got = hip._symmetric(case.a, case.a, case.d, case.alpha, case.beta, tile=tile)
        assert torch.equal(got, got.mT) and case.worst_ulps(got) <= ROUNDED_ONCE
        case = cuda(general_case(2, tile + 72, tile + 8, 168, "fp16"))
        turned = torch.empty((2, tile + 8, tile + 72), dtype=FP16, device=DEVICE)
        got = hip._general(case.a, case.b, case.d, case.alpha, case.beta, transposed=turned, tile=tile)
        assert torch.equal(turned, got.mT) and case.worst_ulps(got) <= ROUNDED_ONCE


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_the_start_of_hip_has_torchs_bits(dtype):
    for shape in ((3, 136, 72), (2, 35, 71)):
        x = torch.randn(shape, device=DEVICE).to(dtype)
        with use_kernels(newton_schulz="hip"):
            start, turned = hip._start(x, None, 1e-7, 2.0**8, FP16)
        want = normalised(x, None, 1e-7, 2.0**8, torch.empty_like(start))
        assert torch.equal(start, want) and torch.equal(turned, want.mT)


def test_general_product(chosen):
    case = cuda(general_case(2, 200, 136, 72, "bf16"))
    if chosen == "hip":
        got = hip._general(case.a, case.b, case.d, case.alpha, case.beta)
    else:
        config = choose_config("update", 2, 200, 136, AMD)
        config = config if config.engine == "triton" else ProductConfig()
        c = empty_rows(2, 200, 136, like=case.a)
        got = product(case.a, case.b, case.d, c, case.alpha, case.beta, False, config)
    assert case.worst_ulps(got) <= ROUNDED_ONCE


def test_every_configuration_of_the_table_on_sizes_with_tails():
    configs = {ProductConfig(**row["config"]) for row in json.loads(TABLE.read_text())["rows"]} - {
        ProductConfig(engine="cublas")
    }
    symmetric, general = symmetric_case(3, 392, 200, "fp16"), general_case(3, 392, 520, 200, "fp16")
    for config in configs:
        if config.engine == "triton" and config.block_n <= 2 * config.block_m:
            a, d = symmetric.a.to(DEVICE), symmetric.d.to(DEVICE)
            for x in (a, a.mT.contiguous().mT):
                got = product(x, x, d, empty_rows(3, 392, 392, like=a), symmetric.alpha, symmetric.beta, True, config)
                assert torch.equal(got, got.mT) and symmetric.worst_ulps(got.cpu()) <= ROUNDED_ONCE, config
        if config.engine == "triton":
            a, b, d = (x.to(DEVICE) for x in (general.a, general.b, general.d))
            for right in (b, b.mT.contiguous().mT):
                got = product(a, right, d, empty_rows(3, 392, 520, like=a), general.alpha, general.beta, False, config)
                assert general.worst_ulps(got.cpu()) <= ROUNDED_ONCE, config


@pytest.mark.parametrize("n, k", [(2048, 4096), (2048, 2048), (1024, 2048)])
def test_large_symmetric_product_is_exactly_symmetric_and_near_cublas(n, k):
    a = torch.randn((2, n, k), device=DEVICE).to(FP16) / 32
    got = triton.TritonProducts(2, n, k, False, FP16).gram(a, 1.0)
    assert torch.equal(got, got.mT)
    exact = a[0].double() @ a[0].double().mT
    theirs = a[0] @ a[0].mT
    assert (got[0] - exact).norm() <= 1.01 * (theirs - exact).norm()


def cublas(x: torch.Tensor, coefficients: str) -> torch.Tensor:
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    x = (x.float() / x.float().norm(dim=(-2, -1), keepdim=True)).to(BF16)
    for a, b, c in coefficient_triples(coefficients, 5):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    got = got.mT if got.shape != exact.shape else got
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("coefficients", sorted(COEFFICIENT_SETS))
@pytest.mark.parametrize(
    "shape", [(17, 256), (256, 256), (2, 128, 2048), (2, 1024, 512), (2048, 4096), (2048, 2048), (1024, 2048)]
)
def test_newton_schulz_within_the_error_of_cublas(chosen, shape, coefficients):
    if chosen == "hip" and torch.version.hip is None and max(shape) > 256:
        pytest.skip("emulated matrix instructions are slow")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(BF16).to(DEVICE)
    batched = x if x.ndim == 3 else x[None]
    with in_form("standard"):
        exact = hip_ops.newton_schulz(batched.double(), 5, coefficients, dtype=torch.float64)
    anchor = error(cublas(batched, coefficients), exact.mT if exact.shape[-2] > exact.shape[-1] else exact)
    for form, dtype in (("auto", None), ("standard", FP16), ("gram", FP16), ("standard", BF16)):
        with in_form(form):
            got = hip_ops.newton_schulz(x, 5, coefficients, dtype=dtype)
        assert got.shape == x.shape and got.dtype == BF16 and got.is_contiguous()
        assert error(got.reshape(exact.shape), exact) <= (1.05 if dtype == BF16 else 1.0) * anchor, (form, dtype)


@pytest.mark.parametrize("form", ["standard", "gram"])
def test_singular_values_of_a_large_ill_conditioned_matrix(form):
    n, m = 512, 1024
    u, _, v = torch.linalg.svd(torch.randn((n, m), device=DEVICE), full_matrices=False)
    spectrum = torch.logspace(0, -2, n, device=DEVICE)
    x = ((u * spectrum) @ v).to(BF16)
    values = torch.linalg.svdvals(x.double())
    values = values / values.square().sum().sqrt()
    low, high = singular_value_interval(coefficient_triples("simple", 5), values.min().item(), values.max().item())
    with use_kernels("triton"), in_form(form):
        got = torch.linalg.svdvals(hip_ops.newton_schulz(x.float()).double())
    assert low - 0.02 <= got.min() and got.max() <= high + 0.02


def test_newton_schulz_inside_a_captured_graph():
    x = torch.randn((2, 64, 128), device=DEVICE).to(BF16)
    with use_kernels("triton"):
        want = hip_ops.newton_schulz(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = hip_ops.newton_schulz(x)
        graph.replay()
        assert torch.equal(got, want)


def test_matrices_of_zaya(chosen):
    shapes = (
        [(17, 256), (256, 17), (256, 256), (128, 256)]
        if chosen == "hip"
        else [(2048, 1024), (1024, 2048), (256, 2048), (128, 2048), (256, 256), (17, 256)]
    )
    for shape in shapes:
        x = torch.randn((2, *shape), device=DEVICE).to(BF16)
        with in_form("standard"):
            exact = hip_ops.newton_schulz(x.double(), dtype=torch.float64)
        got = hip_ops.newton_schulz(x)
        assert got.shape == x.shape and error(got, exact) < 0.01


@pytest.mark.parametrize("shape", [(2, 200, 136), (2, 136, 200), (3, 512, 512)])
def test_quack(shape):
    if reason := available(DEVICE):
        pytest.skip(reason)
    x = torch.randn(shape, device=DEVICE).to(BF16)
    with in_form("standard"):
        exact = hip_ops.newton_schulz(x.double(), dtype=torch.float64)
    for dtype, square_sums in itertools.product((FP16, BF16), (None, x.float().square().sum((1, 2)))):
        plan = make_plan(coefficient_triples("simple", 5), *shape[1:], dtype)
        got, by_triton = (version.newton_schulz(x, square_sums, *arguments(plan)) for version in (quack, triton))
        assert error(got, exact) <= 1.05 * error(by_triton, exact)


@pytest.mark.parametrize("shape", [(3, 256, 512), (2, 40, 72), (5, 33, 65)])
def test_the_start_has_torchs_bits(shape):
    x = (torch.randn(shape, device=DEVICE) * torch.logspace(-4, 3, shape[0], device=DEVICE)[:, None, None]).bfloat16()
    sums = x.float().square().sum((1, 2))
    for dtype in (FP16, BF16):
        expected = normalised(x, sums, 1e-7, 2.0**-3, torch.empty_like(x, dtype=dtype))
        assert torch.equal(triton.start_of(x, sums, 1e-7, 2.0**-3, torch.empty_like(x, dtype=dtype)), expected)
