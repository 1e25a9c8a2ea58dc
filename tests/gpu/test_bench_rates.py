# SPDX-License-Identifier: Apache-2.0
"""Test `zaya bench hbm|gemm|mlp|tune` on a device: right results at plausible rates; torch reads its own tuned file, and
refuses that of another version.
"""

import json

import pytest
import torch
from torch.cuda import tunable

RECIPE = ("experiment=zaya1_base", "cluster=gpu", "nproc=1", "model.num_layers=2", "stage.seq_length=2048")
RECIPE += ("stage.micro_batch_size=2", "stage.global_batch_size=2")


@pytest.fixture(scope="module")
def measured(zaya, tmp_path_factory):
    """measured(kind, *words) -> the record's folder and the record."""

    def run(kind, *words):
        folder = tmp_path_factory.mktemp(kind)
        print(zaya("bench", kind, *words, f"--output={folder}"))
        return folder, json.loads((folder / f"{kind}.json").read_text())

    return run


@pytest.mark.alone
def test_memory_and_chain(measured):
    rows = measured("hbm", "--max-bytes=300M")[1]["rows"]
    assert {row["wrong"] for row in rows} == {0} and max(row["tb_per_s"] for row in rows) > 0.5
    _, record = measured("mlp", "--hidden=4096", "--ffn=8192", "--tokens=4096", "--layers=2")
    assert {row["wrong"] for row in record["rows"]} == {0} and record["rows"][-1]["tflops"] > 50


@pytest.mark.alone
def test_products_of_a_recipe(measured):
    record = measured("gemm", *RECIPE)[1]
    assert {row["wrong"] for row in record["rows"]} == {0}
    experts = [row for row in record["rows"] if row["name"] == "gate and up" and row["multiple"] is None]
    assert [row["direction"] for row in experts] == ["forward", "dgrad", "wgrad"]
    assert all(0.02 < row["share"] < 1.5 for row in experts)


def test_torch_reads_its_tuned_file_and_refuses_that_of_another_version(measured, tmp_path):
    folder, record = measured("tune", *RECIPE)
    assert record["accepted"] and {row["wrong"] for row in record["rows"]} == {0}
    assert sum(row["recorded"] == "yes" for row in record["rows"]) >= 4
    assert record["environment"]["PYTORCH_TUNABLEOP_FILENAME"] == str(folder / "tunableop_results.csv")
    results = folder / "tunableop_results0.csv"
    other = tmp_path / "other0.csv"
    version = f"Validator,PT_VERSION,{record['validators']['PT_VERSION']}"
    assert version in results.read_text()
    other.write_text(results.read_text().replace(version, "Validator,PT_VERSION,1.0.0"))
    tunable.set_filename(str(results))
    tunable.enable(True)
    try:
        tunable.tuning_enable(False)
        assert torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda")).sum() == 16**3
        assert tunable.read_file(str(results)) and not tunable.read_file(str(other))
    finally:
        tunable.enable(False)
