# SPDX-License-Identifier: Apache-2.0
"""Test the router's operators on the CPU: the reference against fp64 and autograd, wrong arguments, and torch's own
checks.
"""

import re

import pytest
import torch

import hip_ops
from hip_ops import saved_bytes, use_kernels
from hip_ops.ops import router_mlp
from hip_ops.ops.router_mlp import Routed, RouterParameters, reference
from hip_ops.runtime import choice
from tests.hip_ops.router_bugs import check_ties
from tests.hip_ops.router_cases import EPS, Router, check_backward, check_forward, parameters_of, public_call

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
CASES = [
    *(Router(37, 32, 5, dtype) for dtype in (FP64, FP32, BF16, FP16)),
    Router(200, 64, 17, BF16),
    Router(64, 256, 25, BF16),  # ZAYA1-74B's
    Router(64, 256, 17, averaged=False),
    Router(1, 48, 9, forced=False),
    Router(33, 128, 16, FP32, unweighted=False, uses_state=False),
    Router(7, 16, 2, FP64),
    Router(0, 32, 5, BF16),
    Router(3, 24, 1),
]


OPERATORS, FUNCTIONS = (
    (router_mlp._forward, router_mlp._backward),
    (reference.router_mlp, reference.router_mlp_backward),
)


def backward_arguments(case: Router) -> tuple:
    """Of `router_mlp_backward`, from the reference's forward."""
    arguments = case.arguments()
    state, _, ids, hidden1, hidden2, logits, _ = reference.router_mlp(*arguments)
    saved = (state, *arguments[1:3], hidden1, hidden2, logits, ids)
    return *case.upstream(), *saved, *(arguments[place] for place in (4, 5, 7, 9)), *arguments[12:], True


class Operators:
    """hip_ops' public functions with the reference's arguments."""

    @staticmethod
    def router_mlp(*arguments):
        return public_call(arguments)

    @staticmethod
    def router_mlp_backward(d_weights, d_state, state, previous, gamma, hidden1, hidden2, logits, ids, *rest):
        routed = Routed(state, None, ids, hidden1, hidden2, logits, None)
        w_norm, w1, w2, w_out, eps, unweighted, trained = rest
        parameters = RouterParameters(gamma, None, w_norm, w1, None, w2, None, w_out, None)
        return hip_ops.router_mlp_backward(
            d_weights, d_state, routed, previous, parameters, eps=eps, unweighted=unweighted, trained=trained
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_against_fp64(case):
    check_forward(reference, case)
    check_backward(reference, case)


def test_equal_probabilities_and_none():
    check_ties(reference)


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[5]], ids=str)
def test_operators_give_what_the_reference_gives(case):
    arguments = case.arguments()
    got, want = Operators.router_mlp(*arguments), reference.router_mlp(*arguments)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
    given = backward_arguments(case)
    found, (d_projected, d_previous, of_parameters) = (
        version.router_mlp_backward(*given) for version in (Operators, reference)
    )
    assert torch.equal(found.d_projected, d_projected)
    assert d_previous.numel() == 0 if found.d_previous is None else torch.equal(found.d_previous, d_previous)
    assert torch.equal(torch.cat(found[2:]), of_parameters)
    assert [len(each) for each in found[2:]] == [case.width, case.width, case.classes, len(reference.SUM_NAMES)]


def test_strided_rows_are_taken():
    arguments = list(Router(9).arguments())
    wide = torch.randn(9, 40)
    arguments[0] = wide[:, :32]
    got, want = Operators.router_mlp(*arguments), reference.router_mlp(*arguments)
    assert torch.equal(got.state, want[0]) and got.state.is_contiguous()


def test_operators_as_torch_sees_them():
    for case in (Router(6), Router(6, averaged=False, forced=False, dtype=BF16)):
        torch.library.opcheck(torch.ops.hip_ops.router_mlp.default, case.arguments())
        torch.library.opcheck(torch.ops.hip_ops.router_mlp_backward.default, backward_arguments(case))


def call(**changes):
    names = ("projected", "previous", "gamma", "b_down", "w_norm", "w1", "b1", "w2", "b2", "w_out", "biases", "forced")
    arguments = dict(zip(names, Router(6).arguments(), strict=False)) | changes
    parameters = RouterParameters(*(arguments.pop(name) for name in RouterParameters._fields))
    return hip_ops.router_mlp(**({"eps": EPS} | arguments), parameters=parameters)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(projected=torch.zeros(2, 3, 32)), "projected has shape (2, 3, 32). Allowed: [n, r]"),
        (dict(previous=torch.zeros(5, 32)), "previous has shape (5, 32). Allowed: (6, 32), [n, r]"),
        (dict(previous=None), "one of previous and gamma is None. Allowed: both or neither"),
        (dict(w1=torch.zeros(32, 31)), "w1 has shape (32, 31). Allowed: (32, 32), [r, r]"),
        (dict(w2=torch.zeros(32, 32).half()), "w2 is torch.float16. Allowed: torch.float32 like w_out"),
        (dict(w_out=torch.zeros(5)), "w_out has shape (5,). Allowed: [c>0, r>0]"),
        (dict(biases=torch.zeros(4)), "biases has shape (4,). Allowed: (5,), [c]"),
        (dict(biases=torch.zeros(5).double()), "biases is torch.float64. Allowed: torch.float32"),
        (dict(forced=torch.zeros(6).int()), "forced is torch.int32. Allowed: torch.int64"),
        (dict(b_down=torch.zeros(32, device="meta")), "b_down is on meta. Allowed: on cpu like w_out"),
        (dict(unweighted=5), "unweighted is 5. Allowed: -1 or one of the 5 classes"),
        (dict(projected=torch.zeros(6, 32).int()), "projected is torch.int32. Allowed: torch.float32 like w_out"),
        (dict(w_out=torch.zeros(5, 32).int()), "w_out is torch.int32. Allowed: torch.bfloat16 or torch.float16 or"),
    ],
)
def test_errors_name_what_is_wrong(changes, words):
    with pytest.raises(ValueError, match=re.escape(f"hip_ops.router_mlp: {words}")):
        call(**changes)


@pytest.mark.parametrize(
    "name, tensor, words",
    [
        ("state", torch.zeros(2, 3, 32), "state has shape (2, 3, 32). Allowed: [n, r]"),
        ("state", torch.zeros(6, 32).int(), "state is torch.int32. Allowed: torch.float32 like w_out"),
        ("d_weights", torch.zeros(6).double(), "d_weights is torch.float64. Allowed: torch.float32"),
        ("logits", torch.zeros(6, 5), "logits has 5 columns. Allowed: 16, of which the first 5 are classes"),
    ],
)
def test_errors_of_the_backward_name_what_is_wrong(name, tensor, words):
    arguments, routed = Router(6).arguments(), call()
    d_weights = routed.weights if name != "d_weights" else tensor
    if name != "d_weights":
        routed = routed._replace(**{name: tensor})
    with pytest.raises(ValueError, match=re.escape(f"hip_ops.router_mlp_backward: {words}")):
        hip_ops.router_mlp_backward(d_weights, None, routed, arguments[1], parameters_of(arguments), eps=EPS)


def test_there_is_no_hip_version():
    """kernels=hip lets the router run other versions; an override that names hip for it is an error."""
    with use_kernels("hip"):
        for mine in OPERATORS:
            assert mine.choice(torch.device("cpu")) == "reference (kernels=hip; it has no version 'hip')"
        arguments = Router(3, dtype=BF16).arguments()
        assert torch.equal(Operators.router_mlp(*arguments).state, reference.router_mlp(*arguments)[0])
    with pytest.raises(
        ValueError, match=re.escape("kernel_overrides.router_mlp=hip: no such version. Allowed: auto, triton")
    ):
        with use_kernels("auto", router_mlp="hip"):
            pass


def test_the_order_of_versions_on_an_accelerator(monkeypatch):
    """Triton runs where it takes the arguments, otherwise the compiled version, which takes all."""
    monkeypatch.setattr(choice, "missing", lambda version, device, named: None)
    with use_kernels("auto"):
        for mine in OPERATORS:
            said = mine.choice(torch.device("cuda", 0), check=False)
            assert said == "triton where it takes the arguments, then compiled (kernels=auto)"


@pytest.mark.parametrize(
    "case, taken",
    [
        (Router(3, 256, 17, BF16), True),
        (Router(3, 32, 64, FP16, averaged=False, forced=False), True),
        (Router(3, 256, 17, FP32), False),
        (Router(3, 48, 17, BF16), False),
        (Router(3, 512, 17, BF16), False),
        (Router(3, 256, 65, BF16), False),
    ],
    ids=str,
)
def test_which_routers_triton_takes(case, taken):
    for mine, given in zip(OPERATORS, (case.arguments(), backward_arguments(case)), strict=True):
        assert mine.fits["triton"](*given) is taken


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "case",
    [Router(9, 32, 5), Router(9, 32, 5, averaged=False, forced=False, unweighted=False, uses_state=False)],
    ids=str,
)
def test_the_reference_compiles(case):
    for function, given in zip(FUNCTIONS, (case.arguments(), backward_arguments(case)), strict=True):
        compiled = torch.compile(function, dynamic=False, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(*given), function(*given), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_saved_bytes():
    routed = Routed(*reference.router_mlp(*Router(7, 32, 17, BF16).arguments()))
    for name, expected in saved_bytes.router_mlp(7, 32, 17, 2).items():
        assert getattr(routed, name).nbytes == expected


@pytest.mark.parametrize(
    "part, message",
    [
        (None, None),
        (0, "state"),
        (1, "weights"),
        (2, "chooses|counts"),
        (3, "hidden1"),
        (4, "hidden2"),
        (5, "logits"),
        (6, "counts|entropy"),
    ],
)
def test_the_self_check_finds_what_is_wrong(part, message):
    """Replaces the kernels by a reference that computes in fp32 where bf16 is rounded, with one wrong result."""

    def spoilt(*arguments):
        found = list(reference.router_mlp(*arguments))
        if part is not None:
            found[part] = (found[part] + 1) % 17 if part == 2 else found[part] * 1.1
        return tuple(found)

    said = router_mlp._forward.difference(spoilt, torch.device("cpu"))
    assert said is None if message is None else re.search(message, said)


@pytest.mark.parametrize("part", [None, *range(6)])
def test_the_backwards_self_check_finds_what_is_wrong(part):
    """part: of d_projected, d_previous, d_w1, d_w2, d_out and sums, of which the last four are one tensor."""

    def spoilt(*arguments):
        *found, of_parameters = reference.router_mlp_backward(*arguments)
        found += router_mlp._parts(of_parameters)
        if part is not None:
            found[part] = found[part] * 1.1
        return *found[:2], torch.cat(found[2:])

    said = router_mlp._backward.difference(spoilt, torch.device("cpu"))
    assert said is None if part is None else said.startswith(f"result[{part}], element")
