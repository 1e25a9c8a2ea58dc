# SPDX-License-Identifier: Apache-2.0
"""Test how the comparison with transformers joins a record; tests/bench/test_bench_step.py runs it."""

import json
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "step40-4xh200.json"


def test_the_anchors_figures_join_the_record(script, tmp_path):
    script, record = script("step_vs_transformers"), json.loads(RECORD.read_text())
    step = record["step"]
    (tmp_path / "step.json").write_text(json.dumps(record))
    anchor = {"what": "transformers", "ms": 200.0, "allocated_gib": 99.0}
    anchor["tokens_per_s_per_device"] = step["tokens_per_s_per_device"] / 2
    (tmp_path / "anchor.json").write_text(json.dumps(anchor))
    joined = script.with_anchor(tmp_path)
    assert joined["ratio"] == 2.0 and joined["tflops_per_device"] == pytest.approx(step["tflops_per_device"] / 2)
    assert json.loads((tmp_path / "step.json").read_text()) == record | {"anchor": joined}
    assert "ours / theirs: 2.000" in script.text(joined) and "99.0 GiB" in script.text(joined)
    (tmp_path / "anchor.json").write_text(json.dumps({"what": "transformers", "error": "out of memory: 3 GiB"}))
    assert script.text(script.with_anchor(tmp_path)) == "anchor: transformers: out of memory: 3 GiB"
