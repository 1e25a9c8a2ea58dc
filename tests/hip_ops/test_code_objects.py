# SPDX-License-Identifier: Apache-2.0
"""Test which launches of Triton kernels run from shipped objects, what the HIP runtime is given, and what runs where
none fits or none can be used. No part of it ran on an AMD device: a library of this test takes the runtime's place.

tests/gfx942/test_shipped_objects.py tests the objects themselves.
"""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from hip_ops import errors
from hip_ops.errors import NotCompiled
from hip_ops.ops.router_mlp import _forward, reference, triton
from hip_ops.runtime import code_objects, launchers, operator
from hip_ops.runtime.build import shipped_folder
from hip_ops.runtime.code_objects import (
    OBJECTS_MANIFEST,
    Call,
    CodeObject,
    CodeObjects,
    call_of,
    objects_note,
    serves,
    shipped_objects,
)
from tests.hip_ops.fake_gpu import GPU, FakeGpu
from tests.hip_ops.recorded_modules import compiled_runtime
from tests.hip_ops.torch_process import run_with_torch

FOLDER = shipped_folder("gfx942")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing was read, refused or announced before."""
    monkeypatch.delenv("HIP_OPS_LIBRARY", raising=False)
    monkeypatch.setattr(code_objects, "_refused", {})
    monkeypatch.setattr(errors, "_warnings", set())
    code_objects._read.cache_clear()
    yield
    code_objects._read.cache_clear()


# What decides


def test_what_a_call_is_described_by():
    x = torch.zeros(40, dtype=torch.bfloat16)
    assert x.data_ptr() % 16 == 0
    large = torch.empty(2**30, dtype=torch.bfloat16)[:32]
    call = call_of("k", (x, x[1:], large, large[8:], 32, 33, -16, 2**31, 1e-5), {"BLOCK": 32})
    assert call.arguments == (
        ("*bf16", "DS"), ("*bf16", "S"), ("*bf16", "D"), ("*bf16", "D"), ("i32", "D"), ("i32", ""), ("i32", "D"),
        ("i64", "D"), ("fp32", ""),
    )  # fmt: skip
    assert str(call) == "k (BLOCK=32)"


def test_an_object_covers_calls_with_at_least_its_properties():
    def call(*arguments, **keywords):
        return Call("k", tuple((keywords or {"A": 1, "B": 2}).items()), arguments)

    made = call(("*bf16", "D"), ("i32", ""))
    assert (
        made.covers(made)
        and made.covers(call(("*bf16", "DS"), ("i32", "D")))
        and made.covers(call(*made.arguments, B=2, A=1))
    )
    for other in (
        call(("*bf16", "S"), ("i32", "")),
        call(("*fp16", "DS"), ("i32", "")),
        call(("*bf16", "DS"), ("i64", "D")),
        call(*made.arguments, A=1),
        call(*made.arguments, A=1, B=3),
        call(*made.arguments, A=1, B=2, C=3),
        made._replace(kernel="other"),
    ):
        assert not made.covers(other), other


def test_of_several_objects_the_one_with_most_properties_runs():
    """A shipped object with S of all tensors, and the same without: both compute calls of small tensors."""
    manifest = json.loads((FOLDER / OBJECTS_MANIFEST).read_text())
    strong = next(entry for entry in manifest["objects"] if entry["operator"] == "grouped_product")
    strong = strong | {"arguments": [[name, kind, "DS" * (kind[0] == "*")] for name, kind, _ in strong["arguments"]]}
    less = [[name, kind, properties.replace("S", "")] for name, kind, properties in strong["arguments"]]
    weak = strong | {"file": "weak", "arguments": less}
    for entries in ((strong, weak), (weak, strong)):
        objects = CodeObjects(FOLDER, {"sha256": "", "objects": entries})
        of_strong, of_weak = (CodeObject(**entry).call for entry in (strong, weak))
        assert objects.fitting(of_strong).file == strong["file"] and objects.fitting(of_weak).file == "weak"
        assert objects.fitting(of_weak._replace(arguments=(("*bf16", "S"), *of_weak.arguments[1:]))) is None


# Whether they are used


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the shipped objects, which hip_ops then takes for them."""
    monkeypatch.setattr(code_objects, "shipped_folder", lambda target: tmp_path / target)
    return shutil.copytree(FOLDER, tmp_path / "gfx942")


def test_where_they_are_used(monkeypatch):
    FakeGpu(monkeypatch, hip="7.1")
    assert serves("router_mlp", GPU) and serves("grouped_product", GPU) and not serves("rms_norm", GPU)
    sha256 = json.loads((FOLDER / OBJECTS_MANIFEST).read_text())["sha256"]
    assert code_objects.objects_identity(GPU) == f"shipped, sha256 {sha256}"
    assert re.fullmatch(
        rf"\d+ of grouped_product, router_mlp shipped with the package, sha256 {sha256}", objects_note("gfx942")
    )
    monkeypatch.setenv("HIP_OPS_LIBRARY", "source")
    assert not serves("router_mlp", GPU) and code_objects.objects_identity(GPU) == "none"
    why = "HIP_OPS_LIBRARY=source, so the verified objects are not used"
    assert objects_note("gfx942") == f"compiled by the installed Triton: {why}"
    monkeypatch.setenv("HIP_OPS_LIBRARY", "hipcc")
    assert not serves("router_mlp", GPU) and "no such library. Allowed: shipped, source" in objects_note("gfx942")
    monkeypatch.delenv("HIP_OPS_LIBRARY")
    assert "no code objects are shipped for gfx90a" in objects_note("gfx90a")
    monkeypatch.setattr(torch.version, "hip", None)
    assert not serves("router_mlp", GPU) and code_objects.objects_identity(GPU) is None, "on NVIDIA"


def test_damaged_or_outdated_objects_are_refused(copied, monkeypatch):
    FakeGpu(monkeypatch, hip="7.1")
    assert serves("router_mlp", GPU)
    path, text = copied / OBJECTS_MANIFEST, (copied / OBJECTS_MANIFEST).read_text()
    one = next(copied.glob("router_mlp_forward*.hsaco"))
    content = one.read_bytes()

    def refused() -> str:
        code_objects._read.cache_clear()
        assert not serves("router_mlp", GPU)
        return shipped_objects("gfx942")[1]

    one.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert refused() == f"the shipped object {one} is damaged; install the package again"
    one.unlink()
    assert refused() == f"the shipped object {one} is damaged; install the package again"
    one.write_bytes(content)
    path.write_text(text.replace(json.loads(text)["sha256"], "0" * 64))
    assert refused() == f"the manifest {path} is damaged; install the package again"
    path.write_text(text.replace(json.loads(text)["sources"], "0" * 64))
    assert refused() == "the kernels' sources are not those of the shipped objects"


def test_ranks_compare_the_objects_and_tritons_release(monkeypatch, tmp_path):
    """Triton compiles the calls that no object fits. A Triton that cannot be imported ends no start."""
    FakeGpu(monkeypatch, hip="7.1")
    versions = {"router_mlp": ("triton", "compiled"), "rms_norm": ("hip",)}
    operators = [
        SimpleNamespace(name=name, running=lambda _, v=v: v, compiles_triton=lambda _: False)
        for name, v in versions.items()
    ]
    monkeypatch.setattr(operator, "all_operators", lambda: operators)
    monkeypatch.setattr(operator, "identity", lambda device: None)
    of_objects = versions | {operator.OBJECTS: (code_objects.objects_identity(GPU),)}
    with monkeypatch.context() as broken:
        (tmp_path / "triton.py").write_text("raise RuntimeError('no driver')")
        broken.syspath_prepend(tmp_path)
        broken.delitem(sys.modules, "triton", raising=False)
        assert operator.running(GPU) == of_objects | {operator.TRITON: ("cannot be imported",)}
    release = pytest.importorskip("triton").__version__
    assert operator.running(GPU) == of_objects | {operator.TRITON: (release,)}
    monkeypatch.setenv("HIP_OPS_LIBRARY", "source")
    assert operator.running(GPU) == versions | {operator.OBJECTS: ("none",), operator.TRITON: (release,)}
    monkeypatch.setattr(torch.version, "hip", None)
    assert operator.running(GPU) == versions | {operator.TRITON: (release,)}, "on NVIDIA"


def router_example():
    torch.manual_seed(0)
    return _forward.examples[0](torch.device("cpu"))


def test_a_refusal_is_written_once_and_triton_takes_over(copied, monkeypatch, caplog):
    """No object is launched; the kernel goes to the installed Triton, which finds no device."""
    FakeGpu(monkeypatch, hip="7.1")
    monkeypatch.setattr(code_objects, "architecture", lambda device: "gfx942")
    launched = []
    monkeypatch.setattr(code_objects, "_compiled_by_triton", lambda *names: launched.append(names) or Kernel())
    next(copied.glob("*.hsaco")).write_bytes(b"")
    for _ in range(2):
        triton.router_mlp(*router_example())
    assert launched == [("router_mlp", "router_mlp_forward_kernel")] * 2
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "hip_ops: the installed Triton compiles kernels for gfx942, unverified: the shipped "
    )


class Kernel:
    """Triton's function, which runs nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: None


def test_objects_that_cannot_be_loaded_are_refused(monkeypatch, caplog):
    """No HIP runtime is mapped."""
    FakeGpu(monkeypatch, hip="7.1")
    monkeypatch.setattr(code_objects, "architecture", lambda device: "gfx942")
    monkeypatch.setattr(launchers, "own_maps", lambda: "")
    monkeypatch.setattr(code_objects, "_compiled_by_triton", lambda *names: Kernel())
    code_objects._hip.cache_clear()
    triton.router_mlp(*router_example())
    assert "cannot be loaded: libamdhip64: this process has mapped no HIP runtime" in caplog.text
    assert not serves("router_mlp", GPU) and "cannot be loaded" in objects_note("gfx942")


# Launches


BYTES = """
import pytest, struct, sys, torch
from pathlib import Path
sys.modules["triton"] = None  # an import of it raises
from hip_ops.ops.grouped_product import triton as grouped
from hip_ops.ops.router_mlp import triton as router
from hip_ops.runtime import code_objects
from tests.hip_ops.recorded_modules import RecordedModules
from tests.hip_ops.triton_launches import launched_as_on

patch = pytest.MonkeyPatch()
with launched_as_on("gfx942"):
    hip = RecordedModules(patch, Path(sys.argv[1]))
    empty = lambda *shape: torch.empty(shape, dtype=torch.bfloat16)
    x, offsets = empty(16384, 2048), torch.empty(16, dtype=torch.int32)
    matrices = torch.empty(2**30, dtype=torch.bfloat16)[64 : 64 + 16 * 4096 * 2048].view(16, 4096, 2048)
    out = grouped.grouped_rows(x, matrices.mT, offsets)
    (launch,) = hip.launches
    (one,) = [one for one in code_objects.shipped_objects("gfx942")[0].all if (code_objects.shipped_folder("gfx942") / one.file).read_bytes() == launch.code]
    assert one.keywords["TRANSPOSED"] and one.keywords["EXPERTS"] == 16 and one.operator == "grouped_product"
    assert launch.kernel == "grouped_pointer_rows_kernel" and launch.stream == 0x5EED
    rows, columns = one.keywords["BLOCK_M"], one.keywords["BLOCK_N"]
    assert launch.grid == ((16384 // rows + 16) * (4096 // columns), 1, 1)
    assert launch.block == (64 * one.keywords["num_warps"], 1, 1) and launch.shared == one.shared > 0
    pointers = struct.pack("<QQQQ", x.data_ptr(), matrices.data_ptr(), out.data_ptr(), offsets.data_ptr())
    numbers = struct.pack("<iiiiii", 16, 4096, 2048, 2048, 4096 * 2048, 2048)
    assert launch.arguments == pointers + numbers + bytes(16), launch.arguments.hex()

    total = torch.empty(2**29 + 64, dtype=torch.float32)[: 16 * 2048 * 2048].view(16, 2048, 2048)
    grouped.grouped_outer_(total, x, x, offsets, True)
    launch = hip.launches[-1]
    assert launch.kernel == "grouped_pointer_outer_kernel" and len(hip.launches) == 2
    pointers = struct.pack("<QQQQ", x.data_ptr(), x.data_ptr(), total.data_ptr(), offsets.data_ptr())
    numbers = struct.pack("<iiiiiii", 16, 2048, 2048, 2048, 2048, 2048 * 2048, 2048)
    assert launch.arguments == pointers + numbers + bytes(4) + bytes(16)  # the next pointer at a multiple of 8

    r, vectors = empty(100, 256), [empty(256) for _ in range(5)]
    w, w_out, biases = [empty(256, 256) for _ in range(2)], empty(17, 256), torch.empty(18)[1:]
    gamma, b_down, w_norm, b1, b2 = vectors
    state, weights, ids, *_ = router.router_mlp(r, r, gamma, b_down, w_norm, w[0], b1, w[1], b2, w_out, biases, None, 1e-5, 16)
    launch = hip.launches[-1]
    assert launch.kernel == "router_mlp_forward_kernel" and launch.grid == (4, 1, 1) and launch.block == (256, 1, 1)
    given = [r, r, gamma, b_down, w_norm, w[0], b1, w[1], b2, w_out, biases, ids, state, weights, ids]
    assert launch.arguments[:120] == struct.pack("<15Q", *[each.data_ptr() for each in given])
    assert launch.arguments[152:] == struct.pack("<ifi", 100, 1e-5, 16) + bytes(4) + bytes(16)
    assert len(launch.arguments) == 184
print("right")
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory, require_tool):
    require_tool("cc")
    return compiled_runtime(tmp_path_factory.mktemp("runtime"))


def test_what_the_runtime_is_given(runtime):
    """The bytes of the arguments, grid, block, LDS, stream and code of ZAYA1's calls."""
    done = run_with_torch(BYTES, runtime)
    assert done.stdout == "right\n", done.stderr


FAULTS = """
import ctypes, logging, pytest, shutil, sys, torch
from pathlib import Path
folder, library = map(Path, sys.argv[1:])
from hip_ops.ops.router_mlp import _forward, triton
from hip_ops.runtime import code_objects
from tests.hip_ops.recorded_modules import RecordedModules
from tests.hip_ops.triton_launches import launched_as_on

logging.basicConfig(stream=sys.stdout, format="%(message)s")
patch = pytest.MonkeyPatch()
with launched_as_on("gfx942"):
    hip = RecordedModules(patch, library, load_code=209)
    (folder / "lib").mkdir()
    shutil.copy(library, folder / "lib" / "libamdhip64.so")
    with patch.context() as linked:
        linked.setattr(torch.version, "hip", "10.0.0")
        linked.setattr(torch, "__file__", str(folder / "__init__.py"))
        code_objects._hip()
    last_error = ctypes.CDLL(str(library)).test_last_error
    compiled = []
    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **keywords: compiled.append(grid)
    patch.setattr(code_objects, "_compiled_by_triton", lambda *names: Kernel())
    inputs = _forward.examples[0](torch.device("cpu"))
    triton.router_mlp(*inputs)
    assert compiled and not hip.launches and not last_error(), last_error()

    code_objects._refused.clear()
    hip = RecordedModules(patch, library)
    triton.router_mlp(*inputs)
    hip.launch_code = 719
    for _ in range(2):  # an error of a launch is no reason for another version: it may have run in part
        with pytest.raises(RuntimeError, match=r"router_mlp_forward_kernel-.*hsaco failed with code 719: another error") as failed:
            triton.router_mlp(*inputs)
        assert type(failed.value) is RuntimeError and not last_error(), last_error()
    assert len(hip.launches) == 3 and len(compiled) == 1
    hip.launch_code = 0

    devices = [torch.device("cuda", index) for index in range(2)]
    for device in devices * 2:
        objects = code_objects.loaded_objects(device)
        objects.launch(objects.all[0], (1,), [0] * len(objects.all[0].arguments), device)
    first, second, third, fourth = [each.module for each in hip.launches[-4:]]
    assert first == third != second == fourth, "a module a device, loaded once"
print("right")
"""


def test_codes_of_the_runtime_and_modules_of_two_devices(runtime, tmp_path):
    """A torch that wrote ROCm's version. An object that the runtime refuses, a launch that fails: HIP's last error is
    cleared after each.
    """
    done = run_with_torch(FAULTS, tmp_path, runtime)
    assert done.returncode == 0, done.stderr
    refusal, right = done.stdout.splitlines()
    assert right == "right" and "failed with code 209: hipErrorNoBinaryForGpu" in refusal
    assert refusal.startswith(
        "hip_ops: the installed Triton compiles kernels for gfx942, unverified: the shipped objects"
    )


SELECTS = """
import logging, pytest, sys, torch
from pathlib import Path
folder, library, has_triton = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "broken"
if has_triton:
    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from tests.hip_ops.triton_launches import Driver
    def fails(*arguments, **keywords):
        raise RuntimeError("ld.lld was not found")
    triton.compiler.compile, driver._active = fails, Driver(GPUTarget("hip", "gfx942", 64), 94)
else:
    sys.modules["triton"] = None  # an import of it raises
from hip_ops.ops.router_mlp import _backward, _example, _forward, reference
from hip_ops.runtime import code_objects, operator
from tests.hip_ops.fake_gpu import GPU
from tests.hip_ops.recorded_modules import RecordedModules, emulated
from tests.hip_ops.triton_launches import launched_as_on

logging.basicConfig(stream=sys.stdout, format="%(message)s")
patch = pytest.MonkeyPatch()
with launched_as_on("gfx942"):
    hip = RecordedModules(patch, library)
    hip.run, hip.gpu.triton = emulated(folder), has_triton
    for each in (_forward, _backward):
        print(each.name, "|", each.choice(GPU), "|", each.results[GPU, "triton"])
    checked = len(hip.launches)
    versions = _forward.implementations(GPU)
    patch.setattr(_forward, "implementations", lambda device: versions)
    torch.manual_seed(3)
    inputs = _example(torch.device("cpu"))
    print(_forward.compare([_forward.run(*inputs), inputs], [reference.router_mlp(*inputs), inputs], 2**-6), len(hip.launches) - checked)
    narrow = [each[..., :128].contiguous() if torch.is_tensor(each) and each.dim() and each.shape[-1] == 256 else each for each in inputs]
    narrow[5], narrow[7] = narrow[5][:128].contiguous(), narrow[7][:128].contiguous()
    for _ in range(2):
        assert torch.equal(_forward.run(*narrow)[2], reference.router_mlp(*narrow)[2])
    print(len(hip.launches) - checked)
"""


@pytest.mark.slow  # half a minute in the emulator; the test after it shows what a call does
@pytest.mark.parametrize("triton", ["absent", "broken"])
def test_a_start_without_a_triton_that_compiles(runtime, tmp_path, triton):
    """The self-check passes with the shipped bytes, which the emulator runs where a device would; other shapes run on
    the next version.
    """
    if triton == "broken":
        pytest.importorskip("triton")
    done = run_with_torch(SELECTS, tmp_path, runtime, triton)
    assert done.returncode == 0, done.stderr
    forward, backward, same, first, second, launches = done.stdout.splitlines()
    for line, name in ((forward, "router_mlp"), (backward, "router_mlp_backward")):
        assert line.startswith(f"{name} | triton from shipped objects where it takes the arguments, then "), line
        assert line.endswith("| passed"), line
    assert (same, launches) == ("None 1", "1")
    form = "router_mlp_forward_kernel (HAS_PREVIOUS=True, HAS_FORCED=True, R=128, "
    assert first.startswith(f"hip_ops: no shipped object fits {form}") and "`python -m tools.ship`" in first
    error = "ModuleNotFoundError" if triton == "absent" else "RuntimeError: ld.lld was not found"
    assert second.startswith(f"hip_ops: no shipped object fits {form}") and f"and Triton fails: {error}" in second
    assert second.endswith("Another version of router_mlp runs")


def test_a_call_that_nothing_here_compiles_runs_on_another_version(monkeypatch, caplog):
    """Triton finds no device on this machine. It is asked once for a shape."""
    FakeGpu(monkeypatch, hip="7.1")
    monkeypatch.setattr(code_objects, "architecture", lambda device: "gfx942")
    objects, _ = shipped_objects("gfx942")
    monkeypatch.setitem(objects.functions, None, {})
    asked = []

    def compiled(operator, kernel):
        asked.append(kernel)
        raise RuntimeError("ld.lld was not found")

    monkeypatch.setattr(code_objects, "_compiled_by_triton", compiled)
    versions = [(_forward.fits["triton"], triton.router_mlp), (None, reference.router_mlp)]
    monkeypatch.setattr(_forward, "implementations", lambda device: versions)
    inputs = router_example()
    inputs = (*inputs[:9], inputs[9][:16], inputs[10][:16], *inputs[11:13], -1)  # 16 classes
    for _ in range(2):
        assert torch.equal(_forward.run(*inputs)[2], reference.router_mlp(*inputs)[2])
    assert asked == ["router_mlp_forward_kernel"]
    announced, failed = (record.getMessage() for record in caplog.records)
    assert "HAS_FORCED=True, R=256, CLASSES=16" in announced and "`python -m tools.ship`" in announced
    assert "Triton fails: RuntimeError: ld.lld was not found. Another version of router_mlp runs" in failed
    with pytest.raises(NotCompiled):
        triton.router_mlp(*inputs)


class Compiler(Kernel):
    """Triton's function, each step of which raises the next of its errors, unless that is None."""

    def __init__(self, compiling=(), loading=(), launching=()):
        self.errors = {"compiling": [*compiling], "loading": [*loading], "launching": [*launching]}
        self.steps: list[str] = []

    def step(self, name: str) -> None:
        self.steps.append(name)
        if self.errors[name] and (error := self.errors[name].pop(0)):
            raise error

    def warmup(self, *arguments, grid, **keywords):
        self.step("compiling")
        return self

    run = property(lambda self: self.step("loading"))

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: self.step("launching")


def test_only_what_triton_cannot_compile_goes_to_another_version(monkeypatch, caplog):
    """Memory that is short and errors of loading and launching are raised, and nothing is remembered of them. Every form
    is announced, once.
    """
    resources = pytest.importorskip("triton").OutOfResources(131072, 65536, "shared memory")
    FakeGpu(monkeypatch, hip="7.1")
    monkeypatch.setattr(code_objects, "architecture", lambda device: "gfx942")
    objects, _ = shipped_objects("gfx942")
    monkeypatch.setitem(objects.functions, None, {})

    def run(compiler: Compiler, rows: int = 2, **keywords) -> list[str]:
        monkeypatch.setattr(code_objects, "_compiled_by_triton", lambda *names: compiler)
        compiler.steps.clear()
        code_objects.launch_triton_kernel("grouped_product", "k", (1,), rows, device=torch.device("cpu"), **keywords)
        return compiler.steps

    memory, launch = torch.OutOfMemoryError("HIP out of memory"), RuntimeError("Triton Error [HIP]: Code: 719")
    passing = Compiler([memory], [None, launch], [None, launch])
    with pytest.raises(torch.OutOfMemoryError):
        run(passing, BLOCK=1)
    assert run(passing, BLOCK=1) == ["compiling", "loading", "launching"]
    with pytest.raises(RuntimeError, match="719") as error:
        run(passing, BLOCK=1)
    assert type(error.value) is RuntimeError and run(passing, BLOCK=1) == ["launching"]
    with pytest.raises(RuntimeError, match="719") as error:
        run(passing, 1, BLOCK=1)
    assert type(error.value) is RuntimeError and run(passing, 1, BLOCK=1) == ["compiling", "loading", "launching"]
    for block, failing in enumerate((Compiler([ValueError("no layout")]), Compiler((), [resources])), 2):
        for _ in range(2):  # the second time without Triton
            with pytest.raises(
                NotCompiled, match="ValueError: no layout|OutOfResources: out of resource: shared memory"
            ):
                run(failing, BLOCK=block)
        assert failing.steps == []
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(";")[0] for text in texts] == [
        f"hip_ops: no shipped object fits k (BLOCK={block})" for block in (1, 2, 3)
    ]
