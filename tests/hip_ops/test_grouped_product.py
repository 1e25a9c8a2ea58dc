# SPDX-License-Identifier: Apache-2.0
"""Test grouped products as operators: the reference against fp64, named errors, fakes, the choice of versions,
Triton's table.
"""

import functools
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import hip_ops
from benchmarks.research.tuning_tables import SHARED_MEMORY, shared_memory, write_grouped
from hip_ops import errors, use_kernels
from hip_ops.ops import grouped_product
from hip_ops.ops.grouped_product import configs, grouped_mm, quack, reference
from hip_ops.runtime import quack_tiles, self_check
from hip_ops.runtime.operator import warm_up
from tests.hip_ops.fake_gpu import CPU, GPU, FakeGpu
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from tests.hip_ops.product_cases import ulp

CASES = [
    Grouped((3, 0, 40, 5), 24, 36),
    Grouped((0, 0), 16, 8, "fp32"),
    Grouped((7,), 1, 1, "fp16", padding_rows=0),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype):
    """From one row to more than the reference pads, at the start and at the end of an expert's rows."""
    x, w = torch.randn(40, 24).to(dtype), torch.randn(2, 24, 36).to(dtype)
    whole = hip_ops.grouped_rows(x, w, torch.tensor([0, 40], dtype=torch.int32))
    for count in range(1, 40):
        parts = [
            hip_ops.grouped_rows(part, w, torch.tensor([0, count], dtype=torch.int32))
            for part in (x[:count], x[-count:])
        ]
        assert torch.equal(parts[0], whole[:count]) and torch.equal(parts[1], whole[-count:]), count


def summed(version: str, dtype: torch.dtype, out_dtype: torch.dtype, make) -> tuple[torch.Tensor, ...]:
    """a and b of numbers from `make`, a block `start`, the products of `version`, and the block with them added.

    The dtype of the products is what the version adds: grouped_mm rounds them to the operands' dtype, the reference
    does not.
    """
    a, b, offsets = make(24, 16).to(dtype), make(24, 8).to(dtype), torch.tensor([3, 3, 20], dtype=torch.int32)
    start = make(3, 16, 8).to(out_dtype)
    added = dtype if version == "grouped_mm" else torch.promote_types(dtype, torch.float32)
    with use_kernels(grouped_product=version):
        product = torch.full((3, 16, 8), torch.nan, dtype=added)
        hip_ops.grouped_outer_(product, a, b, offsets, accumulate=False)
        written = hip_ops.grouped_outer_(torch.full_like(start, torch.nan), a, b, offsets, accumulate=False)
        total = hip_ops.grouped_outer_(start.clone(), a, b, offsets)
    assert torch.equal(written, product.to(out_dtype))
    return a, b, start, product, total


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of the rows that `summed` gives to the three experts."""
    return torch.stack([a[:3].T @ b[:3], torch.zeros(a.shape[1], b.shape[1], dtype=a.dtype), a[3:20].T @ b[3:20]])


SUMS = [
    (version, dtype, out_dtype)
    for version, dtypes in (
        ("reference", (torch.float64, torch.float32, torch.bfloat16)),
        ("grouped_mm", (torch.float32, torch.bfloat16)),
    )
    for dtype in dtypes
    for out_dtype in dict.fromkeys((dtype if dtype == torch.float64 else torch.float32, dtype))
]


@pytest.mark.parametrize("version, dtype, out_dtype", SUMS, ids=str)
def test_adding_to_a_block_is_the_product_and_a_sum(version, dtype, out_dtype):
    """Bit for bit, with multiples of 1/8, whose sums are exact in any order: only where a version rounds is left."""
    a, b, start, product, total = summed(
        version, dtype, out_dtype, lambda *shape: torch.randint(-64, 65, shape, dtype=torch.float64) / 8
    )
    assert torch.equal(product, products(a.double(), b.double()).to(product.dtype))
    assert torch.equal(total, (start.double() + product.double()).to(out_dtype))
    assert torch.equal(total[1], start[1]) and not torch.equal(total, start)


@pytest.mark.parametrize("version, dtype, out_dtype", SUMS, ids=str)
def test_adding_any_numbers_to_a_block(version, dtype, out_dtype):
    """Bit for bit the product and a sum by grouped_mm, with numbers whose sums depend on the order.

    The reference's product adds to the block itself, and BLAS may begin its sums with the block's numbers. Up to 18
    terms in another order: 16 eps of the arithmetic. A block in bf16 is rounded once on top.
    """
    a, b, start, product, total = summed(version, dtype, out_dtype, torch.randn)
    assert torch.equal(total[1], start[1])
    if version == "grouped_mm":
        assert torch.equal(total, start.clone().add_(product))
    else:
        assert torch.equal(product, products(a.to(product.dtype), b.to(product.dtype)))
        want, eps = start.to(product.dtype) + product, torch.finfo(product.dtype).eps
        rounding = ulp(want, out_dtype) / 2 if out_dtype == torch.bfloat16 else 0.0
        assert ((total.to(product.dtype) - want).abs() <= 16 * eps * (1 + want.abs()) + rounding).all()


X, W, OUT = torch.zeros(6, 4), torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
OFFSETS = torch.tensor([2, 6], dtype=torch.int32)
ERRORS = [
    (lambda: hip_ops.grouped_rows(X, W[0], OFFSETS), "matrices has shape (4, 3). Allowed: [E>0, k, n]"),
    (lambda: hip_ops.grouped_rows(X[0], W, OFFSETS), "x has shape (4,). Allowed: [T, k]"),
    (lambda: hip_ops.grouped_rows(X[:, :3], W, OFFSETS), "matrices has shape (2, 4, 3). Allowed: [E>0, k, n]"),
    (lambda: hip_ops.grouped_rows(X, W[:0], OFFSETS[:0]), "matrices has shape (0, 4, 3). Allowed: [E>0, k, n]"),
    (lambda: hip_ops.grouped_rows(X, W, OFFSETS.long()), "offsets is torch.int64. Allowed: torch.int32"),
    (lambda: hip_ops.grouped_rows(X, W, OFFSETS[:1]), "offsets has shape (1,). Allowed: (2,), [E]"),
    (
        lambda: hip_ops.grouped_rows(X, W.bfloat16(), OFFSETS),
        "matrices is torch.bfloat16. Allowed: torch.float32 like x",
    ),
    (lambda: hip_ops.grouped_rows(X, W, OFFSETS.to("meta")), "offsets is on meta. Allowed: on cpu like x"),
    (lambda: hip_ops.grouped_outer_(OUT.half(), X, X[:, :3], OFFSETS), "out is torch.float16. Allowed: torch.float32"),
    (lambda: hip_ops.grouped_outer_(OUT[0], X, X[:, :3], OFFSETS), "out has shape (4, 3). Allowed: [E>0, m, n]"),
    (lambda: hip_ops.grouped_outer_(OUT, X[:, :3], X, OFFSETS), "a has shape (6, 3). Allowed: (6, 4), [T, m]"),
    (lambda: hip_ops.grouped_outer_(OUT, X, X, OFFSETS), "b has shape (6, 4). Allowed: (6, 3), [T, n]"),
    (lambda: hip_ops.grouped_outer_(OUT, X, X[:5, :3], OFFSETS), "b has shape (5, 3). Allowed: (6, 3), [T, n]"),
    (lambda: hip_ops.grouped_outer_(OUT, X, X[:, :3], OFFSETS[:1]), "offsets has shape (1,). Allowed: (2,), [E]"),
    (
        lambda: hip_ops.grouped_outer_(OUT, X, X[:, :3].double(), OFFSETS),
        "b is torch.float64. Allowed: torch.float32 like a",
    ),
    (lambda: hip_ops.grouped_outer_(OUT.to("meta"), X, X[:, :3], OFFSETS), "a is on cpu. Allowed: on meta like out"),
]


@pytest.mark.parametrize("call, words", ERRORS, ids=[words for _, words in ERRORS])
def test_errors_name_what_is_wrong(call, words):
    with pytest.raises(ValueError) as raised:
        call()
    assert words in str(raised.value) and str(raised.value).startswith("hip_ops.grouped_")


def test_a_block_with_any_strides_is_written():
    out, case = torch.zeros(2, 3, 4).mT, Grouped((2, 4), 4, 3, "fp32", padding_rows=0)
    a, b = case.operand(4, 1), case.operand(3, 2)
    hip_ops.grouped_outer_(out, a, b, OFFSETS)
    torch.testing.assert_close(out, torch.stack((a[:2].T @ b[:2], a[2:].T @ b[2:])))


# Versions


def versions_that_take(made, *arguments) -> list[str]:
    names = {made._function_of(name): name for name in (*made.versions, "reference")}
    return [names[function] for fits, function in made.implementations(GPU) if fits is None or fits(*arguments)]


def test_order_on_hopper_and_what_each_takes(monkeypatch):
    FakeGpu(monkeypatch)
    from hip_ops.ops.grouped_product import triton

    operators = rows, outer = grouped_product._rows, grouped_product._outer
    for made in operators:
        for name in ("results", "choices", "_chosen"):
            monkeypatch.setattr(made, name, {})
        for module in (quack, triton):  # neither runs on this machine
            monkeypatch.setattr(module, made.name, functools.partial(getattr(reference, made.name)))
        monkeypatch.setitem(made.available, "quack", lambda device: None)
    x, offsets = torch.zeros(20, 24, dtype=torch.bfloat16), torch.tensor([3, 20], dtype=torch.int32)
    w, out = torch.zeros(2, 16, 24, dtype=torch.bfloat16), torch.zeros(2, 24, 24)
    assert versions_that_take(rows, x[:, :16], w, offsets) == ["quack", "triton", "grouped_mm", "reference"]
    assert versions_that_take(rows, x, w.mT, offsets) == ["quack", "triton", "grouped_mm", "reference"]
    assert versions_that_take(rows, x[:, :12], w[:, :12], offsets) == ["triton", "reference"], "rows of 24 bytes"
    assert versions_that_take(rows, x[:0], w, offsets) == ["triton", "reference"], "no rows"
    assert versions_that_take(rows, x.half(), w.half(), offsets) == ["triton", "reference"]
    assert versions_that_take(outer, out, x, x, offsets, True) == ["quack", "triton", "grouped_mm", "reference"]
    assert versions_that_take(outer, out.bfloat16(), x, x, offsets, False)[0] == "quack"
    assert versions_that_take(outer, out.mT, x, x, offsets, True) == ["grouped_mm", "reference"]
    apart = torch.zeros(2 * 24 * 24 + 1)[1:].view(2, 24, 24)
    assert versions_that_take(outer, apart, x, x, offsets, True) == ["triton", "grouped_mm", "reference"]
    monkeypatch.setitem(grouped_mm.DTYPES, "cpu", (torch.bfloat16,))  # as on a GPU
    assert versions_that_take(rows, x.float(), w.float(), offsets) == ["reference"]
    assert versions_that_take(outer, out, x.float(), x.float(), offsets, True) == ["reference"]
    with use_kernels(grouped_product="grouped_mm"):
        assert versions_that_take(rows, x, w.mT, offsets) == ["grouped_mm", "quack", "triton", "reference"]
    monkeypatch.setitem(rows.available, "quack", lambda device: "quack is not installed")
    rows._chosen.clear()
    assert versions_that_take(rows, x, w.mT, offsets) == ["triton", "grouped_mm", "reference"]
    assert "no quack: quack is not installed" in rows.choice(GPU)


def test_a_cpu_runs_the_reference_unless_a_version_is_asked_for():
    mine = [grouped_product._rows, grouped_product._outer]
    with use_kernels("auto"):
        assert set(warm_up("cpu", mine).values()) == {"reference (kernels=auto)"}
    with use_kernels("hip"):
        assert set(warm_up("cpu", mine).values()) == {"reference (kernels=hip; it has no version 'hip')"}
    with (
        use_kernels(grouped_product="quack"),
        pytest.raises(ValueError, match="version 'quack' of grouped_rows is not available on cpu"),
    ):
        hip_ops.grouped_rows(X.bfloat16(), W.bfloat16(), OFFSETS)


@pytest.mark.parametrize("case", [Grouped((3, 0, 40, 5), 24, 36, "fp32"), Grouped((3, 0, 40, 5), 24, 40)], ids=str)
def test_grouped_mm(case):
    with use_kernels(grouped_product="grouped_mm"):
        for flag in (False, True):
            check_rows(hip_ops, case, flag)
            if case.dtype == "fp32":
                check_outer(hip_ops, case, flag)
        a, b, out = case.operand(case.k, 1), case.operand(case.n, 2), torch.randn(4, case.k, case.n)
        want = reference.grouped_rows(case.operand(case.k, 1)[:0], case.matrices(False), case.offsets() * 0)
        assert torch.equal(hip_ops.grouped_rows(a[:0], case.matrices(False), case.offsets() * 0), want)
        check_outer(hip_ops, case, False, out_dtype=a.dtype)
        product = hip_ops.grouped_outer_(torch.empty_like(out, dtype=a.dtype), a, b, case.offsets(), accumulate=False)
        got = hip_ops.grouped_outer_(out.clone(), a, b, case.offsets())
    assert torch.equal(got, out.add_(product)), "the product, rounded to the operands' dtype, and a sum"


def test_grouped_mm_says_why_it_is_not_available(monkeypatch):
    assert grouped_mm.available(CPU) is None and grouped_mm.available(GPU) is None
    assert grouped_mm.available(torch.device("xpu")) == "torch's grouped_mm does not run on xpu"
    monkeypatch.setattr(grouped_mm, "_grouped_mm", None)
    assert grouped_mm.available(GPU) == f"torch {torch.__version__} has no grouped_mm"


@pytest.mark.parametrize(
    "tensor, taken",
    [
        (torch.zeros(9, 16), True),
        (torch.zeros(9, 24)[:, :16], True),
        (torch.zeros(9, 18)[:, :16], False),
        (torch.zeros(9, 14), False),
        (torch.zeros(0, 16), False),
        (torch.zeros(9 * 16 + 1)[1:].view(9, 16), False),
        (torch.zeros(9, 32)[:, ::2], False),
        (torch.zeros(3, 8, 16), True),
        (torch.zeros(3, 8, 16).mT, True),
        (torch.zeros(3, 9, 16), False),
        (torch.zeros(3, 8, 16)[..., ::2], False),
        (torch.zeros(16, 16).T, False),
        (torch.zeros(1, 16).expand(9, 16), False),
        (torch.zeros(16, 8, 3).permute(2, 1, 0), False),
    ],
)
def test_what_the_copy_engine_takes(tensor, taken):
    """Zeros become bf16, and strides are kept."""
    half = tensor
    if tensor.storage_offset() == 0:
        half = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bfloat16)
    assert quack_tiles.aligned(half) == taken


def test_the_loop_on_an_accelerator_is_announced_once(monkeypatch, caplog):
    offsets = SimpleNamespace(device=GPU, tolist=lambda: [2, 5])
    monkeypatch.setattr(errors, "_warnings", set())
    monkeypatch.setattr(self_check, "comparing", True)
    with caplog.at_level(logging.WARNING):
        assert reference._counts(offsets, 6, torch.float32) == [2, 3, 1]
        assert not caplog.records, "a self-check"
        monkeypatch.setattr(self_check, "comparing", False)
        for _ in range(2):
            reference._counts(offsets, 6, torch.float32)
    assert [each.message for each in caplog.records] == [
        "hip_ops: grouped products of torch.float32 on cuda:0 loop over the experts and synchronise the host in each "
        "call"
    ]


# Triton's table


def test_table_has_every_kind_and_fits_the_machine():
    part = configs.read_table()["sm_90"]
    assert part["measured_on"] and {row["kind"] for row in part["rows"]} == set(configs.KINDS)
    for row in part["rows"]:
        config = row["config"]
        assert shared_memory(config, 4 if row["kind"] == "outer" else 2) <= SHARED_MEMORY["sm_90"]
        assert config.block_n // config.parts >= 16 and config.parts in (
            (1, 2) if row["kind"] != "outer" else (1, 2, 4)
        )
        # a warp group takes 64 rows or more
        assert config.block_m % (64 * config.num_warps // 4) == 0
        assert config.launch_options().keys() == {"num_warps", "num_stages"}  # NVIDIA's compiler refuses AMD's options
        assert configs.choose_config("sm_90", row["kind"], row["rows"], row["k"], row["n"]) == config


@pytest.mark.parametrize("kind", configs.KINDS)
def test_candidates_of_mi300x(kind):
    assert configs.derived_config("gfx942", kind, 16, 1024, 4096, 2048) in [
        each.config for each in configs.DERIVED[kind]
    ]
    for candidate in configs.DERIVED[kind]:
        assert not candidate.config.descriptors and candidate.config.parts == 1


def test_the_tile_of_mi300x_depends_on_rounds_over_its_compute_units():
    def side(kind, rows, k, n):
        chosen = configs.choose_config("gfx942", kind, rows, k, n)
        return chosen.block_m, chosen.block_n

    # 16 experts of 1024 rows: 16 * 4.5 * 16 = 1152 tiles of 256 x 256 in 4 rounds of 304, 4352 of 128 x 128 in 15
    assert side("rows_t", 1024, 2048, 4096) == side("rows", 1024, 4096, 2048) == (256, 256)
    # 512 rows: 640 tiles of 256 x 256 would take 3 rounds, the last of them nearly empty; 2304 small ones take 8
    assert side("rows_t", 512, 2048, 4096) == (128, 128)
    assert side("rows", 16, 4096, 2048) == (128, 128)
    assert side("outer", 1024, 4096, 2048) == (128, 256) and side("outer", 16, 136, 264) == (128, 128)
    # no multiples of 64
    assert side("rows_t", 1024, 2048, 4104) == side("rows", 1024, 4112, 2048) == (128, 128)


def test_configurations_of_devices_that_the_table_does_not_know():
    assert not configs.choose_config("sm_80", "rows", 100, 64, 64).descriptors
    shape = ("rows_t", 512, 2048, 4096)
    known = configs.choose_config("gfx942", *shape)
    assert known.kpack == 2 and configs.choose_config("gfx90a", *shape) == replace(known, kpack=1)
    assert all(each.config.kpack == 1 for kind in configs.KINDS for each in configs.candidates("gfx950")[kind])
    # 1152 tiles of 256 x 256 take 5 rounds of the 256 units of an MI355X, 4352 of 128 x 128 take 17
    assert configs.choose_config("gfx950", "rows_t", 1024, 2048, 4096) == configs.DERIVED_OF_GFX950["rows_t"][0].config
    assert shared_memory(configs.ANY_NVIDIA) <= 98304


def test_written_table_reads_back(tmp_path):
    path = tmp_path / "table.json"
    config = configs.GroupedConfig(block_n=128, parts=2)
    write_grouped("sm_90", [{"kind": "outer", "rows": 8, "k": 9, "n": 7, "config": config, "ms": 0.5}], "a test", path)
    written = json.loads(path.read_text())
    assert written["sm_90"] == {
        "measured_on": "a test",
        "rows": [{"kind": "outer", "rows": 8, "k": 9, "n": 7, "config": {"block_n": 128, "parts": 2}, "ms": 0.5}],
    }
    assert configs.read_table(path)["sm_90"]["rows"][0]["config"] == config
    mine = replace(config, kpack=2)
    row = {"kind": "outer", "rows": 8, "k": 9, "n": 7, "config": mine, "ms": 0.5}
    write_grouped("gfx942", [row], "another test", path)
    assert json.loads(path.read_text())["sm_90"] == written["sm_90"]
    assert configs.read_table(path)["gfx942"]["rows"][0]["config"] == mine
