# SPDX-License-Identifier: Apache-2.0
"""tools/record_signatures.py on a small package, as a folder, a wheel and a commit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "record_signatures.py"
FILES = {
    "pack/__init__.py": "raise ImportError('never imported')\ntry:\n    from .inner import *\nexcept ImportError:\n    pass\n",
    "pack/inner/__init__.py": "from .norms import norm as rms_norm, _Norm\nfrom .. import missing\n",
    "pack/inner/norms.py": """
import torch
LIMIT: int = 3 * 2
if LIMIT:
    @compiled("norm")
    def norm(x, /, weight: "Tensor", eps=1e-5, *rest, window=(-1, -1, 0), **words):
        '''Normalize.

        x: (rows, columns)
        '''
        def hidden():
            return 1, 2, 3
        if eps:
            return x, None
        return
class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps): return x
    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, *dy
        return gradients(dy) if weight else dy, None, None
    def other(self): pass
""",
}


@pytest.fixture
def package(tmp_path):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def recorded(*arguments, fails=False):
    done = subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert bool(done.returncode) == fails, done.stderr
    return done.stderr if fails else json.loads(done.stdout)


def test_parameters_returns_and_classes(package):
    data = recorded(
        package, "--version", "1.2", "--symbols", "pack.rms_norm", "pack.inner._Norm", "pack.inner.norms.LIMIT"
    )
    assert (data["package"], data["version"], data["commit"]) == ("pack", "1.2", None)
    norm, function, limit = data["symbols"].values()
    assert (norm["kind"], norm["file"], norm["decorators"]) == ("function", "pack/inner/norms.py", ["compiled('norm')"])
    assert norm["parameters"] == [
        {"name": "x", "kind": "POSITIONAL_ONLY"},
        {"name": "weight", "kind": "POSITIONAL_OR_KEYWORD", "annotation": "'Tensor'"},
        {"name": "eps", "kind": "POSITIONAL_OR_KEYWORD", "default": "1e-05"},
        {"name": "rest", "kind": "VAR_POSITIONAL"},
        {"name": "window", "kind": "KEYWORD_ONLY", "default": "(-1, -1, 0)"},
        {"name": "words", "kind": "VAR_KEYWORD"},
    ]
    assert [(each["values"], each["none"]) for each in norm["returns"]] == [(2, [1]), (1, [0])]
    assert function["bases"] == ["torch.autograd.Function"] and [*function["methods"]] == ["forward", "backward"]
    backward = function["methods"]["backward"]["returns"]
    assert [(each["values"], each["none"]) for each in backward] == [(None, [0]), (3, [1, 2])]
    assert limit["value"] == "3 * 2"


def test_what_is_absent_which_methods_and_lines_of_docstrings(package):
    assert "pack.gone" in recorded(package, "--version", "1", "--symbols", "pack.gone", fails=True)
    assert "--version" in recorded(package, "--symbols", "pack.inner.norms.norm", fails=True)
    norm = recorded(package, "--version", "1", "--symbols", "pack.rms_norm", "--doc", "[(]rows")
    assert norm["symbols"]["pack.rms_norm"]["doc"] == ["x: (rows, columns)"]
    symbols = ("--symbols", "pack.gone", "pack.inner._Norm", "--methods", "other")
    data = recorded(package, "--version", "1", "--absent", *symbols)["symbols"]
    assert data["pack.gone"] is None and [*data["pack.inner._Norm"]["methods"]] == ["other"]


def test_versions_of_a_wheel_and_of_a_commit(package):
    (package / "amd_pack-0.1.dist-info").mkdir()
    (package / "amd_pack-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: amd-pack\nVersion: 0.1.7\n"
    )
    assert recorded(package, "--symbols", "pack.rms_norm")["version"] == "0.1.7"
    (package / "amd_pack-0.1.dist-info" / "METADATA").unlink()
    git = ["git", "-C", package, "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "v0.2.post1"]):
        subprocess.run([*git, *command], check=True)
    (package / "pack/inner/norms.py").write_text("def norm(): pass")
    data = recorded(package / ".git", "--rev", "v0.2.post1", "--symbols", "pack.rms_norm")
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (data["version"], data["commit"]) == ("0.2.post1", head)
    assert data["symbols"]["pack.rms_norm"]["parameters"][0]["name"] == "x"
