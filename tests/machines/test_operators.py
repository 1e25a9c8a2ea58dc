# SPDX-License-Identifier: Apache-2.0
"""Test the checks of hip_ops' operators: every operator has a case, and a perturbed result is detected."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hip_ops.runtime.conditions import Result
from hip_ops.runtime.operator import OPERATORS, Operator, all_operators
from hip_ops.versions import VERSIONS
from zaya_plugin.machines import operators
from zaya_plugin.machines.checks import CHECKS as ROWS
from zaya_plugin.machines.checks import Setting
from zaya_plugin.machines.operator_cases import CASES, SMALL

CPU_SETTING, CPU = Setting("cpu", 0, "CPU x86_64", Path("unused")), torch.device("cpu")
TINY = replace(SMALL, rows=24, classes=512, chunk=16, hidden=64)
all_operators()


def figures(name: str, **versions: float) -> dict:
    rows = {v: {"ms": ms, "runs": "hip (kernels=auto)", "ulps": {}} for v, ms in versions.items()}
    return {name: {"compared_ms": 1.0, "flops": None, "versions": rows}}


def test_every_operator_has_a_case_and_every_folder_a_row():
    assert {case.operator or name for name, case in CASES.items()} == set(OPERATORS)
    assert set(VERSIONS) <= set(ROWS)


@pytest.mark.parametrize("folder", VERSIONS)
def test_a_folder_on_this_machine(folder):
    outcome = operators.operators(CPU_SETTING, folder, TINY)
    assert outcome.state == "pass", outcome.reason
    for entry in outcome.figures.values():
        assert entry["versions"]["auto"]["ms"] > 0 and entry["bytes"] > 0 and entry["compared_ms"] > 0
        assert entry["versions"]["reference"]["wrong"] is None


@pytest.mark.parametrize("name", CASES)
def test_a_perturbed_result_is_wrong(monkeypatch, name):
    """One element in a result is off by an eighth, as by a wrong lane; or one place of an order."""
    run = Operator.run

    def perturbed(self, *arguments):
        result = run(self, *arguments)
        into = [t for _, t in operators.tensors_of(result, "")] or [t for _, t in operators.tensors_of(arguments, "")]
        changed = next(t for t in into if t.is_floating_point() and t.numel() or name == "sort_by_expert")
        place = changed.reshape(-1).double().abs().argmax()
        value = changed.reshape(-1)[place]
        changed.view(-1)[place] = value * 1.125 if changed.is_floating_point() else value + 1
        return result

    assert verdict(name) == {None}
    monkeypatch.setattr(Operator, "run", perturbed)
    assert None not in verdict(name)


def verdict(name: str) -> set[str | None]:
    case = CASES[name]
    outcome = operators.measured(OPERATORS[case.operator or name], case, TINY, CPU, lambda text: None)
    return {row.get("wrong") for row in outcome["versions"].values() if "missing" not in row}


def test_a_version_that_is_wrong_at_real_sizes_alone(monkeypatch):
    """The self-check's example passes; the case's rows do not."""
    from hip_ops.ops.grouped_product import grouped_mm

    operator, right = OPERATORS["grouped_rows"], grouped_mm.grouped_rows
    tokens = TINY.tokens

    def wrong(x, matrices, offsets):
        out = right(x, matrices, offsets)
        return out * 1.05 if len(x) == tokens else out

    wrong.__name__ = "grouped_rows"
    monkeypatch.setattr(grouped_mm, "grouped_rows", wrong)
    monkeypatch.setattr(operator, "_chosen", {})
    monkeypatch.setattr(operator, "results", {})
    outcome = operators.operators(CPU_SETTING, "grouped_product", TINY)
    assert outcome.state == "wrong" and outcome.reason.startswith("grouped_rows, grouped_mm: result errs by")


def test_ulps():
    exact = torch.tensor([1.0, -3.0, 100.0, 0.0], dtype=torch.float64)
    mine = exact.bfloat16()
    assert operators.worst_ulps(mine, exact) == 0.0
    mine[2] += 0.5  # bf16 has steps of 0.5 there
    assert operators.worst_ulps(mine, exact) == 1.0
    mine = exact.bfloat16()
    mine[3] = 0.25  # below the root mean square, 50: an ULP of its size
    assert operators.worst_ulps(mine, exact) == 1.0
    mine[0] = math.nan
    assert operators.worst_ulps(mine, exact) == math.inf
    nan = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    assert operators.worst_ulps(nan.bfloat16(), nan) == 0.0


def test_a_faster_version_becomes_an_override():
    outcome = operators.judged("muon", figures("muon_update_", auto=2.0, hip=2.0, triton=1.5, reference=9.0), False)
    assert outcome.state == "slow" and outcome.overrides == {"cluster.kernel_overrides.muon": "triton"}
    assert "triton is 1.33 times faster than hip" in outcome.reason
    outcome = operators.judged("muon", figures("muon_update_", auto=2.0, hip=1.7, triton=1.95), False)
    assert outcome.state == "pass" and not outcome.overrides, "hip is what auto runs"


def test_far_below_a_copy_is_slow():
    outcome = operators.judged("muon", figures("muon_update_", auto=4.0, hip=4.0), False)
    assert outcome.state == "slow" and "25% of a copy; expected 40% or more" in outcome.reason
    assert operators.judged("muon", figures("muon_update_", auto=4.0), True).state == "pass"


def test_conditions(monkeypatch):
    """A CPU compares grouped_mm; a version that differs is named with its condition."""
    outcome = operators.conditions(CPU_SETTING)
    assert outcome.state == "pass" and outcome.figures["compared"]
    from hip_ops.ops.grouped_product import grouped_mm

    right = grouped_mm.grouped_rows

    def grouped_rows(*arguments):
        return right(*arguments) * 1.05

    monkeypatch.setattr(grouped_mm, "grouped_rows", grouped_rows)
    outcome = operators.conditions(CPU_SETTING)
    assert outcome.state == "wrong" and outcome.reason.startswith(
        "grouped_rows, grouped_mm, plain call: call 1: result, element"
    )


def test_a_version_that_no_training_step_calls_is_unsupported(monkeypatch):
    """As grouped_mm behind triton on ROCm, which waits for the host in a captured graph."""
    failing = Result("grouped_rows", "grouped_mm", "captured graph", "RuntimeError: operation not permitted")
    accelerator = Setting("cuda", 1, "AMD Instinct MI300X", Path("unused"))
    order = {"grouped_rows": ("triton", "grouped_mm", "reference")}
    monkeypatch.setattr(operators, "device_of", lambda setting: CPU)
    monkeypatch.setattr(operators, "ZAYA1_BASE", TINY)
    monkeypatch.setattr(Operator, "running", lambda self, device: order.get(self.name, ("reference",)))
    results = {"grouped_rows": [failing]}
    monkeypatch.setattr(operators.self_check_conditions, "check", lambda operator, *_: results.get(operator.name, []))
    outcome = operators.conditions(accelerator)
    assert outcome.state == "unsupported" and outcome.reason.startswith(
        "grouped_rows, grouped_mm, captured graph: Runtime"
    )
    assert outcome.figures["unsupported"] and not outcome.figures["wrong"]
    numbers = "call 2: result, element 3: it gives 2, the reference 1"
    for changes in (
        {"condition": "default stream", "difference": numbers},
        {"condition": "default stream"},
        {"condition": "full device"},
        {"difference": numbers},
    ):
        results["grouped_rows"] = [failing, failing._replace(**changes)]
        assert operators.conditions(accelerator).state == "wrong", changes
    results["grouped_rows"] = [failing]
    order["grouped_rows"] = ("grouped_mm", "reference")  # without Triton a step calls it
    assert operators.conditions(accelerator).state == "wrong"
    order["grouped_rows"] = ("triton", "grouped_mm", "reference")
    results["grouped_rows"].append(failing._replace(version="triton"))
    outcome = operators.conditions(accelerator)
    assert outcome.state == "wrong" and outcome.reason.startswith("grouped_rows, triton")
