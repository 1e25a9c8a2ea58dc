# SPDX-License-Identifier: Apache-2.0
"""Ids through the chunk encoder are those of the tokenizer, for every kind of tokenizer that is cut, on random text."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from zaya_plugin.corpus import chunk_encoder
from zaya_plugin.corpus.chunk_encoder import GPT4_LIKE, ChunkEncoder, Cut

ALPHABET = list("ab cdE9.!'\"\n\t\r_-\u2581") + [
    "  ",
    "\n    ",
    " \n",
    "'s",
    "don't ",
    "<|end|>",
    " <|end|>",
    "12345",
    "!!\n\n",
    "é",
    "e\u0301",
    "日本",
    "🙂",
    "\u00a0",
    "\u2003",
    "\u2028",
    "\x1c",
    "\x1f",
    "\x85",
    "\u200b",
    "\u0301",
    "\u0378",
    "<a b>",
    "ſ",
    "'ſ",
    "'Re",
    "\x00",
    "\x7f",
    "١",
    "\ufeff",
    "\u00aa",
    "\v",
    "\f",
]
CORPUS = [
    "a ab abc cab  bad\n    cab! don't 123 it's\n\nbad. 日本 é e\u0301",
    "!!\n\n a\ta\r\n b-b_b \u2581 ab ab ab",
] * 20


def byte_level(pre, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def gemma():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    # Words with all spaces before them: what a vocabulary without tokens across a space comes from.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581*[^\u2581]+|\u2581+"), "isolated")
    special = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    )
    record = json.loads(tokenizer.to_str())
    record["added_tokens"] = [token for token in record["added_tokens"] if not token["content"].startswith("<0x")]
    record["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    return Tokenizer.from_str(json.dumps(record))


def gpt4_like(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def runs_of_spaces():
    """As GPT-NeoX: added tokens match several spaces at the start of a run, before any word."""
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken(" " * count, normalized=False) for count in (2, 3, 8)])
    return tokenizer


KINDS = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "neox": runs_of_spaces,
    "llama3": lambda: byte_level(gpt4_like(GPT4_LIKE[0])),
    "qwen2": lambda: byte_level(gpt4_like(GPT4_LIKE[1]), normalizers.NFC()),
    "gemma": gemma,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def test_same_ids_as_the_tokenizer(tokenizer):
    encoder = ChunkEncoder(tokenizer, np.dtype("int32"))
    assert encoder.cut is not None

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.lists(st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join), min_size=1, max_size=3))
    def check(texts):
        expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        assert [np.frombuffer(ids, np.int32).tolist() for ids in encoder.encode(texts)] == expected

    check()


def test_same_ids_for_any_characters(tokenizer):
    encoder = ChunkEncoder(tokenizer, np.dtype("int32"))

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(st.text(max_size=60))
    def check(text):
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert np.frombuffer(encoder.encode([text])[0], np.int32).tolist() == expected

    check()


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(chunk_encoder, "MOST_REMEMBERED", 10)
    encoder = ChunkEncoder(KINDS["gpt2"](), np.dtype("int32"))
    long = "x" * 100
    expected = [encoder.tokenizer.encode(text).ids for text in (f"a {long}", "b b")]
    for _ in range(3):
        assert [np.frombuffer(ids, np.int32).tolist() for ids in encoder.encode([f"a {long}", "b b"])] == expected
        assert len(encoder.remembered) == 3 and max(map(len, encoder.remembered)) < 3  # a, b and " b"
    encoder.encode([" ".join(f"w{number}" for number in range(20))])
    assert encoder.remembered == {}


def test_tokenizers_that_are_not_cut(tokenizer):
    record = json.loads(tokenizer.to_str())
    assert Cut.of(record) is not None
    for changes in (
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}},
        {"model": {**record["model"], "dropout": 0.1}},
        {"model": {**record["model"], "type": "Unigram"}},
        {"added_tokens": [{**record["added_tokens"][0], "content": "<a b>"}]},
        {"added_tokens": [{**record["added_tokens"][0], "rstrip": True}]},
    ):
        assert Cut.of({**record, **changes}) is None
    odd = Tokenizer.from_str(tokenizer.to_str())
    odd.add_special_tokens([AddedToken("<a b>")])
    encoder = ChunkEncoder(odd, np.dtype("int32"))
    assert encoder.cut is None
    assert np.frombuffer(encoder.encode(["a <a b>b"])[0], np.int32).tolist() == odd.encode("a <a b>b").ids


def test_vocabulary_with_tokens_across_spaces_is_not_cut():
    record = json.loads(gemma().to_str())
    record["model"]["vocab"]["b\u2581a"] = max(record["model"]["vocab"].values()) + 1
    assert Cut.of(record) is None
