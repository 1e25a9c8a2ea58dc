# SPDX-License-Identifier: Apache-2.0
"""Test the self-check of operators: versions that pass, messages about others, and state that it does not change."""

import logging
import re
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hip_ops import use_kernels
from hip_ops.runtime.self_check import PLAIN_CALL, differences
from tests.hip_ops.fake_gpu import CPU, GPU, FakeGpu

pytestmark = pytest.mark.usefixtures("nothing_selected", "no_function_modes")


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def example(device):
    return torch.randn(3, 50, device=device), 2.0


@pytest.fixture
def make(make_operator, require_tool):
    """make(candidate) -> an operator whose version hip is `candidate`; kernels=hip is set."""
    require_tool("g++")
    with use_kernels("hip"):
        yield lambda candidate, reference=scale, **options: make_operator(
            reference, hip=candidate, **{"example": example} | options
        )


def runs(made, device=CPU):
    """Return the first version that runs on `device`."""
    return made.implementations(device)[0][1]


def test_a_right_version_is_checked_once_and_used(make, caplog):
    calls = []

    def right(x, factor):
        calls.append(x.shape)
        return x + x * (factor - 1)

    scaled = make(right)
    x = torch.arange(4.0)
    for _ in range(3):
        assert torch.equal(scaled(x, 3.0), x * 3)
    assert calls == [(3, 50), (4,), (4,), (4,)]
    assert scaled.results == {(CPU, "hip"): "passed"} and not [
        r for r in caplog.records if r.levelno >= logging.WARNING
    ]


def wrong_by_a_factor(x, factor):
    out = x * factor
    out[1, 7] *= 1.01
    return out


def test_a_wrong_version_is_reported_with_both_numbers(make, caplog):
    scaled = make(wrong_by_a_factor)
    with torch.random.fork_rng():
        torch.manual_seed(20240817)
        want = torch.randn(3, 50)[1, 7].item() * 2
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            scaled(torch.ones(2, 3), 3.0)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    for said in (record.getMessage(), str(caught.value)):
        assert scaled.name in said and "cpu" in said and "it failed its self-check" in str(caught.value)
        numbers = re.search(r"result, element 57: it gives (\S+), torch (\S+) \(allowed", said)
        assert [float(number) for number in numbers.groups()] == pytest.approx([want * 1.01, want], rel=1e-6)


def test_operators_in_place_and_lists(make):
    def add_(tensors: Sequence[Tensor], amount: float) -> None:
        for tensor in tensors:
            tensor.add_(amount)

    def forgets_the_last_(tensors, amount):
        for tensor in tensors[:-1]:
            tensor.add_(amount)

    in_place = {
        "reference": add_,
        "mutates": ("tensors",),
        "example": lambda device: ([torch.zeros(3, device=device), torch.ones(2, device=device)], 5.0),
    }
    right, wrong = make(add_, **in_place), make(forgets_the_last_, **in_place)
    x = [torch.zeros(2), torch.zeros(2)]
    for add in (right, right.registered):
        versions = [t._version for t in x]
        assert add(x, 1.0) is None and [t._version for t in x] > versions
    assert all(torch.equal(t, torch.full((2,), 2.0)) for t in x)
    with pytest.raises(ValueError, match=re.escape("argument[0][1], element 0: it gives 1, torch 6")):
        wrong(x, 1.0)


@pytest.mark.parametrize(
    "candidate, said",
    [
        (lambda x, factor: (x * factor).double(), "result is torch.float64"),
        (
            lambda x, factor: (x * factor)[:-1],
            r"result is torch.float32 \(2, 50\), torch gives torch.float32 \(3, 50\)",
        ),
        (lambda x, factor: (x * factor, x), "it gives 3 tensors, torch 2"),
        (lambda x, factor: torch.where(x > 2, torch.nan, x * factor), "it gives nan, torch"),
    ],
)
def test_other_differences(make, candidate, said):
    with pytest.raises(ValueError, match=said):
        make(candidate)(torch.ones(3, 4), 2.0)


def test_tolerance_and_compare(make):
    def rounded(x, factor):
        return (x * factor).bfloat16().float()

    with pytest.raises(ValueError, match="it failed its self-check"):
        runs(make(rounded))
    assert runs(make(rounded, tolerance=2**-8)) is rounded
    seen = []
    assert runs(make(rounded, compare=lambda got, want, tolerance: seen.append((got[0].shape, want[1][1])))) is rounded
    assert seen == [((3, 50), 2.0)]


def test_several_examples(make):
    def wrong_for_matrices(x, factor):
        return x * factor if x.dim() == 1 else -x * factor

    def vector(device):
        return torch.ones(3), 2.0

    assert runs(make(wrong_for_matrices, example=(vector, vector))) is wrong_for_matrices
    with pytest.raises(ValueError, match="it failed its self-check"):
        runs(make(wrong_for_matrices, example=(vector, example)))


def test_fp64_runs_the_reference(make):
    negative = make(lambda x, factor: -x * factor, compare=lambda got, want, tolerance: None)
    assert negative(torch.ones(2), 3.0)[0] == -3 and negative(torch.ones(2, dtype=torch.float64), 3.0)[0] == 3


def test_the_random_state_and_the_callers_modes_are_left_alone(make):
    def checks_modes(x, factor):
        assert not torch.is_autocast_enabled("cpu") or x.shape == (4, 4)
        return scale(x, factor)

    torch.manual_seed(3)
    want = torch.randn(4)
    torch.manual_seed(3)
    scaled = make(checks_modes)
    with torch.autocast("cpu", torch.bfloat16):
        scaled(torch.ones(4, 4), 2.0)
    assert scaled.results == {(CPU, "hip"): "passed"}
    assert torch.equal(torch.randn(4), want)


def test_the_example_is_the_same_in_every_process():
    seen = []

    def keep(x, factor):
        seen.append(x.clone())
        return x * factor

    for seed in (1, 2):
        torch.manual_seed(seed)
        assert differences(keep, scale, example, CPU, (PLAIN_CALL,)) == [None]
    assert torch.equal(*seen)


def test_threads_check_once(make):
    calls = []

    def counts(x, factor):
        calls.append(x.shape)
        return x * factor

    scaled = make(counts)
    threads = [threading.Thread(target=lambda: scaled(torch.ones(2), 2.0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.count((3, 50)) == 1 and len(calls) == 9


def test_fake_and_meta_tensors_come_from_the_reference(make):
    def never(x, factor):
        raise AssertionError

    scaled = make(never)
    with FakeTensorMode():
        assert scaled(torch.empty(5, 2), 2.0).shape == (5, 2)
        assert scaled(torch.empty(2, 5).t(), 2.0).is_contiguous()
    assert scaled(torch.empty(5, 2, device="meta"), 2.0).is_meta
    assert scaled.results == {}


def test_a_first_use_while_a_graph_is_captured_says_what_to_do(make, monkeypatch):
    """The check reads numbers from the device, which a capture does not allow. (Simulated without a GPU.)"""
    gpu = FakeGpu(monkeypatch, hip="7.1")
    monkeypatch.setattr("hip_ops.runtime.choice._hip", lambda device, named: None)
    scaled = make(scale)
    gpu.capturing = True
    message = r"first used on cuda:0 while a graph is captured.*hip_ops.warm_up\('cuda:0'\) before the capture"
    with pytest.raises(RuntimeError, match=message):
        scaled.implementations(GPU)
    assert scaled.results == {} and scaled.choices == {}
    gpu.capturing = False
    assert runs(scaled, GPU) is scale
    gpu.capturing = True
    with use_kernels("auto"):
        assert runs(scaled, GPU) is scale, "known from before"


def test_what_a_reference_may_not_be(make):
    def with_a_default(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    def without_a_number(x: Tensor, factor) -> Tensor:
        return x * factor

    with pytest.raises(AssertionError, match="defaults"):
        make(scale, with_a_default)
    with pytest.raises(ValueError, match="Parameter factor must have a type annotation"):
        make(scale, without_a_number)


def test_opcheck(make):
    scaled = make(scale)
    torch.library.opcheck(scaled.registered._opoverload, (torch.ones(3), 2.0))
