# SPDX-License-Identifier: Apache-2.0
"""From the recipe's `data` group to sources: packed sets, validation blends and ledgers, and what is refused."""

import json
import os
import shutil

import pytest

from zaya_plugin.config.schema import DataConfig, Recipe, StageConfig
from zaya_plugin.corpus import pack
from zaya_plugin.data.blend import domain_names
from zaya_plugin.data.prepared import load_manifest
from zaya_plugin.data.sources import changes, find_sources


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
    with pytest.raises(ValueError, match="data/web, data/web: a source is listed twice"):
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


@pytest.fixture(scope="module")
def permuted(tmp_path_factory, corpus, run):
    """The corpus prepared with the tokenizer of `prepared`, but with the ids of two tokens exchanged."""
    from zaya_plugin.data.tokenizer import train_bpe

    root = tmp_path_factory.mktemp("permuted")
    train_bpe([json.loads(line)["text"] for line in corpus.read_text().splitlines()[:40]], 400, str(root / "tokenizer"))
    path = root / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = (name for name, number in vocabulary.items() if number in (300, 301))
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content))
    options = ("--tokenizer", root / "tokenizer", "--output", root / "out", "--valid-fraction", 0.2, "--quiet")
    assert run("--input", corpus, *options) == 0
    return root / "out"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.blend", {"blend": ["1 {}"]}),
        ("data.blend", {"blend": ["1 {own}", "2 {}"]}),
        ("data.valid_path", {"valid_path": "{}/valid"}),
        ("data.valid_blend", {"valid_blend": ["1 {own}", "1 {}"]}),
        ("data.path", {"tokenizer": "{}/tokenizer"}),
    ],
)
def test_data_of_another_tokenizer_is_refused_by_name(prepared, permuted, key, value):
    def fill(entry):
        return entry.format(permuted, own=prepared) if isinstance(entry, str) else list(map(fill, entry))

    options = {name: fill(entry) for name, entry in value.items()}
    with pytest.raises(ValueError, match=f"^{key}=.*: was made with another tokenizer") as refused:
        find_sources(recipe(path=str(prepared), **options))
    assert str(permuted) in str(refused.value) and f"{prepared}/tokenizer" in str(refused.value)


def test_the_same_tokenizer_written_in_another_way_is_accepted(tmp_path, prepared):
    shutil.copytree(prepared / "tokenizer", tmp_path / "again")
    path = tmp_path / "again" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "truncation": None}))
    find_sources(recipe(path=str(prepared), tokenizer=str(tmp_path / "again")))


def test_a_dataset_without_its_tokenizer_needs_one(tmp_path, prepared):
    copied = shutil.copytree(prepared, tmp_path / "copied")
    shutil.rmtree(copied / "tokenizer")
    with pytest.raises(ValueError, match="data.path=.*tokenizer.json does not exist"):
        find_sources(recipe(path=str(copied)))
    find_sources(recipe(path=str(copied), tokenizer=str(prepared / "tokenizer")))


@pytest.mark.parametrize("key", ["path", "valid_path", "valid_blend"])
def test_validation_shorter_than_one_sequence_is_refused(prepared, key):
    tokens = load_manifest(prepared).splits["valid"].tokens
    options = {"path": str(prepared), "valid_path": str(prepared / "valid"), "valid_blend": [f"1 {prepared}"]}
    chosen = {"path": str(prepared), key: options[key]}
    find_sources(recipe(tokens - 1, **chosen))
    with pytest.raises(ValueError, match=f"^data.{key}=.*holds {tokens} tokens, and one sequence needs {tokens + 1}"):
        find_sources(recipe(tokens, **chosen))


@pytest.mark.parametrize("key", ["path", "blend"])
def test_training_data_shorter_than_one_sequence_is_refused(prepared, key):
    tokens = load_manifest(prepared).splits["valid"].tokens
    short = f"{prepared}/valid"
    options = {"path": short} if key == "path" else {"path": str(prepared), "blend": [f"3 {prepared}", f"1 {short}"]}
    options["valid_path"] = f"{prepared}/train"
    find_sources(recipe(tokens - 1, **options))
    with pytest.raises(ValueError, match=f"^data.{key}=.*holds {tokens} tokens, and one sequence needs {tokens + 1}"):
        find_sources(recipe(tokens, **options))


def test_facts_of_the_data_are_compared(tmp_path, prepared, permuted):
    own = find_sources(recipe(path=str(prepared))).facts()
    moved = find_sources(recipe(path=str(shutil.copytree(prepared, tmp_path / "moved")))).facts()
    assert set(own) == {"tokenizer", "special_tokens", "train", "valid"} and changes(own, moved) == [] != own["train"]
    other = find_sources(recipe(path=str(permuted))).facts()
    found = changes(own, other)
    assert [line.split(" was ")[0] for line in found] == ["the tokenizer", "the train data", "the valid data"]
    assert str(prepared) in found[1] and other["train"][f"{permuted}/train"] in found[1]
    bos, chats = {**own, "special_tokens": True}, {**own, "special_tokens": None}
    assert changes(own, chats) == changes(chats, bos) == []
    assert changes(own, bos) == ["its texts had not the tokenizer's special tokens (bos), and now have"]
    assert changes(bos, own) == ["its texts had the tokenizer's special tokens (bos), and now have not"]
    assert changes({**own, "valid": None}, {key: own[key] for key in ("tokenizer", "train")}) == []
