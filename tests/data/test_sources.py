# SPDX-License-Identifier: Apache-2.0
"""From the recipe's `data` group to sources: packed sets, validation blends and ledgers, and what is refused."""

import os

import pytest

from zaya_plugin.config.schema import DataConfig, Recipe, StageConfig
from zaya_plugin.data import pack
from zaya_plugin.training.datasets import find_sources


@pytest.fixture(scope="module")
def bins(tmp_path_factory, prepared):
    output = tmp_path_factory.mktemp("bins") / "out"
    assert pack.main([str(prepared), "--sequence-length", "128", "--output", str(output), "--quiet"]) == 0
    return output


def recipe(length=128, **data):
    return Recipe(stage=StageConfig(name="s", seq_length=length), data=DataConfig(**{key: value for key, value in data.items()}))


def test_packed_set_needs_packing_and_its_length(bins):
    assert find_sources(recipe(path=str(bins), packing="documents")).valid == str(bins / "valid")
    with pytest.raises(ValueError, match="is packed: .*data.packing=none. Set data.packing=documents"):
        find_sources(recipe(path=str(bins)))
    with pytest.raises(ValueError, match="set stage.seq_length=128"):
        find_sources(recipe(64, path=str(bins), packing="documents"))


def test_validation_blend(prepared, bins):
    entries = [f"3 {prepared}", f"1 {bins}"]
    found = find_sources(recipe(path=str(prepared), valid_blend=entries, packing="documents"))
    assert found.valid == [(3.0, str(prepared / "valid")), (1.0, str(bins / "valid"))]
    with pytest.raises(ValueError, match="give one of them"):
        find_sources(recipe(path=str(prepared), valid_blend=entries, valid_path=str(prepared / "valid")))
    with pytest.raises(ValueError, match="data.valid_blend holds 'half data'"):
        find_sources(recipe(path=str(prepared), valid_blend=["half data"]))


def test_ledger_of_earlier_stages(prepared):
    found = find_sources(recipe(path=str(prepared), order="continuing", consumed=[f"1280 {prepared}"]))
    assert found.consumed == {os.path.realpath(prepared / "train"): 1280}
    assert find_sources(recipe(path=str(prepared), order="continuing")).consumed == {}
    assert find_sources(recipe(path=str(prepared))).consumed is None
    with pytest.raises(ValueError, match="is read with data.order=continuing alone"):
        find_sources(recipe(path=str(prepared), consumed=[f"1280 {prepared}"]))


def test_stream_and_validation_are_built_together(prepared, tmp_path):
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(str(prepared / "tokenizer"), metadata_path={"library": "huggingface"})
    options = {"path": str(prepared), "cache_path": str(tmp_path), "order": "continuing"}
    sources = find_sources(recipe(consumed=[f"1280 {prepared}"], **options))
    train, valid, test = sources.build((20, 4, 0), 128, 7, tokenizer)
    assert len(train) == 20 and len(valid) >= 4 and test is None
    before = find_sources(recipe(**options)).build((10, 0, 0), 128, 7, tokenizer)[0]
    whole = find_sources(recipe(**options)).build((30, 0, 0), 128, 7, tokenizer)[0]

    def samples(dataset):
        return [tuple(dataset[number]["tokens"].tolist()) for number in range(len(dataset))]

    assert sorted(samples(before) + samples(train)) == sorted(samples(whole)) and len(set(samples(whole))) == 30
