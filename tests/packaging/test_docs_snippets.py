# SPDX-License-Identifier: Apache-2.0
"""Python snippets of the documents run as printed. The fence names why one cannot: `network`; a `fragment` of a program
runs behind what FRAGMENTS gives it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import without_phases

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    (page.name, number, *match.groups())
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, match in enumerate(FENCE.finditer(page.read_text()))
]
KERNELS = ("kernels.md",)
(OWN_LOOP,) = [text for page, number, _, text in SNIPPETS if (page, number) == ("own-loop.md", 0)]
SHOWN_AND_RUN_ELSEWHERE = {("own-loop.md", 0): "tests/test_example.py"}
# tests/checkpoint/convert runs its calls on models that it makes.
NOT_RUN = {("fine-tune.md", 0): "network", ("weights.md", 0): "network"}
TORCH = "import torch\nimport hip_ops\n"
SORTED = TORCH + "order = hip_ops.sort_by_expert(torch.arange(32) % 16, 16)\n"
FRAGMENTS = {  # (page, number) -> the lines before it
    ("kernels.md", 0): SORTED
    + "x, residual, weight, eps = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-5\n"
    + "expert_ids, tokens, probs = torch.arange(32) % 16, torch.randn(32, 8), torch.rand(32)\n"
    + "first_product = second_product = lambda rows, offsets: rows\n"
    + "projected, previous, d_state = torch.randn(3, 5, 8)\ngamma, b_down, w_norm, b1, b2 = torch.randn(5, 8)\n"
    + "w1, w2, w2_main_grad = torch.randn(3, 8, 8)\nw_out, biases = torch.randn(17, 8), torch.zeros(17)\n"
    + "d_weights = torch.randn(5)\nfc1, fc1_main_grad, d_gate_up = *torch.randn(2, 16, 12, 8), torch.randn(32, 12)",
    ("reinforcement.md", 0): "import functools, torch, zaya_plugin\nfrom pathlib import Path\n"
    + "from tests.inference.small import SMALL, publish_small\nzaya_plugin.apply_patches()\n"
    + "zaya_plugin.zaya_from_hf = functools.partial(zaya_plugin.zaya_from_hf, use_cpu_initialization=True)\n"
    + "publish_small(Path('exports/mine'))\nrows = [torch.zeros(4, 1, dtype=torch.int32)] * SMALL.num_layers",
    ("own-loop.md", 1): OWN_LOOP.partition("model = ")[0]
    + "from megatron.core.models.gpt import GPTModel\nfrom zaya_plugin import zaya_block_spec",
}


def test_what_is_not_run_is_listed():
    assert {(page, number) for page, number, why, _ in SNIPPETS if why} == {*NOT_RUN, *FRAGMENTS}
    for page, _, _, text in SNIPPETS:
        compile(text, page, "exec")


@pytest.mark.parametrize("fragment", [key for key in FRAGMENTS if key[0] in KERNELS], ids=str)
def test_a_fragment_runs(fragment):
    (text,) = [text for *key, _, text in SNIPPETS if tuple(key) == fragment]
    exec(f"{FRAGMENTS[fragment]}\n{text}", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, f"{FRAGMENTS.get((page, number), '')}\n{text}", id=f"{page}-{number}")
        for page, number, why, text in SNIPPETS
        if page not in KERNELS and (page, number) not in {**NOT_RUN, **SHOWN_AND_RUN_ELSEWHERE}
    ],
)
def test_a_snippet_runs_as_printed(tmp_path, page, text):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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
    assert without_phases(told.err).startswith("zaya: data.path=data/mine: there is no dataset at this path"), (
        "the one thing that it lacks"
    )
