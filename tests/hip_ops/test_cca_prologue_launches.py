# SPDX-License-Identifier: Apache-2.0
"""Test the host side of the CCA prologue's Triton kernels without a GPU: divisions by multiplication, grids, and
launches that do not fit into shared memory.
"""

import pytest
import torch

from tests.hip_ops.cca_prologue_cases import Case, backward, make
from tests.hip_ops.cca_prologue_triton_device import KERNELS
from tests.hip_ops.cpu_kernels import run_python

triton = pytest.importorskip("triton")


@pytest.mark.parametrize(
    "by", [1, 2, 3, 4, 5, 7, 10, 63, 64, 65, 4096, 4098, 65535, 2**20 + 1, 2**30, 2**30 + 1, 2**31 - 1]
)
def test_divisor(by):
    """Computes `divide` where a wrong rounding shows first: next to multiples, and at the end of the range."""
    from hip_ops.ops.cca_prologue.triton_rows import divisor

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
    """Replaces a kernel and records grid and stages; the weights' kernel does not fit with more than `stages`
    stages.
    """

    def __init__(self, kernel, calls: list, stages: int):
        self.arg_names, self.name, self.calls, self.stages = kernel.arg_names, kernel.__name__, calls, stages

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            assert len(arguments) + len(set(keywords) & set(self.arg_names)) == len(self.arg_names), self.name
            name, stages = (
                self.name.removeprefix("cca_prologue_").removesuffix("_kernel"),
                keywords.get("num_stages", 1),
            )
            self.calls.append((name, grid, stages))
            if name == "weight" and stages > self.stages:
                raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")

        return launch


@pytest.fixture
def recorded(monkeypatch):
    """Return a function that calls forward and backward of a case with recorded kernels, as on an H100, and returns
    the launches.
    """
    from hip_ops.ops.cca_prologue import triton as module

    def run(case: Case, stages: int) -> list:
        calls: list = []
        with monkeypatch.context() as patched:
            for name in KERNELS:
                patched.setattr(module, name, Recorded(getattr(module, name), calls, stages))
            patched.setattr(module, "multiprocessors", lambda device: 132)
            inputs = make(case)
            module.cca_prologue(*inputs.arguments)
            query, key, _ = inputs.upstream
            backward(
                module,
                inputs,
                {
                    "query": query,
                    "key": key,
                    "inverse_norm": torch.ones(case.heads + case.groups, case.rows * case.chunks, case.batch),
                },
            )
        return calls

    yield run
    module._plan.cache_clear()


def test_launches(recorded):
    calls = recorded(Case(2048, 2, 8, 2), stages=3)
    # 64 tiles of 64 rows, and twice as many of 32. On 132 multiprocessors a query head gets up to 12 programs and a key
    # head 18: 11 of 6 tiles and 16 of 4. The weights' kernel has one, of 10 tiles, and two programs in a run for
    # temperatures that are zero.
    assert calls == [
        ("taps", (10, 8, 1), 1),
        ("forward", (8 * 11 + 2 * 16,), 2),
        ("taps", (10, 8, 2), 1),
        ("norm", (11, 32), 1),
        ("input", (8 * 11 + 2 * 16,), 2),
        ("weight", (12, 13), 3),
        ("sum", (10, 16), 1),
    ]


def test_halos_count_as_rows_of_the_input(recorded):
    calls = recorded(Case(63, 1, 8, 2, halo=True), stages=3)
    assert calls[1] == ("forward", (10,), 2)
    assert calls[4:6] == [("input", (20,), 2), ("weight", (12, 2), 3)]


def test_fewer_stages_where_shared_memory_is_short(recorded):
    for _ in range(2):
        calls = [stages for name, _, stages in recorded(Case(100, 1, 8, 2), stages=1) if name == "weight"]
        assert calls in ([3, 2, 1], [1]), "found once, and kept"
    assert calls == [1]


def test_no_stage_fits(recorded):
    with pytest.raises(triton.runtime.errors.OutOfResources):
        recorded(Case(100, 1, 8, 2, delayed=0), stages=0)


INTERPRETED = """
from hip_ops.ops.cca_prologue import triton as module
from tests.hip_ops.cca_prologue_cases import FP32, Case, check

choose = module.launch
module.launch = lambda kernel, d, heads, _, **more: choose(kernel, d, heads, 2, **(more | {"warp_size": 32}))
module.multiprocessors = lambda device: 24
check(module, Case(67, 2, 4, 2, 32, 2, True, 5, rotary=16, zero=True, delayed=20, dtype=FP32))
check(module, Case(70, 1, 5, 1, 64, at=(15, 31, 32), dtype=FP32))
check(module, Case(130, 1, 2, 1, pad=8, rope_batch=True, dtype=FP32))
print("right")
"""


@pytest.mark.slow  # test_cca_prologue_gfx942.py runs the compiled kernels, in AMD's tiles and bf16
def test_hoppers_tiles_in_the_interpreter():
    done = run_python(INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]
