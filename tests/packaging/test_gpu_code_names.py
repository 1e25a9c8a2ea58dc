# SPDX-License-Identifier: Apache-2.0
"""Tests and benchmarks that need a GPU run seldom, so ty looks for names in them that no longer exist."""

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
NAMES = ("missing-attribute", "missing-module-member", "import-not-found")
ARGUMENTS = ("missing-argument", "unknown-argument", "too-many-positional-arguments")
# Attributes that are set on tensors and on a stand-in, and an argument that transformers reads from its keywords.
RUN_TIME_NAMES = {"main_grad", "grad_added_to_main_grad", "zaya_role", "get_config", "attn_implementation"}
FOREIGN_MODULE = re.compile(r"imported module `(?!(zaya_plugin|hip_ops|patches|tests|tools)\b)")


def missing(root: Path, *folders: str) -> list[str]:
    """Return the lines in which ty reports a missing name or a wrong argument in folders of `root`, but for
    RUN_TIME_NAMES and modules of other packages.
    """
    sources = ", ".join(f'"{folder}"' for folder in folders)
    places = ["--project", root, "--python", sys.prefix, "--extra-search-path", REPO]
    rules = ["--ignore=all", *(f"--error={rule}" for rule in NAMES + ARGUMENTS)]
    command = [Path(sys.executable).parent / "ty", "check", *places, *rules, "--output-format=concise"]
    shown = subprocess.run(
        [*command, "--config", f"src.include=[{sources}]"], cwd=root, capture_output=True, text=True, timeout=280
    )
    assert shown.returncode in (0, 1), shown.stderr
    found = [line for line in shown.stdout.splitlines() if re.search(r":\d+:\d+: ", line)]
    found = [line for line in found if not FOREIGN_MODULE.search(line)]
    return [line for line in found if not RUN_TIME_NAMES.intersection(re.findall(r"`(\w+)`", line))]


def test_names_exist():
    assert missing(REPO, "tests/gpu", "benchmarks") == []


def test_a_missing_name_is_found(tmp_path):
    (tmp_path / "gpu").mkdir()
    text = (REPO / "tests/gpu/test_host_buffer.py").read_text()
    for number, name in enumerate(("buffer.allocate", "staging.wait", "buffer.bytes", "pin", "checkpoint.host_buffer")):
        assert name in text
        (tmp_path / f"gpu/test_{number}.py").write_text(re.sub(rf"\b{name}\b", f"{name}_of_old", text))
    found = "\n".join(missing(tmp_path, "gpu"))
    assert sorted(re.findall(r"test_(\d)\.py.*_of_old`", found)) == ["0", "1", "2", "3", "4"], found
