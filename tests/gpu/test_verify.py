# SPDX-License-Identifier: Apache-2.0
"""`zaya verify` on an accelerator: nothing is wrong, and every version of an operator has an error and a time."""

import json
import os

import pytest
import torch

from zaya_plugin.machines.software import VISIBLE


@pytest.mark.parametrize(
    "lines",
    [
        ("environment", "rates", "rms_norm", "grouped_product", "newton_schulz"),
        ("conditions",),
        ("all_reduce", "graph_capture", "demo_losses"),
        pytest.param(("zaya1_base", "hazards"), marks=pytest.mark.alone),  # takes 85 % of the free memory
    ],
    ids="-".join,
)
def test_nothing_is_wrong(zaya, tmp_path, lines, monkeypatch):
    if not any(map(os.environ.get, VISIBLE)):  # also on a machine that has fewer devices than its recipe
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    out = tmp_path / "verify.json"
    print(zaya("verify", "--only", ",".join(lines), "--output", out))  # its exit status is 0
    found = {entry["check"]: entry for entry in json.loads(out.read_text())["checks"]}
    may_also_be = {  # on one device; without llvm-objdump; where the machine's recipe captures nothing
        "all_reduce": "skipped",
        "hazards": "skipped",
        "graph_capture": "unsupported",
        "conditions": "unsupported",
    }
    assert list(found) == list(lines)
    for name, entry in found.items():
        assert entry["state"] in ("pass", "slow", may_also_be.get(name)), entry
    for folder in {"rms_norm", "grouped_product", "newton_schulz"} & found.keys():
        for operator in found[folder]["figures"].values():
            ran = {version for version, row in operator["versions"].items() if row.get("ms")}
            assert {"auto", "reference"} < ran, operator
