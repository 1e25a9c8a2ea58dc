# SPDX-License-Identifier: Apache-2.0
"""Test the check `verified_code` of `zaya doctor`, and the same table in docs/environment.md (ZAYA_UPDATE_GOLDEN=1 writes
it).
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hip_ops.runtime import build, launchers, operator
from hip_ops.versions import VERSIONS
from tests.generated_table import check_table
from zaya_plugin.bench import step_code
from zaya_plugin.machines import verified_code
from zaya_plugin.machines.check_process import examine
from zaya_plugin.machines.checks import CHECKS, DOCTOR, Setting

CPU_SETTING = Setting("cpu", 0, "CPU x86_64", Path("unused"), chosen="cpu")
PAGE = Path(__file__).parents[2] / "docs" / "environment.md"
BEGIN, END = "<!-- code: made by tests/machines/test_verified_code.py -->\n", "<!-- end of code -->\n"


def test_doctor_lists_the_code_of_a_step():
    outcome = examine(CHECKS["verified_code"], CPU_SETTING)
    figures = outcome.figures
    assert DOCTOR in CHECKS["verified_code"].commands and outcome.state == "pass"
    assert figures["target"] == "gfx942" and figures["prediction"] is True
    assert sum(row["share"] for row in figures["rows"]) == pytest.approx(1)
    assert figures["verified_share"] == pytest.approx(sum(row["share"] for row in figures["rows"] if row["verified"]))
    assert outcome.reason.startswith(
        f"{100 * figures['verified_share']:.1f} % of a step in verified code (PREDICTION for 8"
    )
    lines = "\n".join(outcome.details)
    assert lines.startswith("verified ") and "\nunverified  34.3 %  hipBLASLt (head, projections)\n" in lines
    assert "shipped library (HIP): rms_norm, newton_schulz, cca_prologue" in lines
    assert json.loads(json.dumps(figures)) == figures


def test_a_library_that_is_built_at_the_site_is_not_verified(monkeypatch):
    monkeypatch.setenv(build.LIBRARY_VARIABLE, "source")
    outcome = verified_code.verified_code(CPU_SETTING)
    assert "HIP, built at the site" in [row["code"] for row in outcome.figures["rows"]]
    assert step_code.LIBRARY not in [row["code"] for row in outcome.figures["rows"]]


def test_shipped_objects_count_where_they_run(monkeypatch):
    for target in ("gfx942", "gfx950"):
        assert verified_code.shipped_operators(target) == {"router_mlp", "grouped_product"}
    monkeypatch.setenv(build.LIBRARY_VARIABLE, "source")
    assert verified_code.shipped_operators("gfx942") == frozenset()


def test_on_an_amd_device_the_versions_that_run_count(monkeypatch):
    """A stand-in for the device: its target, and operators of which one runs another version and one has none."""

    def first(folder):
        def version(device):
            assert device == torch.device("cuda", 0)
            if folder == "muon":
                raise ValueError("not available")
            return "compiled" if folder == "rms_norm" else "triton"

        return version

    operators = [SimpleNamespace(folder=folder, first=first(folder)) for folder in VERSIONS]
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(launchers, "target_of", lambda device: "gfx90a")
    monkeypatch.setattr(operator, "all_operators", lambda: operators)
    outcome = verified_code.verified_code(Setting("cuda", 8, "AMD Instinct MI250X", Path("unused")))
    rows = {row["code"]: row["of"] for row in outcome.figures["rows"]}
    assert outcome.figures["target"] == "gfx90a" and outcome.figures["verified_share"] == 0
    assert (
        "rms_norm" in rows[step_code.LIBRARIES["formulas"]]
        and "grouped_product" in rows["Triton, compiled at the site"]
    )
    assert rows["not available"] == ["muon"]


def test_the_first_version_is_that_of_the_choice():
    for one in operator.all_operators():
        assert one.first(torch.device("cpu")) == "reference"


def table() -> str:
    rows = verified_code.verified_code(CPU_SETTING).figures["rows"]
    lines = ["| code | share of the step | verified | operators |", "|---|---|---|---|"]
    for row in rows:
        operators = ", ".join(f"`{source}`" for source in row["of"] if source in VERSIONS)
        lines.append(
            f"| {row['code']} | {verified_code.percent(row['share'])} | {'yes' if row['verified'] else 'no'} | {operators} |"
        )
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table():
    check_table(PAGE, BEGIN, END, table(), "tests/machines/test_verified_code.py")
