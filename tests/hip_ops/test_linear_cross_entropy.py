# SPDX-License-Identifier: Apache-2.0
"""Linear + cross-entropy in chunks, on the CPU: losses and gradients with a promise and without, z-loss, cut
vocabularies, memory.
"""

import contextlib
import re
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hip_ops
from hip_ops import saved_bytes, use_kernels
from hip_ops.ops import linear_cross_entropy
from hip_ops.ops.dense_product.reference import dense_product_ as reference_of_products
from hip_ops.ops.linear_cross_entropy import BROKEN_PROMISE
from hip_ops.runtime import main_grad
from hip_ops.runtime.main_grad import add_product_
from hip_ops.runtime.operator import OPERATORS
from hip_ops.saved_bytes import chunk_for
from tests.hip_ops.cpu_kernels import run_python

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
PASSES = ("row_statistics", "overwrite_with_gradient", "overwrite_with_exponentials", "finish_gradient")


def inputs(tokens=13, h=8, classes=37, dtype=FP64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, h, generator=generator, dtype=FP64).to(dtype).requires_grad_()
    weight = torch.randn(classes, h, generator=generator, dtype=FP64).to(dtype).requires_grad_()
    labels = torch.randint(classes, (tokens,), generator=generator)
    grad = torch.rand(tokens, generator=generator, dtype=FP64).to(torch.promote_types(dtype, FP32))
    grad[::3] = 0.0
    return hidden, weight, labels, grad


def chunks_of(tokens: int | None):
    """Sets the tokens of a chunk; without it all tokens are one chunk. None: the operator's choice."""
    if tokens is None:
        return contextlib.nullcontext()
    return mock.patch.object(linear_cross_entropy, "chunk_for", lambda *_: tokens)


def plain(hidden, weight, labels, grad, z_loss=0.0):
    """Losses and gradients in fp64 by torch's cross-entropy."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = hidden @ weight.t()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none") + z_loss * logits.logsumexp(-1) ** 2
    return losses.detach(), *torch.autograd.grad((losses * grad.double()).sum(), (hidden, weight))


@pytest.mark.parametrize("promise", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 4, 1, 100])
@pytest.mark.parametrize("dtype", [FP64, FP32])
def test_against_torchs_cross_entropy_in_fp64(chosen, dtype, chunk, z_loss, promise):
    hidden, weight, labels, grad = inputs(dtype=dtype)
    with chunks_of(chunk):
        losses = hip_ops.linear_cross_entropy(
            hidden, weight, labels, promised_grad=grad if promise else None, z_loss=z_loss
        )
    assert losses.dtype == grad.dtype
    found = (losses.detach(), *torch.autograd.grad((losses * grad).sum(), (hidden, weight)))
    for got, want in zip(found, plain(hidden, weight, labels, grad, z_loss), strict=True):
        torch.testing.assert_close(
            got.double(), want, **(dict(rtol=1e-12, atol=1e-13) if dtype == FP64 else dict(rtol=2e-6, atol=3e-6))
        )


def ulps(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> float:
    """Largest error in ULP of bf16 at the size of the terms whose sum a result is."""
    return ((got.double() - want).abs() / (terms * 2**-8)).max().item()


@pytest.mark.parametrize("promise", [False, True])
def test_in_bf16_gradients_are_within_2_ulp_of_what_the_rounded_logits_give(chosen, promise):
    """Against fp64 from bf16 logits, which any bf16 head has: of the hidden state 1 rounding of the softmax and 1 of
    the result, of the weight summed in fp32 1 rounding, and with a promise 1 of the hidden state times a factor; ULP at
    the size of the terms.
    """
    hidden, weight, labels, grad = inputs(64, 32, 500, BF16)
    main_grad = torch.zeros(500, 32)
    with chunks_of(24):
        losses = hip_ops.linear_cross_entropy(
            hidden, weight, labels, promised_grad=grad if promise else None, main_grad=main_grad
        )
    (d_hidden,) = torch.autograd.grad((losses * grad).sum(), hidden)
    x, w = hidden.detach().double(), weight.detach().double()
    logits = (x @ w.t()).to(BF16).double()
    want = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    # sums of products in fp32 and fp64 fall to other sides of a rounding
    torch.testing.assert_close(losses.detach().double(), want, rtol=1e-2, atol=1e-2)
    d = (logits.softmax(-1) - torch.nn.functional.one_hot(labels, 500)) * grad.double()[:, None]
    assert ulps(d_hidden, d @ w, d.abs() @ w.abs() + 1e-12) < 2
    assert ulps(main_grad, d.t() @ x, d.abs().t() @ x.abs() + 1e-12) < 2
    assert (main_grad - d.t() @ x).norm() < 4e-3 * (d.t() @ x).norm()


@pytest.mark.parametrize("largest", [39.0, 41.0, 63.0])
def test_a_small_promise_with_large_logits_keeps_its_gradients(chosen, largest):
    """1e-6, as of a mean over a step's tokens, and hidden states of 1e-4: their product with 1 / sum is far down in
    bf16's exponents.
    """
    hidden, weight, labels, _ = inputs(24, 8, 700, BF16)
    hidden, weight = (1e-4 * hidden.detach()).requires_grad_(), (1e4 * weight.detach()).requires_grad_()
    with torch.no_grad():
        hidden *= largest / (hidden @ weight.t()).abs().amax(-1, keepdim=True)
    grad = torch.full((24,), 1e-6)
    found = []
    for promised in (grad, None):
        losses = hip_ops.linear_cross_entropy(
            hidden, weight, labels, promised_grad=promised, main_grad=(main_grad := torch.zeros(700, 8))
        )
        found.append((torch.autograd.grad((losses * grad).sum(), hidden)[0].double(), main_grad.double()))
    for promised, recomputed in zip(*found, strict=True):
        assert (promised - recomputed).norm() < 2**-7 * recomputed.norm()


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_gradcheck(z_loss):
    hidden, weight, labels, grad = inputs(5, 4, 9)
    with chunks_of(2):
        assert torch.autograd.gradcheck(
            lambda h, w: hip_ops.linear_cross_entropy(h, w, labels, z_loss=z_loss), (hidden, weight)
        )


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_gradients_with_a_promise_are_the_slopes(z_loss):
    """Compares with central differences of each element, because gradcheck also passes gradients that were not
    promised.
    """
    hidden, weight, labels, grad = inputs(5, 4, 9)

    def total(h, w):
        with chunks_of(2):
            return (hip_ops.linear_cross_entropy(h, w, labels, promised_grad=grad, z_loss=z_loss) * grad).sum()

    gradients = torch.autograd.grad(total(hidden, weight), (hidden, weight))
    for place, gradient in enumerate(gradients):
        for at in range(gradient.numel()):
            moved = []
            for step in (1e-6, -1e-6):
                pair = [hidden.detach().clone(), weight.detach().clone()]
                pair[place].view(-1)[at] += step
                moved.append(total(*pair).item())
            assert (moved[0] - moved[1]) / 2e-6 == pytest.approx(gradient.flatten()[at].item(), abs=1e-7)


@pytest.mark.parametrize("promise", [False, True])
def test_the_main_gradient_is_added_to_and_autograd_gets_none(promise):
    hidden, weight, labels, grad = inputs(dtype=FP32)
    want = plain(hidden, weight, labels, grad)[2]
    main_grad = torch.full_like(weight, 2.0, requires_grad=False)
    for _ in range(2):
        with chunks_of(5):
            losses = hip_ops.linear_cross_entropy(
                hidden, weight, labels, promised_grad=grad if promise else None, main_grad=main_grad
            )
        (losses * grad).sum().backward()
    assert weight.grad is None and hidden.grad is not None
    torch.testing.assert_close(main_grad.double(), 2.0 + 2 * want, rtol=1e-5, atol=1e-5)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, labels, grad = inputs(dtype=FP32)
    want = plain(hidden, weight, labels, grad)
    for promised in (None, grad):
        losses = hip_ops.linear_cross_entropy(hidden.detach(), weight, labels, promised_grad=promised)
        torch.testing.assert_close(
            torch.autograd.grad((losses * grad).sum(), weight)[0].double(), want[2], rtol=1e-5, atol=1e-5
        )
        losses = hip_ops.linear_cross_entropy(hidden, weight.detach(), labels, promised_grad=promised)
        torch.testing.assert_close(
            torch.autograd.grad((losses * grad).sum(), hidden)[0].double(), want[1], rtol=1e-5, atol=1e-5
        )
        main_grad = torch.zeros_like(weight)
        with torch.no_grad():
            losses = hip_ops.linear_cross_entropy(hidden, weight, labels, promised_grad=promised, main_grad=main_grad)
        assert not losses.requires_grad and not main_grad.any()
        assert not hip_ops.linear_cross_entropy(
            hidden.detach(), weight.detach(), labels, promised_grad=promised
        ).requires_grad


@pytest.mark.parametrize("broken", [lambda g: 2 * g, lambda g: g + 1e-6, lambda g: torch.full_like(g, torch.nan)])
def test_a_broken_promise_is_detected(broken):
    hidden, weight, labels, grad = inputs(dtype=FP32)
    losses = hip_ops.linear_cross_entropy(hidden, weight, labels, promised_grad=grad)
    with pytest.raises(RuntimeError, match="gradient is not promised_grad"):
        losses.backward(broken(grad))
    assert len(BROKEN_PROMISE) < 255, "torch's assertions on a device take no longer message"


def test_labels_that_are_no_class_take_no_part():
    hidden, weight, labels, grad = inputs()
    labels[:3] = torch.tensor([-100, 37, 2**40])
    logits = hidden.detach() @ weight.detach().t()
    for promised in (None, grad):
        losses = hip_ops.linear_cross_entropy(hidden, weight, labels, promised_grad=promised)
        torch.testing.assert_close(losses[:3].detach(), logits[:3].logsumexp(-1))
        (d_hidden,) = torch.autograd.grad((losses * grad).sum(), hidden)
        torch.testing.assert_close(d_hidden[:3], (logits.softmax(-1) * grad[:, None] @ weight.detach())[:3])


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("first_class", [0, 7])
@pytest.mark.parametrize("no_class", [(), (-100,), (37, 2**40, -100)], ids=str)
@pytest.mark.parametrize("dtype", [FP64, FP32, BF16])
def test_losses_without_gradients_are_the_same(dtype, no_class, first_class, z_loss):
    """torch's cross_entropy computes them on a CPU where it can."""
    hidden, weight, labels, _ = inputs(dtype=dtype)
    labels[: len(no_class)] = torch.tensor(no_class)

    def run():
        with chunks_of(5):
            return hip_ops.linear_cross_entropy(
                hidden, weight, labels + first_class, z_loss=z_loss, first_class=first_class
            )

    with torch.no_grad():
        alone = run()
    tolerance = 1e-12 if dtype == FP64 else 2e-6
    torch.testing.assert_close(alone, run().detach(), rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        assert hip_ops.linear_cross_entropy(hidden[:0], weight, labels[:0]).shape == (0,)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", PASSES)
def test_torch_compile_makes_one_graph_of_a_reference(name):
    """Traces any number of parts and rows with the same results; other backends than Inductor trace the same."""
    operator, nodes = OPERATORS[name], []
    compiled = torch.compile(operator.reference, dynamic=False, fullgraph=True, backend="aot_eager")
    assert operator.difference(compiled, torch.device("cpu")) is None

    def count(graph, _):
        nodes.append(len(graph.graph.nodes))
        return graph

    labels, grad = torch.arange(3), torch.ones(3)
    for parts in (2, 40):
        torch._dynamo.reset()  # else the second shape is traced with the first one's guards
        logits = torch.randn(3, 1008 * parts - 5)
        normalizer, statistics = torch.randn(2, 3), torch.rand(parts, 3, 3)
        more = {
            "overwrite_with_gradient": (normalizer, grad, 0.0),
            "finish_gradient": (statistics, 0, parts, grad, 0.0),
        }.get(name, (parts,))
        torch.compile(operator.reference, dynamic=False, fullgraph=True, backend=count)(logits, labels, 0, *more)
    assert nodes[0] == nodes[1], nodes


def test_no_tokens_and_strided_ones():
    hidden, weight, labels, grad = inputs(dtype=FP32)
    losses = hip_ops.linear_cross_entropy(hidden[:0], weight, labels[:0], promised_grad=grad[:0])
    assert losses.shape == (0,)
    losses.sum().backward()
    assert not weight.grad.any()
    wide = torch.randn(13, 16)[:, ::2].requires_grad_()
    with chunks_of(4):
        found = [
            torch.autograd.grad(
                hip_ops.linear_cross_entropy(x, weight, labels.repeat_interleave(2)[::2]).sum(), (x, weight)
            )
            for x in (wide, wide.detach().contiguous().requires_grad_())
        ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_same_bits_again(chosen):
    hidden, weight, labels, grad = inputs(40, 16, 300, BF16)

    def run():
        with chunks_of(16):
            losses = hip_ops.linear_cross_entropy(hidden, weight, labels, promised_grad=grad)
        return (losses.detach(), *torch.autograd.grad((losses * grad).sum(), (hidden, weight)))

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("fp32_total", [True, False])
def test_add_product(fp32_total):
    a, b, total = torch.randn(9, 5).bfloat16(), torch.randn(9, 4).bfloat16(), torch.randn(5, 4)
    total = total if fp32_total else total.bfloat16()
    want = total.double() + a.double().t() @ b.double()
    assert add_product_(total, a, b) is total
    torch.testing.assert_close(
        total.double(), want, rtol=1e-6 if fp32_total else 2**-7, atol=1e-6 if fp32_total else 2**-7
    )


class Products(TorchDispatchMode):
    """Collects the dtypes of all operands of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function is torch.ops.hip_ops.dense_product_.default:
            with self:  # what an operator calls is seen by no mode
                return reference_of_products(*arguments)
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.dtypes |= {each.dtype for each in arguments}
        return function(*arguments, **(named or {}))


def test_a_device_without_products_into_fp32_rounds_them_before_the_sum(monkeypatch, caplog):
    """A CPU is such a device for the check; elsewhere it multiplies fp32 operands."""
    monkeypatch.setattr(main_grad, "ROUNDED_ELEMENTS", 3 * 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with caplog.at_level("WARNING", logger="hip_ops"):
        assert main_grad.fp32_product.__wrapped__(torch.device("cpu"), BF16) is None
    assert "are rounded to it before they are added to fp32 weight gradients; addmm: " in caplog.text
    monkeypatch.setattr(main_grad, "fp32_product", lambda device, dtype: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    a, b, total = torch.randn(9, 10).bfloat16(), torch.randn(9, 4).bfloat16(), torch.randn(10, 4)
    assert main_grad.way_of_adding(total, a) == "rounded" and main_grad.way_of_adding(a, a) == "same"
    want, split = total + (a.t() @ b), total.clone()
    with Products() as found:
        assert add_product_(total, a, b) is total
        main_grad.add_products_(list(split.split([6, 4])), a, b)
    torch.testing.assert_close(total, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(split, want, rtol=0, atol=1e-6)
    assert found.dtypes == {BF16}


@pytest.mark.parametrize("promised", [True, False])
def test_the_head_on_a_device_without_products_into_fp32(monkeypatch, promised):
    hidden, weight, labels, grad = inputs(40, 16, 300, BF16)

    def run():
        total = torch.zeros(weight.shape)
        with chunks_of(16), use_kernels("reference"), Products() as found:
            promise = {"promised_grad": grad} if promised else {}
            losses = hip_ops.linear_cross_entropy(hidden, weight, labels, main_grad=total, **promise)
            (losses * grad).sum().backward()
        return total, found.dtypes

    exact, wide = run()
    way = {True: "same", False: "rounded"}
    for module in (main_grad, linear_cross_entropy):
        monkeypatch.setattr(module, "way_of_adding", lambda total, a: way[total.dtype == a.dtype])
    rounded, narrow = run()
    assert torch.float32 in wide
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < 2**-8, error
    assert narrow == {BF16}


def peak_bytes(run) -> int:
    """Return the peak of memory that `run` allocates, from torch's profiler."""
    from torch._C._profiler import _EventType as EventType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    del kept
    now = most = 0
    events = profile.profiler.kineto_results.experimental_event_tree()
    changes = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag == EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    for _, size in sorted(changes):
        now += size
        most = max(most, now)
    return most


def test_no_more_than_a_chunk_of_logits_exists():
    tokens, h, classes, chunk = 256, 16, 4096, 32
    hidden, weight, labels, grad = inputs(tokens, h, classes, FP32)
    main_grad = torch.zeros_like(weight)

    def run(promised):
        with chunks_of(chunk):
            losses = hip_ops.linear_cross_entropy(hidden, weight, labels, promised_grad=promised, main_grad=main_grad)
        (losses * grad).sum().backward()

    with hip_ops.use_kernels("hip"):  # torch's reference makes copies of a chunk
        for promised in (grad, None):
            run(promised)
            most = peak_bytes(lambda promised=promised: run(promised))
            logits = 4 * chunk * classes
            assert logits <= most <= 1.1 * logits + 4 * tokens * (2 * h + 40), (most, logits)


def test_the_chunk_of_zayas_head_takes_less_than_a_gibibyte_and_a_half():
    chunk = chunk_for(8192, 262272, 2)
    assert chunk == 2048
    of_hidden, of_losses = 2 * 8192 * 2048, 4 * 8192
    extra = (
        saved_bytes.linear_cross_entropy_work(8192, 2048, 262272, 2)
        - of_hidden
        + sum(saved_bytes.linear_cross_entropy(8192, 2048, 2).values())
        + of_losses
    )
    assert 1.04 * 2**30 < extra < 1.06 * 2**30  # 1.048 GiB measured on an H100
    assert chunk_for(8192, 262272 // 2, 2) == 4096  # two tensor-parallel ranks
    assert (
        chunk_for(100, 262272, 2) == 100
        and chunk_for(4096, 262272, 4) == 1024
        and chunk_for(7, 64, 4) == 7
        and chunk_for(5, 2**40, 2) == 1
    )


@pytest.mark.parametrize("promise", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_saved_bytes(dtype, promise):
    hidden, weight, labels, grad = inputs(dtype=dtype)
    main_grad = torch.zeros(weight.shape)
    losses = hip_ops.linear_cross_entropy(
        hidden, weight, labels, promised_grad=grad if promise else None, main_grad=main_grad
    )
    node = losses.grad_fn
    kept = [*node.saved_tensors, *([node.gradients.hidden] if promise else [])]
    mine = [tensor.nbytes for tensor in kept if tensor is not hidden and tensor is not weight]
    assert sorted(mine) == sorted(
        saved_bytes.linear_cross_entropy(*hidden.shape, hidden.element_size(), promised=promise).values()
    )
    losses.backward(grad)


def test_working_bytes_with_ranks():
    one, two = (saved_bytes.linear_cross_entropy_work(100, 8, 4096, 4, ranks) for ranks in (1, 2))
    assert one == 4 * (8 * 100 + 4096 * 100) + 4 * 100 * (8 + 3 * 2) and two - one == 4 * 100 * 3 * 2


# Two ranks, each with its rows of the matrix; in the last case rows are cut into two parts besides, as on a GPU.
RANKS = """
import os, sys
from unittest import mock
import torch
import hip_ops
from tests.hip_ops.test_linear_cross_entropy import linear_cross_entropy, chunks_of, inputs, plain

def rank(number, ranks):
    torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(sys.argv[1], ranks), rank=number,
        world_size=ranks)
    for dtype, cut, parts in ((torch.float32, 24, 1), (torch.float64, 5, 1), (torch.float32, 20, 2)):
        with chunks_of(4), mock.patch.object(linear_cross_entropy, "parts_for", lambda logits: parts), mock.patch.object(linear_cross_entropy,
            "parts_of_exponentials", lambda classes: parts):
            hidden, weight, labels, grad = inputs(dtype=dtype)
            first, rows = (0, weight[:cut]) if number == 0 else (cut, weight[cut:])
            rows = rows.detach().requires_grad_()
            want = plain(hidden, weight, labels, grad, 0.1)
            for promised in (grad, None):
                losses = hip_ops.linear_cross_entropy(hidden, rows, labels, promised_grad=promised, z_loss=0.1,
                    group=torch.distributed.group.WORLD, first_class=first)
                d_hidden, d_rows = torch.autograd.grad((losses * grad).sum(), (hidden, rows))
                everyone = [torch.empty_like(losses) for _ in range(ranks)]
                torch.distributed.all_gather(everyone, losses.detach())
                assert all(torch.equal(each, everyone[0]) for each in everyone), "losses differ between ranks"
                torch.distributed.all_reduce(d_hidden)
                for got, exact in zip((losses.detach(), d_hidden, d_rows),
                    (want[0], want[1], want[2][first : first + len(rows)]), strict=True):
                    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=5e-6)
    torch.distributed.destroy_process_group()

children = []
for number in range(2):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            rank(number, 2)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0, 0], codes
print("right")
"""


@pytest.mark.slow
def test_a_vocabulary_cut_over_two_ranks(tmp_path):
    done = run_python(RANKS, tmp_path / "store", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(hidden=torch.zeros(2, 3, 4)), "hidden has shape (2, 3, 4). Allowed: [tokens, h]"),
        (dict(weight=torch.zeros(5, 7)), "weight has shape (5, 7). Allowed: [classes>0, h]"),
        (dict(weight=torch.zeros(0, 4)), "weight has shape (0, 4). Allowed: [classes>0, h]"),
        (dict(weight=torch.zeros(5, 4, dtype=BF16)), "weight is torch.bfloat16. Allowed: torch.float32 like hidden"),
        (
            dict(hidden=torch.zeros(3, 4, dtype=torch.float16)),
            "hidden is torch.float16. Allowed: torch.bfloat16 or torch.float32",
        ),
        (dict(labels=torch.zeros(4, dtype=torch.int64)), "labels has shape (4,). Allowed: (3,), [tokens]"),
        (dict(labels=torch.zeros(3, dtype=torch.int32)), "labels is torch.int32. Allowed: torch.int64"),
        (dict(promised_grad=torch.zeros(3, 1)), "promised_grad has shape (3, 1). Allowed: (3,), [tokens]"),
        (dict(main_grad=torch.zeros(4, 5)), "main_grad has shape (4, 5). Allowed: (5, 4), [classes, h]"),
        (
            dict(main_grad=torch.zeros(5, 4, dtype=BF16)),
            "main_grad is torch.bfloat16. Allowed: torch.float32 (or all tensors torch.float64)",
        ),
        (
            dict(labels=torch.zeros(3, dtype=torch.int64, device="meta")),
            "labels is on meta. Allowed: on cpu like hidden",
        ),
    ],
)
def test_errors_name_what_is_wrong(change, says):
    call = dict(hidden=torch.zeros(3, 4), weight=torch.zeros(5, 4), labels=torch.zeros(3, dtype=torch.int64)) | change
    with pytest.raises(ValueError, match=re.escape(says)):
        hip_ops.linear_cross_entropy(**call)
