# SPDX-License-Identifier: Apache-2.0
"""The self-check of operators: what passes, what falls back loudly, and what raises."""

import logging
import re
import sys
import threading
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hip_ops import backend, operator
from hip_ops.build import BuildError
from hip_ops.operator import Operator, warm_up
from hip_ops.self_check import difference

CPU = torch.device("cpu")


def scale(x, factor):
    return x * factor


def example(device):
    return torch.randn(3, 50, device=device), 2.0


@pytest.fixture
def make(fresh_backend, monkeypatch):
    """make(candidate) -> an operator whose hip version is `candidate`; the backend is hip."""
    monkeypatch.setattr(operator, "OPERATORS", {})
    module = types.ModuleType("injected_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def make(candidate, reference=scale, **options):
        module.candidate = candidate
        return Operator(
            f"test_{len(operator.OPERATORS)}",
            torch=reference,
            hip="injected_kernels:candidate",
            **{"example": example, **options},
        )

    with backend.use_backend("hip"):
        yield make


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


def test_a_wrong_version_falls_back_loudly_with_both_numbers(make, caplog):
    scaled = make(wrong_by_a_factor)
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(scaled(x, 3.0), x * 3) and torch.equal(scaled(x, 3.0), x * 3)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    with torch.random.fork_rng():
        torch.manual_seed(20240817)
        want = torch.randn(3, 50)[1, 7].item() * 2
    said = record.getMessage()
    assert f"the hip version of {scaled.name} failed its self-check on cpu; torch runs instead" in said
    numbers = re.search(r"result, element 57: it gives (\S+), torch (\S+) \(allowed", said)
    assert [float(number) for number in numbers.groups()] == pytest.approx([want * 1.01, want], rel=1e-6)


def test_an_exception_falls_back_loudly(make, caplog):
    def fails(x, factor):
        raise RuntimeError("hip_ops: ho_scale failed on cpu with code 98: invalid device function")

    scaled = make(fails)
    assert torch.equal(scaled(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert "RuntimeError: hip_ops: ho_scale failed on cpu with code 98" in caplog.text


@pytest.mark.parametrize("explicit", [True, False])
def test_kernels_that_cannot_be_built(make, caplog, monkeypatch, explicit):
    def fails(x, factor):
        raise BuildError("this command failed: hipcc")

    scaled = make(fails)
    if explicit:
        with pytest.raises(
            ValueError, match=r"backend 'hip' cannot be had for test_0 on cpu: this command failed: hipcc"
        ):
            scaled(torch.ones(2), 3.0)
        return
    monkeypatch.setitem(backend._choices, ("cpu", "auto"), backend.Choice(("hip", "torch"), "auto", explicit=False))
    with backend.use_backend("auto"):
        assert torch.equal(scaled(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert "BuildError: this command failed: hipcc" in caplog.text


def test_a_version_that_does_not_exist(make, monkeypatch):
    only_torch = Operator("only_torch", torch=scale, example=example)
    with pytest.raises(ValueError, match="only_torch has no hip version; set HIP_OPS_BACKEND"):
        only_torch(torch.ones(2), 3.0)
    monkeypatch.setitem(backend._choices, ("cpu", "auto"), backend.Choice(("hip", "torch"), "auto", explicit=False))
    with backend.use_backend("auto"):
        assert torch.equal(only_torch(torch.ones(2), 3.0), torch.full((2,), 3.0))


def test_operators_in_place_and_lists(make, caplog):
    def add_(tensors, amount):
        for tensor in tensors:
            tensor.add_(amount)

    def forgets_the_last_(tensors, amount):
        for tensor in tensors[:-1]:
            tensor.add_(amount)

    in_place = {
        "reference": add_,
        "example": lambda device: ([torch.zeros(3, device=device), torch.ones(2, device=device)], 5.0),
    }
    assert make(add_, **in_place).implementation(CPU) is add_
    x = [torch.zeros(2), torch.zeros(2)]
    assert make(forgets_the_last_, **in_place)(x, 1.0) is None
    assert all(torch.equal(t, torch.ones(2)) for t in x), "the reference ran, and once"
    assert "argument[0][1], element 0: it gives 1, torch 6" in caplog.text


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
def test_other_differences(make, caplog, candidate, said):
    make(candidate)(torch.ones(3, 4), 2.0)
    assert re.search(said, caplog.text), caplog.text


def test_tolerance_and_compare(make):
    def rounded(x, factor):
        return (x * factor).bfloat16().float()

    assert make(rounded).implementation(CPU) is scale
    assert make(rounded, tolerance=2**-8).implementation(CPU) is rounded
    seen = []
    assert (
        make(rounded, compare=lambda got, want: seen.append((got[0].shape, want[1][1]))).implementation(CPU) is rounded
    )
    assert seen == [((3, 50), 2.0)]


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
        assert difference(keep, scale, example, CPU) is None
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


def test_fake_and_meta_tensors_run_the_reference_unchecked(make):
    def never(x, factor):
        raise AssertionError

    scaled = make(never)
    with FakeTensorMode():
        assert scaled(torch.empty(5, 2), 2.0).shape == (5, 2)
    assert scaled(torch.empty(5, 2, device="meta"), 2.0).is_meta
    assert scaled.results == {}


def test_a_first_use_while_a_graph_is_captured_says_what_to_do(make, monkeypatch):
    """The check compares numbers, which needs the device's answer; a capture has none. (Simulated: there is no GPU here.)"""
    scaled = make(scale)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setitem(backend._choices, ("cuda", "hip"), backend.Choice(("hip",), "", explicit=True))
    with pytest.raises(
        RuntimeError,
        match=r"first used on cuda:0 while a graph is captured.*hip_ops.warm_up\('cuda:0'\) ahead of the capture",
    ):
        scaled.implementation(gpu)
    scaled.results[gpu, "hip"] = "passed"
    assert scaled.implementation(gpu) is scale


def test_warm_up_tells_what_came_out(make):
    good, bad, plain = make(scale), make(scale), Operator("plain", torch=scale, example=example)
    sys.modules["injected_kernels"].wrong = wrong_by_a_factor
    bad.versions["hip"] = "injected_kernels:wrong"
    assert warm_up("cpu", [good]) == {good.name: "passed"}
    assert "element 57" in warm_up("cpu", [bad])[bad.name]
    with backend.use_backend("torch"):
        assert warm_up(CPU, [plain]) == {"plain": "torch"}
