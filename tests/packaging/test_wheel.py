# SPDX-License-Identifier: Apache-2.0
"""The content of the wheel, and that it works outside the repository."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

# import name -> folder in the repository
ROOMS = {
    "zaya_plugin": "zaya_plugin",
    "zaya_plugin/patches": "patches",
    "zaya_plugin/recipes": "recipes",
    "hip_ops": "hip_ops",
}


def pip(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    """`--isolated`: the machine's pip configuration and index are not used."""
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(source_copy, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    # CC=false: the build must not want a compiler.
    built = pip(
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
        str(source_copy),
        CC="false",
        CXX="false",
    )
    assert built.returncode == 0, built.stderr
    (file,) = target.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


# Known by the hashes in their manifests; hip_ops loads them on MI300X and MI355X, and pip sees data.
SHIPPED = [f"hip_ops/shipped/{target}/libhip_ops.so" for target in ("gfx942", "gfx950")]
# Bytes of a target's objects as compressed: 45 of 393 kB and 32 of 232 kB, for the recipes of ZAYA1-base and of ZAYA1-74B. A
# recipe that needs others raises the limit of its own target alone.
OBJECT_BYTES = {"gfx942": 400_000, "gfx950": 240_000}
OBJECTS = [str(Path(library).with_name("objects.json")) for library in SHIPPED]  # of Triton kernels


def test_is_pure(wheel, names):
    assert wheel.name.endswith("-py3-none-any.whl")
    binaries = [name for name in names if re.search(r"\.(so|o|a|co|hsaco|pyc|pyd)(\.|$)", name)]
    archive = zipfile.ZipFile(wheel)
    objects = {
        f"{Path(manifest).parent}/{entry['file']}": entry["sha256"]
        for manifest in OBJECTS
        for entry in json.loads(archive.read(manifest))["objects"]
    }
    assert {*binaries} == {*SHIPPED, *objects}, (
        "two libraries, the objects of their manifests, no other product of a compiler"
    )
    assert {name: hashlib.sha256(archive.read(name)).hexdigest() for name in objects} == objects
    for name in SHIPPED:
        mine = [each for each in objects if Path(each).parent == Path(name).parent]
        compressed = sum(archive.getinfo(each).compress_size for each in mine)
        assert 0 < compressed < OBJECT_BYTES[Path(name).parent.name]
        manifest = json.loads(archive.read(str(Path(name).with_name("manifest.json"))))
        assert hashlib.sha256(archive.read(name)).hexdigest() == manifest["sha256"]
        assert archive.getinfo(name).file_size < 1.5e6 and archive.getinfo(name).compress_size < 0.4e6


def test_top_level_holds_two_packages(names):
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"zaya_plugin", "hip_ops"}


def test_holds_every_module_and_recipe(names, project_files):
    expected = set()
    for room, folder in ROOMS.items():
        for file in project_files:
            if file.parts[0] == folder and (file.suffix == ".py" or file.suffix == ".yaml"):
                expected.add("/".join((room, *file.parts[1:])))
    assert {f"{room}/__init__.py" for room in ROOMS} <= expected
    assert expected - names == set(), "in the repository, not in the wheel: a folder without __init__.py?"
    assert {name for name in names if name.endswith((".py", ".yaml"))} - expected == set()


def test_holds_the_marks_of_typed_packages(names):
    assert {"hip_ops/py.typed", "zaya_plugin/py.typed"} <= names


def test_holds_the_kernel_sources(names, project_files):
    sources = {str(file) for file in project_files if file.parts[0] == "hip_ops" and file.suffix in (".hip", ".h")}
    assert sources <= names


def test_holds_the_tables_of_the_kernels(names, project_files):
    tables = {str(file) for file in project_files if file.parts[0] == "hip_ops" and file.suffix == ".json"}
    assert tables and tables <= names


@pytest.mark.slow
def test_kernels_build_from_the_installed_copy(wheel, tmp_path, require_tool):
    """The repository cannot be imported: `-I` removes the current folder and PYTHONPATH from the path."""
    require_tool("g++")
    target = tmp_path / "site"
    assert pip("install", "--no-index", "--no-deps", "--target", str(target), str(wheel)).returncode == 0
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r}); from hip_ops.__main__ import main; sys.exit(main(['build', "
        "'--target', 'cpu']))"
    )
    env = {**os.environ, "HIP_OPS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == "libhip_ops.so" and "building kernels for cpu" in done.stderr
    assert sorted(target.rglob("*.so")) == [target / name for name in SHIPPED], (
        "nothing is written into the installation"
    )


def metadata_of(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(archive.read(name).decode())


def test_plain_requirements_name_no_host_package(wheel):
    plain = [line for line in metadata_of(wheel).get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.split("[<>=]", line)[0] for line in plain} == {
        "hydra-core",
        "omegaconf",
        "numpy",
        "packaging",
        "PyYAML",
        "xxhash",
        "tqdm",
    }
    assert not [line for line in plain if "<" in line or "==" in line], "an upper bound could replace what is installed"


def test_metadata(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get("License-Expression", metadata["License"]) == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {
        "completion",
        "cpu",
        "data",
        "dev",
        "docs",
        "eval",
        "megatron",
        "pictures",
        "terminal",
        "trackers",
    }
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "zaya = zaya_plugin.cli:main" in archive.read(entry_points).decode()


PROGRAM = """
import json, sys
target = sys.argv[1]
if target: sys.path.insert(0, target)
import hip_ops, zaya_plugin, zaya_plugin.patches, zaya_plugin.recipes
from hydra import compose, initialize_config_module
from importlib.resources import files
with initialize_config_module("zaya_plugin.recipes", version_base="1.3"):
    from hydra.core.global_hydra import GlobalHydra
    repository = GlobalHydra.instance().config_loader().repository
    found = sorted(str(group) for group in repository.get_group_options("", results_filter=None))
json.dump({
    "files": [module.__file__ for module in (hip_ops, zaya_plugin, zaya_plugin.patches, zaya_plugin.recipes)],
    "groups": found,
    "torch": "torch" in sys.modules,
}, sys.stdout)
"""


def imported(cwd: Path, target: str = "") -> dict:
    command = [sys.executable, "-I", "-c", PROGRAM, target]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def recipe_groups(project_files) -> set[str]:
    return {
        file.parts[1]
        for file in project_files
        if file.parts[0] == "recipes" and file.suffix == ".yaml" and len(file.parts) > 2
    }


def test_wheel_imports_from_any_folder(wheel, tmp_path, project_files):
    target = tmp_path / "site"
    done = pip("install", "--no-index", "--no-deps", "--target", str(target), str(wheel))
    assert done.returncode == 0, done.stderr
    assert not (target / "patches").exists() and not (target / "recipes").exists()
    seen = imported(tmp_path, str(target))
    assert [str(Path(file).parent.relative_to(target)) for file in seen["files"]] == [
        "hip_ops",
        "zaya_plugin",
        "zaya_plugin/patches",
        "zaya_plugin/recipes",
    ]
    assert recipe_groups(project_files) <= set(seen["groups"])
    program = "import sys; sys.path.insert(0, '.'); from hip_ops.runtime.build import build; print(build('gfx942'))"
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=target, capture_output=True, text=True)
    assert done.stdout == f"{target / SHIPPED[0]}\n" and done.stderr == "", "used as it lies, from unchanged sources"
    assert not seen["torch"], "importing the packages must not import torch"


def test_installed_package_imports_from_any_folder(tmp_path, project_files):
    """The environment that the tests run in holds an editable install; Hydra must find the recipes through it
    as well.
    """
    seen = imported(tmp_path)
    assert Path(seen["files"][2]).name == "__init__.py"
    assert recipe_groups(project_files) <= set(seen["groups"])
    gone = subprocess.run([sys.executable, "-I", "-c", "import patches"], cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'patches'" in gone.stderr
