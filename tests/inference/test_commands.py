# SPDX-License-Identifier: Apache-2.0
"""`zaya generate` and `zaya eval` as a user types them, in this process."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from tokenizers import Tokenizer

from tests.chat_files import MARKING, write_chats
from tests.checkpoint_files import pretend_checkpoint
from tests.inference.small import SMALL, TEXTS, open_given, publish_small
from tests.running import command
from zaya_plugin import cli
from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.convert import loading
from zaya_plugin.checkpoint.convert.importing import import_model, open_source
from zaya_plugin.data.indexed_dataset import IndexedReader, spread
from zaya_plugin.data.prepared import load_manifest
from zaya_plugin.data.routed_experts import decoded
from zaya_plugin.inference import opening
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


def test_a_chat_is_the_template_s_prompt_and_prints_the_answer_alone(zaya, published, tmp_path):
    prompt = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    code, answer, _ = zaya("generate", published, "--chat", "--chat-template", "chatml", "--prompt", "the cat", *NEW)
    _, whole, _ = zaya("generate", published, "--prompt", prompt, *NEW)
    assert code == 0 and prompt + answer == whole
    code, _, error = zaya("generate", published, "--chat", "--prompt", "the cat", *NEW)
    assert code == 2 and "has no chat template" in error and "--chat-template chatml" in error
    (tmp_path / "broken.jinja").write_text("{{ nothing.at.all }}")
    code, _, error = zaya(
        "generate", published, "--chat", "--chat-template", tmp_path / "broken.jinja", "--prompt", "x"
    )
    assert code == 2 and "the chat template fails: UndefinedError" in error and "Traceback" not in error


def choices_of(theirs, tokens: list[int]) -> list:
    """The classes that transformers' routers choose, [tokens, layers, 1]."""
    chosen: list[torch.Tensor] = []

    def keep(gate, _, out):
        chosen.append(out[2].masked_fill(out[1] == 0, SMALL.num_experts))

    hooks = [layer.mlp.gate.register_forward_hook(keep) for layer in theirs.model.layers]
    with torch.no_grad():
        theirs(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).tolist()


def test_routed_experts_are_those_of_transformers(zaya, published, theirs, corpus, tmp_path):
    """Prompt and new tokens but the last, for each prompt of a batch; and all tokens of a dataset's sequences."""
    words = ["--prompt", "the cat", "--prompt", "one two three", *NEW, "--routed-experts", tmp_path / "routed.jsonl"]
    assert zaya("generate", published, *words)[0] == 0
    assert zaya("eval", published, "--data", corpus, "--limit", 2, "--routed-experts", tmp_path / "eval.jsonl")[0] == 0
    for file, left in (("routed.jsonl", 1), ("eval.jsonl", 0)):
        lines = list(map(json.loads, (tmp_path / file).read_text().splitlines()))
        assert len(lines) == 2
        for line in lines:
            rows = decoded(line["routed_experts"], len(line["tokens"]) - left, SMALL.num_layers)
            assert rows.tolist() == choices_of(theirs, line["tokens"][: len(line["tokens"]) - left])
            assert len(set(rows.flatten())) > 2
    shutil.copytree(corpus, tmp_path / "more")
    code, _, error = zaya(
        "eval", published, "--data", corpus, tmp_path / "more", "--routed-experts", tmp_path / "x.npy"
    )
    assert code == 2 and "--routed-experts=" in error and "is of one dataset" in error


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
        (["MODEL", "def main():"], "^zaya: def main\\(\\):: one word too many. Fix: --prompt 'def main\\(\\):'.$"),
        (["MODEL", "--max-tokens", "60"], "^zaya: --max-tokens: no such option. .* Fix: --max-new-tokens.$"),
        (["MODEL", "--prompt", ""], "--prompt=: has no token"),
        (
            ["nothing/here/at/all", "--prompt", "a"],
            "MODEL=nothing/here/at/all: no such checkpoint: the path does not exist",
        ),
        (["MODEL", "--prompt", "a", "--step", "5"], "--step=5: .* is a published model"),
        (["MODEL", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens: '0' is not a whole number from 1 to"),
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
    code, text, err = zaya("eval", checkpoint, "--data", corpus, "--batch-size", 2, "--output", out)
    found = json.loads(out.read_text())["results"]["data"]
    assert code == 0 and f"{found['perplexity']:.4f}" in text and "special tokens" not in err
    other = shutil.copytree(corpus, tmp_path / "other")
    replace(load_manifest(other), special_tokens=True).write(other)
    note = f"note: the texts of {other} have the tokenizer's special tokens (bos), and those of the model have not"
    assert note in zaya("eval", checkpoint, "--data", other, "--limit", 1)[2]
    stream = numpy.fromfile(corpus / "valid.bin", json.loads((corpus / "manifest.json").read_text())["dtype"])
    assert found["tokens"] == len(stream) - 1

    from zaya_plugin.hosts.adapter import micro_batch
    from zaya_plugin.parallel.context_order import ContextShard

    opened = open_given(checkpoint, needs_tokenizer=False)
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


@pytest.fixture(scope="module")
def chats(tmp_path_factory, corpus):
    """Packed chats in which a turn, and no document, ends with the tokenizer's end of document."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder / "chats.jsonl", 60)
    (folder / "template.jinja").write_text(MARKING)
    words = ["--chat", "--input", "chats.jsonl", "--chat-template", "template.jinja"]
    paths = [str(folder / word) if "." in word else word for word in words]
    more = ["--tokenizer", str(corpus / "tokenizer"), "--valid-fraction", "0.3", "--workers", "1", "--quiet"]
    assert cli.main(["data", "prepare", *paths, "--output", str(folder / "plain"), *more]) == 0
    packed = ["--sequence-length", "128", "--output", str(folder / "packed"), "--quiet"]
    assert cli.main(["data", "pack", str(folder / "plain"), *packed]) == 0
    return folder / "packed"


def test_perplexity_of_chats_is_that_of_trainings_validation(zaya, checkpoint, chats, tmp_path):
    """Training's own samples, loss mask and documents: answers alone count, and documents end where the marks say."""
    from megatron.core.tokenizers import MegatronTokenizer

    from zaya_plugin.data.dataset import build_gpt_datasets
    from zaya_plugin.hosts.adapter import micro_batch
    from zaya_plugin.parallel.context_order import ContextShard

    out = tmp_path / "found.json"
    assert zaya("eval", checkpoint, "--data", chats, "--batch-size", 3, "--output", out)[0] == 0
    found = json.loads(out.read_text())["results"]["packed"]
    tokenizer = MegatronTokenizer.from_pretrained(str(chats / "tokenizer"), metadata_path={"library": "huggingface"})
    bins = IndexedReader(str(chats / "valid")).indexed.tokens // 128
    built = dict(sequence_length=128, seed=1, tokenizer=tokenizer, cache_path=str(tmp_path / "cache"))
    held_out = build_gpt_datasets(str(chats), str(chats), (0, 2 * bins, 0), **built)[1]  # one epoch has one bin less
    samples = {tuple(held_out[number]["tokens"].tolist()): held_out[number] for number in range(2 * bins)}
    model, total, count = open_given(checkpoint).decoder.model, 0.0, 0.0
    for sample in samples.values():
        sample = {name: value.unsqueeze(0) for name, value in sample.items()}
        batch = micro_batch(sample, "cpu", ContextShard(), eod=tokenizer.eod)
        with torch.no_grad():
            losses = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
        total, count = total + (losses * batch.loss_mask).sum().item(), count + batch.loss_mask.sum().item()
    assert len(samples) == bins >= 4 and found["tokens"] == count < 64 * bins
    assert math.isclose(found["loss"], total / count, rel_tol=1e-5)


def test_limit_and_names(zaya, published, corpus, tmp_path):
    out = tmp_path / "found.json"
    assert zaya("eval", published, "--data", corpus, corpus / "train", "--limit", 1, "--output", out)[0] == 0
    results = json.loads(out.read_text())["results"]
    assert {name: each["tokens"] for name, each in results.items()} == {"data": 256, "train": 256}


def test_a_limit_is_spread_evenly(zaya, published, corpus, tmp_path):
    """The first sequences of a file may be of one kind of text."""
    assert spread(100, 4) == [12, 37, 62, 87] and spread(3, 9) == spread(3, None) == [0, 1, 2] and spread(2, 1) == [0]
    out, stream = tmp_path / "found.json", IndexedReader(str(corpus / "train")).stream
    count = -(-(len(stream) - 1) // 256)
    assert zaya("eval", published, "--data", corpus / "train", "--limit", 2, "--output", out)[0] == 0
    found, model = json.loads(out.read_text())["results"]["train"], open_given(published).decoder.model
    windows = [torch.from_numpy(stream[n * 256 : n * 256 + 257].astype("int64")) for n in spread(count, 2)]
    expected = [summed_loss(model, window.unsqueeze(0)) for window in windows]
    assert count >= 4 and math.isclose(
        found["loss"], sum(loss for loss, _ in expected) / sum(n for _, n in expected), rel_tol=1e-6
    )


def test_mistakes_of_eval(zaya, published, corpus, tmp_path, monkeypatch):
    for words, says in (
        ((), f"none of --tasks, --suite and --data was given. Fix: zaya eval {published} --data."),
        (("--outputs=file",), "--outputs: no such option. Allowed: --batch-size, --data, "),
        (("--data", "--out=file"), "--out: has another name now. Fix: --output=file."),
        (("--data",), "has no recipe.yaml"),
        (("--data", tmp_path / "none"), "there is no dataset at this path"),
        (("--data", corpus, "--output", tmp_path / "no" / "file"), "its folder does not exist"),
        (("--data", corpus, "--limit", 0), "--limit: '0' is not a whole number from 1 to"),
        (("--data", corpus, "--num-fewshot", 3), "--num-fewshot=3: requires --tasks"),
        (("--data", corpus, "--include", tmp_path), f"--include={tmp_path}: requires --tasks"),
        (("--tasks", "a", "--include", tmp_path / "no"), "must be a folder"),
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
    opened = open_given(published)
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
        ("checkpoint", "export", trained, "--output", tmp_path / "x", "--tokenizer"),
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


def flip(file: Path, places) -> None:
    content = bytearray(file.read_bytes())
    for place in places:
        content[place] ^= 1
    file.write_bytes(content)


def test_every_reader_compares_a_checkpoint_with_its_manifest(zaya, checkpoint, corpus, tmp_path, monkeypatch):
    """One byte of a weight flipped: each command ended with 0 and another model."""
    copy = tmp_path / "checkpoints" / checkpoint.name
    shutil.copytree(checkpoint, copy)
    shutil.copytree(checkpoint.parent / "tokenizer", copy.parent / "tokenizer")
    shard = copy / "__0_0.distcp"
    flip(shard, [shard.stat().st_size // 2])
    readers = (
        ("generate", copy.parent, "--prompt", "a", "--max-new-tokens", 1),
        ("eval", copy.parent, "--data", corpus, "--limit", 1),
        ("checkpoint", "export", copy.parent, "--output", tmp_path / "export"),
    )
    for words in readers:
        code, _, err = zaya(*words)
        assert code == 2 and f"{copy.parent}: the checkpoint of step 0 is damaged: {shard} has the checksum" in err
        assert not (tmp_path / "export").exists()
        assert zaya(*words, "--no-verify")[0] == 0, "for those who have compared it just before"
    for number in range(4):  # what is not tensors: the index, the arguments
        for file in (copy / ".metadata", copy / f"__{SMALL.num_layers + 1}_0.distcp"):
            whole = file.read_bytes()
            flip(file, range(number, min(len(whole), 6000), 15))
            code, _, err = zaya(*readers[0], "--no-verify")
            assert code == 2 and err.count("\n") == 1 and "cannot be read" in err, err
            file.write_bytes(whole)
    flip(shard, [shard.stat().st_size // 2])
    (copy / manifest.NAME).unlink()
    monkeypatch.setattr(on_disk, "MANIFEST_MARK", "as in a checkpoint of another program")
    code, _, err = zaya(*readers[0])
    assert code == 0 and f"note: {copy} has no manifest.json, so its content was compared with nothing" in err


def test_a_model_that_is_none_is_named_before_torch_is_loaded(tmp_path):
    """With what is there: a curriculum's folder shows its stages'."""
    curriculum = tmp_path / "curriculum"
    for stage in ("one", "two"):
        pretend_checkpoint(curriculum / stage, 4)
        (curriculum / stage / "recipe.yaml").write_text("checkpoint: {path: checkpoints}")
    (curriculum / "curriculum.json").write_text("{}")
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("checkpoint: {path: checkpoints}")
    given = {
        curriculum: f"it is the folder of a curriculum. Allowed: .*{curriculum}/one.* Fix: {curriculum}/two",
        tmp_path: "no iter_. folder is in it. Allowed: a run directory with checkpoints",
        tmp_path / "file": "it is a file",
        tmp_path / "run": "the run has saved none in .*run/checkpoints",
        tmp_path / "none": "the path does not exist. Allowed: a run directory",
    }
    program = (
        "import json, sys; from zaya_plugin import cli\n"
        "for words in json.load(sys.stdin): print(cli.main(words), file=sys.stderr)\n"
        "assert not {'torch', 'megatron'} & {*sys.modules}"
    )
    tried = [
        words
        for path in map(str, given)
        for words in (["generate", path, "--prompt", "a"], ["checkpoint", "export", path, "--output", "x"])
    ]
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(tried), capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and lines[1::2] == ["2"] * len(tried), done.stderr
    for line, words in zip(lines[::2], tried, strict=True):
        path = Path(words[2 if words[0] == "checkpoint" else 1])
        key = "CKPT" if words[0] == "checkpoint" else "MODEL"
        assert re.match(f"zaya: {key}={path}: no such checkpoint: {given[path]}", line), line


@pytest.mark.slow
def test_results_go_to_wandb(published, corpus, tmp_path):
    words = ("eval", published, "--data", corpus, "--limit", 1, "--wandb", "project")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    # Without WANDB_SERVICE: a service that a test of this process has started writes to its own directory.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        command(*map(str, words)),
        cwd=tmp_path,
        env={**environment, "WANDB_MODE": "offline", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "wandb sync" in done.stderr, done.stderr
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"eval/data/perplexity" in log.read_bytes()


def test_a_machine_without_torch_gets_one_line(published, checkpoint, corpus, tmp_path):
    program = (
        "import json, sys; from zaya_plugin import cli; sys.modules['torch'] = None\n"
        "for words in json.load(sys.stdin): print(cli.main(words), file=sys.stderr)"
    )
    tried = (
        ("generate", checkpoint, "--prompt", "a"),
        ("eval", published, "--data", corpus),
        ("checkpoint", "export", checkpoint, "--output", tmp_path / "export"),
        ("checkpoint", "import", published, "--output", tmp_path / "import"),
        ("checkpoint", "roundtrip", published),
    )
    words = json.dumps([[str(word) for word in words] for words in tried])
    done = subprocess.run([sys.executable, "-c", program], input=words, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and lines[1::2] == ["2"] * len(tried), done.stderr
    for line, (command_, *_) in zip(lines[::2], tried, strict=True):
        assert line.startswith(f"zaya: zaya {command_}: requires the package torch, which is not installed."), line
        assert line.endswith("Fix: an environment with it: pip install 'zaya_plugin[cpu]', or pip install torch.")


@pytest.mark.parametrize("statement", ["from json import nothing", "import json.nothing", "import zaya_plugin.nothing"])
def test_a_wrong_import_of_a_package_that_is_there_shows_its_place(monkeypatch, statement):
    monkeypatch.setattr(cli, "_dispatch", lambda words: exec(statement))
    with pytest.raises(ImportError):
        cli.main(["generate"])
