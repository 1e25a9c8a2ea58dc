# SPDX-License-Identifier: Apache-2.0
"""Grouped products as operators: the torch reference against fp64, errors by name, fakes; the table of Triton's configurations."""

import json

import pytest
import torch

import hip_ops
from hip_ops import backend, operator
from hip_ops.reference import grouped_product as reference
from hip_ops.triton_kernels import grouped_configs as configs
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows

CASES = [
    Grouped((3, 0, 40, 5), 24, 36),
    Grouped((0, 0), 16, 8, "fp32"),
    Grouped((7,), 1, 1, "fp16", nobody=0),
    Grouped((1, 2, 3), 9, 5, "bf16", pad=3),
]


@pytest.mark.parametrize("module", [hip_ops, reference], ids=["operator", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(module, case):
    for flag in (False, True):
        check_rows(module, case, flag)
        check_outer(module, case, flag)
    check_outer(module, case, True, out_dtype=case.random(1).dtype)


def test_fp64_is_exact_to_fp64():
    x, w, offsets = (
        torch.randn(6, 3, dtype=torch.float64),
        torch.randn(2, 3, 4, dtype=torch.float64),
        torch.tensor([2, 6], dtype=torch.int32),
    )
    torch.testing.assert_close(hip_ops.grouped_rows(x, w, offsets), torch.cat((x[:2] @ w[0], x[2:] @ w[1])))
    out = torch.zeros(2, 3, 4, dtype=torch.float64)
    y = torch.randn(6, 4, dtype=torch.float64)
    assert hip_ops.grouped_outer_(out, x, y, offsets) is out
    torch.testing.assert_close(out, torch.stack((x[:2].T @ y[:2], x[2:].T @ y[2:])))


def test_operators_as_torch_sees_them():
    x, w, offsets = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([2, 5], dtype=torch.int32)
    torch.library.opcheck(torch.ops.hip_ops.grouped_rows.default, (x, w, offsets))
    a, b, out = torch.randn(6, 4), torch.randn(6, 3), torch.randn(2, 4, 3)
    torch.library.opcheck(torch.ops.hip_ops.grouped_outer_.default, (out, a, b, offsets, True))


X, W, OUT, OFFSETS = (
    torch.zeros(6, 4),
    torch.zeros(2, 4, 3),
    torch.zeros(2, 4, 3),
    torch.tensor([2, 6], dtype=torch.int32),
)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: hip_ops.grouped_rows(X, W[0], OFFSETS), "matrices has shape (4, 3); it must be [E, k, n]"),
        (lambda: hip_ops.grouped_rows(X[:, :3], W, OFFSETS), "x has shape (6, 3); it must be [T, 4]"),
        (
            lambda: hip_ops.grouped_rows(X, W, OFFSETS.long()),
            "offsets is torch.int64 (2,); it must be torch.int32 (2,)",
        ),
        (
            lambda: hip_ops.grouped_rows(X, W.bfloat16(), OFFSETS),
            "matrices is torch.bfloat16; it must be torch.float32",
        ),
        (lambda: hip_ops.grouped_rows(X, W, OFFSETS.to("meta")), "offsets is on meta; it must be on cpu"),
        (lambda: hip_ops.grouped_outer_(OUT.mT, X, X[:, :3], OFFSETS), "it must be [E, m, n] with rows without gaps"),
        (
            lambda: hip_ops.grouped_outer_(OUT.half(), X, X[:, :3], OFFSETS),
            "out is torch.float16; it must be torch.float32",
        ),
        (
            lambda: hip_ops.grouped_outer_(OUT, X, X, OFFSETS),
            "have shapes (6, 4), (6, 4); it must be [T, 4] and [T, 3]",
        ),
        (
            lambda: hip_ops.grouped_outer_(OUT, X, X[:, :3], OFFSETS[:1]),
            "offsets is torch.int32 (1,); it must be torch.int32 (2,)",
        ),
        (
            lambda: hip_ops.grouped_outer_(OUT, X, X[:, :3].double(), OFFSETS),
            "b is torch.float64; it must be torch.float32",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value) and str(raised.value).startswith("hip_ops.grouped_")


def test_a_backend_that_lacks_them_is_told_by_warm_up_and_refused():
    from hip_ops import grouped_product

    mine = [grouped_product._rows, grouped_product._outer]
    with backend.use_backend("hip"):
        assert operator.warm_up("cpu", mine) == {"grouped_rows": "no hip version", "grouped_outer_": "no hip version"}
        assert "no hip version" in grouped_product.wrong_on(torch.device("cpu"))
        with pytest.raises(ValueError, match="grouped_rows has no hip version"):
            hip_ops.grouped_rows(X.bfloat16(), W.bfloat16(), OFFSETS)


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_table_has_every_kind_and_fits_the_machine(architecture):
    part = configs.read_table()[architecture]
    assert part["measured_on"] and {row["kind"] for row in part["rows"]} == set(configs.KINDS)
    for row in part["rows"]:
        config = row["config"]
        assert config.shared_memory(4 if row["kind"] == "outer" else 2) <= configs.SHARED_MEMORY[architecture]
        assert config.block_n // config.parts >= 16 and config.parts in (
            (1, 2) if row["kind"] != "outer" else (1, 2, 4)
        )
        if architecture == "sm_90":  # a warp group takes 64 rows or more
            assert config.block_m % (64 * config.num_warps // 4) == 0
        else:
            assert not config.descriptors
        assert configs.choose_config(architecture, row["kind"], row["rows"], row["k"], row["n"]) == config


def test_configurations_of_devices_that_the_table_does_not_know():
    assert not configs.choose_config("sm_80", "rows", 100, 64, 64).descriptors
    assert configs.choose_config("gfx950", "rows", 100, 64, 64) == configs.choose_config("gfx942", "rows", 100, 64, 64)
    assert configs.ANY_NVIDIA.shared_memory(2) <= 98304


def test_written_table_reads_back(tmp_path):
    path = tmp_path / "table.json"
    config = configs.GroupedConfig(block_n=128, parts=2)
    configs.write_table(
        "sm_90", [{"kind": "outer", "rows": 8, "k": 9, "n": 7, "config": config, "ms": 0.5}], "a test", path
    )
    written = json.loads(path.read_text())
    assert written["sm_90"] == {
        "measured_on": "a test",
        "rows": [{"kind": "outer", "rows": 8, "k": 9, "n": 7, "config": {"block_n": 128, "parts": 2}, "ms": 0.5}],
    }
    assert written["gfx942"] == json.loads(configs.TABLE.read_text())["gfx942"]
    assert configs.read_table(path)["sm_90"]["rows"][0]["config"] == config
