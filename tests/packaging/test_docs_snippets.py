# SPDX-License-Identifier: Apache-2.0
"""Python snippets of the documents run as printed; the fence names why one cannot: `network`, or `fragment` of a program."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    (page.name, number, *match.groups())
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, match in enumerate(FENCE.finditer(page.read_text()))
]
SHOWN_AND_RUN_ELSEWHERE = {("api.md", 0): "tests/test_example.py"}
NOT_RUN = {
    ("weights.md", 0): "network",
    ("api.md", 1): "fragment",
    **{("kernels.md", number): "fragment" for number in range(4)},
}


def test_what_is_not_run_is_listed():
    assert {(page, number): why for page, number, why, _ in SNIPPETS if why} == NOT_RUN
    for page, _, _, text in SNIPPETS:
        compile(text, page, "exec")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, id=f"{page}-{number}")
        for page, number, why, text in SNIPPETS
        if not why and (page, number) not in SHOWN_AND_RUN_ELSEWHERE
    ],
)
def test_a_snippet_runs_as_printed(tmp_path, page, text):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if "data/demo" in text:
        words = "data prepare --input docs --glob *.md --output data/demo --train-bpe 300 --valid-fraction 0.2".split()
        (tmp_path / "docs").symlink_to(ROOT / "docs")
        subprocess.run([sys.executable, "-m", "zaya_plugin.cli", *words], cwd=tmp_path, env=environment, check=True)
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_recipe_of_the_page_trains_on_one_machine(tmp_path, capsys, monkeypatch):
    from zaya_plugin import cli

    page = (ROOT / "docs" / "recipes.md").read_text()
    (recipe,) = re.findall(r"^```yaml\n(# @package _global_\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_recipes" / "experiment").mkdir(parents=True)
    (tmp_path / "my_recipes" / "experiment" / "mine.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "experiment=mine", "--config-dir", "my_recipes", "--dry-run"]) == 2
    told = capsys.readouterr()
    assert "batch        16 sequences of 256 tokens a step: 2 micro-batches of 4 a data-parallel rank\n" in told.out
    assert told.err.startswith("zaya: data.path=data/mine: there is no dataset at this path"), (
        "the one thing that it lacks"
    )
