# SPDX-License-Identifier: Apache-2.0
"""Test the choice of an operator's version on a device, its reason, and unavailable versions."""

import importlib
import logging
import re
import threading

import pytest
import torch
from torch import Tensor

from hip_ops import set_kernels, use_kernels
from hip_ops.runtime import choice, operator
from hip_ops.runtime.launchers import library, target_of
from hip_ops.runtime.operator import report, table, warm_up
from hip_ops.versions import NO_FP32, VERSIONS, selection
from tests.hip_ops.fake_gpu import CPU, GPU, FakeGpu, compiler

pytestmark = pytest.mark.usefixtures("nothing_selected")


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def by_hip(x, factor):
    return x * factor


def by_triton(x, factor):
    return x * factor


def wrong(x, factor):
    return x * factor * 1.5


def fails(x, factor):
    raise RuntimeError("invalid device function")


def needs_a_build(x, factor):
    library(target_of(GPU))
    return x * factor


def example(device):
    return torch.arange(1.0, 9.0, device=device), 2.0


@pytest.fixture
def make(make_operator):
    """Return an operator from make(hip=..., triton=..., ...); versions that are not named are correct."""
    return lambda **options: make_operator(
        scale, **{"hip": by_hip, "triton": by_triton, "compiled": True, "example": example} | options
    )


@pytest.fixture
def rocm(monkeypatch, no_compilers, empty_cache, tmp_path):
    """Simulates an MI300X with a hipcc that compiles nothing, and requests its build in place of the shipped library."""
    monkeypatch.setenv("HIP_OPS_LIBRARY", "source")
    compiler(
        tmp_path / "empty", "hipcc", '[ "$1" = --version ] && echo HIP version: 7.1 || { echo no such file; exit 1; }'
    )
    return FakeGpu(monkeypatch, hip="7.1")


def chosen(made, device=GPU):
    """Names of the versions that run, best first."""
    names = {made._function_of(version): version for version in (*made.versions, "reference")}
    return [names[function] for _, function in made.implementations(device)]


# What is requested


def test_code_goes_before_the_environment(monkeypatch):
    assert selection().of("rms_norm") == ("auto", "kernels=auto")
    monkeypatch.setenv("HIP_OPS_KERNELS", "hip, router_mlp=triton")
    set_kernels(None)
    assert selection().of("rms_norm") == ("hip", "HIP_OPS_KERNELS=hip")
    assert selection().of("router_mlp") == ("triton", "HIP_OPS_KERNELS: router_mlp=triton")
    with use_kernels("reference"):
        assert selection().of("rms_norm").version == selection().of("router_mlp").version == "reference"
        with use_kernels("triton", rms_norm="hip"):
            assert selection().of("rms_norm").version == "hip" and selection().of("muon").version == "triton"
        assert selection().of("rms_norm").version == "reference"
    assert selection().of("rms_norm").version == "hip"
    set_kernels("auto", {"muon": "reference"})
    assert [selection().of(name).version for name in ("rms_norm", "muon")] == ["auto", "reference"]
    set_kernels(None)
    assert selection().of("rms_norm").version == "hip"


def test_unknown_names(monkeypatch):
    kernels = "kernels=rocm: no such version. Allowed: auto, hip, triton, compiled, reference"
    with pytest.raises(ValueError, match=re.escape(kernels)):
        set_kernels("rocm")
    with pytest.raises(ValueError, match=re.escape(kernels)), use_kernels("rocm"):
        pass
    none = (
        "kernels=None: reads HIP_OPS_KERNELS. Allowed: no kernel_overrides. Fix: put them into HIP_OPS_KERNELS, as in "
    )
    with pytest.raises(ValueError, match=re.escape(none)):
        set_kernels(None, {"muon": "hip"})
    override = "kernel_overrides.router_mlp=hip: no such version. Allowed: auto, triton, compiled, reference"
    with pytest.raises(ValueError, match=re.escape(override)):
        set_kernels("auto", {"router_mlp": "hip"})
    with pytest.raises(ValueError, match="kernel_overrides.router=.*no such operator. Allowed: rms_norm, "):
        set_kernels("auto", {"router": "triton"})
    for text, said in (("rocm", kernels), ("auto,router_mlp=hip", override), ("auto,router_mlp", "router_mlp=: no")):
        monkeypatch.setenv("HIP_OPS_KERNELS", text)
        set_kernels(None)
        with pytest.raises(ValueError, match=re.escape(f"HIP_OPS_KERNELS={text}: ") + ".*" + re.escape(said)):
            selection()


# CPU


def test_auto_on_a_cpu_is_the_reference_and_reported_once(make, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "hip_ops")
    monkeypatch.setattr(operator, "compile_function", lambda function: fails)
    made = make()
    for _ in range(3):
        assert torch.equal(made(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert [record.getMessage() for record in caplog.records] == [
        f"hip_ops: {made.name} on cpu: reference (kernels=auto)"
    ]
    assert made.results == {}, "nothing was checked"
    with use_kernels("hip"):
        assert chosen(made, CPU) == ["hip"]
    with use_kernels("reference"):
        assert chosen(made, CPU) == ["reference"]
    assert [record.getMessage().partition(": ")[2] for record in caplog.records[1:]] == [
        f"{made.name} on cpu: hip (kernels=hip)",
        f"{made.name} on cpu: reference (kernels=reference)",
    ]


@pytest.mark.parametrize(
    "version, why",
    [("triton", "Triton (compiles for GPUs|is not installed)"), ("compiled", "torch.compile is not used on a CPU")],
)
def test_what_a_cpu_lacks_raises_when_it_is_asked_for(make, monkeypatch, version, why):
    made = make()
    monkeypatch.setenv("HIP_OPS_KERNELS", version)
    set_kernels(None)
    message = rf"HIP_OPS_KERNELS={version}: version '{version}' of {made.name} is not available on cpu: {why}"
    with pytest.raises(ValueError, match=message):
        made(torch.ones(2), 3.0)
    with (
        use_kernels(**{made.name: version}),
        pytest.raises(ValueError, match=f"kernel_overrides.{made.name}={version}: "),
    ):
        made(torch.ones(2), 3.0)


def test_triton_on_a_cpu_with_its_interpreter(make, monkeypatch):
    FakeGpu(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with use_kernels("triton"):
        assert chosen(make(), CPU) == ["triton"]


def test_hip_without_a_compiler_raises_when_it_is_asked_for(make, no_compilers, empty_cache):
    with (
        use_kernels("hip"),
        pytest.raises(
            ValueError,
            match=r"'hip' of \w+ is not available on cpu: g\+\+ is not on PATH.*the cache holds no library for cpu",
        ),
    ):
        make()(torch.ones(2), 3.0)


# GPUs


def test_auto_on_rocm_takes_hip_then_triton_then_compiled_then_the_reference(make, rocm, tmp_path):
    assert chosen(make()) == ["hip"]
    (tmp_path / "empty" / "hipcc").unlink()
    made = make()
    assert chosen(made) == ["triton"]
    assert "triton (kernels=auto; no hip: neither hipcc nor a clang++ that knows gfx942" in made.choice(GPU)
    assert chosen(make(triton=wrong)) == ["compiled"]
    rocm.triton = False
    made = make()
    assert chosen(made) == ["reference"]
    assert "no triton: Triton is not installed" in made.choice(GPU) and "no compiled: Triton is not" in made.choice(GPU)


def test_rocm_with_another_architecture(make, monkeypatch):
    FakeGpu(monkeypatch, hip="7.1", gcn_arch_name="gfx1100")
    made = make()
    assert chosen(made) == ["triton"]
    assert (
        "no hip: hip_ops: cuda:0 is gfx1100; the kernels need waves of 64 and MFMA: gfx90a, gfx942, gfx950"
        in made.choice(GPU)
    )


def test_nvidia_takes_triton_and_hip_only_by_name(make, monkeypatch, tmp_path):
    FakeGpu(monkeypatch)
    compiler(tmp_path / "bin", "nvcc", "echo release 13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    made = make()
    assert chosen(made) == ["triton"] and "on NVIDIA its build is slow and only verifies the kernels" in made.choice(
        GPU
    )
    with use_kernels("hip"):
        assert chosen(made) == ["hip"]


def test_a_device_of_another_kind(rocm):
    assert "not on device meta" in choice.missing("hip", torch.device("meta"), named=True)


def test_a_hip_build_that_fails_drops_to_triton_and_is_reported_once(make, rocm, caplog):
    """The build runs with a compiler that fails."""
    caplog.set_level(logging.INFO, "hip_ops")
    made = [make(hip=needs_a_build) for _ in range(2)]
    assert [chosen(each) for each in made] == [["triton"], ["triton"]]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"version hip of {made[0].name} failed its self-check on cuda:0 and is not used. BuildError: " in warning
    assert "hipcc" in warning and "no such file" in warning
    for each in made:
        said = (
            "triton (kernels=auto; no hip: it failed its self-check: BuildError: hip_ops: this command failed with "
            "code 1:)"
        )
        assert each.choice(GPU) == said and f"hip_ops: {each.name} on cuda:0: {said}" in caplog.messages
        assert each.results[GPU, "triton"] == "passed"
    with (
        use_kernels("hip"),
        pytest.raises(ValueError, match=r"(?s)kernels=hip: version 'hip' of .*hipcc.*no such file"),
    ):
        made[0].implementations(GPU)


def broken_hipcc(monkeypatch, folder):
    return "BuildError: hip_ops: this command failed with code 1"


def read_only_cache(monkeypatch, folder):
    """A folder that the owner of all files cannot make either."""
    monkeypatch.setenv("HIP_OPS_CACHE", "/proc/hip_ops")
    return "OSError: hip_ops: cannot write the kernel cache /proc/hip_ops/"


def missing_runtime(monkeypatch, folder):
    """The shipped library in a process without libamdhip64; neither a compiler nor a cache is used."""
    monkeypatch.delenv("HIP_OPS_LIBRARY")
    monkeypatch.setenv("HIP_OPS_CACHE", "/proc/hip_ops")
    monkeypatch.setattr("hip_ops.runtime.launchers.own_maps", lambda: "")  # another test may have loaded Debian's
    (folder / "empty" / "hipcc").unlink()
    return "ValueError: libamdhip64: this process has mapped no HIP runtime, and torch was built for HIP 7.1"


@pytest.mark.parametrize("cause", [broken_hipcc, read_only_cache, missing_runtime])
def test_the_next_version_runs_where_hip_cannot_be_loaded(make, rocm, monkeypatch, tmp_path, caplog, cause):
    """The real loader fails; the versions behind it are right, wrong, or fail."""
    why = cause(monkeypatch, tmp_path)
    assert chosen(make(hip=needs_a_build)) == ["triton"]
    assert f"failed its self-check on cuda:0 and is not used. {why}" in caplog.messages[0]
    assert chosen(make(hip=needs_a_build, triton=wrong)) == ["compiled"]
    monkeypatch.setattr(operator, "compile_function", lambda function: fails)
    last = make(hip=needs_a_build, triton=fails)
    assert chosen(last) == ["reference"]
    ((takes, function),) = last.implementations(GPU)
    assert takes is None and torch.equal(function(torch.ones(2), 3.0), torch.full((2,), 3.0))
    for version in ("hip", "triton", "compiled"):
        assert f"no {version}: it failed its self-check" in last.choice(GPU)
    with use_kernels("hip"), pytest.raises(ValueError, match=re.escape(why)):
        last.implementations(GPU)


def test_the_shipped_library_needs_no_compiler(make, rocm, monkeypatch, tmp_path):
    (tmp_path / "empty" / "hipcc").unlink()
    assert "no hip: neither hipcc nor a clang" in make().choice(GPU)
    monkeypatch.delenv("HIP_OPS_LIBRARY")
    assert choice.missing("hip", GPU, named=False) is None and chosen(make()) == ["hip"]
    monkeypatch.setenv("HIP_OPS_LIBRARY", "gcc")
    assert "no hip: HIP_OPS_LIBRARY=gcc: no such library. Allowed: shipped, source" in make().choice(GPU)


def test_a_version_that_is_wrong_is_skipped_with_both_numbers(make, rocm, caplog):
    made = make(hip=wrong, triton=fails)
    assert chosen(made) == ["compiled"]
    numbers = "result, element 7: it gives 24, torch 16"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2 and numbers in warnings[0] and "RuntimeError: invalid device function" in warnings[1]
    for selected in ({"kernels": "hip"}, {made.name: "hip"}):
        with use_kernels(**selected), pytest.raises(ValueError, match=f"'hip' of {made.name} is not .*{numbers}"):
            made.implementations(GPU)
    assert chosen(made) == ["compiled"] and len(caplog.records) == 2, "checked and told once"


def test_a_compiled_version_is_checked_too(make, rocm, monkeypatch):
    monkeypatch.setattr(operator, "compile_function", lambda function: fails)
    made = make(hip=wrong, triton=wrong)
    assert chosen(made) == ["reference"] and "RuntimeError" in made.results[GPU, "compiled"]
    behind = make(hip=wrong, fits={"triton": lambda x, factor: x.dim() == 2})
    (takes, _), (_, compiled) = behind.implementations(GPU)
    assert not takes(torch.ones(3), 2.0) and (GPU, "compiled") not in behind.results, "compiling takes seconds"
    assert torch.equal(compiled(torch.ones(3), 2.0), torch.full((3,), 2.0)), (
        "the reference, as the compiled version fails"
    )
    assert "RuntimeError" in behind.results[GPU, "compiled"]
    warmed = make(hip=wrong, fits={"triton": lambda x, factor: x.dim() == 2})
    warm_up(GPU, [warmed])
    assert (GPU, "compiled") in warmed.results, "all of them ahead of a capture"


def test_the_versions_that_run_by_name(make, rocm, monkeypatch):
    """As ranks compare them: a compiled version behind another one is compiled and compared at its first call."""
    monkeypatch.setattr(operator, "compile_function", lambda function: fails)
    behind = make(hip=wrong, fits={"triton": lambda x, factor: x.dim() == 2})
    assert behind.running(GPU) == ("triton", "compiled") and (GPU, "compiled") not in behind.results
    warm_up(GPU, [behind])
    assert behind.running(GPU) == ("triton", "reference")


def test_triton_compiles_side_by_side(make, monkeypatch, caplog):
    """The first calls of three folders meet, each in a thread of its own; their errors are the self-check's to report."""
    gpu, checking = FakeGpu(monkeypatch), threading.get_ident()
    met, calls = threading.Barrier(3, timeout=60), []
    caplog.set_level(logging.INFO, "hip_ops")

    def meets(x, factor):
        calls.append((threading.get_ident(), factor, x.tolist()))
        if threading.get_ident() != checking and factor == 2.0:
            met.wait()
        return x * factor

    def meets_and_fails(x, factor):
        meets(x, factor)
        return fails(x, factor)

    first, second = (lambda device, factor=factor: (torch.rand(8), factor) for factor in (2.0, 3.0))
    made = [make(triton=version, example=(first, second)) for version in (meets, meets, meets_and_fails)]
    made.append(make(triton=meets, example=second))
    made[3].folder = made[0].folder  # they may share kernels
    state = torch.get_rng_state()
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        warm_up(GPU, made)
    warm_up(CPU, made)
    with use_kernels(**{each.name: "reference" for each in made[:3]}):
        warm_up(GPU, made)
    assert calls == []
    gpu.capturing = False
    warm_up(GPU, made)
    assert [chosen(each) for each in made] == [["triton"], ["triton"], ["compiled"], ["triton"]]
    ahead = [(thread, factor) for thread, factor, _ in calls if thread != checking]
    assert len({thread for thread, _ in ahead}) == 3 and sorted(factor for _, factor in ahead) == [2] * 3 + [3] * 4
    assert len(calls) == len(ahead) + 6 and len({(factor, *numbers) for _, factor, numbers in calls}) == 2
    assert torch.equal(torch.get_rng_state(), state), "the same numbers in all calls, and nothing is drawn"
    assert caplog.text.count("failed ahead of its self-check: invalid device function") == 2
    assert caplog.text.count("failed its self-check on cuda:0 and is not used") == 1
    warm_up(GPU, made)
    assert len(calls) == len(ahead) + 6, "checked already"


def test_a_named_version_and_operators_that_lack_it(make_operator, make, rocm):
    """kernels=hip takes hip where there is one; the others as with auto, and it is listed."""
    without_hip = make_operator(scale, example=example, triton=by_triton)
    with use_kernels("hip"):
        assert chosen(make()) == ["hip"] and chosen(without_hip) == ["triton"]
        assert without_hip.choice(GPU) == "triton (kernels=hip; it has no version 'hip')"
    made = make()
    with use_kernels("reference", **{made.name: "triton"}):
        assert chosen(made) == ["triton"] and chosen(without_hip) == ["reference"]
    with pytest.raises(
        ValueError, match=f"kernel_overrides.{without_hip.name}=hip: no such version. Allowed: auto, triton, "
    ):
        set_kernels("auto", {without_hip.name: "hip"})


def test_a_version_that_the_folder_lacks(make):
    with pytest.raises(AssertionError, match=r"has no versions \['quack'\]"):
        make(fits={"quack": lambda x, factor: True})


def test_a_version_that_takes_some_arguments_only(make, rocm, tmp_path, caplog):
    compiler(tmp_path / "empty", "g++", "echo 13.2")
    made = make(fits={"hip": lambda x, factor: x.dim() == 1})
    assert chosen(made) == ["hip", "triton"]
    assert made.choice(GPU) == "hip where it takes the arguments, then triton (kernels=auto)"
    with use_kernels("hip"):
        seen = make(hip=lambda x, factor: -by_hip(x, factor), compare=lambda got, want, tolerance: None, fits=made.fits)
        assert torch.equal(seen(torch.ones(2), 3.0), -torch.full((2,), 3.0)) and not caplog.records
        for _ in range(2):
            assert torch.equal(seen(torch.ones(2, 2), 3.0), torch.full((2, 2), 3.0)), "the reference, on a CPU"
    (warning,) = caplog.messages
    refused = f"this version of {seen.name} does not take float32 (2, 2)"
    assert warning == f"hip_ops: kernels=hip: {refused}; such calls run another version"
    assert torch.equal(seen(torch.ones(2, 2), 3.0), torch.full((2, 2), 3.0)) and len(caplog.messages) == 1, "auto"


def test_a_version_that_is_not_always_the_fastest(make, make_operator, rocm):
    """auto uses it where it is the fastest; a request by name uses it wherever it fits."""
    made = make(fits={"hip": lambda x, factor: x.dim() < 3}, prefers={"hip": lambda x, factor: x.dim() == 1})
    taken = lambda: [made.implementations(GPU)[0][0](torch.ones([1] * dim), 2.0) for dim in (1, 2, 3)]  # noqa: E731
    assert chosen(made) == ["hip", "triton"] and taken() == [True, False, False]
    with use_kernels("hip"):
        assert chosen(made) == ["hip", "triton"] and taken() == [True, True, False]
    alone = make_operator(scale, example=example, hip=by_hip, triton=wrong, fits=made.fits, prefers=made.prefers)
    entries = alone.implementations(GPU)
    assert chosen(alone) == ["hip", "hip", "reference"], "slower, but not plain torch"
    assert entries[1][0](torch.ones(1, 1), 2.0)


def test_a_version_with_examples_and_a_tolerance_of_its_own(make, rocm):
    tolerant = make(hip=wrong, tolerances={"hip": 0.5})
    assert chosen(tolerant) == ["hip"]
    larger = make(hip=lambda x, factor: x[:8] * factor, more_examples={"hip": (lambda device: (torch.ones(9), 2.0),)})
    assert chosen(larger) == ["triton"] and "torch gives torch.float32 (9,)" in larger.results[GPU, "hip"]


@pytest.mark.parametrize("folder", NO_FP32)
def test_versions_that_take_no_fp32(folder):
    """hip_ops/versions.py, which recipes are checked against, agrees with the operators' `fits`."""

    def widened(value):
        if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            return value.float()
        return torch.float32 if value is torch.float16 else value

    importlib.import_module(f"hip_ops.ops.{folder}")
    for each in (each for each in operator.OPERATORS.values() if each.module == f"hip_ops.ops.{folder}"):
        given = [each.examples[-1](CPU)] if folder == "grouped_product" else [example(CPU) for example in each.examples]
        for arguments in given:
            wide = [widened(value) for value in arguments]
            for version in {*each.fits} - {"grouped_mm"}:  # which takes fp32 on a CPU, and no more on a GPU
                assert each.fits[version](*arguments)
                assert each.fits[version](*wide) == (version not in NO_FP32[folder]), (each.name, version)


def test_a_version_that_needs_a_package(make, rocm):
    made = make(available={"hip": lambda device: f"no package for {device}"})
    assert chosen(made) == ["triton"] and "no hip: no package for cuda:0" in made.choice(GPU)
    with use_kernels("hip"), pytest.raises(ValueError, match="no package for cuda:0"):
        made.implementations(GPU)


# Messages


def test_a_choice_without_a_check_runs_nothing(make, rocm):
    made = make(hip=fails, triton=fails)
    assert made.choice(GPU, check=False) == "hip (kernels=auto)" and made.results == {} and made.choices == {}
    chosen(made)
    assert made.choice(GPU, check=False).startswith("compiled (kernels=auto; no hip: it failed its self-check: Runtime")


def test_a_report_is_by_folder(make, make_operator, rocm, monkeypatch):
    right, other, bad = make(), make(), make(hip=wrong)
    monkeypatch.setattr(operator, "all_operators", lambda: [right, other, bad])
    other.folder = right.folder
    failed = (
        "triton (kernels=auto; no hip: it failed its self-check: result, element 7: it gives 24, torch 16 (allowed: "
        "1e-05 of the largest, 16))"
    )
    assert report(GPU) == [f"{right.folder}  hip (kernels=auto)", f"{bad.folder}  {failed}"]
    bad.folder = right.folder
    assert report(GPU) == [f"{right.folder}.{each.name}  {each.choice(GPU)}" for each in (right, other, bad)]
    assert warm_up(GPU) == {right.name: "hip (kernels=auto)", other.name: "hip (kernels=auto)", bad.name: failed}
    assert warm_up("cpu", [bad]) == {bad.name: "reference (kernels=auto)"}
    assert report("cpu") == ["all operators  reference (kernels=auto)"] == table(warm_up("cpu"))
    with use_kernels("hip"), pytest.raises(ValueError, match="24, torch 16"):
        report(GPU)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert report("cuda", check=False) == report(GPU)


def test_every_version_is_there():
    """A function named as the operator's reference in the file of each version that hip_ops/versions.py names."""
    found = [each for each in operator.all_operators() if each.module == f"hip_ops.ops.{each.folder}"]
    assert {each.folder for each in found} == set(VERSIONS)
    for each in found:
        for version in each.versions:
            assert callable(each._function_of(version)), (each.name, version)


def test_set_kernels_inside_a_block_holds_after_it():
    with use_kernels("triton"), use_kernels("hip"):
        set_kernels("reference")
        assert selection().of("muon").version == "reference"
    assert selection().of("muon").version == "reference"
    with use_kernels("triton"):
        set_kernels(None)
    assert selection().of("muon").version == "auto"
