# SPDX-License-Identifier: Apache-2.0
"""Test `zaya bench hbm|gemm|mlp|tune` on the CPU at small sizes: records, exit codes, wrong results, refused sizes."""

import contextlib
import json

import pytest
import torch

from tests.running import MICRO
from zaya_plugin import cli
from zaya_plugin.bench import gemm, probes, tune
from zaya_plugin.plan import recipe_plan

SMALL_CHAIN = ("mlp", "--hidden", "24", "--ffn", "48", "--tokens", "40", "--layers", "2")


def bench(tmp_path, *words):
    """Return the exit code of `zaya bench` and the record."""
    code = cli.main(["bench", *words, "--output", str(tmp_path), "--commit", "abc"])
    return code, json.loads((tmp_path / f"{words[0]}.json").read_text())


def damaged(function, place=-1):
    def call(*given, **named):
        out = function(*given, **named)
        with torch.no_grad():
            out.view(-1)[place] += 1
        return out

    return call


def test_hbm_measures_four_kernels_by_size_and_finds_a_wrong_result(tmp_path, capsys, monkeypatch):
    code, record = bench(tmp_path, "hbm", "--max-bytes", "64K")
    assert code == 0 and record["commit"] == "abc" and record["schema"] == "zaya bench hbm/1"
    rows = record["rows"]
    assert [(row["kernel"], row["bytes"], row["counted_bytes"] // row["bytes"]) for row in rows] == [
        ("copy", 65536, 2),
        ("scale", 65536, 2),
        ("add", 65536, 3),
        ("triad", 65536, 3),
    ]
    for row in rows:
        assert row["tb_per_s"] == pytest.approx(row["counted_bytes"] / row["ms"] / 1e9)
        assert row["share_of_copy"] is None and row["share_of_data_sheet"] is None and row["wrong"] == 0
    assert (tmp_path / "hbm.png").is_file() and "ceiling" not in capsys.readouterr().out, "a CPU has no known rate"
    monkeypatch.setattr(torch, "mul", damaged(torch.mul))
    code, record = bench(tmp_path, "hbm", "--max-bytes", "64K")
    assert code == 1 and [row["wrong"] for row in record["rows"]] == [0, 1, 0, 0]
    assert "WRONG RESULTS: 1 of 4 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hbm", "--max-bytes", "2K"], "--max-bytes=2048: below the smallest arrays. Allowed: 65536 to "),
        (["hbm", "--max-bytes", "64G"], "three arrays of this size are needed"),
        (["hbm", "--max-bytes", "many"], "--max-bytes: 'many' is not a size"),
        (["mlp", "--hidden", "0"], "--hidden: '0' is not a whole number from 1"),
        (["mlp", "--hidden", "9000000", "--ffn", "9000000"], "--hidden=9000000: with --ffn=9000000"),
        (["gemm", *MICRO, "stage.micro_batch_size=3"], "stage.global_batch_size=8"),
        (["tune", *MICRO], "cluster.device=cpu: tuned files are for the accelerator that made them"),
        (["tune", "experiment=zaya1_base", "cluster=mi300x_8"], "cluster.device=cuda: tuned files are for"),
        (["mlp", "--output", "/dev/null"], "--output=/dev/null: "),
        (["collectives", "--table", "t.xyz"], "--table=t.xyz: the name of the file has another ending. Allowed: .md,"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(words, message, capsys, tmp_path):
    output = [] if "--output" in words else ["--output", str(tmp_path / "out")]
    assert cli.main(["bench", *words, *output]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_gemm_measures_the_recipes_products_and_their_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe_plan, "vocabulary_of", lambda recipe: 250)
    monkeypatch.setattr(gemm, "SQUARES", {"cpu": (32, 64)})
    monkeypatch.setattr(gemm, "MULTIPLES", (64,))
    code, record = bench(tmp_path, "gemm", *MICRO, "optim=muon", "nproc=1", "model.num_layers=2")
    rows = record["rows"]
    assert code == 0 and not any(row["wrong"] for row in rows)
    own = [row for row in rows if row["multiple"] is None]
    assert [row["m"] for row in own[:2]] == [32, 64]
    assert [(row["name"], row["direction"]) for row in own[2:5]] == [
        ("queries, keys, values", direction) for direction in ("forward", "dgrad", "wgrad")
    ]
    assert {row["direction"] for row in own if row["name"].startswith("Newton-Schulz")} == {"gram", "square", "apply"}
    experts = [row for row in rows if (row["name"], row["direction"]) == ("gate and up", "forward")]
    assert [(row["multiple"], row["m"], row["n"], row["k"], row["batch"]) for row in experts] == [
        (None, 4, 96, 64, 16),
        (64, 64, 128, 64, 16),
    ]
    for row in rows:
        assert row["tflops"] == pytest.approx(row["gflop"] / row["ms"])
        assert row["share"] == pytest.approx(row["tflops"] / record["large_tflops"])
    monkeypatch.setattr(torch, "mm", damaged(torch.mm))
    found = gemm.products_of([*MICRO])
    monkeypatch.setattr(gemm, "products_of", lambda overrides: (found[0][:1], found[1]))
    assert bench(tmp_path, "gemm", *MICRO)[0] == 1


@pytest.mark.parametrize(
    ("rates", "gflop", "text"),
    [
        ((1e12, 9.6e11, 2e12), None, "2 TFLOP/s at 0.004194 GFLOP; they still rise at 0.004194 GFLOP, the largest"),
        ((1e12, 1.92e12, 2e12), 2 * 64**3 / 1e9, "2 TFLOP/s at 0.004194 GFLOP; they reach 95% of that at 0.0005243"),
        ((2e12, 1e12, 1.99e12), 2 * 32**3 / 1e9, "2 TFLOP/s at 6.554e-05 GFLOP; they reach 95% of that at 6.554e-05"),
    ],
)
def test_gemm_names_the_size_that_saturates_and_shows_its_progress(tmp_path, capsys, monkeypatch, rates, gflop, text):
    steps = []

    class Bar(contextlib.nullcontext):
        def __init__(self, title, total, unit):
            super().__init__(self)
            steps.append(total)

        def update(self):
            steps.append(1)

    def product(sized, device, dtype, calls):
        rate = dict(zip((32, 64, 128), rates, strict=True)).get(sized.m, 1e12)
        return probes.Measured(sized.flops, sized.flops / rate, 0, 1)

    products, recipe = gemm.products_of([*MICRO])
    monkeypatch.setattr(gemm, "products_of", lambda overrides: (products[:2], recipe))
    monkeypatch.setattr(gemm, "SQUARES", {"cpu": (32, 64, 128)})
    for name, value in (("bar", Bar), ("product", product), ("MULTIPLES", ())):
        monkeypatch.setattr(gemm, name, value)
    _, record = bench(tmp_path, "gemm", *MICRO)
    assert record["saturation_gflop"] == gflop and f"square products: {text}" in capsys.readouterr().out
    assert steps == [1 + 3 + 2, *[1] * 6]


def test_mlp_is_compared_with_the_published_rate_and_finds_a_wrong_product(tmp_path, monkeypatch):
    code, record = bench(tmp_path, *SMALL_CHAIN)
    rows = record["rows"]
    assert code == 0 and [row["tokens"] for row in rows[::2]] == [2, 5, 10, 20, 40]
    assert [row["wrong"] for row in rows] == [0] * 10
    assert [row["gflop"] for row in rows[-2:]] == [4 * 2 * 40 * 24 * 48 / 1e9, 12 * 2 * 40 * 24 * 48 / 1e9]
    assert rows[-1]["share"] == pytest.approx(rows[-1]["tflops"] / 732.42, rel=1e-4)
    monkeypatch.setattr(torch.nn.functional, "linear", damaged(torch.nn.functional.linear))
    code, record = bench(tmp_path, *SMALL_CHAIN)
    assert code == 1 and all(row["wrong"] > 0 for row in record["rows"])


# A line of hipBLASLt's log, and the two lines of a result, in the form of Primus' examples/mlperf/gpt_oss_20b.
LOGGED = (
    "hipblaslt-bench --api_method c -m 2048 -n 16384 -k 2048 --lda 2048 --ldb 2048 --ldc 2048 --ldd 2048 --stride_a 0 "
    "--alpha 1.000000 --beta 0.000000 --transA T --transB N --batch_count 1 --scaleA 0 --scaleB 0 --bias_vector "
    "--bias_source d --a_type bf16_r --compute_type f32_r --algo_method index --solution_index 56073"
)
TUNED = (
    "Git Version: fa9cdd18\n"
    "    transA,transB,grouped_gemm,batch_count,m,n,k,a_type,b_type,c_type,compute_type,us,solution_index,gcnArchName,CUs\n"
    "    T,N,0,1,2048,16384,2048,bf16_r,bf16_r,bf16_r,f32_r,250.5,24641,gfx942:sramecc+:xnack-,304\n"
)


def test_hipblaslts_log_becomes_commands_and_its_file_is_read(tmp_path):
    command = tune.bench_command(LOGGED, "/opt/rocm/bin/hipblaslt-bench")
    text = " ".join(command)
    assert text.startswith("/opt/rocm/bin/hipblaslt-bench --api_method c -m 2048 -n 16384 -k 2048 --lda 2048")
    assert "--bias_vector --bias_source d" in text and "index" not in text and "56073" not in text
    assert text.endswith(
        "--compute_type f32_r --rotating 512 --cold_iters 20 --iters 20 --requested_solution -1 "
        "--skip_slow_solution_ratio 0.7"
    )
    assert tune.bench_command("[2026-11-27] hipblasLtCreate", "x") == tune.bench_command("", "x") == []
    path = tmp_path / "tune_hipblas_gemm_results.txt"
    path.write_text(TUNED)
    version, rows = tune.read_override(path)
    assert version == "fa9cdd18" and [row["solution_index"] for row in rows] == ["24641"]
    for broken in ("", TUNED.partition("\n")[2], TUNED.replace("solution_index", "index"), "Git Version: fa9cdd18\n"):
        path.write_text(broken)
        with pytest.raises(ValueError, match="is no tuning file of hipBLASLt"):
            tune.read_override(path)


def test_variables_that_choose_kernels_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    assert cli.main(["bench", "tune", *MICRO]) == 2
    assert "PYTORCH_TUNABLEOP_ENABLED=1: is set" in capsys.readouterr().err
