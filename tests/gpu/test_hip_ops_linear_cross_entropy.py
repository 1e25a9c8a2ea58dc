# SPDX-License-Identifier: Apache-2.0
"""Test linear + cross-entropy on an accelerator: Triton, and
hip_ops/ops/linear_cross_entropy/vocabulary_{rows,exponentials}.hip compiled for it (by nvcc on NVIDIA).
"""

import importlib

import pytest
import torch

import hip_ops
from hip_ops.runtime.main_grad import add_product_, fp32_product
from hip_ops.runtime.operator import OPERATORS, all_operators, warm_up
from tests.hip_ops import vocabulary_exponentials_cases as exponentials
from tests.hip_ops.test_linear_cross_entropy import chunks_of, inputs
from tests.hip_ops.vocabulary_rows_cases import BF16, CASES, FP32, Logits, check
from tests.no_waiting import no_waiting

DEVICE = torch.device("cuda")
NAMES = ("row_statistics", "overwrite_with_gradient", "overwrite_with_exponentials", "finish_gradient")
LARGE = [
    Logits(5, 262272),
    Logits(3, 262272, parts=16, z_loss=1e-4),
    Logits(2, 65536, FP32, parts=4),
    Logits(4, 32768, shape="confident", pad=8),
]


@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_rows_against_fp64(chosen, case):
    check(importlib.import_module(f"hip_ops.ops.linear_cross_entropy.{chosen}"), case, "cuda")


LARGE_EXPONENTIALS = [
    Logits(5, 262272, parts=129),
    Logits(3, 262272, parts=129, z_loss=1e-4, shape="confident"),
    Logits(2, 65536, FP32, parts=32, shape="rising"),
    Logits(300, 5000, parts=3, pad=8),
]


@pytest.mark.parametrize("case", [*exponentials.CASES, *LARGE_EXPONENTIALS], ids=str)
def test_exponentials_against_fp64(chosen, case):
    exponentials.check(importlib.import_module(f"hip_ops.ops.linear_cross_entropy.{chosen}"), case, "cuda")


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("case", exponentials.SEVERAL_RANKS, ids=str)
def test_parts_of_other_ranks(chosen, case, others):
    exponentials.check(importlib.import_module(f"hip_ops.ops.linear_cross_entropy.{chosen}"), case, "cuda", others)


def test_the_self_check_passes(chosen):
    all_operators()
    warm_up(DEVICE, [OPERATORS[name] for name in NAMES])
    found = {name: OPERATORS[name].results[torch.device("cuda", torch.cuda.current_device()), chosen] for name in NAMES}
    assert found == dict.fromkeys(NAMES, "passed")


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_reference_agrees(name):
    all_operators()
    operator = OPERATORS[name]
    found = operator.difference(operator._function_of("compiled"), DEVICE)
    assert found is None, found


def on_device(tokens=512, h=256, classes=20000, dtype=BF16):
    hidden, weight, labels, grad = inputs(tokens, h, classes, dtype)
    return (
        (hidden.detach() / 4).to(DEVICE).requires_grad_(),
        weight.detach().to(DEVICE).requires_grad_(),
        labels.to(DEVICE),
        grad.to(DEVICE),
    )


def run(hidden, weight, labels, grad, *, promise, main_grad=None, z_loss=0.0, chunk=None):
    with chunks_of(chunk):
        losses = hip_ops.linear_cross_entropy(
            hidden, weight, labels, promised_grad=grad if promise else None, main_grad=main_grad, z_loss=z_loss
        )
    wanted = (hidden, weight) if main_grad is None else (hidden,)
    gradients = torch.autograd.grad((losses * grad).sum(), wanted)
    return losses.detach(), gradients[0], gradients[1] if main_grad is None else main_grad


@pytest.mark.parametrize("promise", [False, True])
@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_losses_and_gradients_against_fp64(chosen, dtype, with_main_grad, promise):
    """The exact values start from logits as the device rounds them, which every bf16 head has; norms are compared,
    and each element at the size of its terms.
    """
    hidden, weight, labels, grad = on_device(dtype=dtype)
    main_grad = torch.zeros(weight.shape, device=DEVICE) if with_main_grad else None
    losses, d_hidden, d_weight = run(
        hidden, weight, labels, grad, promise=promise, main_grad=main_grad, z_loss=1e-3, chunk=200
    )
    x, w = hidden.detach().double(), weight.detach().double()
    with torch.no_grad():  # in the same chunks: products of other shapes may sum in another order, and round otherwise
        logits = torch.cat([piece @ weight.t() for piece in hidden.split(200)]).double() if dtype == BF16 else x @ w.t()
    lse = logits.logsumexp(-1)
    d = (
        logits.softmax(-1) * (1 + 2e-3 * lse)[:, None] - torch.nn.functional.one_hot(labels, weight.shape[0])
    ) * grad.double()[:, None]
    want = torch.nn.functional.cross_entropy(logits, labels, reduction="none") + 1e-3 * lse**2
    loose = 2**-8 if dtype == BF16 else 2e-5  # TF32 is off; fp32 sums of 20,000
    assert (losses - want).abs().max() < (2e-5 if dtype == BF16 else 2e-4) * want.abs().max()
    # one rounding of d and one of the result; of the weight with a promise also hidden times a row's factor, where the
    # result is not rounded instead of it
    of_weight = 2 + (promise and not with_main_grad and dtype == BF16)
    for got, exact, terms, roundings in (
        (d_hidden, d @ w, d.abs() @ w.abs(), 2),
        (d_weight, d.t() @ x, d.abs().t() @ x.abs(), of_weight),
    ):
        assert (got - exact).norm() <= loose * exact.norm()
        assert ((got - exact).abs() <= roundings * loose * terms + 1e-12).all()
    if with_main_grad and dtype == BF16:  # summed in fp32: no rounding of the result
        assert (d_weight - d.t() @ x).norm() <= 0.6 * 2**-8 * (d.t() @ x).norm()


def test_modes_and_runs_agree(chosen):
    arguments = on_device()
    first = run(*arguments, promise=True)
    assert all(torch.equal(a, b) for a, b in zip(first, run(*arguments, promise=True), strict=True))
    losses, d_hidden, d_weight = run(*arguments, promise=False)
    torch.testing.assert_close(losses, first[0], rtol=1e-5, atol=1e-5)
    # of a factor more or less in what is rounded, twice or three times each
    for got, want in ((d_hidden, first[1]), (d_weight, first[2])):
        assert (got.double() - want.double()).norm() <= 2**-8 * want.double().norm()
    other = run(*arguments, promise=True, chunk=128)
    torch.testing.assert_close(other[0], first[0], rtol=1e-4, atol=1e-4)


def test_nothing_waits_for_the_host_and_a_graph_holds_it(chosen):
    hidden, weight, labels, grad = on_device()
    main_grad = torch.zeros(weight.shape, device=DEVICE)

    def step():
        with chunks_of(200):
            losses = hip_ops.linear_cross_entropy(hidden, weight, labels, promised_grad=grad, main_grad=main_grad)
        return losses, torch.autograd.grad((losses * grad).sum(), hidden)[0]

    step()
    with no_waiting():
        step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    labels.copy_(labels.flip(0))
    main_grad.zero_()
    graph.replay()
    replayed = [tensor.clone() for tensor in (*captured, main_grad)]
    main_grad.zero_()
    for a, b in zip(replayed, (*step(), main_grad), strict=True):
        assert torch.equal(a, b.detach())


def test_products_are_summed_in_fp32():
    """The weight gradients of the head and of all projections depend on it."""
    assert fp32_product(DEVICE, BF16) in ("addmm", "mm")
    a, b = torch.randn(300, 96, device=DEVICE).to(BF16), torch.randn(300, 64, device=DEVICE).to(BF16)
    total = torch.randn(96, 64, device=DEVICE)
    want = total.double() + a.double().t() @ b.double()
    assert add_product_(total, a, b) is total
    assert (total - want).abs().max() < 1e-4


def test_memory_of_a_chunk(chosen):
    """Forward and backward at ZAYA's width allocate one chunk of logits and small tensors."""
    tokens, classes = 2048, 262272
    hidden = torch.randn(tokens, 256, device=DEVICE, dtype=BF16, requires_grad=True)
    weight = (torch.randn(classes, 256, device=DEVICE) * 0.05).to(BF16).requires_grad_()
    labels, grad = torch.randint(classes, (tokens,), device=DEVICE), torch.ones(tokens, device=DEVICE)
    main_grad = torch.zeros(classes, 256, device=DEVICE)
    run(hidden, weight, labels, grad, promise=True, main_grad=main_grad, chunk=512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(hidden, weight, labels, grad, promise=True, main_grad=main_grad, chunk=512)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 1.15 * 512 * classes * 2 + 2**26, extra


def test_training_has_the_losses_of_the_reference(demo, tmp_path):
    """20 steps of the demo in bf16 with DDP's overlap."""
    recipe = ("cluster=gpu", "exit_interval=20", "checkpoint.save_interval=null", "parallel.overlap_grad_reduce=true")
    plain = demo(tmp_path / "plain", *recipe, "cluster.kernel_overrides.linear_cross_entropy=reference")
    fused = demo(tmp_path / "fused", *recipe, "cluster.kernel_overrides.linear_cross_entropy=triton")
    assert list(plain) == list(fused) == list(range(1, 21))
    assert max(abs(plain[step] - fused[step]) for step in range(1, 6)) < 5e-3
    assert max(abs(plain[step] - fused[step]) for step in plain) < 0.05
