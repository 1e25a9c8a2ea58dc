# SPDX-License-Identifier: Apache-2.0
"""The host side of the CCA prologue's Triton kernels, without a GPU: divisions by multiplication, grids, and what happens where memory is short."""

import contextlib

import pytest
import torch

from tests.hip_ops.cca_prologue_cases import Case, backward, make

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("by", [1, 2, 3, 4, 5, 7, 10, 63, 64, 65, 4096, 4098, 65535, 2**20 + 1, 2**30, 2**30 + 1, 2**31 - 1])
def test_divisor(by):
    """As `divide` computes it, at every place where a wrong rounding shows first: beside multiples, and at the end of the range."""
    from hip_ops.triton_kernels.cca_prologue_rows import divisor

    packed = divisor(by)
    multiplier, shift = packed >> 6, packed & 63
    assert 2**31 <= multiplier < 2**32 and shift < 32
    last = (2**31 - 1) // by
    for multiple in {0, 1, 2, 3, last // 2, last - 1, last}:
        for n in range(max(0, multiple * by - 2), min(2**31, multiple * by + 3)):
            assert (2 * n * multiplier >> 32) >> shift == n // by, n
    n = 2**31 - 1
    assert (2 * n * multiplier >> 32) >> shift == n // by


class Recorded:
    """Stands for a kernel: notes grid and keywords; a cca_prologue_conv_kernel of more stages than `stages` does not fit."""

    def __init__(self, kernel, calls: list, stages: int):
        self.arg_names, self.name, self.calls, self.stages = kernel.arg_names, kernel.__name__, calls, stages

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            assert len(arguments) + len(set(keywords) & set(self.arg_names)) == len(self.arg_names), self.name
            self.calls.append((self.name, grid, keywords["num_stages"] if self.name == "cca_prologue_conv_kernel" else None))
            if self.name == "cca_prologue_conv_kernel" and keywords["num_stages"] > self.stages:
                raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

        return launch


@pytest.fixture
def recorded(monkeypatch):
    """A function that calls the backward of a case with recorded kernels, and gives what was launched."""
    from hip_ops.triton_kernels import cca_prologue as module

    def run(case: Case, stages: int) -> list:
        calls: list = []
        with monkeypatch.context() as patched:
            for name in ("cca_prologue_norm_kernel", "cca_prologue_conv_kernel", "cca_prologue_sum_kernel"):
                patched.setattr(module, name, Recorded(getattr(module, name), calls, stages))
            patched.setattr(module, "_processors", lambda device: 132)
            patched.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
            inputs = make(case)
            query, key, _ = inputs.upstream
            backward(module, inputs, {"query": query, "key": key, "inverse_norm": torch.ones(case.heads + case.groups, case.rows * case.chunks, case.batch)})
        return calls

    yield run
    module._plan.cache_clear()


def test_three_launches(recorded):
    calls = recorded(Case(2048, 2, 8, 2), stages=3)
    # 64 tiles of 64 rows: 6 runs of up to 11 tiles for each half of the 10 heads; two programs in a run for temperatures that are zero
    assert calls == [("cca_prologue_norm_kernel", (11, 32), None), ("cca_prologue_conv_kernel", (22, 6), 3), ("cca_prologue_sum_kernel", (10, 16), None)]


def test_halos_count_as_rows(recorded):
    calls = recorded(Case(63, 1, 8, 2, halo=True), stages=3)
    assert calls[1] == ("cca_prologue_conv_kernel", (22, 2), 3)


def test_fewer_stages_where_shared_memory_is_short(recorded):
    for _ in range(2):
        calls = [stages for name, _, stages in recorded(Case(100, 1, 8, 2), stages=1) if name == "cca_prologue_conv_kernel"]
        assert calls in ([3, 2, 1], [1]), "found once, and kept"
    assert calls == [1]


def test_no_stage_fits(recorded):
    with pytest.raises(triton.runtime.errors.OutOfResources):
        recorded(Case(100, 1, 8, 2, delayed=0), stages=0)
