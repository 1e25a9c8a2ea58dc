# SPDX-License-Identifier: Apache-2.0
"""A run of `zaya train`, then `zaya eval` and `zaya generate` on its directory."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from tests.running import train, zaya
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.inference.opening import open_model
from zaya_plugin.inference.perplexity import summed_loss


@pytest.mark.slow
def test_perplexity_is_what_the_run_logged(tmp_path):
    """On the samples of the run's last validation; then the commands on the whole held-out part."""
    data = tmp_path / "data"
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"line {n} of a text about {n * n % 97} things " * 6}) + "\n" for n in range(300))
    )
    words = ("--train-bpe", "400", "--valid-fraction", "0.3")
    prepared = zaya("data", "prepare", "--input", str(tmp_path / "text.jsonl"), "--output", str(data), *words)
    assert prepared.returncode == 0, prepared.stdout
    iterations = (
        "stage.train_iters=4",
        "stage.eval_interval=2",
        "checkpoint.save_interval=4",
        "optim.lr_warmup_iters=1",
    )
    run = train(tmp_path / "run", data, *iterations)
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [row["valid_loss"] for row in rows if row.get("step") == 4 and "valid_loss" in row]

    from megatron.core.tokenizers import MegatronTokenizer

    from zaya_plugin.data.sources import find_sources

    recipe = load_recipe(run.run_dir / "recipe.yaml")
    sources = find_sources(recipe)
    tokenizer = MegatronTokenizer.from_pretrained(sources.tokenizer, metadata_path={"library": "huggingface"})
    length, batch, count = recipe.stage.seq_length, recipe.stage.global_batch_size, recipe.stage.eval_iters
    held_out = sources.build((0, 4 * count * batch, 0), length, recipe.seed, tokenizer)[1]
    opened = open_model(SimpleNamespace(given=str(run.run_dir), step=None, tokenizer=None, device="cpu", dtype=None))
    assert opened.step == 4
    found = []
    for start in range(0, 4 * count * batch, count * batch):
        samples = [held_out[start + place] for place in range(count * batch)]
        windows = torch.stack([torch.cat((each["tokens"], each["labels"][-1:])) for each in samples])
        total, tokens = summed_loss(opened.decoder.model, windows)
        found.append(total / tokens)
    assert logged and all(min(abs(math.exp(each) / math.exp(loss) - 1) for each in found) < 1e-5 for loss in logged)

    out = tmp_path / "found.json"
    done = zaya("eval", str(run.run_dir), "--data", "--out", str(out))
    assert done.returncode == 0, done.stdout
    result = json.loads(out.read_text())
    assert result["step"] == 4 and abs(result["results"]["data"]["loss"] - logged[-1]) < 1
    done = zaya("generate", str(run.run_dir), "--prompt", "line 7", "--max-new-tokens", "8")
    assert done.returncode == 0 and "line 7" in done.stdout and "Warning" not in done.stdout, done.stdout
