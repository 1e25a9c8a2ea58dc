# SPDX-License-Identifier: Apache-2.0
"""Test the code objects of Triton kernels that the package ships: that they are those of the recipes and of the
self-check, what they take, and how their arguments lie.

The emulator runs them where a test's call is of the form of one (triton_objects.py); budgets.toml holds the rows of
those of ZAYA1's training.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hip_ops.ops.grouped_product.configs import GroupedConfig
from hip_ops.runtime.build import PACKAGE, shipped_folder
from hip_ops.runtime.code_objects import (
    KERNEL_SOURCES,
    OBJECTS_MANIFEST,
    CodeObject,
    kernels_digest,
    objects_digest,
    shipped_objects,
)
from tests.gfx942 import wait_states
from tests.gfx942.budgets import LDS_A_CU, MATRIX, opcodes, resources
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.code_object import open_code_object
from tests.gfx942.toolchain import ARCH, TARGETS
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from tests.hip_ops.grouped_device import GroupedOnDevice
from tests.hip_ops.router_cases import Router, check_backward, check_forward
from tests.hip_ops.router_device import RouterOnDevice
from tests.hip_ops.training_calls import ZAYA1_74B, Sizes, training_calls
from tools.ship import object_differences

ROOT = PACKAGE.parent
FOLDER = shipped_folder(ARCH)
MANIFEST = json.loads((FOLDER / OBJECTS_MANIFEST).read_text())
OBJECTS = [CodeObject(**entry) for entry in MANIFEST["objects"]]
REBUILD = "run `python -m tools.ship` and commit what it writes"


@pytest.mark.parametrize("target", TARGETS)
def test_they_were_compiled_from_these_sources_by_the_pinned_triton(target):
    folder = shipped_folder(target)
    manifest = json.loads((folder / OBJECTS_MANIFEST).read_text())
    assert manifest["sources"] == kernels_digest(), f"a kernel's source changed: {REBUILD}"
    pinned = re.search(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert manifest["triton"] == pinned[1], REBUILD
    assert manifest["sha256"] == objects_digest([entry["sha256"] for entry in manifest["objects"]])
    assert {path.name for path in folder.glob("*.hsaco")} == {entry["file"] for entry in manifest["objects"]}
    objects, why_not = shipped_objects(target)
    assert why_not == "" and len(objects.all) == len(manifest["objects"])


def test_the_digest_covers_all_device_code():
    """Every function of Triton that the kernels' modules name."""
    triton = pytest.importorskip("triton")
    for one in OBJECTS:
        module = importlib.import_module(f"hip_ops.ops.{one.operator}.triton_kernels")
        functions = [value for value in vars(module).values() if isinstance(value, triton.runtime.JITFunction)]
        files = {str(Path(function.fn.__code__.co_filename).relative_to(PACKAGE)) for function in functions}
        assert files <= {*KERNEL_SOURCES}, one.kernel


@pytest.mark.parametrize("target", TARGETS)
def test_every_recipe_and_self_check_has_its_object(target):
    """Composes all recipes of the machine, which takes seconds: a change of a tile or a recipe must not leave the
    shipped kernels unused.
    """
    pytest.importorskip("triton")
    from tools.triton_objects import recorded_calls

    of_recipes, objects = recorded_calls(target), shipped_objects(target)[0].all
    assert {(*call[::2], frozenset(call.keywords)) for call in of_recipes} == {
        (one.kernel, one.call.arguments, frozenset(one.keywords.items())) for one in objects
    }, REBUILD
    assert {one.operator for one in objects} == {*of_recipes.values()} == {"router_mlp", "grouped_product"}


def test_the_self_check_runs_every_object_of_training():
    """The objects of the calls of ZAYA1-base and of ZAYA1-74B, and one example fewer is seen."""
    pytest.importorskip("triton")
    from tools.triton_objects import NAMES, examples, launches_as_on

    objects, _ = shipped_objects(ARCH)
    with launches_as_on(ARCH) as launches:

        def files(arguments_of) -> set[str]:
            each_call = (call for name in NAMES for each in arguments_of(name) for call in launches(name, each))
            return {objects.fitting(call).file for call in each_call}

        def files_of(sizes: Sizes, expert_ranks: int) -> tuple[set[str], set[str]]:
            calls = training_calls(statistics_parts=4, sizes=sizes, expert_ranks=expert_ranks)
            return files(calls.__getitem__), files(lambda name: examples(name, sizes.of_a_rank(expert_ranks)))

        trained, checked = files_of(Sizes(), 1)
        assert len(trained) == 10 and trained <= checked
        assert not trained <= files(lambda name: examples(name)[:-1])
        of_74b, checked = files_of(ZAYA1_74B, 8)
        assert len(of_74b) >= 9 and of_74b.isdisjoint(trained) and of_74b <= checked


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: one.file)
def test_what_an_object_takes(one, require_tool):
    """No spills, at least two waves on a SIMD, matrix instructions, no missing wait state, no path of a machine."""
    require_tool("llvm-objdump-19")
    path = FOLDER / one.file
    used = resources(path, one.kernel, one.shared, one.threads)
    assert (used.scratch, used.vgpr_spills, used.sgpr_spills) == (0, 0, 0)
    assert used.waves_per_simd >= 2 and used.lds <= LDS_A_CU[ARCH]
    assert any(opcodes(path, one.kernel)[name] for name in MATRIX)
    assert wait_states.scan(path) == []
    assert not re.search(rb"/\w+/|\.py\b", path.read_bytes())


def check_grouped(one: CodeObject) -> str:
    """An expert without rows, rows and columns past a tile's end, fewer rows than a slab. Return the object that ran."""
    has = one.keywords
    fields = {"block_m": "BLOCK_M", "block_n": "BLOCK_N", "block_k": "BLOCK_K", "group": "GROUP"}
    options = {name: value for name, value in has.items() if name.islower()}
    config = GroupedConfig(**{field: has[name] for field, name in fields.items()}, **options)
    small = all("S" in properties for _, kind, properties in one.arguments if kind.startswith("*"))
    on_device = GroupedOnDevice(Device(allow_shifted_waves=True), config, small=small or None)
    counts = {2: (270, 5), 4: (0, 270, 5)}.get(has["EXPERTS"], (0, 270, 0, 5, *[0] * 12))
    case = Grouped(counts, 128, 320)
    if "TRANSPOSED" in has:
        check_rows(on_device, case, has["TRANSPOSED"])
    else:
        kinds = {name: kind for name, kind, _ in one.arguments}
        out_dtype = torch.float32 if kinds["out_pointer"] == "*fp32" else torch.bfloat16
        check_outer(on_device, case, has["ACCUMULATE"], out_dtype=out_dtype)
    return on_device.code.path.name


def check_router(one: CodeObject) -> str:
    """Several programs and a tail. Return the object that ran."""
    has, on_device, which = one.keywords, RouterOnDevice(), one.kernel.split("_")[2]
    flags = {"forced": has.get("HAS_FORCED", False), "uses_state": has.get("HAS_D_STATE", True)}
    case = Router(70, has["R"], has["CLASSES"], torch.bfloat16, averaged=has.get("HAS_PREVIOUS", True), **flags)
    (check_forward if which == "forward" else check_backward)(on_device, case)
    return on_device.codes[which].path.name


# tests/hip_ops/test_router_mlp_gfx942.py and test_grouped_product_gfx942.py run one object of each other kernel.
FAST = next(one for one in OBJECTS if one.keywords.get("ACCUMULATE") and one.keywords["EXPERTS"] == 16)


@pytest.mark.parametrize(
    "one", [pytest.param(one, id=one.file, marks=() if one is FAST else pytest.mark.slow) for one in OBJECTS]
)
def test_numbers(one):
    """Against fp64."""
    assert (check_router if one.operator == "router_mlp" else check_grouped)(one) == one.file


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: one.file)
def test_the_packed_arguments_lie_where_the_kernel_reads_them(one):
    info = open_code_object(FOLDER / one.file).kernels[one.kernel]
    assert info.max_threads == one.threads
    visible = [argument for argument in info.arguments if not argument.kind.startswith("hidden_")]
    kinds = [kind for _, kind, _ in one.arguments] + ["*"] * one.trailing_pointers
    assert len(visible) == len(kinds)
    for place, (argument, kind) in enumerate(zip(visible, kinds, strict=True)):
        values = [0] * len(one.arguments)
        if place < len(values):
            values[place] = 1.0 if kind == "fp32" else 0x11
            packed = one.packed(values)
            (first, *_) = [at for at, byte in enumerate(packed) if byte]
            assert first - 2 * (kind == "fp32") == argument.offset, argument  # 1.0 begins with two zero bytes
        assert argument.size == (8 if kind.startswith("*") or kind == "i64" else 4)
        assert (argument.kind == "global_buffer") == kind.startswith("*")
    assert len(one.packed([0] * len(one.arguments))) == visible[-1].offset + visible[-1].size


def test_a_changed_object_is_seen(tmp_path):
    copy = shutil.copytree(FOLDER, tmp_path / ARCH)
    assert object_differences(copy, FOLDER) == []
    first, second, third = sorted(copy.glob("*.hsaco"))[:3]
    first.write_bytes(first.read_bytes()[:-1] + b"\1")
    second.rename(copy / "other.hsaco")
    assert object_differences(copy, FOLDER) == [
        "other.hsaco: not shipped",
        f"{second.name}: no recipe needs it",
        f"{first.name}: the bytes differ",
    ]
    third.unlink()
    assert f"{third.name}: no recipe needs it" in object_differences(copy, FOLDER)


@pytest.mark.slow  # compiles all
@pytest.mark.timeout(1800)
def test_a_new_build_in_another_folder_has_the_same_bytes(tmp_path):
    """The kernels' sources, and Triton's cache, lie elsewhere."""
    root, output = tmp_path / "another" / "folder", tmp_path / "output"
    for name in ("hip_ops", "tests", "tools", "zaya_plugin", "recipes", "patches", "benchmarks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "results", "kept"))
    output.mkdir()
    program = (
        f"from pathlib import Path; from tools.triton_objects import build; build(Path({str(output)!r}), {ARCH!r})"
    )
    env = {**os.environ, "PYTHONPATH": str(root), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert object_differences(output, FOLDER) == []
