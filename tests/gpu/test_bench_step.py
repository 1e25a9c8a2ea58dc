# SPDX-License-Identifier: Apache-2.0
"""Test `zaya bench step` on a device: kernels get their parts, launched one by one and as a graph; the anchor runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_plugin.bench.step_parts import PARTS
from zaya_plugin.plan.flops import Shape, training_flops

pytestmark = pytest.mark.alone  # shares of a step's time are bounded
LAYERS, LENGTH, SIZE, MICRO_BATCHES, ROWS = 2, 2048, 4, 2, 32_768
RECIPE = (
    "experiment=zaya1_base",
    "cluster=gpu",
    "logger=none",
    "nproc=1",
    f"--random-tokens={ROWS}",
    f"model.num_layers={LAYERS}",
    f"stage.seq_length={LENGTH}",
    f"stage.micro_batch_size={SIZE}",
    f"stage.global_batch_size={SIZE * MICRO_BATCHES}",
    "cluster.kernels=auto",
)
SHAPE = Shape(LAYERS, 2048, 8, 2, 128, 16, 2048, 256, ROWS)


@pytest.fixture(scope="module")
def measured(zaya, tmp_path_factory):
    """measured(name, *words) -> the record; each name runs once."""
    known = {}

    def run(name, *words):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            print(zaya("bench", "step", *RECIPE, f"--output={folder}", "--steps=3", *words))
            known[name] = json.loads((folder / "step.json").read_text())
            known[name]["trace_bytes"] = (folder / "trace.json.gz").stat().st_size
        return known[name]

    return run


def rows_of(record):
    rows = {row["part"]: row for row in record["parts"]}
    assert list(rows) == list(PARTS) and sum(row["share"] for row in rows.values()) == pytest.approx(1, abs=1e-9)
    assert sum(row["ms"] for row in rows.values()) == pytest.approx(record["traced"]["ms"])
    return rows


def test_kernels_are_distinguished(measured, record_property):
    record = measured("eager")
    rows, step, rates = rows_of(record), record["step"], record["rates"]
    record_property("rows", {part: (row["ms"], row["roofline"]) for part, row in rows.items()})
    assert (
        record["traced"]["source"] == "kernels" and record["traced"]["launches"] > 100 < record["traced"]["activities"]
    )
    assert 100 < rates["gemm_tflops"] < 2500 and 1 < rates["copy_tb_per_s"] < 10 and record["trace_bytes"] > 10_000
    tokens = LENGTH * SIZE * MICRO_BATCHES
    assert step["tflops_per_device"] == pytest.approx(training_flops(SHAPE, tokens, LENGTH) / step["ms"] * 1e3 / 1e12)
    assert 0 < step["share_of_gemm"] < 1 and 1 < step["allocated_gib"] <= step["reserved_gib"]
    for part in ("embedding", "norms", "projections", "prologue", "attention", "router", "experts", "head"):
        assert rows[part]["forward_ms"] > 0 and rows[part]["backward_ms"] > 0, part
    assert rows["gradients"]["ms"] > 0 and rows["optimizer"]["ms"] > 0
    assert rows["other"]["share"] < 0.03, rows["other"]["longest"]
    for part in ("projections", "attention", "experts", "head", "optimizer"):
        assert 0.02 < rows[part]["gemm_share"] < 1.05, (part, rows[part])
    names = {part: " ".join(kernel["name"] for kernel in row["longest"]) for part, row in rows.items()}
    assert re.search(r"flash|fmha|sdpa|cudnn", names["attention"], re.IGNORECASE), names["attention"]
    assert re.search(r"rms_norm|merge|residual", names["norms"], re.IGNORECASE), names["norms"]
    assert re.search(r"swiglu", names["experts"], re.IGNORECASE), names["experts"]
    attention = re.compile(r"flash_(fwd|bwd)|fmha|cudnn_generated.*sdpa", re.IGNORECASE)
    assert not [part for part, text in names.items() if part != "attention" and attention.search(text)]


def test_a_graph_has_the_parts_of_the_step_it_was_made_of(measured, record_property):
    eager, graph = measured("eager"), measured("graph", "cluster.graphs=full_iteration")
    rows, expected = rows_of(graph), rows_of(eager)
    record_property("ms", {part: (row["ms"], expected[part]["ms"]) for part, row in rows.items()})
    assert graph["traced"]["from_graph"] and not eager["traced"]["from_graph"]
    assert graph["traced"]["launches"] < eager["traced"]["launches"] / 2
    assert abs(graph["traced"]["activities"] - eager["traced"]["activities"]) < 0.15 * eager["traced"]["activities"]
    for part in ("norms", "projections", "prologue", "attention", "experts", "head"):
        assert rows[part]["activities"] == pytest.approx(expected[part]["activities"], rel=0.02), part
        assert rows[part]["ms"] == pytest.approx(expected[part]["ms"], rel=0.25), part
    assert rows["other"]["share"] < 0.05, rows["other"]["longest"]


def test_without_an_optimizer_there_is_neither_its_time_nor_its_memory(measured):
    eager, record = measured("eager"), measured("forward_backward", "--forward-backward-only")
    assert rows_of(record)["optimizer"]["ms"] == 0 and record["step"]["allocated_gib"] < eager["step"]["allocated_gib"]
    folder = record["recipe"]["run_dir"]
    script = Path(__file__).parents[2] / "benchmarks" / "step_vs_transformers.py"
    print(subprocess.run([sys.executable, script, folder], stdout=subprocess.PIPE, text=True, check=True).stdout)
    anchor = json.loads((Path(folder) / "step.json").read_text())["anchor"]
    assert "error" not in anchor, anchor
    assert anchor["compiled"] and anchor["tokens"] == record["step"]["tokens"] == LENGTH * SIZE * MICRO_BATCHES
    assert anchor["micro_batches"] == record["step"]["micro_batches"] == MICRO_BATCHES
    assert anchor["ratio"] == pytest.approx(record["step"]["tokens_per_s"] / anchor["tokens_per_s_per_device"])
    assert abs(anchor["loss"] - 10.4) < 0.5  # fresh weights: ln 32768
