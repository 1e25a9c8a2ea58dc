# SPDX-License-Identifier: Apache-2.0
"""Grouped products and weight gradients in main gradients on an accelerator: numbers against fp64, no host, no copy,
the same bits twice.
"""

import importlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops import grouped_product
from hip_ops.ops.grouped_product.configs import GroupedConfig, choose_config
from hip_ops.runtime.main_grad import add_products_, fp32_product, main_grad_linear
from hip_ops.runtime.operator import warm_up
from hip_ops.versions import VERSIONS
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from tests.no_waiting import no_waiting
from zaya_plugin.model.experts import ExpertMLP

DEVICE = torch.device("cuda", 0)
CASES = [
    Grouped((0, 3, 0, 150, 300, 1), 264, 520),
    Grouped((128, 256), 64, 256, "fp16", padding_rows=0),
    Grouped((0, 0), 64, 64),
    Grouped((700,), 2048, 136),
    Grouped((5, 6, 7), 33, 35, "bf16", pad=3),
    Grouped((100, 29), 72, 40, "bf16", pad=8),
    Grouped((17,) * 16, 128, 384),
]


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case, flag):
    with use_kernels("triton"):
        check_rows(hip_ops, case, flag, DEVICE)
        check_outer(hip_ops, case, flag, DEVICE)
        check_outer(hip_ops, case, flag, DEVICE, out_dtype=case.random(1).dtype)


SETTINGS = [
    dict(),
    dict(flatten=False),
    dict(parts=2),
    dict(block_n=128, num_stages=4, parts=2),
    dict(block_n=128, num_warps=4, programs=2, parts=2),
    dict(programs=0, flatten=False),
    dict(block_m=256, block_n=128, parts=2),
    dict(reduce=False, parts=4),
    dict(descriptors=False, block_n=128, flatten=False),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_kind_of_configuration(settings):
    from hip_ops.ops.grouped_product import triton as kernels

    if choose_config(kernels.table_part(DEVICE), "outer", 1, 1, 1).descriptors is False and settings.get(
        "descriptors", True
    ):
        pytest.skip("no descriptors here")
    outer = replace(GroupedConfig(**{"parts": 4, **settings}))
    rows = replace(outer, parts=min(outer.parts, 2) if settings.get("parts") else 1)
    backend = SimpleNamespace(
        grouped_rows=partial(kernels.grouped_rows, config=rows),
        grouped_outer_=partial(kernels.grouped_outer_, config=outer),
    )
    case = Grouped((0, 3, 0, 150, 300, 1), 264, 520)
    for flag in (False, True):
        check_rows(backend, case, flag, DEVICE)
        check_outer(backend, case, flag, DEVICE)


@pytest.mark.parametrize("name", VERSIONS["grouped_product"])
def test_every_version(name):
    """grouped_mm rounds products to bf16 before they are added."""
    with use_kernels(grouped_product=name):
        try:
            warm_up(DEVICE, (grouped_product._rows, grouped_product._outer))
        except ValueError as error:
            if "failed its self-check" in str(error):
                raise
            pytest.skip(str(error))
    module, case = (
        importlib.import_module(f"hip_ops.ops.grouped_product.{name}"),
        Grouped((0, 30, 0, 150, 300, 1), 256, 512),
    )
    for transposed in (False, True):
        check_rows(module, case, transposed, DEVICE)
    a, b, offsets = case.operand(case.k, 1, DEVICE), case.operand(case.n, 2, DEVICE), case.offsets(DEVICE)
    parts = zip(a[:481].split(case.counts), b[:481].split(case.counts), strict=True)
    exact = torch.stack([left.double().T @ right.double() for left, right in parts])
    within = 4e-3 if name == "grouped_mm" else 1e-6
    for start, accumulate in ((1.0, True), (float("nan"), False)):
        total = torch.full((6, case.k, case.n), start, device=DEVICE)
        module.grouped_outer_(total, a, b, offsets, accumulate)
        want = exact + 1 if accumulate else exact
        assert (total - want).norm() <= within * want.norm()


def test_calls_that_quack_and_grouped_mm_do_not_take():
    nothing, unaligned = Grouped((0, 0), 64, 64, padding_rows=0), CASES[4]
    check_rows(hip_ops, nothing, True, DEVICE)
    check_rows(hip_ops, replace(unaligned, dtype="fp32"), False, DEVICE)
    for accumulate in (False, True):
        check_outer(hip_ops, nothing, accumulate, DEVICE)
        check_outer(hip_ops, unaligned, accumulate, DEVICE)


def experts(rows=480, h=256, f=128, count=6):
    generator = torch.Generator().manual_seed(4)

    def random(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).bfloat16().to(DEVICE)

    blocks = random(count, 2 * f, h, scale=h**-0.5), random(count, h, f, scale=f**-0.5)
    mains = [torch.randn(block.shape, generator=generator).to(DEVICE) for block in blocks]
    matrices = []
    for block, main in zip(blocks, mains, strict=True):
        for matrix, total in zip(block, main, strict=True):
            weight = nn.Parameter(matrix)
            weight.main_grad, weight.grad_added_to_main_grad = total, False
            matrices.append(weight)
    x, weights = random(rows, h).requires_grad_(), torch.rand(rows, generator=generator).to(DEVICE).requires_grad_()
    offsets = torch.tensor([0, 100, 101, 101, 300, 470], dtype=torch.int32).to(DEVICE)
    return x, weights, offsets, matrices, mains, random(rows, h)


def test_the_experts_add_to_main_gradients_wait_for_nobody_and_copy_nothing():
    x, weights, offsets, matrices, mains, grad = experts()
    before, seen = [main.clone() for main in mains], []
    for weight in matrices:
        accumulate = weight.expand_as(weight).grad_fn.next_functions[0][0]

        def hook(*unused, weight=weight):
            seen.append(weight.grad.data_ptr() == weight.data_ptr())
            weight.grad = None

        accumulate.register_hook(hook)
        weight.accumulator = accumulate

    def step():
        x.grad = weights.grad = None
        ExpertMLP.apply(x, weights, offsets, 6, None, 1.0, *matrices).backward(grad)

    step()  # self-checks, compilation
    first = [main.clone() for main in mains]
    for main, old in zip(mains, before, strict=True):
        main.copy_(old)
    seen.clear()
    with no_waiting():
        step()
    assert len(seen) == 12 and all(seen), "autograd copied what was handed over"
    assert all(weight.grad_added_to_main_grad for weight in matrices)
    assert all(torch.equal(a, b) for a, b in zip(mains, first, strict=True)), "other bits in another run"

    exact = [t.detach().double().requires_grad_() for t in matrices]
    rows = []
    for expert, part in enumerate(torch.tensor_split(x.detach().double(), offsets.tolist())[:6]):
        gate, up = (part @ exact[expert].T).chunk(2, dim=-1)
        rows.append(torch.nn.functional.silu(gate) * up @ exact[6 + expert].T)
    y = torch.cat(rows) * weights[:470, None].double()
    wanted = torch.autograd.grad(y, exact, grad[:470].double(), allow_unused=True, materialize_grads=True)
    for main, old, want in zip(mains, before, (torch.stack(wanted[:6]), torch.stack(wanted[6:])), strict=True):
        assert ((main - old).double() - want).norm() <= 1e-2 * want.norm()
        assert torch.equal(main[0], old[0]) and torch.equal(main[3], old[3]), "experts without rows"


def test_in_a_captured_graph():
    """Replayed with other loads: tiles are counted on the device."""
    case = Grouped((100, 0, 150, 50), 256, 384, padding_rows=20)
    x, w, offsets = case.operand(case.k, 1, DEVICE), case.matrices(True, DEVICE), case.offsets(DEVICE)
    x[case.rows :] = 1.0
    b, out = torch.randn(len(x), case.n, device=DEVICE).bfloat16(), torch.zeros(4, case.k, case.n, device=DEVICE)
    hip_ops.grouped_outer_(out, x, b, offsets)
    hip_ops.grouped_rows(x, w, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hip_ops.grouped_rows(x, w, offsets)
        hip_ops.grouped_outer_(out, x, b, offsets)
    for ends in ([0, 0, 320, 320], [1, 200, 201, 310], [0, 0, 0, 0]):
        offsets.copy_(torch.tensor(ends))
        out.zero_()
        graph.replay()
        want = torch.zeros_like(out)
        hip_ops.grouped_outer_(want, x, b, offsets)
        assert torch.equal(out, want)
        assert torch.equal(y[: ends[-1]], hip_ops.grouped_rows(x, w, offsets)[: ends[-1]])


def test_projections_add_in_fp32():
    assert torch.version.hip is not None or fp32_product(DEVICE, torch.bfloat16) == "addmm"
    if fp32_product(DEVICE, torch.bfloat16) is None:
        pytest.skip("this device multiplies bf16 into bf16 alone")
    x, sizes = torch.randn(4096, 512, device=DEVICE).bfloat16().requires_grad_(), (256, 64, 32, 32)
    for some in (sizes, sizes[:1]):
        weights = [nn.Parameter(torch.randn(size, 512, device=DEVICE).bfloat16()) for size in some]
        for weight in weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.randn(weight.shape, device=DEVICE), False
        before = [weight.main_grad.clone() for weight in weights]
        grad = torch.randn(4096, sum(some), device=DEVICE).bfloat16()
        main_grad_linear(x, *weights).backward(grad)
        exact = (grad.double().T @ x.detach().double()).split(some)
        for weight, old, want in zip(weights, before, exact, strict=True):
            # matrix units cut their fp32 sums off where others round: 4.4e-6 on an H100; a product rounded to bf16 is
            # wrong by 2e-3
            assert (weight.main_grad.double() - old.double() - want).norm() <= 1e-5 * want.norm()
            assert weight.grad.data_ptr() == weight.data_ptr()
    totals = [torch.zeros(size, 512, device=DEVICE) for size in sizes]
    a = torch.randn(4096, 384, device=DEVICE).bfloat16()
    add_products_(totals, a, x.detach())
    want = a.double().T @ x.detach().double()
    assert (torch.cat(totals) - want).norm() <= 1e-5 * want.norm()
