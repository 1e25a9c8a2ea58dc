# SPDX-License-Identifier: Apache-2.0
"""`zaya generate` and `zaya eval` as a user types them, in this process."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from tokenizers import Tokenizer

from tests.inference.small import SMALL, TEXTS, publish_small
from tests.running import command
from zaya_plugin import cli
from zaya_plugin.checkpoint import manifest
from zaya_plugin.checkpoint.convert import loading
from zaya_plugin.checkpoint.convert.importing import import_model, open_source
from zaya_plugin.inference import opening
from zaya_plugin.inference.opening import open_model
from zaya_plugin.inference.perplexity import summed_loss


@pytest.fixture
def zaya(capsys):
    """Run a command and return exit code, stdout and stderr."""

    def run(*words) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


@pytest.fixture(scope="module")
def checkpoint(published, tmp_path_factory):
    return import_model(open_source(published), tmp_path_factory.mktemp("imported") / "checkpoints")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from tests.inference.small import VOCABULARY
    from zaya_plugin.data.tokenizer import train_bpe

    folder = tmp_path_factory.mktemp("corpus")
    train_bpe(TEXTS * 3, VOCABULARY, str(folder / "tokenizer"))
    (folder / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(30) for text in TEXTS)
    )
    code = cli.main(
        ["data", "prepare", "--input", str(folder / "lines.jsonl"), "--output", str(folder / "data")]
        + ["--tokenizer", str(folder / "tokenizer"), "--valid-fraction", "0.3", "--workers", "1", "--quiet"]
    )
    assert code == 0
    return folder / "data"


NEW = ("--max-new-tokens", 12)


def test_checkpoint_and_layouts_give_one_text(zaya, published, checkpoint, tmp_path):
    legacy = publish_small(tmp_path / "legacy", "legacy")
    found = {zaya("generate", each, "--prompt", "the cat", *NEW)[1] for each in (checkpoint.parent, checkpoint)}
    prompted = zaya("generate", published, "--prompt", "the cat", *NEW)
    assert prompted[0] == 0 and prompted[1].startswith("the cat") and found == {prompted[1]}
    assert zaya("generate", legacy, "--prompt", "the cat", *NEW)[1].startswith("the cat")


def test_json_of_a_file_in_batches(zaya, published, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\n\none two three\na b\n")
    code, out, _ = zaya("generate", published, "--prompts", file, "--json", "--batch-size", 2, *NEW)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["prompt"] for row in rows] == ["the cat", "one two three", "a b"]
    for row in rows:
        assert 1 <= len(row["tokens"]) <= 12 and row["ended"] == (row["tokens"][-1] == SMALL.eos)
    tokenizer = Tokenizer.from_file(str(published / "tokenizer.json"))
    texts = (tokenizer.decode(rows[2]["tokens"][:n]) for n in range(1, 13))
    cut, text = next((n, text) for n, text in enumerate(texts, 1) if text.endswith("\ufffd"))  # within a character
    assert zaya("generate", published, "--prompt", "a b", "--max-new-tokens", cut)[1] == f"a b{text}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["MODEL"], "--prompt: was not given"),
        (["MODEL", "--prompt", ""], "--prompt=: has no token"),
        (["nothing/here/at/all", "--prompt", "a"], "CKPT=nothing/here/at/all: no such checkpoint"),
        (["MODEL", "--prompt", "a", "--step", "5"], "--step=5: .* is a published model"),
        (["MODEL", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens=0"),
        (["MODEL", "--prompt", "a", "--top-k", "5"], "--temperature=0.0"),
        (["MODEL", "--prompts", "no file"], "--prompts=no file: cannot be read"),
        (["MODEL", "--prompt", "a", "--tokenizer", "."], "--tokenizer=.: . has no tokenizer.json"),
        (["MODEL", "--prompt", "a", "--device", "cuda"], "--device=cuda: torch finds no GPU"),
    ],
)
def test_mistakes_of_generate(zaya, published, words, says):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, _, err = zaya("generate", *(published if word == "MODEL" else word for word in words))
    assert code == 2 and re.search(says, err) and "Traceback" not in err


def test_perplexity_is_that_of_trainings_validation(zaya, checkpoint, corpus, tmp_path):
    """The forward step of training, with its loss and its reduction, on the same tokens."""
    out = tmp_path / "found.json"
    code, text, _ = zaya("eval", checkpoint, "--data", corpus, "--batch-size", 2, "--out", out)
    found = json.loads(out.read_text())["results"]["data"]
    assert code == 0 and f"{found['perplexity']:.4f}" in text
    stream = numpy.fromfile(corpus / "valid.bin", json.loads((corpus / "manifest.json").read_text())["dtype"])
    assert found["tokens"] == len(stream) - 1

    from zaya_plugin.parallel.context_order import ContextShard
    from zaya_plugin.training.batches import micro_batch

    opened = open_model(
        SimpleNamespace(given=str(checkpoint), step=None, tokenizer=None, device="cpu", dtype=None), False
    )
    total = count = 0.0
    length = SMALL.max_position_embeddings
    for begin in range(0, len(stream) - 1, length):
        row = torch.from_numpy(stream[begin : begin + length + 1].astype("int64")).unsqueeze(0)
        size = row.shape[1] - 1
        batch = dict(tokens=row[:, :-1], labels=row[:, 1:], position_ids=torch.arange(size).unsqueeze(0))
        batch = micro_batch(batch | {"loss_mask": torch.ones(1, size)}, "cpu", ContextShard())
        losses = opened.decoder.model(
            batch.tokens, batch.positions, None, labels=batch.labels, loss_mask=batch.loss_mask
        )
        total, count = total + (losses.float() * batch.loss_mask).sum().item(), count + batch.loss_mask.sum().item()
    assert math.isclose(found["perplexity"], math.exp(total / count), rel_tol=1e-5)


def test_loss_is_transformers(decoder, theirs):
    tokens = torch.randint(2, SMALL.vocab_size, (3, 33), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        logits = theirs(tokens[:, :-1], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    total, count = summed_loss(decoder.model, tokens)
    assert count == 96 and math.isclose(total, expected.item(), rel_tol=1e-5)


def test_documents_of_bins_are_computed_alone(decoder):
    """Two documents in a bin, with filling: the losses are those of the documents by themselves."""
    end, generator = 299, torch.Generator().manual_seed(9)
    one, two = (torch.randint(2, 290, (n,), generator=generator) for n in (7, 5))
    filled = torch.cat((one, torch.tensor([end]), two, torch.tensor([end, end, end, end]))).unsqueeze(0)
    total, count = summed_loss(decoder.model, filled, eod=end, reset_positions=True, packed=True)
    alone = [summed_loss(decoder.model, torch.cat((each, torch.tensor([end]))).unsqueeze(0)) for each in (one, two)]
    assert count == sum(n for _, n in alone) and math.isclose(total, sum(loss for loss, _ in alone), rel_tol=1e-5)


def test_limit_and_names(zaya, published, corpus, tmp_path):
    out = tmp_path / "found.json"
    assert zaya("eval", published, "--data", corpus, corpus / "train", "--limit", 1, "--out", out)[0] == 0
    results = json.loads(out.read_text())["results"]
    assert {name: each["tokens"] for name, each in results.items()} == {"data": 256, "train": 256}


def test_mistakes_of_eval(zaya, published, corpus, tmp_path, monkeypatch):
    for words, says in (
        ((), "neither --tasks nor --data"),
        (("--data",), "there is no recipe.yaml"),
        (("--data", tmp_path / "none"), "there is no dataset at this path"),
        (("--data", corpus, "--out", tmp_path / "no" / "file"), "its folder does not exist"),
        (("--data", corpus, "--limit", 0), "--limit=0"),
        (("--tasks", "a", "--include", tmp_path / "no"), "is no folder"),
    ):
        code, _, err = zaya("eval", published, *words)
        assert code == 2 and says in err, err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = zaya("eval", published, "--tasks", "arc_easy")
    assert code == 2 and "pip install 'zaya_plugin[eval]'" in err


def test_data_of_another_tokenizer_is_refused(zaya, published, corpus, tmp_path):
    from zaya_plugin.data.tokenizer import train_bpe

    train_bpe(["other words entirely"] * 3, 290, str(tmp_path / "other"))
    code, _, err = zaya("eval", published, "--data", corpus, "--tokenizer", tmp_path / "other")
    assert code == 2 and "was made with another tokenizer" in err


@pytest.fixture
def unloaded(monkeypatch):
    """Loading the weights of a model fails the test."""

    def load(*_):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(loading, "load_model", load)


def test_keys_and_values_beyond_the_memory_are_refused_before_anything_is_loaded(zaya, published, tmp_path, unloaded):
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\n" * 2000)
    words = ("--prompts", file, "--batch-size", 2000, "--max-new-tokens", 16_000_000)
    code, _, err = zaya("generate", published, *words)
    assert code == 2 and "Traceback" not in err
    found = re.search(
        r"zaya: --max-new-tokens=16000000: the keys and values of 2000 sequences of 16,000,\d{3} tokens need ([\d,.]+) GiB "
        r"and the weights and a prompt's pass 0.0\d GiB, and ([\d,.]+) GiB of memory are free. Allowed: at most [\d,]+ with",
        err,
    )
    needed, free = (float(text.replace(",", "")) for text in found.groups())
    width = SMALL.num_layers * 2 * SMALL.num_query_groups * SMALL.kv_channels * 4
    assert needed == round(2000 * 2**24 * width / 2**30, 2) > free


def test_what_a_refusal_allows_fits_and_one_token_more_does_not(published, monkeypatch):
    opened = open_model(SimpleNamespace(given=str(published), step=None, tokenizer=None, device="cpu", dtype=None))
    room = SMALL.num_layers * 2 * SMALL.num_query_groups * SMALL.kv_channels * 4 * 1024
    monkeypatch.setattr(opening, "free_memory", lambda: opened.bytes_of_pass(3, 7) + 3 * room)
    with pytest.raises(ValueError, match="Allowed: at most 1,017 with 3 sequences at once. Fix: --max-new-tokens 1017"):
        opening.check_room(opened, 3, 7, 1018)
    opening.check_room(opened, 3, 7, 1017)
    opened.decoder.begin([[5] * 7] * 3, 1017)
    held = sum(state.keys.nbytes + state.values.nbytes for state in opened.decoder.states)
    assert held == 3 * room, "what was computed is what is allocated"
    monkeypatch.setattr(opening, "free_memory", lambda: 1000)
    with pytest.raises(ValueError, match="Allowed: a model and prompts that fit. Fix: a smaller --batch-size"):
        opening.check_room(opened, 3, 7, 1)


def test_a_pass_beyond_the_memory_is_refused_before_anything_is_loaded(zaya, published, corpus, unloaded, monkeypatch):
    monkeypatch.setattr(opening, "free_memory", lambda: 1000)
    code, _, err = zaya("eval", published, "--data", corpus, "--batch-size", 9)
    assert code == 2 and re.search(r"--batch-size=9: .* over \d sequences of 256 tokens need .* are free", err), err


def test_a_tokenizer_of_another_corpus_than_the_checkpoints_is_refused(zaya, checkpoint, published, tmp_path):
    """Of the same size, so that every id has a row."""
    from zaya_plugin.data.tokenizer import tokenizer_digest, train_bpe

    train_bpe(
        ["other words entirely, of quite another kind: nothing but punctuation!"] * 3, 290, str(tmp_path / "other")
    )
    own, other = tokenizer_digest(str(published)), tokenizer_digest(str(tmp_path / "other"))
    trained = tmp_path / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, trained)
    whole = manifest.read(trained)

    def states(tokenizer):
        manifest.write(trained, whole["iteration"], whole["files"], data={"tokenizer": tokenizer})

    given = ("--prompt", "a", "--max-new-tokens", 1, "--tokenizer")
    states(own)
    assert zaya("generate", trained, *given, published)[0] == 0
    for words in (
        ("generate", trained, *given),
        ("convert", "export", trained, "--output", tmp_path / "x", "--tokenizer"),
    ):
        code, _, err = zaya(*words, tmp_path / "other")
        assert code == 2 and f"--tokenizer={tmp_path / 'other'}: is another tokenizer ({other}) than that of the" in err
        assert f"{trained} ({own})" in err and not (tmp_path / "x").exists()
    states("organisation/name")
    assert zaya("generate", trained, *given, tmp_path / "other")[0] == 0, "of a name no digest is known"


def test_damaged_files_are_named(zaya, published, checkpoint, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(published, broken)
    (broken / "tokenizer.json").write_text("{")
    code, _, err = zaya("generate", broken, "--prompt", "a")
    assert code == 2 and f"--tokenizer={broken}: cannot be opened" in err
    cut = tmp_path / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, cut)
    next(cut.glob("*.distcp")).write_bytes(b"")
    code, _, err = zaya("generate", cut, "--prompt", "a")
    assert code == 2 and str(cut) in err and "Traceback" not in err


@pytest.mark.slow
def test_results_go_to_wandb(published, corpus, tmp_path):
    words = ("eval", published, "--data", corpus, "--limit", 1, "--wandb", "project")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command(*map(str, words)),
        cwd=tmp_path,
        env={**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "wandb sync" in done.stderr, done.stderr
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"eval/data/perplexity" in log.read_bytes()
