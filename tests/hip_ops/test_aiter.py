# SPDX-License-Identifier: Apache-2.0
"""The versions on AITER against its recorded releases and stand-ins made from them; AITER was not run on a device."""

import functools
import importlib
import re

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.ops import grouped_product
from hip_ops.runtime import aiter as runtime_aiter
from hip_ops.runtime import choice
from hip_ops.runtime.aiter import Function
from tests.hip_ops.fake_gpu import CPU, GPU, FakeGpu
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from tests.stand_ins import aiter as stand_in

grouped = grouped_product.aiter
OPERATORS = (grouped_product._rows, grouped_product._outer)
NEWEST = stand_in.VERSIONS[-1]
named = pytest.mark.parametrize("each", OPERATORS, ids=lambda each: each.name)


@pytest.fixture
def install(monkeypatch):
    """install(version, defect) puts a stand-in into place; the operators have checked nothing yet."""
    for each in OPERATORS:
        for found in ("results", "choices", "_chosen"):
            monkeypatch.setattr(each, found, {})

    return functools.partial(stand_in.install, monkeypatch)


@pytest.fixture
def mi300x(monkeypatch, nothing_selected):
    """A simulated MI300X on which neither HIP nor Triton is available, so that the next version is torch's."""
    FakeGpu(monkeypatch, hip="7.1")
    monkeypatch.setenv("HIP_OPS_LIBRARY", "source")  # shipped objects run without Triton
    left_out = lambda version, *_: f"no {version}" if version in ("hip", "triton") else None  # noqa: E731
    monkeypatch.setattr(choice, "missing", left_out)


RELEASES = [
    version
    for version in stand_in.VERSIONS
    if not runtime_aiter._release(version) < runtime_aiter._release(grouped.FIRST_RELEASE)
]


# The recorded releases


@pytest.mark.parametrize("version", stand_in.VERSIONS)
def test_the_record_is_complete_and_each_backward_returns_a_gradient_for_each_argument(version):
    symbols = stand_in.recorded(version)
    assert (*symbols,) == stand_in.SYMBOLS and all(symbols.values())
    functions = [each["methods"] for each in symbols.values() if each["kind"] == "class"]
    assert len(functions) == 1
    for methods in functions:
        (returned,) = methods["backward"]["returns"]
        assert returned["values"] == len(methods["forward"]["parameters"]) - 1


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("function", (grouped.GMM, grouped.PTGMM), ids=lambda function: function.name)
def test_our_calls_fit(function, version):
    data = stand_in.recorded(version)[f"{function.module}.{function.name}"]
    stand_in.signature_of(data["parameters"]).bind(**dict.fromkeys(function.arguments))


def test_the_layouts_that_the_products_state():
    """For each release, the layouts that fits_rows and fits_outer admit."""
    for version in RELEASES:
        symbols = stand_in.recorded(version)
        rows, outer = (" ".join(symbols[f"{stand_in.GMM}.{name}"]["doc"]) for name in ("gmm", "ptgmm"))
        assert "lhs must be row-major (lhs.stride() == (K, 1))" in rows and "stride (K*N, 1, K)" in rows
        assert (
            "shape (K, M), stride (1, K)" in outer and "out must be row-major (out.stride() == (K * N, N, 1))" in outer
        )


# The results


@pytest.mark.parametrize("version", RELEASES)
def test_results_equal_the_reference(install, version):
    calls = install(version)
    assert [each._check("aiter", CPU) for each in OPERATORS] == ["passed", "passed"]
    assert (len(calls["gmm"]), len(calls["ptgmm"]), len(calls["nptgmm"])) == (2, 3, 0)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(
    "case",
    [Grouped((3, 0, 40, 5), 24, 40), Grouped((0, 0), 16, 8, "fp16"), Grouped((30,), 8, 16, padding_rows=0)],
    ids=str,
)
def test_products_against_fp64(install, case, flag):
    install(NEWEST)
    check_rows(grouped, case, flag)
    check_outer(grouped, case, flag)
    check_outer(grouped, case, False, out_dtype=case.random(1).dtype)


def test_which_calls_are_taken():
    half, wide, borders = torch.ones(4, 6).bfloat16(), torch.ones(4, 6), torch.ones(2, dtype=torch.int32)
    square, matrices = torch.ones(2, 6, 6).bfloat16(), torch.ones(2, 6, 8).bfloat16()
    assert grouped.fits_rows(half, matrices, borders) and grouped.fits_rows(half, square.mT, borders)
    assert grouped.fits_rows(half, torch.ones(2, 8, 6).bfloat16().mT, borders)
    for x, given in ((half, square), (wide, matrices.float()), (half[:0], matrices), (half, matrices[..., :4])):
        assert not grouped.fits_rows(x, given, borders)
    assert not grouped.fits_rows(torch.ones(4, 12).bfloat16()[:, :6], matrices, borders)
    out = torch.zeros(2, 6, 6)
    assert grouped.fits_outer(out, half, half, borders, True) and grouped.fits_outer(
        out.bfloat16(), half, half, borders, False
    )
    assert not grouped.fits_outer(out.bfloat16(), half, half, borders, True), "rounded before it is added"
    assert not grouped.fits_outer(out.mT, half, half, borders, True) and not grouped.fits_outer(
        out, half[:0], half[:0], borders, True
    )


# The reported defects


def aiter_named(each):
    """Request it for the operator's folder."""
    return use_kernels(**{each.folder: "aiter"})


@named
def test_it_is_used_by_name_after_the_check(install, mi300x, each, caplog):
    install(NEWEST)
    with aiter_named(each):
        assert each.choice(GPU).startswith("aiter where it takes the arguments, then ")
        assert each.implementations(GPU)[0][1] is each._function_of("aiter") and each.results[GPU, "aiter"] == "passed"
    assert any("has not run it on any device" in text for text in caplog.messages)


SHOWN = {
    "inf": r"(result|argument)\[0\], element 3: it gives inf, torch -?\d",
    "raises": "RuntimeError: HIP error: an illegal memory access",
    **dict.fromkeys(("lost", "wrong"), r"(result|argument)\[0\], element \d+: it gives .*, torch .* \(allowed: "),
}


@pytest.mark.parametrize("defect", stand_in.DEFECTS)
def test_a_defect_is_refused_with_its_reason_and_the_next_version_runs(install, mi300x, defect, caplog):
    install(NEWEST, defect)
    each, following = grouped_product._outer, "grouped_mm"
    with aiter_named(each):
        choice = each.choice(GPU)
        (_, runs), *_ = each.implementations(GPU)
    reason = each.results[GPU, "aiter"]
    assert re.match(SHOWN[defect], reason)
    assert choice.startswith(following) and f"no aiter: it failed its self-check: {reason}" in choice
    (warning,) = [text for text in caplog.messages if "failed its self-check" in text]
    assert warning == f"hip_ops: version aiter of {each.name} failed its self-check on cuda:0 and is not used. {reason}"
    assert runs is not each._function_of("aiter") and each.difference(runs, CPU, following) is None


def test_the_block_that_nptgmm_leaves_unwritten_is_detected(install, monkeypatch):
    install(NEWEST)
    monkeypatch.setattr(grouped, "PTGMM", Function(stand_in.GMM, "nptgmm", grouped.PTGMM.arguments))
    assert "it gives nan, torch 0" in grouped_product._outer._check("aiter", CPU)


# Availability


@named
def test_auto_never_takes_it(install, mi300x, each):
    install(NEWEST)
    assert "aiter" in each.versions and "aiter" not in each.choice(GPU)
    with use_kernels("reference"):
        assert "aiter" not in each.choice(GPU)
    assert (GPU, "aiter") not in each.results


@pytest.mark.parametrize(
    ("version", "first", "reason"),
    [
        (None, "0.1.14", "AITER is not installed (package amd-aiter, github.com/ROCm/aiter)"),
        (
            "0.1.7.post2.dev18",
            "0.1.14",
            "AITER 0.1.7.post2.dev18 is older than 0.1.14, the first release whose functions are used",
        ),
        (
            "0.1.14.post1",
            "0.1.16",
            "AITER 0.1.14.post1 is older than 0.1.16, the first release whose functions are used",
        ),
        ("0.1.14.post1", "0.1.14", None),
        ("0.2.0.dev3+g1234567", "0.1.16", None),
    ],
)
def test_which_versions_are_available(mi300x, monkeypatch, version, first, reason):
    monkeypatch.setattr(runtime_aiter, "installed", lambda: version)
    assert runtime_aiter.available(GPU, first) == reason


def test_a_request_raises_where_it_is_not_available(install, mi300x):
    install("0.1.14.post1")
    each = grouped_product._rows
    with (
        aiter_named(each),
        pytest.raises(
            ValueError, match="'aiter' of grouped_rows is not available on cuda:0: AITER 0.1.14.post1 is older"
        ),
    ):
        each.choice(GPU)
    with aiter_named(each), pytest.raises(ValueError, match="kernels are for gfx942 and gfx950, not for cpu"):
        install(NEWEST) and each.choice(CPU)


def test_the_version_of_the_package_is_read(monkeypatch):
    asked = []
    monkeypatch.setattr(runtime_aiter.metadata, "version", lambda name: asked.append(name) or "0.1.18")
    assert runtime_aiter.installed() == "0.1.18" and asked == ["amd-aiter"]


def test_another_signature_is_refused(install, mi300x, monkeypatch):
    install(NEWEST)
    module, (rows, outer) = importlib.import_module(stand_in.GMM), OPERATORS
    monkeypatch.setattr(module, "ptgmm", lambda lhs, rhs, group_sizes, preferred_element_type, existing_out: None)
    monkeypatch.delattr(module, "gmm")
    with aiter_named(rows):
        assert rows.choice(GPU).startswith("grouped_mm") and outer.choice(GPU).startswith("grouped_mm")
    assert (
        "ValueError: amd-aiter=0.1.20.post1: aiter.ops.triton.gmm.ptgmm does not take the arguments of this project "
        "(got an unexpected keyword argument 'accumulate')." in outer.results[GPU, "aiter"]
    )
    assert "gmm cannot be imported (" in rows.results[GPU, "aiter"]
