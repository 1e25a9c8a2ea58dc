# SPDX-License-Identifier: Apache-2.0
"""A source on the Hugging Face Hub, from the local cache alone."""

import json

import pytest

from tests.checkpoint.convert.published import TINY, publish
from zaya_plugin.checkpoint.convert.importing import import_model, open_source
from zaya_plugin.checkpoint.convert.model_folder import resolve, token_ids, tokenizer_entries

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the Hub that holds org/model, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--org--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(REVISION)
    publish(model / "snapshots" / REVISION)
    return model


@pytest.mark.parametrize("download", [True, False])
def test_a_name_on_the_hub_is_read_from_the_cache(tmp_path, cache, download):
    source = open_source("org/model", download=download)
    assert source.name == "org/model" and source.model.num_layers == TINY.num_layers
    assert open_source(f"org/model@{REVISION}").folder == source.folder
    assert import_model(source, tmp_path / "checkpoint").is_dir()


@pytest.mark.parametrize("name", ["org/other", "org/model@other"])
def test_what_the_cache_lacks_is_named(cache, name):
    with pytest.raises(ValueError, match=f"^SOURCE={name}: the Hub does not give it"):
        resolve(name)


@pytest.mark.parametrize("name", ["model", "a/b/c", "./model", "/model"])
def test_what_is_neither_folder_nor_name(cache, name):
    with pytest.raises(ValueError, match=f"^SOURCE={name}: must be a folder or a name on the Hub"):
        resolve(name)


def test_a_checkpoint_is_no_source_and_the_message_says_what_is(tmp_path):
    (tmp_path / "iter_0000000").mkdir()
    for key, fix in (
        ("SOURCE", "needs no import"),
        ("handover.from_hf", f"`zaya checkpoint export {tmp_path} --output"),
    ):
        with pytest.raises(ValueError, match=f"^{key}={tmp_path}: holds no .*safetensors files.* Fix: .*{fix}"):
            resolve(str(tmp_path), key=key)


def test_token_ids_and_entries(tmp_path):
    assert tokenizer_entries(tmp_path) is None and token_ids(tmp_path) == {}
    added = [{"id": 7, "content": "<turn>"}]
    content = {"model": {"vocab": [["<pad>", 0.0], ["<eos>", 0.0], ["<bos>", 0.0]]}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    stated = {"bos_token": "<bos>", "eos_token": {"content": "<turn>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    assert tokenizer_entries(tmp_path) == 8 and token_ids(tmp_path) == {"bos": 2, "eos": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert token_ids(tmp_path) == {"bos": 2, "eos": [1, 7]}
    for text, problem in (
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"added_tokens": [5]}', "is not a valid tokenizer file"),
    ):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=f"tokenizer.json: {problem}"):
            tokenizer_entries(tmp_path)
