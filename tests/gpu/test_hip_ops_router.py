# SPDX-License-Identifier: Apache-2.0
"""The router on an accelerator: numbers of Triton's kernels against fp64, the model's router with and without them, no host, the same bits twice."""

import pytest
import torch

import hip_ops
from hip_ops import backend
from hip_ops.operator import OPERATORS, all_operators, warm_up
from hip_ops.reference import router_mlp as reference
from hip_ops.router_mlp import Routed
from tests.hip_ops.product_cases import ulp
from tests.hip_ops.router_bugs import check_ties
from tests.hip_ops.router_cases import DOUBT, Router, check_backward, check_forward, exact
from tests.no_waiting import no_waiting
from zaya_plugin.model.fused_router import RouterMLP, count
from zaya_plugin.model.router import choose_expert, router_logits

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
    from hip_ops.triton_kernels import router_mlp

    return router_mlp


def test_self_check():
    all_operators()
    with backend.use_backend("triton"):
        found = warm_up(DEVICE, [OPERATORS[name] for name in ("router_mlp", "router_mlp_backward")])
    assert set(found.values()) == {"passed"}, found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case):
    check_forward(kernels(), case, DEVICE)
    check_backward(kernels(), case, DEVICE)


def test_choices_and_the_state_to_the_last_bit():
    """The state is rounded once. Choices are torch's in bf16 but where two probabilities lie within rounding; that few do."""
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


def model_step(case: Router, fused: bool) -> list[torch.Tensor]:
    """weights, state, and all gradients of the model's own functions."""
    arguments = case.arguments(DEVICE)
    leaves = [None if t is None else t.clone().requires_grad_() for t in arguments[:10]]
    d_weights, d_state = case.upstream(DEVICE)
    if fused:
        state, weights, *_ = RouterMLP.apply(*leaves, *arguments[10:])
    else:
        state, logits = router_logits(
            *(t.unsqueeze(0) if t is not None and t.shape[:1] == (case.rows,) else t for t in leaves), arguments[12]
        )
        _, weights, ids = choose_expert(
            logits, arguments[10], softmax_in_fp32=True, forced_expert_ids=arguments[11].unsqueeze(0)
        )
        weights, state = weights.masked_fill(ids == arguments[13], 0.0)[0], state[0]
    torch.autograd.backward([weights, state], [d_weights, d_state])
    return [weights.detach(), state.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def test_the_models_router_gives_the_same():
    """All classes given, so that rounding moves values and not tokens."""
    case = Router(2048, 256, 17, BF16)
    given = torch.randint(0, 17, (case.rows,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    arguments = Router.arguments

    def forced(self, device="cpu"):
        found = arguments(self, device)
        return *found[:11], given, *found[12:]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "arguments", forced)
        ours, plain = model_step(case, True), model_step(case, False)
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm()


def test_nothing_waits_and_the_bits_are_the_same_twice():
    arguments = ZAYA.arguments(DEVICE)
    tokens, entropy = torch.zeros(17, dtype=torch.int64, device=DEVICE), torch.zeros((), device=DEVICE)

    def step() -> list[torch.Tensor]:
        routed = hip_ops.router_mlp(*arguments[:12], eps=arguments[12], unweighted=arguments[13])
        count(tokens, entropy, routed.statistics)
        d_weights, d_state = routed.weights.clone(), routed.state.clone()
        return [
            *routed,
            *hip_ops.router_mlp_backward(
                d_weights,
                d_state,
                routed,
                *arguments[1:3],
                arguments[4],
                arguments[5],
                arguments[7],
                arguments[9],
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
    test_self_check()
    arguments, others = ZAYA.arguments(DEVICE), Router(4096, 256, 17, BF16, seed=7).arguments(DEVICE)
    call = lambda given: hip_ops.router_mlp(*given[:12], eps=given[12], unweighted=given[13])  # noqa: E731
    call(arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(arguments)
    for mine, other in zip(arguments[:12], others[:12], strict=True):
        mine.copy_(other)
    graph.replay()
    wanted = call(others)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
