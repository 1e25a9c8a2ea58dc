# SPDX-License-Identifier: Apache-2.0
"""A run of `zaya train`, then `zaya eval` and `zaya generate` on its directory."""

import json
import math

import pytest
import torch
from megatron.core.tokenizers import MegatronTokenizer

from tests.chat_files import MARKING, write_chats
from tests.inference.small import open_given
from tests.running import train, zaya
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.data.indexed_dataset import IndexedReader
from zaya_plugin.data.prepared import marks_of
from zaya_plugin.data.sources import find_sources
from zaya_plugin.data.tokenizer import train_bpe
from zaya_plugin.inference.perplexity import Rows, losses_by_position, summed_loss


@pytest.mark.slow
def test_perplexity_is_what_the_run_logged(tmp_path):
    """On the samples of the run's validations; then the commands on the whole held-out part."""
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

    recipe = load_recipe(run.run_dir / "recipe.yaml")
    sources = find_sources(recipe)
    tokenizer = MegatronTokenizer.from_pretrained(sources.tokenizer, metadata_path={"library": "huggingface"})
    length, batch, count = recipe.stage.seq_length, recipe.stage.global_batch_size, recipe.stage.eval_iters
    held_out = sources.build((0, count * batch, 0), length, recipe.seed, tokenizer)[1]
    opened = open_given(run.run_dir)
    assert opened.step == 4
    samples = [held_out[place] for place in range(count * batch)]
    windows = torch.stack([torch.cat((each["tokens"], each["labels"][-1:])) for each in samples])
    total, tokens = summed_loss(opened.decoder.model, windows)
    (loss,) = logged
    assert abs(math.exp(total / tokens) / math.exp(loss) - 1) < 1e-5
    by_position = losses_by_position(run.run_dir, recipe, windows)
    assert by_position.shape == (count * batch, length) and by_position.mean().item() == pytest.approx(loss, rel=1e-5)

    out = tmp_path / "found.json"
    done = zaya("eval", str(run.run_dir), "--data", "--output", str(out))
    assert "data: " in done.stdout and " sequences of 32 tokens" in done.stdout
    assert done.returncode == 0, done.stdout
    result = json.loads(out.read_text())
    assert result["step"] == 4 and abs(result["results"]["data"]["loss"] - logged[-1]) < 1
    done = zaya("generate", str(run.run_dir), "--prompt", "line 7", "--max-new-tokens", "8")
    assert done.returncode == 0 and "line 7" in done.stdout and "Warning" not in done.stdout, done.stdout


@pytest.mark.slow
def test_perplexity_of_chats_is_what_the_run_logged(tmp_path):
    """Of bins that a validation read: the loss of answers alone, 0.803 where all tokens gave 3.774."""
    write_chats(tmp_path / "chats.jsonl", 300)
    (tmp_path / "template.jinja").write_text(MARKING)
    train_bpe([f"add {a} and {b} sum {a + b}" for a in range(9) for b in range(9)], 280, str(tmp_path / "tokenizer"))
    chat = ("--chat", "--input", str(tmp_path / "chats.jsonl"), "--chat-template", str(tmp_path / "template.jinja"))
    given = ("--tokenizer", str(tmp_path / "tokenizer"), "--valid-fraction", "0.3", "--output", str(tmp_path / "plain"))
    data = tmp_path / "data"
    for words in (
        ("prepare", *chat, *given),
        ("pack", str(tmp_path / "plain"), "--sequence-length", "64", "--output", str(data)),
    ):
        done = zaya("data", *words)
        assert done.returncode == 0, done.stdout
    short = ("stage.train_iters=2", "stage.eval_interval=2", "checkpoint.save_interval=2", "optim.lr_warmup_iters=0")
    run = train(tmp_path / "run", data, *short, "data.packing=documents", "stage.seq_length=64", "stage.eval_iters=1")
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [row["valid_loss"] for row in rows if row.get("step") == 2 and "valid_loss" in row]

    recipe = load_recipe(run.run_dir / "recipe.yaml")
    sources, batch = find_sources(recipe), recipe.stage.global_batch_size
    tokenizer = MegatronTokenizer.from_pretrained(sources.tokenizer, metadata_path={"library": "huggingface"})
    held_out = sources.build((0, 4 * batch, 0), 64, recipe.seed, tokenizer)[1]
    prefix = str(data / "valid")
    stored = Rows(IndexedReader(prefix).stream, 64, True, marks_of(prefix))
    assert len(stored) > 4 * batch, "all samples are of one epoch, whose order does not depend on their number"
    numbers = {stored.row(number)[0][:-1].tobytes(): number for number in range(len(stored))}
    model, found = open_given(run.run_dir).decoder.model, []
    reset = recipe.data.reset_position_ids
    for start in range(0, 4 * batch, batch):
        drawn = [numbers[held_out[start + place]["tokens"].numpy().tobytes()] for place in range(batch)]
        ((tokens, marks),) = stored.batches(batch, drawn)
        total, count = summed_loss(model, tokens, eod=tokenizer.eod, reset_positions=reset, packed=True, marks=marks)
        found.append(total / count)
    assert logged and all(min(abs(each / loss - 1) for each in found) < 1e-5 for loss in logged), (logged, found)
    out = tmp_path / "found.json"
    assert zaya("eval", str(run.run_dir), "--data", "--output", str(out)).returncode == 0
    assert abs(json.loads(out.read_text())["results"]["data"]["loss"] / logged[-1] - 1) < 0.05
