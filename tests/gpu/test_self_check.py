# SPDX-License-Identifier: Apache-2.0
"""Test the conditions of the self-check on a device: every mistake here is right on an idle device's default stream.

Not run yet.
"""

import time

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.runtime.conditions import conditions_on
from hip_ops.runtime.operator import all_operators
from hip_ops.runtime.self_check import difference

GPU = torch.device("cuda", 0)


def doubled(x, total):
    total += x
    return x * 2


def found(version, **options):
    return difference(
        version,
        doubled,
        lambda device: (torch.randn(2**16, device=device), torch.ones(2**16, device=device)),
        GPU,
        **options,
    )


def test_a_correct_version_passes():
    assert found(doubled) is None


def test_a_version_that_launches_on_the_default_stream():
    def version(x, total):
        with torch.cuda.stream(torch.cuda.default_stream(GPU)):
            return doubled(x, total)

    assert found(version).startswith("side stream")


def test_a_version_that_waits_for_the_device():
    """A capture does not allow it."""

    def version(x, total):
        return doubled(x, total) if x.sum().item() < torch.inf else x

    assert found(version).startswith("captured graph: ")


def test_a_version_whose_replay_reads_a_number_of_the_capture():
    seen = []

    def version(x, total):
        if torch.cuda.is_current_stream_capturing():
            return doubled(seen[0], total)
        seen.append(torch.zeros_like(x))
        return doubled(x, total)

    assert found(version).startswith("captured graph, call 1: ")


def test_a_version_with_other_bits_at_every_call():
    calls = []

    def version(x, total):
        calls.append(x)
        return doubled(x, total) * (1 + len(calls) * 2**-23)

    assert "(allowed: equal bits)" in found(version) and found(version, repeats=False) is None


def test_the_calls_on_a_full_device_run_at_once():
    """Four calls that each wait a while take hardly longer than one."""
    full = conditions_on(GPU)[-1]

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        full.run(lambda x: torch.cuda._sleep(50_000_000), [(torch.ones(1, device=GPU),)] * calls)
        return time.perf_counter() - start

    seconds(1)
    assert seconds(4) < 2 * seconds(1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["hip", "triton"])
def test_the_check_of_all_operators_takes_seconds(name):
    """Without builds, which the first round makes."""
    with use_kernels(name):
        for _ in range(2):
            start = time.perf_counter()
            for operator in all_operators():
                if name in operator.versions:
                    assert operator.difference(operator._function_of(name), GPU, name) is None, operator.name
            torch.cuda.synchronize()
            taken = time.perf_counter() - start
    assert taken < 20, f"{taken:.1f} s"
