# SPDX-License-Identifier: Apache-2.0
"""Test the router on an accelerator: Triton's kernels against fp64, the model's step with each version, no wait for
the device, the same bits in two runs.
"""

import pytest
import torch

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.router_mlp import Routed, reference
from hip_ops.runtime.operator import OPERATORS, all_operators, warm_up
from tests.hip_ops.product_cases import ulp
from tests.hip_ops.router_bugs import check_ties
from tests.hip_ops.router_cases import DOUBT, Router, check_backward, check_forward, exact, parameters_of, public_call
from tests.no_waiting import no_waiting
from zaya_plugin.model.router import RouterMLP, count

DEVICE = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
ZAYA = Router(4096, 256, 17, BF16)
CASES = [
    ZAYA,
    Router(64, 256, 17, BF16, averaged=False, forced=False),
    Router(1, 256, 17, BF16),
    Router(1000, 256, 16, BF16, unweighted=False, uses_state=False),
    Router(129, 128, 64, BF16),
    Router(77, 64, 5, BF16),
    Router(65, 32, 9, BF16, averaged=False),
    Router(130, 256, 33, FP16),
    Router(0, 256, 17, BF16),
]


def kernels():
    from hip_ops.ops.router_mlp import triton as router_mlp

    return router_mlp


@pytest.mark.parametrize("version", ["triton", "compiled"])
def test_self_check(version):
    all_operators()
    mine = [OPERATORS[name] for name in ("router_mlp", "router_mlp_backward")]
    with use_kernels(version):
        choices = warm_up(DEVICE, mine)
    for each in mine:
        assert choices[each.name].startswith(version) and each.results[DEVICE, version] == "passed"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case):
    check_forward(kernels(), case, DEVICE)
    check_backward(kernels(), case, DEVICE)


def test_choices_and_the_state_to_the_last_bit():
    """The state is rounded once. Choices equal torch's in bf16, except where two probabilities differ by less than a
    rounding; these are few.
    """
    free = Router(8192, 256, 17, BF16, forced=False)
    arguments = free.arguments(DEVICE)
    mine, theirs = Routed(*kernels().router_mlp(*arguments)), Routed(*reference.router_mlp(*arguments))
    state, _, _, biased, _ = exact(arguments)
    assert ((mine.state.cpu().double() - state).abs() <= (0.5 + 2**-6) * ulp(state, BF16) + 1e-6).all()
    first, second = biased.topk(2).values.unbind(-1)
    other = (mine.ids != theirs.ids).cpu()
    assert ((first - second)[other] <= DOUBT[BF16]).all()
    assert other.float().mean() < 0.01


def test_ties_and_numbers_that_are_none():
    class OnDevice:
        @staticmethod
        def router_mlp(*arguments):
            moved = [
                t.to(DEVICE, BF16 if t.dtype == torch.float32 and t.shape != (5,) else t.dtype)
                if isinstance(t, torch.Tensor)
                else t
                for t in arguments
            ]
            return [t.cpu() for t in kernels().router_mlp(*moved)]

    check_ties(OnDevice)


def model_step(case: Router, version: str) -> list[torch.Tensor]:
    """weights, state, and all gradients of the model's own function."""
    arguments = case.arguments(DEVICE)
    # All classes are given, so that rounding moves values and not tokens.
    forced = torch.randint(0, case.classes, (case.rows,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    leaves = [None if t is None else t.clone().requires_grad_() for t in arguments[:10]]
    with use_kernels(version):
        state, weights, *_ = RouterMLP.apply(*leaves[:2], forced, *arguments[12:], *leaves[2:], arguments[10])
        torch.autograd.backward([weights, state], case.upstream(DEVICE))
    return [weights.detach(), state.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("version", ["triton", "compiled"])
def test_the_models_step_is_that_of_the_reference(version):
    case = Router(2048, 256, 17, BF16)
    for mine, theirs in zip(model_step(case, version), model_step(case, "reference"), strict=True):
        assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm()


def test_nothing_waits_and_the_bits_are_the_same_twice():
    arguments = ZAYA.arguments(DEVICE)
    tokens, entropy = torch.zeros(17, dtype=torch.int64, device=DEVICE), torch.zeros((), device=DEVICE)

    def step() -> list[torch.Tensor]:
        routed = public_call(arguments)
        count(tokens, entropy, routed.statistics)
        d_weights, d_state = routed.weights.clone(), routed.state.clone()
        return [
            *routed,
            *hip_ops.router_mlp_backward(
                d_weights,
                d_state,
                routed,
                arguments[1],
                parameters_of(arguments),
                eps=arguments[12],
                unweighted=arguments[13],
            ),
        ]

    first = step()
    with no_waiting():
        second = step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert int(tokens.sum()) == 2 * ZAYA.rows and entropy > 0


def test_a_captured_graph_takes_other_inputs():
    all_operators()
    warm_up(DEVICE, [OPERATORS["router_mlp"]])
    arguments, others = ZAYA.arguments(DEVICE), Router(4096, 256, 17, BF16, seed=7).arguments(DEVICE)
    public_call(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = public_call(arguments)
    for mine, other in zip(arguments[:12], others[:12], strict=True):
        mine.copy_(other)
    graph.replay()
    wanted = public_call(others)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
