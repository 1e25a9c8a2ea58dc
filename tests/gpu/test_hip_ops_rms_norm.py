# SPDX-License-Identifier: Apache-2.0
"""Test residual merge + RMSNorm or LayerNorm on an accelerator: Triton, and hip_ops/ops/rms_norm/rms_norm*.hip compiled for it (by
nvcc on NVIDIA).
"""

import importlib
from dataclasses import replace

import pytest
import torch

import hip_ops
from hip_ops import use_kernels
from hip_ops.runtime import choice
from hip_ops.runtime.operator import OPERATORS, all_operators, warm_up
from tests.hip_ops.rms_norm_cases import BF16, FP32, Case, check, make, of_module

DEVICE = torch.device("cuda")
CASES = [
    *(Case(scaled, 67, hidden) for scaled in (False, True) for hidden in (256, 512, 1024, 2048, 4096, 8192)),
    Case(False, 300, 2048, residual_dtype=BF16),
    Case(False, 4097, 2048, residual_dtype=BF16, d_new_residual=False),
    Case(True, 4097, 2048),
    Case(True, 33, 2048, pad=8),
    Case(True, 33, 2048, pad=3),
    Case(False, 19, 2051),
    Case(True, 19, 2051, pad=1),
    Case(True, 5, 45),
    Case(False, 7, 1),
    Case(True, 9, 2048, FP32, FP32, FP32),
    Case(True, 9, 2048, FP32, FP32, BF16),
    Case(False, 9, 264, FP32, BF16, FP32),
    Case(True, 9, 1000, BF16, BF16, BF16),
    Case(False, 3, 20000),
    Case(True, 3, 20000, d_new_residual=False),
    Case(True, 1, 2048),
]
CASES += [replace(case, centered=True) for case in CASES]
CASES += [Case(scaled, 65, 2048, centered=True, offset=100.0) for scaled in (False, True)]
FORMS = pytest.mark.parametrize(
    "scaled, centered",
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["plain", "zaya", "plain-layer_norm", "zaya-layer_norm"],
)


def operator(case: Case):
    if case.centered:
        return hip_ops.scaled_residual_layer_norm if case.scaled else hip_ops.add_layer_norm
    return hip_ops.scaled_residual_rms_norm if case.scaled else hip_ops.add_rms_norm


def leaves(case: Case) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in make(case, "cuda").arguments]


def gradients(case: Case, function, inputs) -> list[torch.Tensor]:
    y, new_residual = function(*inputs)
    upstream = make(case, "cuda")
    torch.autograd.backward([y, new_residual], [upstream.dy.view_as(y), upstream.d_new_residual.view_as(y)])
    return [y, new_residual, *(t.grad for t in inputs)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(chosen, case):
    check(of_module(importlib.import_module(f"hip_ops.ops.rms_norm.{chosen}")), case, "cuda")


def test_the_self_check_passes(chosen):
    mine = [each for each in all_operators() if each.folder == "rms_norm"]
    assert len(mine) == 2  # forward and backward
    found = warm_up(DEVICE, mine)
    assert [found[each.name].split()[0] for each in mine] == [chosen] * 2
    assert all(set(each.results.values()) == {"passed"} for each in mine)


@FORMS
def test_autograd_gives_what_the_functions_give(chosen, scaled, centered):
    """Through dispatch, autograd and another stream, for which the default stream does not wait, the bits are the
    same.
    """
    case, found = Case(scaled, 4096, 2048, centered=centered), []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # what is queued on another stream would run ahead of the inputs
            found.append(gradients(case, lambda *a: operator(case)(*a, case.eps), leaves(case)))
        stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    inputs = make(case, "cuda")
    module = of_module(importlib.import_module(f"hip_ops.ops.rms_norm.{chosen}"))
    y, new_residual, *rest = module.forward(inputs)
    direct = module.backward(inputs, new_residual, *rest)
    assert torch.equal(found[0][0], y) and torch.equal(found[0][1], new_residual)
    assert torch.equal(found[0][2], direct["d_x"]) and torch.equal(found[0][3], direct["d_residual"])
    assert torch.equal(found[0][-1], direct["d_bias" if centered else "d_weight"])


@FORMS
def test_compiles_whole(chosen, scaled, centered):
    case = Case(scaled, 512, 2048, centered=centered)

    def function(*arguments):
        y, new_residual = operator(case)(*arguments, case.eps)
        return y * 2, new_residual

    plain = gradients(case, function, leaves(case))
    compiled = gradients(case, torch.compile(function, fullgraph=True), leaves(case))
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


@pytest.mark.parametrize("centered", [False, True], ids=["rms_norm", "layer_norm"])
def test_in_a_captured_graph(chosen, centered):
    case = Case(True, 256, 2048, centered=centered)
    warm_up(DEVICE, [OPERATORS["merge_norm"]])
    inputs = list(make(case, "cuda").arguments)
    expected = operator(case)(*inputs, case.eps)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, new_residual = operator(case)(*inputs, case.eps)
    y.zero_(), new_residual.zero_()
    graph.replay()
    assert torch.equal(y, expected[0]) and torch.equal(new_residual, expected[1])


def test_strides_and_empty_tensors(chosen):
    vectors = list(make(Case(True, 1, 2048), "cuda").arguments[2:])
    x, residual = (
        torch.randn(3, 2048, 5, device="cuda").bfloat16().transpose(1, 2),
        torch.randn(3, 5, 4096, device="cuda")[..., ::2],
    )
    for a, b in zip(
        hip_ops.scaled_residual_rms_norm(x, residual, *vectors),
        hip_ops.scaled_residual_rms_norm(x.contiguous(), residual.contiguous(), *vectors),
        strict=True,
    ):
        assert torch.equal(a, b) and a.is_contiguous()
    y, new_residual = hip_ops.scaled_residual_rms_norm(x[:0], residual[:0], *vectors)
    assert y.shape == new_residual.shape == (0, 5, 2048)


@FORMS
def test_back_ends_agree(scaled, centered):
    """Triton and HIP have the same new_residual; the other results differ by at most a rounding of bf16."""
    case, found = Case(scaled, 1024, 2048, centered=centered), []
    for name in ("triton", "hip"):
        if choice.missing(name, DEVICE, named=True):
            pytest.skip(f"no {name}")
        with use_kernels(name):
            found.append(gradients(case, lambda *a: operator(case)(*a, case.eps), leaves(case)))
    assert torch.equal(found[0][1], found[1][1])
    for a, b in zip(*found, strict=True):
        assert (a.float() - b.float()).abs().max() <= 2**-7 * a.float().abs().max()
