# SPDX-License-Identifier: Apache-2.0
"""Reductions by copies themselves, on devices: sums to the bit, eagerly and from a graph, with ranks that are late; and a barrier that ends."""

import pytest
import torch

from tests.parallel import copied_reduction_ranks


def needs(devices):
    return pytest.mark.skipif(torch.cuda.device_count() < devices, reason=f"needs {devices} accelerators")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))])
def test_sums_have_the_bits_of_those_on_the_cpu(tmp_path, ranks):
    copied_reduction_ranks.run("sums", ranks, tmp_path, "cuda")
    calls = copied_reduction_ranks.ROUNDS + copied_reduction_ranks.REPLAYS
    assert [(tmp_path / f"calls{rank}").read_text() for rank in range(ranks)] == [str(calls)] * ranks


@needs(2)
def test_a_barrier_without_the_others_is_an_error_in_its_time(tmp_path):
    copied_reduction_ranks.run("alone", 2, tmp_path, "cuda")
    seconds, _, error = (tmp_path / "error").read_text().partition(" s: ")
    assert 1 < float(seconds) < 30 and error
