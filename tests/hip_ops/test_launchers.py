# SPDX-License-Identifier: Apache-2.0
"""Test calls of launchers: arguments, return codes and the stream; and the two commands."""

import ctypes
import re

import pytest
import torch

from hip_ops import set_kernels, use_kernels
from hip_ops.__main__ import main
from hip_ops.runtime import conditions, launchers
from tests.hip_ops.cpu_kernels import KERNELS, build_cpu_library
from tests.hip_ops.fake_gpu import CPU, GPU, FakeGpu


class Recorder:
    """A launcher that records its arguments and returns `code`."""

    def __init__(self, code=0):
        self.code, self.arguments = code, None
        self.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p)

    def __call__(self, *arguments):
        self.arguments = arguments
        return self.code


@pytest.fixture
def launcher(monkeypatch):
    recorder = Recorder()
    loaded = type(
        "Library", (), {"ho_test": recorder, "ho_error_string": staticmethod(lambda code: b"invalid device function")}
    )
    monkeypatch.setattr(launchers, "library", lambda target: loaded)
    return recorder


def test_arguments_are_converted_by_the_declaration(launcher):
    x = torch.arange(4.0)
    launchers.call("ho_test", x, None, 7, 0.5, device=CPU)
    assert launcher.arguments == (x.data_ptr(), None, 7, 0.5, None)
    launchers.call("ho_test", x, (ctypes.c_int64 * 2)(1, 2), True, 1, device=CPU)
    assert list(launcher.arguments[1]) == [1, 2] and launcher.arguments[2:4] == (True, 1)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((None, None, 7), "takes 4 arguments and the stream, 3 were given"),
        ((None, None, 7.0, 0.5), "argument 2 is float, the launcher takes c_long"),
        ((None, 3, 7, 0.5), "argument 1 is int, the launcher takes a pointer"),
        ((None, None, 7, None), "argument 3 is NoneType"),
        ((torch.empty(2, device="meta"), None, 7, 0.5), "argument 0 is on meta, the call on cpu"),
    ],
)
def test_wrong_arguments_never_reach_the_launcher(launcher, arguments, said):
    with pytest.raises(AssertionError, match=said):
        launchers.call("ho_test", *arguments, device=CPU)
    assert launcher.arguments is None


@pytest.mark.parametrize(
    "code, said",
    [
        (-1, r"ho_test has no variant for these arguments on cpu: \[\(3,\), None, 7, 0.5\]"),
        (98, "ho_test failed on cpu with code 98: invalid device function"),
    ],
)
def test_codes(launcher, code, said):
    launcher.code = code
    with pytest.raises(RuntimeError, match=said):
        launchers.call("ho_test", torch.ones(3), None, 7, 0.5, device=CPU)


def test_the_current_stream_is_passed_under_the_device(launcher, monkeypatch):
    """Simulated without a GPU; tests/gpu runs kernels on a stream of its own."""
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append(None)

    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(launchers, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 4711 + device.index})
    )
    launchers.call("ho_test", None, None, 7, 0.5, device=gpu)
    assert launcher.arguments[-1] == 4712 and entered == [gpu, None]


def test_a_kernel_runs_through_call(monkeypatch):
    """The whole way to the CPU: declaration, conversion, fibers."""
    from hip_ops.runtime.launchers import load
    from tests.hip_ops.cpu_kernels import source_files

    kernels = load(build_cpu_library(KERNELS / "portable.hip"), *source_files([KERNELS / "portable.hip"]))
    monkeypatch.setattr(launchers, "library", lambda target: kernels)
    x, out = torch.arange(1024.0), torch.zeros(1024)
    launchers.call("ho_test_reverse_run", x, out, 1, 1, device=CPU)
    assert torch.equal(out, x.flip(0))


def test_a_build_that_failed_is_not_tried_again(monkeypatch):
    from hip_ops.runtime.build import BuildError

    tried = []

    def fails(target):
        tried.append(target)
        raise BuildError("no")

    monkeypatch.setattr(launchers, "build", fails)
    monkeypatch.setattr(launchers, "_failures", {})
    launchers._library.cache_clear()
    for _ in range(3):
        with pytest.raises(BuildError):
            launchers.library("cpu")
    assert tried == ["cpu"]


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@pytest.fixture
def operators(make_operator, monkeypatch):
    """Three operators: two in one folder, and one whose version hip is wrong."""
    example = lambda device: (torch.ones(2), 2.0)  # noqa: E731
    right, other, wrong = (make_operator(scale, hip=f, example=example) for f in (scale, scale, lambda x, factor: -x))
    other.folder = right.folder
    monkeypatch.setattr("hip_ops.__main__.all_operators", lambda: [right, other, wrong])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return right, other, wrong


def test_info(nothing_selected, operators, empty_cache, no_compilers, capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "\ncpu (CPU), operators not checked (add --check)\n  all operators  reference (kernels=auto)\n" in out
    for said in (
        "gfx942: none, neither hipcc nor a clang++",
        "cpu: none, g++ is not on PATH",
        "in the cache: no library",
    ):
        assert said in out
    assert f"cache: {empty_cache}" in out


def test_info_where_a_version_is_not_available(
    nothing_selected, operators, empty_cache, no_compilers, capsys, monkeypatch
):
    monkeypatch.setenv("HIP_OPS_KERNELS", "hip")
    set_kernels(None)
    assert main(["info"]) == 1
    out = capsys.readouterr().out
    why = "HIP_OPS_KERNELS=hip: version 'hip' is not available on cpu: g++ is not on PATH: install it"
    assert f"  all operators  none. {why}" in out


def test_info_checks_operators(nothing_selected, operators, capsys, require_tool):
    right, other, wrong = operators
    require_tool("g++")
    with use_kernels("hip"):
        assert main(["info"]) == 0 and wrong.results == {}
        assert "  all operators  hip (kernels=hip)\n" in capsys.readouterr().out
        assert main(["info", "--check"]) == 1 and right.results == other.results == {(CPU, "hip"): "passed"}
        out = capsys.readouterr().out
        assert f"\ncpu (CPU)\n  {right.folder}  hip (kernels=hip)\n  {wrong.folder}  none. kernels=hip: " in out
        assert "it failed its self-check: result, element 0: it gives -1, torch 2" in out
    with use_kernels("hip", **{wrong.folder: "reference"}):
        wrong.results.clear()
        assert main(["info", "--check"]) == 0
        assert f"  {wrong.folder}  reference (kernel_overrides.{wrong.name}=reference)\n" in capsys.readouterr().out


def test_info_checks_a_gpu_under_conditions(nothing_selected, operators, empty_cache, capsys, monkeypatch):
    """A line for each operator when it is done, with its seconds, and for each difference."""
    right, other, wrong = operators
    FakeGpu(monkeypatch, hip="7.1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("hip_ops.__main__.devices", lambda: [GPU])
    checked = []

    def check(operator, device):
        checked.append((operator.name, device))
        said = "call 2: output, element 3: it gives 1\nmore" if operator is other else None
        return [conditions.Result(operator.name, "hip", "side stream", said)]

    monkeypatch.setattr(conditions, "check", check)
    with use_kernels("hip", **{wrong.folder: "reference"}):
        assert main(["info"]) == 0 and not checked
        capsys.readouterr()
        assert main(["info", "--check"]) == 1
        out = capsys.readouterr().out
        assert checked == [(each.name, GPU) for each in operators]
        assert re.search(
            rf"^cuda:0: {right.name} \(hip\) \d+\.\d s\n"
            rf"cuda:0: {other.name}, version hip, side stream: call 2: output, element 3: it gives 1\n"
            rf"cuda:0: {other.name} \(hip\) \d+\.\d s\n"
            r"cuda:0: checked in \d+\.\d s\n\ncuda:0 \(a GPU\)\n",
            out,
            re.M,
        )
        monkeypatch.setattr(conditions, "check", lambda *unused: [])
        assert main(["info", "--check"]) == 0


def test_build_names_what_is_wrong(empty_cache, no_compilers, capsys):
    with pytest.raises(SystemExit):
        main(["build", "--target", "gfx1100"])
    assert "target=gfx1100: no such target. Allowed: gfx90a, gfx942" in capsys.readouterr().err
    assert main(["build", "--target", "cpu"]) == 1
    assert "g++ is not on PATH" in capsys.readouterr().err


def test_help_names_the_environment(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in ("HIP_OPS_KERNELS", "HIP_OPS_CACHE", "HIP_OPS_ARCH", "ROCM_PATH", "HO_CPU_SCHEDULE", "build", "info"):
        assert name in out
