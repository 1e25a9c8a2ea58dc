# SPDX-License-Identifier: Apache-2.0
"""Test that the self-check of the Triton versions compiles all that the training of ZAYA1-base and of ZAYA1-74B launches,
so that the first step compiles nothing.

Triton compiles a kernel again for each combination of dtypes, constants, None, and integers that are 1 or multiples of
16. What it would compile on an H200 and an MI300X is recorded without compiling.
"""

import importlib
from pathlib import Path

import pytest
import torch

import hip_ops
from hip_ops.runtime.model_sizes import ModelSizes, set_model_sizes
from hip_ops.runtime.operator import OPERATORS, all_operators
from tests.hip_ops.training_calls import ZAYA1_74B, Sizes, training_calls
from tests.hip_ops.triton_launches import recorded_kernels

CPU = torch.device("cpu")
# Newton-Schulz: its tiles depend on the number of a rank's matrices of a shape. The embedding's gradient: on AMD another
# kernel runs for a vocabulary beyond 2 GiB. On an MI300X the HIP versions of both run. Not for gfx950: other forms of
# norms and grouped products, of which it runs the HIP version and shipped objects.
NOT_COVERED = {"sm_90": {"newton_schulz"}, "gfx942": {"newton_schulz", "add_rows_"}}
# On an H200 quack computes the grouped products; Triton's table of tiles has other ones for other sizes.
OF_74B = {"sm_90": {"grouped_rows", "grouped_outer_"}}


@pytest.fixture(scope="module", params=NOT_COVERED)
def target(request):
    return request.param


@pytest.fixture(scope="module")
def kernels(target):
    operators = [each for each in all_operators() if "triton" in each.versions]
    for operator in operators:
        operator._function_of("triton")
    with recorded_kernels(target) as recorded:
        yield recorded


@pytest.fixture
def of_base():
    """Sets ZAYA1-base's sizes again after the test."""
    yield
    set_model_sizes(ModelSizes())


def examples(operator):
    return (make(CPU) for make in (*operator.examples, *operator.more_examples.get("triton", ())))


@pytest.mark.parametrize(
    "sizes, expert_ranks",
    [pytest.param(Sizes(), 1, id="base"), pytest.param(ZAYA1_74B, 8, id="74b", marks=pytest.mark.slow)],
)
def test_training_compiles_no_kernel_that_the_self_check_does_not(kernels, target, sizes, expert_ranks, of_base):
    missing, left_out = [], NOT_COVERED[target] | (OF_74B.get(target, set()) if sizes is ZAYA1_74B else set())
    set_model_sizes(sizes.of_a_rank(expert_ranks))
    for name, calls in training_calls(statistics_parts=4, sizes=sizes, expert_ranks=expert_ranks).items():
        operator = OPERATORS[name]
        if "triton" in operator.versions and name not in left_out:
            version = operator._function_of("triton")
            launched = kernels(version, calls)
            assert launched, name
            missing += sorted(launched - kernels(version, examples(operator)))
    assert not missing, "\n".join(map(str, missing))


def test_a_number_of_rows_that_needs_another_kernel_is_seen(kernels):
    """As the examples of before, whose rows were no multiple of 16."""
    gather = OPERATORS["gather_rows"]
    (rows, maps, _, probs), *_ = training_calls(statistics_parts=4)["gather_rows"]
    odd = kernels(gather._function_of("triton"), [(rows[:150], maps[:150], maps[:150], probs[:150])])
    assert len(odd) == 1 and odd.isdisjoint(kernels(gather._function_of("triton"), examples(gather)))


def test_functions_of_kernels_have_no_defaults_that_triton_3_6_refuses():
    """A bare string is no default there of a function that a kernel calls; `tl.constexpr("")` is."""
    triton = pytest.importorskip("triton")
    folder, functions = Path(hip_ops.__file__).parent, {}
    for path in folder.rglob("*.py"):
        if "@triton.jit" in path.read_text():
            module = importlib.import_module("hip_ops." + ".".join(path.relative_to(folder).with_suffix("").parts))
            functions |= {id(each): each for each in vars(module).values() if isinstance(each, triton.JITFunction)}
    assert len(functions) > 60
    assert not [
        (function.fn.__name__, parameter.name)
        for function in functions.values()
        for parameter in function.params
        if parameter.has_default and not isinstance(parameter.default, triton.language.constexpr)
    ]
