# SPDX-License-Identifier: Apache-2.0
"""Test the kernels on rows of logits on the CPU: the torch reference, the HIP source built with g++, and Triton's in
its interpreter.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hip_ops
from hip_ops.ops.linear_cross_entropy import hip as hip_kernels
from hip_ops.ops.linear_cross_entropy import passes, reference
from hip_ops.runtime.operator import OPERATORS
from tests.hip_ops.cpu_kernels import SCHEDULES, run_python
from tests.hip_ops.vocabulary_rows_cases import BF16, CASES, FP32, FP64, Logits, check, inputs


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_build_against_fp64(monkeypatch, case, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    check(hip_kernels, case)


@pytest.mark.parametrize("case", [*CASES, Logits(7, 90, FP64, parts=3, z_loss=0.1)], ids=str)
def test_reference_against_fp64(monkeypatch, case):
    check(reference, case)
    monkeypatch.setitem(reference.ELEMENTS_AT_ONCE, "cpu", 2 * case.classes)  # several blocks of rows
    check(reference, case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 12),
    classes=st.one_of(st.integers(1, 300), st.sampled_from([512, 2048])),
    dtype=st.sampled_from([BF16, FP32]),
    parts=st.integers(1, 5),
    pad=st.sampled_from([0, 1, 8]),
    shape=st.sampled_from(["plain", "confident", "far", "rising"]),
    seed=st.integers(0, 1000),
)
def test_random_shapes(rows, classes, dtype, parts, pad, shape, seed):
    for module in (reference, hip_kernels):
        check(module, Logits(rows, classes, dtype, parts, pad, shape, seed=seed))


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_parts_cover_a_row_once_and_combine_to_torchs_loss(parts):
    logits, labels, _ = inputs(Logits(20, 1003, FP32, shape="rising"))
    labels = torch.randint(0, 1003, (20,))
    normalizer, label = reference.combined(reference.row_statistics(logits, labels, 0, parts))
    want = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(reference.losses(normalizer, label, 0.0), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(normalizer.sum(0), logits.logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert parts * reference.part_size(1003, parts) >= 1003 and reference.part_size(1003, parts) % 16 == 0


def test_what_is_left_of_a_probability_near_one_is_exact():
    """1 - p = 4.5e-5 with a logit of 40; from logsumexp(logits) as one fp32 number it would be wrong by up to
    1.9e-6.
    """
    logits = torch.tensor([[40.0, 30.0, 19.0]])
    normalizer, label = reference.combined(reference.row_statistics(logits, torch.tensor([0]), 0, 1))
    want = -torch.log_softmax(logits.double(), -1)[0, 0].item()
    assert reference.losses(normalizer, label, 0.0).item() == pytest.approx(want, rel=2e-3)
    assert abs((normalizer.sum(0) - label).item() - want) > 5e-3 * want
    reference.overwrite_with_gradient(logits, torch.tensor([0]), 0, normalizer, torch.ones(1), 0.0)
    assert logits[0, 0].item() == pytest.approx(-want, rel=2e-3)


@pytest.mark.parametrize("name", ["row_statistics", "overwrite_with_gradient"])
def test_the_self_check_passes_and_would_not_pass_a_small_error(name):
    operator = OPERATORS[name]
    with hip_ops.use_kernels("hip"):
        hip_ops.warm_up("cpu", [operator])
    assert operator.results[torch.device("cpu"), "hip"] == "passed"
    arguments = operator.examples[0](torch.device("cpu"))
    got, want = (
        [operator.reference(*copied), copied]
        for copied in ([a.clone() if isinstance(a, torch.Tensor) else a for a in arguments] for _ in range(2))
    )
    assert operator.compare(got, want, operator.tolerance) is None
    tensor = got[0] if got[0] is not None else got[1][0]
    at = tensor.abs().flatten().argsort()[tensor.numel() // 2]  # far from the largest
    tensor.view(-1)[at] *= 1.02
    assert "it gives" in operator.compare(got, want, operator.tolerance)


def test_the_registered_operators_keep_torchs_rules(chosen):
    logits, labels, upstream = inputs(Logits(4, 64, FP32))
    torch.library.opcheck(torch.ops.hip_ops.row_statistics.default, (logits, labels, 100, 2))
    normalizer, _ = reference.combined(reference.row_statistics(logits, labels, 100, 1))
    torch.library.opcheck(
        torch.ops.hip_ops.overwrite_with_gradient.default, (logits, labels, 100, normalizer, upstream, 0.0)
    )


def test_a_row_is_cut_only_where_rows_are_few(monkeypatch):
    def parts(rows, classes):
        return passes.parts_for(torch.empty(rows, classes, device="meta"))

    monkeypatch.setattr(torch.version, "hip", None)
    assert [parts(rows, 262272) for rows in (8192, 2048, 1024, 64, 1)] == [1, 1, 2, 16, 16]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert [parts(rows, 262272) for rows in (8192, 4096, 2048, 64, 1)] == [1, 2, 4, 16, 16]
    assert parts(64, 8000) == 1 and passes.parts_for(torch.empty(4, 10)) == 1


PROGRAM = """
from hip_ops.ops.linear_cross_entropy import triton as vocabulary_rows
from tests.hip_ops.vocabulary_rows_cases import CASES, FP32, Logits, check

for case in [*CASES, Logits(2, 9000, FP32, parts=2)]:
    if case.dtype == FP32:  # the interpreter's bf16 rounding is its own
        check(vocabulary_rows, case)
check(vocabulary_rows, Logits(0, 64, FP32))
print("right")
"""


@pytest.mark.slow
def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    done = run_python(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]
