# SPDX-License-Identifier: Apache-2.0
"""The versions on AITER against its recorded releases and stand-ins made from them; AITER was not run on a device."""

import functools
import importlib
import re

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.ops import grouped_product, rms_norm
from hip_ops.runtime import aiter as runtime_aiter
from hip_ops.runtime import availability, self_check
from hip_ops.runtime.aiter import Function
from tests.hip_ops.fake_gpu import CPU, GPU, FakeGpu
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from tests.hip_ops.rms_norm_cases import FP32, Case, check, of_module
from tests.stand_ins import aiter as stand_in

norm, grouped = rms_norm.aiter, grouped_product.aiter
FORWARD, BACKWARD = (rms_norm._forward,), (rms_norm._backward,)
GROUPED = (grouped_product._rows, grouped_product._outer)
OPERATORS = (*FORWARD, *BACKWARD, *GROUPED)
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
    left_out = lambda version, *_: f"no {version}" if version in ("hip", "triton") else None  # noqa: E731
    monkeypatch.setattr(availability, "missing", left_out)


def releases(function: Function) -> list[str]:
    first = norm.FIRST_RELEASE if function.name.startswith("_") else grouped.FIRST_RELEASE
    return [
        version for version in stand_in.VERSIONS if not runtime_aiter._release(version) < runtime_aiter._release(first)
    ]


# The recorded releases


@pytest.mark.parametrize("version", stand_in.VERSIONS)
def test_the_record_is_complete_and_each_backward_returns_a_gradient_for_each_argument(version):
    symbols = stand_in.recorded(version)
    assert (*symbols,) == stand_in.SYMBOLS and all(symbols.values())
    functions = [each["methods"] for each in symbols.values() if each["kind"] == "class"]
    assert len(functions) == 3
    for methods in functions:
        (returned,) = methods["backward"]["returns"]
        assert returned["values"] == len(methods["forward"]["parameters"]) - 1
    # Why the addition's own autograd function is not used: no gradient of its third argument, the residual.
    added = symbols[f"{stand_in.NORM}._RMSNorm2dFwdWithAdd"]["methods"]
    assert added["forward"]["parameters"][3]["name"] == "res_in" and 2 in added["backward"]["returns"][0]["none"]


@pytest.mark.parametrize(
    ("function", "version"),
    [
        (each, version)
        for each in (norm.ADD, norm.NORM, norm.BACKWARD, grouped.GMM, grouped.PTGMM)
        for version in releases(each)
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_our_calls_fit(function, version):
    data = stand_in.recorded(version)[f"{function.module}.{function.name}"]
    stand_in.signature_of(data["parameters"]).bind(**dict.fromkeys(function.arguments))


def test_the_layouts_that_the_products_state():
    """For each release, the layouts that fits_rows and fits_outer admit."""
    for version in releases(grouped.GMM):
        symbols = stand_in.recorded(version)
        rows, outer = (" ".join(symbols[f"{stand_in.GMM}.{name}"]["doc"]) for name in ("gmm", "ptgmm"))
        assert "lhs must be row-major (lhs.stride() == (K, 1))" in rows and "stride (K*N, 1, K)" in rows
        assert (
            "shape (K, M), stride (1, K)" in outer and "out must be row-major (out.stride() == (K * N, N, 1))" in outer
        )


# The results


@pytest.mark.parametrize("version", stand_in.VERSIONS)
def test_results_equal_the_reference(install, version):
    calls = install(version)
    used = OPERATORS if version in releases(grouped.GMM) else (*FORWARD, *BACKWARD)
    assert [each._check("aiter", CPU) for each in used] == ["passed"] * len(used)
    assert len(calls["_rmsnorm_forward_with_add"]) == len(calls["_rmsnorm_forward"]) == 1
    assert len(calls["_rmsnorm_backward"]) == 2
    assert (len(calls["gmm"]), len(calls["ptgmm"])) == ((2, 3) if used is OPERATORS else (0, 0))
    assert not calls["rms_norm"] and not calls["rmsnorm2d_fwd_with_add"] and not calls["nptgmm"]


@pytest.mark.parametrize(
    "case",
    [
        Case(False, 7, 64),
        Case(True, 7, 64),
        Case(True, 5, 33, pad=3),
        Case(False, 5, 33, pad=3, d_new_residual=False),
        Case(False, 4, 16, FP32, FP32, FP32),
        Case(True, 4, 16, FP32, FP32, FP32, d_new_residual=False),
    ],
    ids=str,
)
def test_norms_against_fp64(install, case):
    install(NEWEST)
    check(of_module(norm), case)


def test_a_gradient_that_two_inputs_share_is_returned_once(install):
    install(NEWEST)
    dy, stream, rstd = torch.ones(2, 4), torch.randn(2, 4), torch.ones(2, 1)
    plain = (dy, None, None, stream, None, rstd, *[None] * 4, torch.ones(4))
    empty, shared, *_ = norm.merge_norm_backward(*plain, torch.float32)
    assert shared.shape == (2, 4) and (empty.shape, empty.dtype) == ((0,), torch.float32)
    d_x, shared, *_ = norm.merge_norm_backward(*plain, torch.bfloat16)
    assert torch.equal(d_x, shared.bfloat16())


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
    assert norm.fits(wide, False) and norm.fits(torch.ones(2, 3, 6), False) and not norm.fits(wide, True)
    refused = (half, torch.ones(0, 6), torch.ones(4, 1), torch.ones(1, norm.MAX_COLUMNS + 1))
    assert not any(norm.fits(stream, False) for stream in refused)
    forward, backward = rms_norm._forward.fits["aiter"], rms_norm._backward.fits["aiter"]
    assert forward(None, wide, *[None] * 6) and not forward(wide, half, *[None] * 6)
    assert backward(*[None] * 3, wide, None) and not backward(*[None] * 3, wide, wide)
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
    "lost": r"(result|argument)\[0\], element \d+: it gives .*, torch .* \(allowed: ",
}


@pytest.mark.parametrize("defect", stand_in.DEFECTS)
@pytest.mark.parametrize("each", (*BACKWARD, grouped_product._outer), ids=lambda each: each.name)
def test_a_defect_is_refused_with_its_reason_and_the_next_version_runs(install, mi300x, each, defect, caplog):
    install(NEWEST, defect)
    following = {"rms_norm": "compiled", "grouped_product": "grouped_mm"}[each.folder]
    with aiter_named(each):
        choice = each.choice(GPU)
        (_, runs), *_ = each.implementations(GPU)
    reason = each.results[GPU, "aiter"]
    assert re.match(SHOWN[defect], reason)
    assert choice.startswith(following) and f"no aiter: it failed its self-check: {reason}" in choice
    (warning,) = [text for text in caplog.messages if "failed its self-check" in text]
    assert warning == f"hip_ops: version aiter of {each.name} failed its self-check on cuda:0 and is not used. {reason}"
    assert runs is not each._function_of("aiter") and each.difference(runs, CPU, following) is None


@pytest.mark.parametrize("each", (rms_norm._forward, rms_norm._backward), ids=lambda each: each.name)
def test_layer_norm_runs_the_next_version(install, mi300x, each):
    """A request for AITER is for the whole folder, and LayerNorm has no such version."""
    install(NEWEST)
    with aiter_named(each):
        choice = each.choice(GPU)
    assert choice.startswith("aiter where it takes the arguments, then compiled")
    taken = [each.fits["aiter"](*arguments(CPU)) for arguments in (*each.examples, *each.more_examples["compiled"])]
    assert taken == [True, True, False, False], "RMSNorm of both forms, LayerNorm of none"


def test_the_gradient_that_aiters_own_function_loses_is_found(install):
    """ROCm/aiter#576: through rmsnorm2d_fwd_with_add, the residual and the next merge get no gradient."""
    install(NEWEST)
    own = importlib.import_module(stand_in.NORM).rmsnorm2d_fwd_with_add

    def d_residual_by_aiter(dy, d_new_residual, output, new_residual, mean, rstd, *vectors_weight_and_dtype):
        weight = vectors_weight_and_dtype[-2]
        shape = (-1, weight.shape[0])
        x, residual = torch.zeros_like(new_residual).view(shape), new_residual.clone().view(shape)
        leaves = [tensor.requires_grad_() for tensor in (x, residual, weight.clone())]
        with torch.enable_grad():
            y = own(torch.empty_like(dy).view(shape), x, residual, torch.empty_like(residual), leaves[2], 1e-5)
            _, d_residual, _ = torch.autograd.grad(y, leaves, dy.view(shape), allow_unused=True)
        assert d_residual is None
        return torch.zeros_like(new_residual)

    _, plain = rms_norm._backward.examples
    found = self_check.difference(d_residual_by_aiter, lambda *a: rms_norm._backward.reference(*a)[1], plain, CPU)
    assert found.startswith("result, element") and "it gives 0, torch" in found


def test_the_block_that_nptgmm_leaves_unwritten_is_found(install, monkeypatch):
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


def test_another_signature_is_refused(install, mi300x, monkeypatch, caplog):
    install(NEWEST)
    module = importlib.import_module(stand_in.NORM)
    monkeypatch.setattr(module, "_rmsnorm_backward", lambda dz, x, gamma: None)
    monkeypatch.delattr(module, "_rmsnorm_forward_with_add")
    with aiter_named(BACKWARD[0]):
        assert BACKWARD[0].choice(GPU).startswith("compiled") and FORWARD[0].choice(GPU).startswith("compiled")
    assert (
        "ValueError: amd-aiter=0.1.20.post1: aiter.ops.triton.normalization.rmsnorm._rmsnorm_backward does not take the "
        "arguments of this project (got an unexpected keyword argument 'rsigma')." in BACKWARD[0].results[GPU, "aiter"]
    )
    assert "_rmsnorm_forward_with_add cannot be imported (" in FORWARD[0].results[GPU, "aiter"]
