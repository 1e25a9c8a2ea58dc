# SPDX-License-Identifier: Apache-2.0
"""Test formulas: compiled on accelerators only, and uncompiled where that is requested or torch.compile is not
available.
"""

import functools

import pytest
import torch

from hip_ops import errors, use_kernels
from hip_ops.runtime import compiled
from hip_ops.runtime.operator import all_operators

pytestmark = pytest.mark.usefixtures("nothing_selected")


class OnAccelerator:
    """Has the attributes of an accelerator's tensor that a formula reads."""

    is_cuda = True


@pytest.fixture
def double(monkeypatch):
    """A formula of the folder rms_norm that tells how it ran."""
    monkeypatch.setattr(compiled, "compile_function", lambda function: lambda x: "compiled")
    monkeypatch.setattr(compiled, "missing", lambda version, device, named: None)
    monkeypatch.setattr(compiled, "Tensor", OnAccelerator)

    def double(x):
        """Twice x."""
        return "as written"

    double.__module__ = "hip_ops.ops.rms_norm.reference"
    return compiled.formula(double)


def test_a_formula_is_compiled_on_accelerators_only(double):
    assert double(OnAccelerator()) == "compiled" and double(torch.ones(1)) == double(2.0) == "as written"
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")


def test_a_formula_where_the_reference_is_asked_for(double):
    with use_kernels("reference"):
        assert double(OnAccelerator()) == "as written"
        with use_kernels("reference", rms_norm="auto"):
            assert double(OnAccelerator()) == "compiled"
    for overrides, way in (({"rms_norm": "reference"}, "as written"), ({"muon": "reference"}, "compiled")):
        with use_kernels("auto", **overrides):
            assert double(OnAccelerator()) == way
    with use_kernels("triton"):
        assert double(OnAccelerator()) == "compiled"


def test_a_formula_without_triton(double, monkeypatch):
    monkeypatch.setattr(compiled, "missing", lambda version, device, named: "Triton is not installed")
    assert double(OnAccelerator()) == "as written"


def test_a_formula_whose_compilation_fails(monkeypatch, caplog):
    """As with a Triton whose compiler raises: the compiler is called once, and the formula runs as written."""
    attempts = []

    def backend(graph, _):
        attempts.append(graph)
        raise RuntimeError("ld.lld was not found")

    def add_(x, total, on_accelerator):
        total += x
        return total

    monkeypatch.setattr(compiled, "missing", lambda version, device, named: None)
    monkeypatch.setattr(compiled, "Tensor", OnAccelerator)
    monkeypatch.setattr(errors, "_warnings", set())
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    formula, x, accelerator = compiled.formula(add_), torch.ones(2), OnAccelerator()
    assert [formula(x, torch.zeros(2), accelerator).tolist() for _ in range(2)] == [[1.0, 1.0]] * 2
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "hip_ops"]
    assert warning.endswith("add_, which runs uncompiled: backend='backend' raised: RuntimeError: ld.lld was not found")
    assert len(attempts) == 1
    with pytest.raises(RuntimeError, match="broadcast"):  # an error of the formula itself
        compiled.formula(add_)(torch.ones(3), torch.zeros(2), accelerator)
    assert len(attempts) == 1


def test_a_formula_within_a_compiled_graph_is_a_part_of_it():
    double = compiled.formula(lambda x: x * 2)
    x = torch.ones(2)
    assert torch.equal(torch.compile(lambda x: double(x) + 1, fullgraph=True, backend="eager")(x), 2 * x + 1)


def test_each_choice_of_absent_arguments_has_versions_of_its_own(monkeypatch):
    """torch.compile keeps a limited number of them for a function, and one operator stands for several forms."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def scale(x, factor):
        return x * 2 if factor is None else x * factor

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    made = compiled.compile_function(scale)
    with torch._dynamo.config.patch(recompile_limit=2):
        for factor in (None, torch.tensor(3.0)):
            for size in (2, 3):
                assert made(torch.ones(size), factor).tolist() == [2.0 if factor is None else 3.0] * size
    assert len(graphs) == 4


@pytest.mark.slow
def test_every_reference_that_is_compiled_can_be():
    """Traces each into one graph, whose results pass the self-check. Code for a GPU is not generated."""
    for each in [each for each in all_operators() if "compiled" in each.versions]:
        made = torch.compile(each.reference, dynamic=False, fullgraph=True, backend="aot_eager")
        assert each.difference(made, torch.device("cpu")) is None, each.name
