# SPDX-License-Identifier: Apache-2.0
"""Test the expert path on an accelerator: Triton, and expert_*.hip and weighted_swiglu.hip compiled for it (by nvcc
on NVIDIA).
"""

import importlib

import pytest
import torch

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.expert_permutation import reference
from hip_ops.runtime.choice import missing
from hip_ops.runtime.operator import OPERATORS, all_operators, warm_up
from tests.hip_ops.expert_path_cases import (
    BF16,
    FP32,
    MIXES,
    Rows,
    Swiglu,
    check_rows,
    check_sort,
    check_swiglu,
    expert_ids,
)
from tests.no_waiting import no_waiting

DEVICE = torch.device("cuda")
NAMES = ("sort_by_expert", "gather_rows", "weighted_swiglu", "weighted_swiglu_backward")
ROWS = [
    Rows(67, 2048),
    Rows(67, 2048, mix="skewed", pad=8),
    Rows(33, 2048, pad=3),
    Rows(19, 2051),
    Rows(9, 45, BF16, BF16),
    Rows(7, 1, mix="one"),
    Rows(5, 2048, FP32, BF16, mix="no_expert"),
    Rows(31, 1000, FP32),
    Rows(65, 256),
    Rows(65, 512),
    Rows(3, 8192),
    Rows(3, 20000, FP32),
    Rows(0, 2048),
]
SWIGLU = [
    Swiglu(67, 2048),
    Swiglu(67, 2048, offsets="none"),
    Swiglu(33, 2048, BF16, BF16, pad=8),
    Swiglu(33, 2048, pad=3),
    Swiglu(9, 2051),
    Swiglu(9, 45),
    Swiglu(7, 1, offsets="all"),
    Swiglu(9, 1024, FP32),
    Swiglu(5, 2048, offsets="no_expert"),
    Swiglu(3, 8192),
    Swiglu(3, 9000, FP32, BF16),
    Swiglu(5, 256, scale=12.0),
    Swiglu(0, 2048, offsets="none"),
]


def warmed_up() -> dict[str, str]:
    """Checks every operator of the expert path, so that none waits for the host or is captured at its first use."""
    all_operators()
    return warm_up(DEVICE, [OPERATORS[name] for name in NAMES])


def module(chosen: str, name: str):
    return importlib.import_module(f"hip_ops.ops.{name}.{chosen}")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    "tokens, num_experts", [(0, 16), (1, 1), (63, 16), (4096, 16), (32768, 16), (70001, 5), (5000, 256)]
)
def test_sort(chosen, tokens, num_experts, dtype):
    for mix in MIXES if tokens <= 4096 else MIXES[:1]:
        check_sort(
            module(chosen, "expert_permutation"), expert_ids(mix, tokens, num_experts, dtype).to(DEVICE), num_experts
        )


def test_sort_of_many_tokens(chosen):
    """Compares with the torch reference, which the token-by-token oracle checks at smaller sizes."""
    ids = torch.randint(0, 17, (1_000_003,), device=DEVICE)
    for got, want in zip(
        module(chosen, "expert_permutation").sort_by_expert(ids, 16), reference.sort_by_expert(ids, 16), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows(chosen, case):
    check_rows(module(chosen, "expert_permutation"), case, "cuda")


@pytest.mark.parametrize("case", SWIGLU, ids=str)
def test_swiglu(chosen, case):
    check_swiglu(module(chosen, "weighted_swiglu"), case, "cuda")


def test_the_self_check_passes(chosen):
    assert all(text.startswith(chosen) for text in warmed_up().values())


def path(tokens, probs, gate_up_weight, ids):
    """All experts have the same matrices, so that only the order of rows matters."""
    order = hip_ops.sort_by_expert(ids, 16)
    rows, row_probs = hip_ops.permute_to_experts(tokens, order, probs)
    hidden = hip_ops.weighted_swiglu(rows @ gate_up_weight, row_probs, order.offsets)
    return hip_ops.unpermute_from_experts(hidden, order)


def inputs(tokens: int = 1024, hidden: int = 256):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(DEVICE)
    weight = (torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5).bfloat16().to(DEVICE)
    probs, ids = (
        torch.rand(tokens, generator=generator).to(DEVICE),
        torch.randint(0, 17, (tokens,), generator=generator).to(DEVICE),
    )
    upstream = torch.randn(tokens, hidden, generator=generator).bfloat16().to(DEVICE)
    return [t.requires_grad_() for t in (x, probs, weight)], ids, upstream


def gradients(function, leaves, ids, upstream):
    output = function(*leaves, ids)
    return [output, *torch.autograd.grad(output, leaves, upstream)]


def test_nothing_waits_for_the_host(chosen):
    """Sort, both ways, SwiGLU and all their gradients; and the result is that of plain torch without sorting."""
    leaves, ids, upstream = inputs()
    warmed_up()
    gradients(path, leaves, ids, upstream)  # compiles
    with no_waiting():
        found = gradients(path, leaves, ids, upstream)
        torch.cuda._sleep(20_000_000)
        again = gradients(path, leaves, ids, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))

    def plain(x, probs, weight, ids):
        gate, up = (x @ weight).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up * probs[:, None]).masked_fill(ids[:, None] == 16, 0.0)

    exact = gradients(plain, [t.detach().double().requires_grad_() for t in leaves], ids, upstream.double())
    for got, want in zip(found, exact, strict=True):
        assert (got.double() - want).norm() <= 0.02 * want.norm()


def test_compiles_whole(chosen):
    leaves, ids, upstream = inputs()
    plain = gradients(path, leaves, ids, upstream)
    compiled = gradients(torch.compile(path, fullgraph=True), leaves, ids, upstream)
    for a, b in zip(plain, compiled, strict=True):
        assert (a - b).norm() <= 0.01 * a.norm()


def test_in_a_captured_graph(chosen):
    """Replays with other ids: the shapes do not depend on the tokens' choices."""
    (x, probs, weight), ids, _ = inputs()
    x, probs, weight = x.detach(), probs.detach(), weight.detach()
    warmed_up()
    path(x, probs, weight, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = path(x, probs, weight, ids)
    for fill in (ids.flip(0), torch.full_like(ids, 7), torch.full_like(ids, 16)):
        ids.copy_(fill)
        graph.replay()
        assert torch.equal(output, path(x, probs, weight, ids))
    assert not output.any()


def test_rows_of_strided_tokens_and_other_streams(chosen):
    order = hip_ops.sort_by_expert(expert_ids("even", 300, 16).to(DEVICE), 16)
    tokens = torch.randn(300, 4096, device=DEVICE).bfloat16()[:, ::2]
    want, _ = hip_ops.permute_to_experts(tokens.contiguous(), order)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what is queued on another stream would run ahead of the inputs
        copy = tokens.clone()
        found, _ = hip_ops.permute_to_experts(copy, order)
        back = hip_ops.unpermute_from_experts(found, order)
    stream.synchronize()
    assert torch.equal(found, want) and torch.equal(back, tokens.masked_fill((order.row_of_token < 0)[:, None], 0))


def test_versions_agree():
    """Triton and HIP: the same order and rows; SwiGLU within a rounding of bf16."""
    found = []
    for name in ("triton", "hip"):
        if missing(name, DEVICE, named=True):
            pytest.skip(f"no {name}")
        with use_kernels(name):
            leaves, ids, upstream = inputs(hidden=2048)
            order = hip_ops.sort_by_expert(ids, 16)
            found.append(
                [
                    *order,
                    *hip_ops.permute_to_experts(leaves[0], order, leaves[1]),
                    *gradients(path, leaves, ids, upstream),
                ]
            )
    assert all(torch.equal(a, b) for a, b in zip(found[0][:6], found[1][:6], strict=True))
    for a, b in zip(found[0][6:], found[1][6:], strict=True):
        assert (a.float() - b.float()).abs().max() <= 2**-6 * a.float().abs().max()
