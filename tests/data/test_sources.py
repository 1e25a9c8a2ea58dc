# SPDX-License-Identifier: Apache-2.0
"""From the recipe's `data` group to sources: packed sets, validation blends and ledgers, and what is refused."""

import os

import pytest

from zaya_plugin.config.schema import DataConfig, Recipe, StageConfig
from zaya_plugin.corpus import pack
from zaya_plugin.data.blend import domain_names
from zaya_plugin.data.sources import find_sources


@pytest.fixture(scope="module")
def bins(tmp_path_factory, prepared):
    output = tmp_path_factory.mktemp("bins") / "out"
    assert pack.main([str(prepared), "--sequence-length", "128", "--output", str(output), "--quiet"]) == 0
    return output


def recipe(length=128, **data):
    return Recipe(
        stage=StageConfig(name="s", seq_length=length), data=DataConfig(**{key: value for key, value in data.items()})
    )


def test_packed_set_needs_packing_and_its_length(bins):
    assert find_sources(recipe(path=str(bins), packing="documents")).valid == str(bins / "valid")
    with pytest.raises(ValueError, match="data.packing=none: .* is packed: .* Fix: data.packing=documents"):
        find_sources(recipe(path=str(bins)))
    with pytest.raises(ValueError, match="Fix: stage.seq_length=128"):
        find_sources(recipe(64, path=str(bins), packing="documents"))


def test_validation_blend(prepared, bins):
    entries = [f"3 {prepared}", f"1 {bins}"]
    found = find_sources(recipe(path=str(prepared), valid_blend=entries, packing="documents"))
    assert found.valid == [(3.0, str(prepared / "valid")), (1.0, str(bins / "valid"))]
    assert list(found.domains.values()) == [3.0, 1.0] and list(found.domains) == domain_names(
        [str(prepared), str(bins)]
    )
    with pytest.raises(ValueError, match="Allowed: one of the two"):
        find_sources(recipe(path=str(prepared), valid_blend=entries, valid_path=str(prepared / "valid")))
    with pytest.raises(ValueError, match="data.valid_blend=.*'half data' has no weight"):
        find_sources(recipe(path=str(prepared), valid_blend=["half data"]))


def test_names_of_domains():
    assert domain_names(["data/web", "data/code"]) == ["web", "code"]
    assert domain_names(["a/web", "b/web", "/c/code"]) == ["a_web", "b_web", "code"]
    with pytest.raises(ValueError, match="data/web, data/web: a source comes twice"):
        domain_names(["data/web", "data/web"])
    with pytest.raises(ValueError, match="sources would share the names a_b, a_b, c_b"):
        domain_names(["x/a_b", "a/b", "c/b"])


def test_a_validation_takes_its_domains_in_turn(prepared, tmp_path, bins):
    """Each domain's samples are those of a run that validates on it alone; a later validation continues in each."""
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(str(prepared / "tokenizer"), metadata_path={"library": "huggingface"})
    options = {"path": str(prepared), "cache_path": str(tmp_path), "packing": "documents"}
    entries = [f"3 {prepared}", f"1 {bins}"]
    both = find_sources(recipe(valid_blend=entries, **options)).build((6, 8, 0), 128, 7, tokenizer, validation=4)
    alone = [
        find_sources(recipe(valid_path=str(folder / "valid"), **options)).build((0, 4, 0), 128, 7, tokenizer)[1]
        for folder in (prepared, bins)
    ]
    plain = find_sources(recipe(**options)).build((6, 0, 0), 128, 7, tokenizer)[0]
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert len(both[1]) >= 8 and both[2] is None and both[1].split == alone[0].index_split
    for number, (domain, at) in enumerate(places):
        assert both[1][number]["tokens"].equal(alone[domain][at]["tokens"]), number
    assert all(both[0][number]["tokens"].equal(plain[number]["tokens"]) for number in range(6))


def test_the_loss_of_a_blend_is_the_mean_by_weight():
    from zaya_plugin.data.dataset import mean_loss

    assert mean_loss({"web": 2.0, "code": 4.0}, {"web": 3.0, "code": 1.0}) == 2.5


def test_ledger_of_earlier_stages(prepared):
    found = find_sources(recipe(path=str(prepared), order="continuing", consumed=[f"1280 {prepared}"]))
    assert found.consumed == {os.path.realpath(prepared / "train"): 1280}
    assert find_sources(recipe(path=str(prepared), order="continuing")).consumed == {}
    assert find_sources(recipe(path=str(prepared))).consumed is None
    with pytest.raises(ValueError, match="is not read.* Fix: data.order=continuing"):
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
