# SPDX-License-Identifier: Apache-2.0
"""Datasets of a run, through Megatron's builder on real files."""

import shutil

import numpy as np
import pytest

from zaya_plugin.data.blend import resolve_blend
from zaya_plugin.data.dataset import build_gpt_datasets
from zaya_plugin.data.prepared import DatasetWarning, load_manifest

SEQUENCE = 32


@pytest.fixture(scope="module")
def tokenizer(prepared):
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(str(prepared / "tokenizer"), metadata_path={"library": "huggingface"})


@pytest.fixture
def build(tmp_path, tokenizer):
    def call(train, valid, num_samples, **options):
        options = {
            "sequence_length": SEQUENCE,
            "seed": 7,
            "tokenizer": tokenizer,
            "cache_path": str(tmp_path / "cache"),
            **options,
        }
        return build_gpt_datasets(train, valid, num_samples, **options)

    return call


def stream(prefix) -> np.ndarray:
    return np.fromfile(f"{prefix}.bin", np.uint16)


def occurs(sample, tokens) -> bool:
    """Whether the tokens of a sample that lie in one document occur in the stream in this order."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(sample))
    return bool((windows == sample).all(1).any())


def test_megatron_reads_what_was_prepared(prepared, read_tokens):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for name in ("train", "valid"):
        dataset = IndexedDataset(str(prepared / name))
        assert [dataset[number].tolist() for number in range(len(dataset))] == read_tokens(prepared / name)
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))


def test_samples_cover_one_epoch_exactly(prepared, build):
    tokens = load_manifest(prepared).splits["train"].tokens
    samples = (tokens - 1) // SEQUENCE
    train, valid, test = build(prepared, prepared, (samples, 5, 0))
    assert len(train) == samples and len(valid) >= 5 and test is None
    drawn = np.concatenate([train[number]["tokens"].numpy() for number in range(samples)])
    assert drawn.shape == (samples * SEQUENCE,)
    # Every token of the epoch but the few of the last, incomplete sequence.
    lost = np.bincount(stream(prepared / "train"), minlength=400) - np.bincount(drawn, minlength=400)
    assert lost.min() >= 0 and lost.sum() == tokens - samples * SEQUENCE


def test_sample_is_text_of_the_split_with_labels_shifted_by_one(prepared, build):
    train, valid, _ = build(prepared / "train", prepared / "valid", (20, 20, 0))
    for name, dataset in (("train", train), ("valid", valid)):
        for number in range(20):
            sample = dataset[number]
            assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids", "document_ends"}
            tokens, labels = sample["tokens"].numpy(), sample["labels"].numpy()
            assert np.array_equal(sample["document_ends"].numpy(), tokens == 0)
            assert np.array_equal(tokens[1:], labels[:-1]) and sample["loss_mask"].sum() == SEQUENCE
            assert np.array_equal(sample["position_ids"].numpy(), np.arange(SEQUENCE))
            # documents are shuffled, so whole ones only
            for piece in np.split(tokens, np.flatnonzero(tokens == 0) + 1):
                assert len(piece) == 0 or occurs(piece, stream(prepared / name))


def test_order_depends_on_the_seed_alone(prepared, build, tmp_path):
    def first(seed, cache):
        return build(prepared, None, (30, 0, 0), seed=seed, cache_path=str(tmp_path / cache))[0][0]["tokens"].tolist()

    assert first(1, "a") == first(1, "b") != first(2, "a")


def test_blend_draws_by_weight_and_by_size_over_many_epochs(tmp_path, prepared, build):
    second = tmp_path / "second"
    for suffix in (".bin", ".idx"):
        shutil.copy(prepared / f"valid{suffix}", f"{second}{suffix}")
    with pytest.warns(DatasetWarning):
        train, _, _ = build([(3, prepared), (1, second)], None, (2000, 0, 0))
    counts = np.bincount([train[number]["dataset_id"] for number in range(2000)])
    assert counts.tolist() == [1500, 500]
    with pytest.warns(DatasetWarning):
        train, _, _ = build([prepared, second], None, (3000, 0, 0))
    splits = load_manifest(prepared).splits
    share = splits["train"].tokens / (splits["train"].tokens + splits["valid"].tokens)
    assert len(train) >= 3000 > 2 * (splits["train"].tokens + splits["valid"].tokens) / SEQUENCE
    drawn = np.bincount([train[number]["dataset_id"] for number in range(3000)])
    assert drawn[0] / 3000 == pytest.approx(share, abs=0.01)


def test_cache_of_replaced_data_is_not_used(tmp_path, run, corpus, texts, build):
    for seed in (0.2, 0.4):
        output = tmp_path / "out"
        assert (
            run(
                "--input",
                corpus,
                "--output",
                output,
                "--train-bpe",
                400,
                "--valid-fraction",
                seed,
                "--overwrite",
                "--quiet",
            )
            == 0
        )
        train, _, _ = build(output, None, (10, 0, 0))
        assert len(train.document_index) == load_manifest(output).splits["train"].documents
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_dataset_without_split_is_all_training(tmp_path, run, corpus, build):
    assert (
        run("--input", corpus, "--output", tmp_path / "out", "--train-bpe", 400, "--valid-fraction", 0, "--quiet") == 0
    )
    assert resolve_blend(tmp_path / "out", "train") == ([str(tmp_path / "out" / "text")], None)
    with pytest.raises(ValueError, match="has no valid split.*it has text.*prepare it with --valid-fraction"):
        build(tmp_path / "out", tmp_path / "out", (1, 1, 0))


@pytest.mark.parametrize(
    ("train", "valid", "samples", "message"),
    [
        ("nowhere", None, (1, 0, 0), "there is no dataset at this path"),
        ("{prepared}", None, (1, 5, 0), "5 valid samples are requested, without valid data"),
        ("{prepared}", None, (0, 0, 0), "requests no sample"),
        (
            [(1.0, "{prepared}"), "{prepared}"],
            None,
            (1, 0, 0),
            "has no weight. Allowed: weights above 0, .* for every dataset or for none",
        ),
        ([(0.0, "{prepared}"), (1.0, "{prepared}")], None, (1, 0, 0), "a weight must be a positive number"),
    ],
)
def test_errors(prepared, build, train, valid, samples, message):
    def fill(entry):
        return (
            tuple(map(fill, entry))
            if isinstance(entry, tuple)
            else entry.format(prepared=prepared)
            if isinstance(entry, str)
            else entry
        )

    with pytest.raises(ValueError, match=message):
        build(fill(train) if isinstance(train, str) else [fill(entry) for entry in train], valid, samples)


def test_tokenizer_that_does_not_fit_is_refused_before_training(tmp_path, prepared, build):
    from megatron.core.tokenizers import MegatronTokenizer

    from zaya_plugin.data.tokenizer import train_bpe

    train_bpe(["short"], 258, str(tmp_path / "other"))
    other = MegatronTokenizer.from_pretrained(str(tmp_path / "other"), metadata_path={"library": "huggingface"})
    with pytest.raises(ValueError, match="holds token id 399, and the vocabulary has 258 entries"):
        build(prepared, None, (1, 0, 0), tokenizer=other)
