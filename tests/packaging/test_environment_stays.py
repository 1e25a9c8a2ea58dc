# SPDX-License-Identifier: Apache-2.0
"""Installing the plain package into an environment that already has torch, megatron-core and the rest changes none of
them.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# A ROCm training image as its package metadata shows it: builds that no index holds, and a core older than the extra
# `cpu` asks for.
ROCM_IMAGE = {
    "torch": "2.8.0+rocm6.4.2",
    "megatron-core": "0.16.0rc0",
    "transformer-engine": "2.2.0.dev0+rocm",
    "aiter": "0.1.5",
    "numpy": "1.26.4",
    "hydra-core": "1.3.2",
    "omegaconf": "2.3.0",
    "tqdm": "4.66.0",
    "antlr4-python3-runtime": "4.9.3",
    "PyYAML": "6.0.1",
    "packaging": "23.2",
}


def would_install(source: Path, pythonpath: str = "") -> dict[str, str]:
    """Name -> version of all that `pip install source` would put into this environment, with no index to take anything
    from.
    """
    report = ("--dry-run", "--quiet", "--report", "-", "--no-index", "--no-build-isolation")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "install",
        *report,
        str(source),
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env=env | ({"PYTHONPATH": pythonpath} if pythonpath else {}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(done.stdout)["install"]}


def as_installed(site: Path, packages: dict[str, str]) -> str:
    for name, version in packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
        files = ("METADATA", "INSTALLER", "RECORD")  # what an uninstallation removes
        (info / "RECORD").write_text("".join(f"{info.name}/{file},,\n" for file in files))
    return str(site)


def test_this_environment_stays(source_copy):
    assert set(would_install(source_copy)) == {"zaya_plugin"}


def test_rocm_image_stays(source_copy, tmp_path):
    site = as_installed(tmp_path / "site", ROCM_IMAGE)
    assert set(would_install(source_copy, pythonpath=site)) == {"zaya_plugin"}


def test_the_check_sees_a_missing_requirement(source_copy, tmp_path):
    """An environment whose omegaconf is too old: pip must want another, and with no index it fails, naming it."""
    site = as_installed(tmp_path / "site", ROCM_IMAGE | {"omegaconf": "1.4.1"})
    with pytest.raises(AssertionError, match="omegaconf"):
        would_install(source_copy, pythonpath=site)


def test_extras_are_what_the_set_up_installed(source_copy):
    """Fails in an environment made by other means; `make setup` brings it up to date."""
    assert set(would_install(Path(f"{source_copy}[cpu,dev,docs]"))) == {"zaya_plugin"}


def wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel without code."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
@pytest.mark.parametrize("omegaconf", [ROCM_IMAGE["omegaconf"], "1.4.1"])
def test_pip_freeze_is_the_same_but_for_this_package(source_copy, tmp_path, omegaconf):
    """A real `pip install .` into a populated environment. With an omegaconf that is too old, where an index has a newer
    one, the comparison sees the change.
    """
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    as_installed(site, ROCM_IMAGE | {"omegaconf": omegaconf, "xxhash": "3.5.0"})
    (tmp_path / "index").mkdir()
    wheel(tmp_path / "index", "omegaconf", "2.3.9")
    wheel(tmp_path / "index", "numpy", "9.9.9")
    wheel(tmp_path / "index", "trackio", "9.9.9")

    def pip(*words: str) -> str:
        command = [sys.executable, "-m", "pip", "--isolated", "--python", str(environment / "bin" / "python"), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    built = tmp_path / "built"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            built,
            source_copy,
        ],
        check=True,
        capture_output=True,
    )
    before = set(pip("freeze", "--all").splitlines())
    pip("install", "--no-index", "--find-links", str(tmp_path / "index"), *map(str, built.glob("*.whl")))
    after = set(pip("freeze", "--all").splitlines())
    gone, new = before - after, {line.partition("==")[0].partition(" @")[0] for line in after - before}
    if omegaconf == ROCM_IMAGE["omegaconf"]:
        assert (gone, new) == (set(), {"zaya_plugin"}) and len(before) > len(ROCM_IMAGE)
    else:
        assert (gone, new) == ({f"omegaconf=={omegaconf}"}, {"omegaconf", "zaya_plugin"})
