# SPDX-License-Identifier: Apache-2.0
"""Test the division of a step's time by the code that runs: names of kernels, shares that add up, and the stored
prediction for the MI300X (ZAYA_UPDATE_GOLDEN=1 writes it).
"""

import json
import os
import re
from pathlib import Path

import pytest

import hip_ops
from hip_ops.saved_bytes import chunk_for
from hip_ops.versions import VERSIONS
from tools import step_sources
from zaya_plugin.bench import step_code
from zaya_plugin.config.compose import compose
from zaya_plugin.plan.prediction import predict
from zaya_plugin.plan.step_source import load, source_of

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORD = RECORDS / "step40-4xh200-copy_engines.json"  # as in the table of docs/verification.md
MI300X = {folder: "hip" if "hip" in names else "triton" for folder, names in VERSIONS.items()}
TRITON_ONLY = {"router_mlp", "grouped_product"}


def mi300x_step(record: dict) -> dict:
    words = ["experiment=zaya1_base", "cluster=mi300x_8", "data.path=none", "stage.global_batch_size=128"]
    words += ["parallel.recompute_granularity=selective", "parallel.recompute_modules=[permute]"]  # as the record
    words += ["stage.micro_batch_size=4"]
    return predict(compose(words), 8, source_of(record)).record()


def test_the_stored_prediction_is_that_of_the_record():
    record = load(RECORD)
    result = mi300x_step(record)
    times = step_sources.by_source(result, record)
    assert sum(times.values()) == pytest.approx(result["step"]["ms"], rel=1e-12)
    computed = step_sources.to_store(result, record)
    if os.environ.get("ZAYA_UPDATE_GOLDEN"):
        step_code.STORED.write_text(json.dumps(computed, indent=1) + "\n")
    stored = step_code.stored()
    assert stored == computed, "run: ZAYA_UPDATE_GOLDEN=1 python -m pytest tests/bench/test_step_code.py"
    # nearly all of this part is of one source
    rows = {row["part"]: row["ms"] for row in result["parts"]}
    slowed = 1 + rows["slowed"] / sum(
        ms for part, ms in rows.items() if part not in (*step_sources.PARTS_WITHOUT_COLLECTIVES, "slowed")
    )
    assert times["attention"] == pytest.approx(rows["attention"] * slowed, rel=0.01)
    assert times["collectives"] == pytest.approx(result["step"]["exposed_communication_ms"])


def test_every_code_has_its_share():
    times = step_code.stored()["ms"]
    rows = step_code.by_code(times, MI300X, library=True, objects=())
    share = {row["code"]: row["share"] for row in rows}
    assert sum(share.values()) == pytest.approx(1) and sum(row["ms"] for row in rows) == pytest.approx(
        sum(times.values())
    )
    assert [row["verified"] for row in rows] == [True] + [False] * (len(rows) - 1)
    assert share[step_code.LIBRARY] == pytest.approx(0.18, abs=0.02)
    assert share["Triton, compiled at the site"] == pytest.approx(0.26, abs=0.02)
    assert share[step_code.LIBRARIES["matrix products"]] == pytest.approx(0.34, abs=0.02)
    assert share[step_code.LIBRARIES["attention"]] == pytest.approx(0.19, abs=0.02)
    assert sum(ms for source, ms in times.items() if source in (step_code.TORCH, step_code.UNLISTED)) < 0.04 * sum(
        times.values()
    )


def test_what_is_shipped_decides_what_is_verified():
    times = step_code.stored()["ms"]
    by_objects = {row["code"]: row for row in step_code.by_code(times, MI300X, library=True, objects=TRITON_ONLY)}
    assert {*by_objects[step_code.OBJECTS]["of"]} == TRITON_ONLY & times.keys()
    assert "Triton, compiled at the site" not in by_objects
    from_source = {row["code"]: row for row in step_code.by_code(times, MI300X, library=False, objects=())}
    assert not any(row["verified"] for row in from_source.values()) and "HIP, built at the site" in from_source
    changed = MI300X | {"rms_norm": "compiled", "cca_prologue": "reference"}
    rows = {row["code"]: row["of"] for row in step_code.by_code(times, changed, library=True, objects=())}
    assert "rms_norm" in rows[step_code.LIBRARIES["formulas"]]
    assert "cca_prologue" in rows[step_code.LIBRARIES[step_code.TORCH]]


def test_the_kernels_of_hip_ops_are_known_by_name():
    """Every Triton kernel of training has its operator, and every kernel in the shipped library has one."""
    folder = Path(hip_ops.__file__).parent / "ops"
    kernels = {
        (name, path.parent.name)
        for path in folder.glob("*/*.py")
        if path.parent.name != "decode_step"
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert len(kernels) > 25 and {operator for _, operator in kernels} == VERSIONS.keys() - {
        "gradient_addition",
        "dense_product",
    }
    assert {(name, step_sources.source_of(name)) for name, _ in kernels} == kernels
    library = (folder.parent / "shipped" / "gfx942" / "libhip_ops.so").read_bytes()
    names = {name.decode() for name in re.findall(rb"ho_\w+(?=\.kd\0)", library)}
    assert len(names) > 100 and {step_sources.source_of(name) for name in names} == VERSIONS.keys() - TRITON_ONLY - {
        "dense_product"
    }


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x64", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("attn_fwd", "attention"),
        ("triton_per_fused__fused_rms_norm__fused_rms_norm_backward__to_copy_add_mul_0", "formulas"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "collectives"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "torch"),
    ],
)
def test_kernels_of_libraries(name, source):
    assert step_sources.source_of(name) == source


FORMULA_LIMIT = 0.005  # of a step, above which a formula gets a kernel of its own
# Steps of 65,536 tokens a device with the router's kernels, by device count and attention.
OF_TODAY = (
    "step40-h200-quack",
    "step40-h200-cudnn",
    "step40-h200-one_pass",
    "step40-4xh200",
    "step40-2xh200-fused_router",
)


@pytest.mark.parametrize("name", OF_TODAY)
def test_the_formulas_that_inductor_compiles_are_below_the_limit(name):
    """All of them together, and with every kernel of their part that was too short to be listed."""
    record = load(RECORDS / f"{name}.json")
    kernels = [(row["part"], one) for row in record["parts"] for one in row["longest"]]
    formulas = [(part, one["ms"]) for part, one in kernels if step_sources.source_of(one["name"]) == "formulas"]
    assert {part for part, _ in formulas} == {"norms"} and len(formulas) >= 4
    listed = sum(ms for _, ms in formulas)
    norms = next(row for row in record["parts"] if row["part"] == "norms")
    unlisted = step_sources.shares_of(norms)[step_code.UNLISTED] * norms["ms"]
    assert 0.0013 < listed / record["traced"]["ms"] < 0.0019
    assert max(ms for _, ms in formulas) / record["traced"]["ms"] < 0.0006
    assert (listed + unlisted) / record["traced"]["ms"] < FORMULA_LIMIT


def test_the_addition_of_rounded_gradients_would_be_above_it():
    """Where a device has no product into fp32: 10 bytes an element of the head's matrix for each chunk of tokens, and of
    the projections' for each micro-batch. So it is an operator with a HIP kernel.
    """
    recipe = compose(["experiment=zaya1_base", "cluster=mi300x_8", "data.path=none", "stage.global_batch_size=128"])
    hidden, classes, micro_batches = recipe.model.hidden_size, 262_272, 4
    tokens = 4 * recipe.stage.seq_length  # as in the stored prediction
    chunks = micro_batches * -(-tokens // chunk_for(tokens, classes, 2))
    heads = recipe.model.num_attention_heads, 2 * recipe.model.num_query_groups  # keys; values have as many channels
    projections = recipe.model.num_layers * hidden * recipe.model.kv_channels * (2 * heads[0] + heads[1])
    bytes_added = 10 * (chunks * classes * hidden + micro_batches * projections)
    ms = 1e3 * bytes_added / (recipe.machine.copy_tb_per_s * 1e12)
    assert chunks == 32 and ms == pytest.approx(41.7, abs=0.5)
    share = ms / step_code.stored()["step_ms"]
    assert share == pytest.approx(0.0245, abs=0.002) and share > 4 * FORMULA_LIMIT
    assert VERSIONS["gradient_addition"][0] == "hip"


def test_kernels_that_run_at_once_do_not_exceed_their_part():
    def row(ms, *kernels):
        return {"ms": ms, "longest": [{"name": name, "count": 1, "ms": its} for name, its in kernels]}

    alone = step_sources.shares_of(row(10.0, ("rms_norm_forward_kernel", 6.0), ("nvjet_x", 2.0)))
    assert alone == pytest.approx({"rms_norm": 0.6, "matrix products": 0.2, "unlisted": 0.2})
    at_once = step_sources.shares_of(row(10.0, ("rms_norm_forward_kernel", 12.0), ("nvjet_x", 4.0)))
    assert at_once == pytest.approx({"rms_norm": 0.75, "matrix products": 0.25, "unlisted": 0})
