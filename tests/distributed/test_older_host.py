# SPDX-License-Identifier: Apache-2.0
"""Muon in the release of megatron-core whose API Primus pins (0.16), where the buffer layout cuts matrices: the bits of
the supported release.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import megatron.core
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
OLD = "0.16.0"


@pytest.fixture(scope="module")
def old_release(tmp_path_factory) -> Path:
    """The package alone, from the index that pip uses; nothing is installed."""
    folder = tmp_path_factory.mktemp("old")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        f"megatron-core=={OLD}",
    ]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def weights(path: Path, version: str, ranks: int, site: Path | None = None) -> dict:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "-m",
        "tests.distributed.older_host",
    ]
    search = os.pathsep.join(str(p) for p in (site, ROOT, os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [*launch, version, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return torch.load(path)


@pytest.mark.slow  # downloads 2.6 MB
def test_five_muon_steps_have_the_bits_of_the_supported_release(tmp_path, old_release):
    here = weights(tmp_path / "new.pt", megatron.core.__version__, 2)
    assert here["cut"] == 0
    for ranks in (1, 2, 4):
        old = weights(tmp_path / f"old{ranks}.pt", OLD, ranks, old_release)
        assert (old["cut"] > 0) == (ranks > 1), "Megatron's own layout should cut matrices"
        assert old["weights"].keys() == here["weights"].keys()
        assert all(torch.equal(old["weights"][name], weight) for name, weight in here["weights"].items())
