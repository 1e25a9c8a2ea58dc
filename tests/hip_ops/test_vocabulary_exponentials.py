# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy from one pass over rows of logits on the CPU: the torch reference, the HIP source built with g++, and
Triton in its interpreter.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hip_ops
from hip_ops.ops.linear_cross_entropy import hip as hip_kernels
from hip_ops.ops.linear_cross_entropy import passes, reference
from hip_ops.ops.linear_cross_entropy.reference import part_size
from hip_ops.runtime.operator import OPERATORS
from hip_ops.saved_bytes import MAX_PART_CLASSES, parts_of_exponentials
from tests.hip_ops.cpu_kernels import SCHEDULES, run_python
from tests.hip_ops.vocabulary_exponentials_cases import CASES, SEVERAL_RANKS, check
from tests.hip_ops.vocabulary_exponentials_edges import BORDERS, EDGES
from tests.hip_ops.vocabulary_rows_cases import BF16, EXPONENT, FIRST, FP32, FP64, ROUNDING, Logits, inputs, near

MANY_PARTS = Logits(3, 1100, FP32, parts=70, shape="steps")  # more than a wave has lanes
MODULES = pytest.mark.parametrize("module", [reference, hip_kernels], ids=["reference", "hip"])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", [*CASES, MANY_PARTS], ids=str)
def test_cpu_build_against_fp64(monkeypatch, case, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    check(hip_kernels, case)


@pytest.mark.parametrize(
    "case",
    [*CASES, MANY_PARTS, Logits(7, 90, FP64, parts=3, z_loss=0.1), Logits(6, 200, FP64, parts=4, shape="steps", pad=1)],
    ids=str,
)
def test_reference_against_fp64(monkeypatch, case):
    check(reference, case)
    monkeypatch.setitem(reference.ELEMENTS_AT_ONCE, "cpu", 2 * case.classes)  # several blocks of rows
    check(reference, case)


@MODULES
@pytest.mark.parametrize("other_ranks", [1, 2, 3])
@pytest.mark.parametrize("case", [*SEVERAL_RANKS, MANY_PARTS], ids=str)
def test_several_ranks_against_fp64(module, case, other_ranks):
    check(module, case, other_ranks=other_ranks)


def test_several_ranks_in_fp64():
    check(reference, Logits(6, 200, FP64, parts=3, shape="steps"), other_ranks=3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 12),
    classes=st.one_of(st.integers(1, 300), st.sampled_from([512, 1040, 2048])),
    dtype=st.sampled_from([BF16, FP32]),
    parts=st.integers(1, 5),
    pad=st.sampled_from([0, 1, 8]),
    shape=st.sampled_from(["plain", "confident", "far", "rising", "steps"]),
    other_ranks=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_random_shapes(rows, classes, dtype, parts, pad, shape, other_ranks, seed):
    for module in (reference, hip_kernels):
        check(module, Logits(rows, classes, dtype, parts, pad, shape, seed=seed), other_ranks=other_ranks)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.integers(0, 2**20), st.integers(1, 80).flatmap(lambda parts: st.integers(2048 * parts - 1, 2048 * parts + 1))
    )
)
def test_parts_fit_into_registers_and_cover_a_row(classes):
    parts = parts_of_exponentials(classes)
    assert part_size(classes, parts) <= MAX_PART_CLASSES and parts * part_size(classes, parts) >= classes
    assert parts == 1 or (parts - 1) * MAX_PART_CLASSES < classes, "fewer parts would do"


def test_zayas_row_has_129_parts():
    assert parts_of_exponentials(262272) == 129 and part_size(262272, 129) == 2048


def run(module, logits, labels, first_class, parts, grad, z_loss=0.0):
    statistics = module.overwrite_with_exponentials(logits, labels, first_class, parts)
    return statistics, module.finish_gradient(logits, labels, first_class, statistics, 0, parts, grad, z_loss)


@MODULES
@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.__name__)
def test_edges(module, edge):
    edge(module)


def test_references_keep_exponents_between_least_and_most():
    tops = torch.tensor([*BORDERS, -torch.inf, torch.inf])
    assert reference.reference_of(tops).tolist() == [*BORDERS.values(), -torch.inf, torch.inf]
    some = torch.linspace(-1000, 1000, 100001)
    exponents = some - reference.reference_of(some)
    assert exponents.min() > reference.MIN_EXPONENT - 1e-4 and exponents.max() <= reference.MAX_EXPONENT + 1e-4
    assert torch.equal(reference.reference_of(some) % reference.EXPONENT_PERIOD, torch.zeros_like(some))


@MODULES
@pytest.mark.parametrize(
    "case",
    [
        Logits(9, 1000, parts=4, z_loss=1e-2),
        Logits(9, 1000, FP32, parts=4, shape="rising"),
        Logits(9, 200, FP32, shape="confident"),
        Logits(8, 640, parts=4, shape="steps"),
    ],
    ids=str,
)
def test_exponentials_and_factors_are_the_gradient_of_two_passes(module, case):
    logits, labels, upstream = inputs(case)
    normalizer, label = reference.combined(reference.row_statistics(logits, labels, FIRST, 1))
    want = logits.clone()
    reference.overwrite_with_gradient(want, labels, FIRST, normalizer, upstream, case.z_loss)
    _, (losses, factors) = run(module, logits, labels, FIRST, case.parts, upstream, case.z_loss)
    rounding = 3 * ROUNDING[case.dtype]  # of the one, of the other, and of a scaled part
    # what is left of 1 - p
    slack = 3 * EXPONENT * want.double().abs().amax(1, keepdim=True) if case.shape == "confident" else 1e-18
    near("gradient", logits.double() * factors.double()[:, None], want, rounding + 4 * EXPONENT, slack)
    near("losses", losses, reference.losses(normalizer, label, case.z_loss), EXPONENT, 1e-5)


@pytest.mark.parametrize("name", ["overwrite_with_exponentials", "finish_gradient"])
def test_the_self_check_passes_and_would_not_pass_a_small_error(name):
    operator = OPERATORS[name]
    with hip_ops.use_kernels("hip"):
        hip_ops.warm_up("cpu", [operator])
    assert operator.results[torch.device("cpu"), "hip"] == "passed"
    arguments = operator.examples[0](torch.device("cpu"))

    def results():
        copied = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        return [operator.reference(*copied), copied]

    got, want = results(), results()
    assert operator.compare(got, want, operator.tolerance) is None
    for tensor, error, said in ((got[0], 1e-4, "result"), (got[1][0], 0.02, "row")):
        values = tensor.view(-1)
        places = values.nonzero().flatten()
        at = places[values[places].abs().argsort()[len(places) // 2]]  # far from the largest
        kept = values[at].clone()
        values[at] = kept * (1 + error)
        assert operator.compare(got, want, operator.tolerance).startswith(f"{said}, element {at}: it gives")
        values[at] = torch.nan
        assert "it gives nan" in operator.compare(got, want, operator.tolerance)
        values[at] = kept
    assert operator.compare(got, want, operator.tolerance) is None


def test_the_self_check_has_a_row_of_which_a_part_is_scaled():
    statistics = OPERATORS["finish_gradient"].examples[0](torch.device("cpu"))[3]
    assert (statistics[0, 0] != statistics[1, 0]).any() and (statistics[0, 0] == statistics[1, 0]).any()


def test_the_registered_operators_keep_torchs_rules(chosen):
    logits, labels, upstream = inputs(Logits(4, 64, FP32))
    torch.library.opcheck(torch.ops.hip_ops.overwrite_with_exponentials.default, (logits, labels, FIRST, 2))
    statistics = reference.overwrite_with_exponentials(logits, labels, FIRST, 2)
    torch.library.opcheck(
        torch.ops.hip_ops.finish_gradient.default, (logits, labels, FIRST, statistics, 0, 2, upstream, 1e-3)
    )


def test_the_operators_take_what_the_kernels_can(chosen):
    check(passes, Logits(2, 2048, FP32))
    check(passes, Logits(3, 70, FP64, parts=2))
    labels, rows = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4112)
    with pytest.raises(ValueError, match="4112 classes in 1 parts. Allowed: at most 2048 classes a part"):
        passes.overwrite_with_exponentials(rows, labels, 0, 1)
    statistics, grad = torch.ones(4, 3, 2), torch.ones(2)
    for first_part in (-1, 3, 4):
        with pytest.raises(ValueError, match=f"first_part is {first_part}. Allowed: 0 to 2"):
            passes.finish_gradient(rows, labels, 0, statistics, first_part, 2, grad, 0.0)
    assert passes.finish_gradient(rows, labels, 0, statistics, 2, 2, grad, 0.0).shape == (2, 2)
    for wrong in (grad.double(), torch.ones(3)):
        with pytest.raises(ValueError, match="hip_ops.finish_gradient: grad"):
            passes.finish_gradient(rows, labels, 0, statistics, 2, 2, wrong, 0.0)


@pytest.mark.parametrize("name", ["overwrite_with_exponentials", "finish_gradient", "overwrite_with_gradient"])
def test_columns_with_strides_are_right_or_refused(chosen, name):
    """Kernels write to contiguous rows; the reference takes any strides."""
    logits, *arguments = OPERATORS[name].examples[0](torch.device("cpu"))
    rows = torch.randn(logits.shape)
    strided, contiguous = rows.t().contiguous().t(), rows.clone()
    assert strided.stride() == (1, 16)
    if chosen == "hip":
        with pytest.raises(ValueError, match=r"strides are \(1, 16\)"):
            OPERATORS[name](strided, *arguments)
        return
    results = [OPERATORS[name](each, *arguments) for each in (strided, contiguous)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(strided, contiguous)


PROGRAM = """
from hip_ops.ops.linear_cross_entropy import triton as vocabulary_exponentials
from tests.hip_ops.test_vocabulary_exponentials import MANY_PARTS
from tests.hip_ops.vocabulary_exponentials_cases import CASES, SEVERAL_RANKS, check
from tests.hip_ops.vocabulary_exponentials_edges import EDGES
from tests.hip_ops.vocabulary_rows_cases import FP32, Logits

for case in [*CASES, MANY_PARTS, Logits(2, 9000, FP32, parts=5), Logits(3, 600, FP32, parts=2, shape="nothing"),
    Logits(0, 64, FP32)]:
    if case.dtype == FP32:  # the interpreter's bf16 rounding is its own
        check(vocabulary_exponentials, case)
for case in SEVERAL_RANKS:
    if case.dtype == FP32:
        check(vocabulary_exponentials, case, other_ranks=2)
for edge in EDGES:
    edge(vocabulary_exponentials)
print("right")
"""


@pytest.mark.slow  # test_vocabulary_exponentials_gfx942.py runs the compiled kernels
def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    done = run_python(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]
