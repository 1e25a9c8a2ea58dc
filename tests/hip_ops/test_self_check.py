# SPDX-License-Identifier: Apache-2.0
"""Test the comparison of a version with its reference, and the conditions under which it is repeated: messages name the
one that fails.
"""

import pytest
import torch
from torch import Tensor

from hip_ops import use_kernels
from hip_ops.runtime import conditions, self_check
from hip_ops.runtime.conditions import CALLS_PER_CONDITION, in_a_graph
from hip_ops.runtime.self_check import PLAIN_CALL, Condition, differences, in_turn
from tests.hip_ops.fake_gpu import CPU, GPU

X = torch.arange(1.0, 9.0)


def difference(candidate, reference, example) -> str | None:
    """Return the difference of one plain call on the CPU."""
    return differences(candidate, reference, example, CPU, (PLAIN_CALL,))[0]


class Somewhere:
    """Conditions on a CPU. `where` is the one that runs."""

    def __init__(self):
        self.where, self.calls = "", 0

    def condition(self, name: str) -> Condition:
        def run(candidate, arguments):
            self.where, self.calls = name, 0
            return in_turn(candidate, arguments)

        return Condition(name, CALLS_PER_CONDITION, run)

    def both(self) -> list[Condition]:
        return [self.condition(name) for name in ("default stream", "side stream")]


@pytest.fixture
def somewhere():
    return Somewhere()


def double_(x, total):
    total += x
    return x * 2


def example(device):
    return X.clone(), torch.ones(8)


def found(candidate, reference=double_, *, conditions, **options):
    return differences(candidate, reference, example, CPU, conditions, **options)


def test_every_call_gets_arguments_of_its_own(somewhere):
    seen = []

    def version(x, total):
        seen.append((somewhere.where, total.tolist()))
        return double_(x, total)

    assert found(version, conditions=somewhere.both()) == [None, None]
    assert seen == [(name, [1.0] * 8) for name in ("default stream", "side stream") for _ in range(CALLS_PER_CONDITION)]


def test_a_version_that_is_wrong_on_one_stream(somewhere):
    def version(x, total):
        total += x
        return x * (3 if somewhere.where == "side stream" else 2)

    right, wrong = found(version, conditions=somewhere.both())
    assert right is None and wrong.startswith("call 1: result, element 7: it gives 24, torch 16")


def test_a_version_that_raises_on_one_stream(somewhere):
    def version(x, total):
        if somewhere.where == "side stream":
            raise RuntimeError("invalid resource handle")
        return double_(x, total)

    assert found(version, conditions=somewhere.both()) == [None, "RuntimeError: invalid resource handle"]


def test_a_plain_call(monkeypatch):
    """A run compares one call of each version; the operator reports its error."""
    seen = []
    assert difference(lambda x, total: (seen.append(x), double_(x, total))[1], double_, example) is None
    assert len(seen) == 1
    assert difference(lambda x, total: double_(x, total) + 1, double_, example).startswith("result, element 0: ")
    with pytest.raises(ZeroDivisionError):
        difference(lambda x, total: 1 / 0, double_, example)


def sums_in_any_order(somewhere):
    def version(x, total):
        somewhere.calls += 1
        total += x
        return torch.nextafter(x * 2, X + 100) if somewhere.calls == 2 else x * 2

    return version


def test_calls_must_give_equal_bits(somewhere):
    """The second call differs by one unit in the last place, far below the tolerance."""
    (said, _) = found(sums_in_any_order(somewhere), conditions=somewhere.both())
    assert said.startswith("call 2: output[0], element 0: it gives 2.0000002")
    assert said.endswith("the first call 2 (allowed: equal bits)")
    for options in (dict(repeats=False), dict(written=lambda got: got[1][1])):  # of the second: the argument alone
        assert found(sums_in_any_order(somewhere), conditions=somewhere.both(), **options) == [None, None]


def test_bits_of_nan_are_equal(somewhere):
    def nan(x, total):
        return torch.full_like(x, torch.nan), torch.ones(3, dtype=torch.bool), torch.empty(0)

    assert found(nan, nan, conditions=somewhere.both()) == [None, None]


class Graph:
    """A capture that runs on the CPU: a replay makes the call again into the same results."""

    def __init__(self, replays=lambda call, result: result.copy_(call())):
        self.replays = replays

    def capture(self, call):
        result = call()
        return result, lambda: self.replays(call, result)

    def condition(self) -> Condition:
        return Condition("captured graph", CALLS_PER_CONDITION, lambda *work: in_a_graph(*work, capture=self.capture))


def test_a_graph_is_replayed_with_fresh_arguments():
    assert found(double_, conditions=[Graph().condition()]) == [None], "total is added to once, at every replay"


def test_a_graph_whose_second_replay_is_wrong():
    numbers = iter((0.0, 1.0))
    replays = Graph(lambda call, result: result.copy_(call() + next(numbers)))
    (said,) = found(double_, conditions=[replays.condition()])
    assert said.startswith("call 2: result, element 0: it gives 3, torch 2")


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def test_the_results_of_an_operator(make_operator, somewhere):
    """A row for each version and condition; a condition that has failed is not repeated with the next example."""
    seen = []

    def wrong_on_the_side_stream(x, factor):
        seen.append((somewhere.where, factor))
        return x * (factor + (somewhere.where == "side stream"))

    examples = tuple(lambda device, factor=factor: (X.clone(), factor) for factor in (2.0, 3.0))
    made = make_operator(scale, hip=wrong_on_the_side_stream, triton=scale, example=examples)
    results = conditions.check(made, CPU, ("hip", "triton"), somewhere.both())
    assert [each[:3] for each in results] == [
        (made.name, version, name) for version in ("hip", "triton") for name in ("default stream", "side stream")
    ]
    assert [bool(each.difference) for each in results] == [False, True, False, False]
    assert results[1].difference.startswith("call 1: result, element 7: it gives 24, torch 16")
    assert [each for each in seen if each[0] == "side stream"] == [("side stream", 2.0)] * CALLS_PER_CONDITION
    assert ("default stream", 3.0) in seen


def test_the_versions_that_are_checked_are_those_that_run(make_operator):
    made = make_operator(scale, hip=scale, example=lambda device: (X.clone(), 2.0))
    assert conditions.check(made, CPU) == [], "the reference alone"
    with use_kernels(**{made.name: "reference"}):
        assert conditions.check(made, CPU, ("hip",)) == [(made.name, "hip", "plain call", None)]


def test_a_version_that_cannot_be_imported(make_operator):
    made = make_operator(scale, hip=scale, example=lambda device: (X.clone(), 2.0))
    ((_, _, _, said),) = conditions.check(made, CPU, ("triton",))
    assert said.startswith("ModuleNotFoundError: ")


def test_tensors_in_lists_are_assigned():
    held = (torch.ones(2), [torch.ones(3), 4], None)
    conditions.assign(held, (torch.tensor([1.0, 2.0]), [torch.arange(3.0), 5], None))
    assert held[0].tolist() == [1, 2] and held[1][0].tolist() == [0, 1, 2] and held[1][1] == 4
    conditions.assign(held)
    assert held[0].tolist() == [0, 0] and held[1][0].tolist() == [0, 0, 0]


def test_the_conditions_of_a_device():
    assert [(each.name, each.calls) for each in conditions.conditions_on(CPU)] == [("plain call", 1)]
    calls = {each.name: each.calls for each in conditions.conditions_on(GPU)}
    assert calls == {"default stream": 2, "side stream": 2, "captured graph": 2, "full device": 4}


def test_references_are_quiet_while_a_version_is_compared():
    seen = []
    version = lambda x, total: (seen.append(self_check.comparing), double_(x, total))[1]  # noqa: E731
    assert difference(version, double_, example) is None
    assert seen == [True] and not self_check.comparing
