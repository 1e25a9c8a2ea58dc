# SPDX-License-Identifier: Apache-2.0
"""Test that every file of benchmarks/results is cited by name: in a document, in the packages, or in a test."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CITING = ("README.md", "docs/*.md", "docs/*.yaml", "hip_ops/**/*.py", "zaya_plugin/**/*.py", "tests/**/*.py")


def test_every_result_is_cited():
    paths = [path for pattern in CITING for path in ROOT.glob(pattern)]
    text = "\n".join(path.read_text() for path in paths)
    results = sorted(path for path in (ROOT / "benchmarks" / "results").iterdir())
    uncited = [path.name for path in results if path.name not in text and f"{path.stem}.png" not in text]
    assert results and not uncited, f"nothing cites {uncited}: delete them, or name them where their figures are quoted"
