# SPDX-License-Identifier: Apache-2.0
"""Test the CCA prologue on an accelerator: Triton, and hip_ops/ops/cca_prologue/cca_prologue*.hip compiled for it (by
nvcc on NVIDIA).
"""

from types import SimpleNamespace

import pytest
import torch

import hip_ops
from hip_ops.runtime.operator import OPERATORS, all_operators, warm_up
from tests.hip_ops.cca_prologue_cases import FP32, GRADIENTS, Case, check, compare, exact, make
from tests.hip_ops.cca_prologue_steps import StepState, prologue_step

DEVICE = torch.device("cuda", 0)
NAMES = ("cca_prologue", "cca_prologue_backward")
ZAYA = Case(300, 2, 8, 2)
# Triton compiles once for all cases of a line: what may differ in it are rows, micro batch, chunks, where documents
# start, and padding by 16.
CASES = [
    ZAYA,
    Case(1, 5, 8, 2),
    Case(67, 2, 8, 2, pad=16),
    Case(77, 1, 8, 2, zero=True),
    Case(129, 3, 8, 2, halo=True, chunks=2),
    Case(2, 3, 8, 2, halo=True),
    Case(200, 2, 8, 2, document=9),
    Case(64, 1, 8, 2, at=(31, 32, 33, 63)),
    Case(90, 3, 8, 2, document=4, rope_batch=True),
    Case(150, 1, 8, 2, chunks=2, halo=True, document=5, rope_batch=True),
    Case(1, 70, 8, 2, halo=True, document=2),
    Case(77, 1, 8, 2, zero=True, halo=True, document=7),
    Case(67, 2, 4, 1, pad=3),
    Case(130, 1, 2, 2, rotary=128, delayed=20),
    Case(130, 1, 4, 2, rotary=0, delayed=256),
    Case(90, 1, 4, 2, 64, rotary=64, delayed=0, zero=True, halo=True, document=7),
    Case(90, 2, 6, 2, 32, rotary=16, halo=True, chunks=2),
    Case(40, 1, 2, 1, 48, rotary=16),
    Case(70, 2, 4, 2, 32, rotary=16, dtype=FP32, halo=True),
    Case(70, 1, 2, 1, 128, dtype=FP32, document=9),
]


def operators() -> dict:
    all_operators()
    return {name: OPERATORS[name] for name in NAMES}


def call(case: Case, tensors: dict):
    return hip_ops.cca_prologue(
        *list(tensors.values())[:7],
        query_groups=case.groups,
        delayed_channels=case.late,
        **{name: tensors[name] for name in ("halo", "value_halo", "starts")},
    )


def gradients(case: Case, function) -> dict[str, torch.Tensor]:
    inputs = make(case, "cuda")
    leaves = {
        name: t.requires_grad_() if t is not None and name in GRADIENTS else t for name, t in inputs.tensors.items()
    }
    results = function(leaves)
    torch.autograd.backward(results, inputs.upstream)
    return dict(zip(("query", "key", "value"), results, strict=True)) | {
        name: leaves[name].grad for name in GRADIENTS if leaves[name] is not None
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(chosen, case):
    """A case that the chosen version does not take runs the next version."""
    check(SimpleNamespace(**operators()), case, "cuda")


def test_the_self_check_passes(chosen):
    mine = operators().values()
    for each, choice in zip(mine, warm_up(DEVICE, mine).values(), strict=True):
        assert choice.startswith(chosen) and each.results[DEVICE, chosen] == "passed"


def test_autograd_gives_the_same_on_another_stream(chosen):
    """With dispatch, autograd and another stream, which the default stream does not wait for: the same bits again."""
    case, found = Case(1000, 2, 8, 2, document=50, halo=True), []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # what is queued on another stream would run ahead of the inputs
            found.append(gradients(case, lambda leaves: call(case, leaves)))
        stream.synchronize()
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name
    results, wanted = exact(make(case))
    for name, want in (results | wanted).items():
        if name in found[0]:
            compare(
                name,
                found[0][name],
                want,
                case.d,
                1.5e-2,
                least=(case.d * case.rows * case.batch) ** 0.5 if name == "temperature" else 1e-30,
            )


def test_compiles_whole(chosen):
    case = Case(200, 2, 8, 2, document=20)

    def function(leaves):
        query, key, value = call(case, leaves)
        return query * 2, key, value

    plain, compiled = gradients(case, function), gradients(case, torch.compile(function, fullgraph=True))
    for name in plain:
        assert torch.equal(plain[name], compiled[name]), name


def test_in_a_captured_graph(chosen):
    warm_up(DEVICE, operators().values())
    tensors = make(ZAYA, "cuda").tensors
    expected = call(ZAYA, tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(ZAYA, tensors)
    for result in found:
        result.zero_()
    graph.replay()
    assert all(map(torch.equal, found, expected))


def test_steps_give_what_the_whole_sequence_gives(chosen):
    """A prompt of 70 tokens, then single tokens."""
    case = Case(75, 6, 8, 2)
    tensors = make(case, "cuda").tensors
    whole = call(case, tensors)
    projected, *parameters, rope = list(tensors.values())[:7]
    state = StepState.empty(case.batch, case.channels, case.late, dtype=projected.dtype, device=DEVICE)
    for part in (slice(0, 70), *(slice(t, t + 1) for t in range(70, 75))):
        got = prologue_step(projected[part], *parameters, rope[part], query_groups=case.groups, state=state)
        for name, result, expected in zip(("query", "key", "value"), got, whole, strict=True):
            compare(name, result, expected[part], case.d, 2**-8)


def test_strides_of_the_gradients(chosen):
    """As attention gives them: batch first, heads before rows."""
    case, found = Case(65, 2, 8, 2), []
    for order in ((0, 1, 2, 3), (1, 2, 0, 3)):
        inputs = make(case, "cuda")
        leaves = {
            name: t.requires_grad_() if t is not None and name in GRADIENTS else t for name, t in inputs.tensors.items()
        }
        results = call(case, leaves)
        back = [order.index(i) for i in range(4)]
        torch.autograd.backward(results, [u.permute(order).contiguous().permute(back) for u in inputs.upstream])
        found.append([leaves[name].grad for name in GRADIENTS if leaves[name] is not None])
    assert all(map(torch.equal, *found))
