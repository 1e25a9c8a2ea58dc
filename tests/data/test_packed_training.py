# SPDX-License-Identifier: Apache-2.0
"""Packed sets, streams and the page cache through the datasets that training uses."""

import json

import numpy as np
import pytest
from megatron.core.tokenizers import MegatronTokenizer

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin import cli
from zaya_plugin.commands.data import recipe_of
from zaya_plugin.commands.data import warm as parser
from zaya_plugin.corpus import warm
from zaya_plugin.data.dataset import build_gpt_datasets, build_stream
from zaya_plugin.data.prepared import load_manifest, packed_loss_mask

LENGTH = 128


@pytest.fixture(scope="module")
def bins(tmp_path_factory, prepared):
    output = tmp_path_factory.mktemp("bins") / "out"
    assert (
        cli.main(["data", "pack", str(prepared), "--sequence-length", str(LENGTH), "--output", str(output), "--quiet"])
        == 0
    )
    return output


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return MegatronTokenizer.from_pretrained(str(prepared / "tokenizer"), metadata_path={"library": "huggingface"})


def build(train, samples, tokenizer, cache, **options):
    options = {"sequence_length": LENGTH, "seed": 7, "tokenizer": tokenizer, "cache_path": str(cache), **options}
    return build_gpt_datasets(train, None, (samples, 0, 0), **options)[0]


def test_megatron_draws_one_bin_a_sample(bins, tokenizer, tmp_path):
    stored = np.fromfile(bins / "train.bin", np.uint16).reshape(-1, LENGTH)
    epochs = 3
    dataset = build(bins, epochs * len(stored) - 1, tokenizer, tmp_path)
    by_content = {row.tobytes(): 0 for row in stored}
    for number in range(epochs * len(stored) - 1):
        sample = dataset[number]
        tokens, labels, mask = (sample[name].numpy() for name in ("tokens", "labels", "loss_mask"))
        by_content[tokens.astype(np.uint16).tobytes()] += 1
        assert np.array_equal(mask > 0, packed_loss_mask(tokens, 0)) and np.array_equal(tokens[1:], labels[:-1])
        assert not (mask > 0)[tokens == 0].any() and (labels[mask > 0] == tokens[1:][(mask > 0)[:-1]]).all()
    # One bin, the last of the last epoch, is left: its last label would come from a next one.
    assert sum(by_content.values()) == epochs * len(stored) - 1 and set(by_content.values()) <= {epochs, epochs - 1}
    counts = load_manifest(bins).packing.counts["train"]
    assert sum(int(packed_loss_mask(row, 0).sum()) for row in stored) == counts["loss tokens"]


def test_blend_of_packed_and_plain_data(bins, prepared, tokenizer, tmp_path):
    dataset = build([(0.5, bins), (0.5, prepared)], 40, tokenizer, tmp_path)
    for number in range(40):
        sample = dataset[number]
        ends = int((sample["tokens"] == 0).sum())
        if sample["dataset_id"] == 1:
            assert sample["loss_mask"].sum() == LENGTH
        else:
            assert sample["loss_mask"].sum() == LENGTH - ends - int(sample["tokens"][-1] != 0)
    with pytest.raises(ValueError, match="stage.seq_length=64: .* packed into bins of 128 tokens"):
        build(bins, 4, tokenizer, tmp_path, sequence_length=64)


def test_stream_of_bins_and_its_ledger(bins, tokenizer, tmp_path):
    stored = {row.tobytes() for row in np.fromfile(bins / "train.bin", np.uint16).reshape(-1, LENGTH)}
    stream = build_stream(bins, 2 * len(stored), LENGTH, 7, tokenizer, str(tmp_path), {})
    drawn = [stream[number]["tokens"].numpy().astype(np.uint16).tobytes() for number in range(len(stream))]
    assert set(drawn) == stored and all(drawn.count(row) == 2 for row in stored)
    sample = stream[5]
    assert np.array_equal(sample["loss_mask"].numpy() > 0, packed_loss_mask(sample["tokens"].numpy(), 0))
    assert stream[None]["loss_mask"].sum() == 0
    import os

    with pytest.raises(ValueError, match="would start inside one"):
        build_stream(bins, 8, LENGTH, 7, tokenizer, str(tmp_path), {os.path.realpath(bins / "train"): 5})


def test_byte_ranges_of_samples_are_where_their_tokens_are(bins, prepared, tokenizer, tmp_path):
    blend = [(0.5, str(bins)), (0.5, str(prepared))]
    for dataset in (
        build(blend, 60, tokenizer, tmp_path),
        build(prepared, 60, tokenizer, tmp_path),
        build_stream(blend, 60, LENGTH, 7, tokenizer, str(tmp_path), {}),
    ):
        for number in range(0, 60, 7):
            pieces = []
            for path, begin, end in warm.sample_ranges(dataset, number):
                with open(path, "rb") as stream:
                    stream.seek(begin)
                    pieces.append(np.frombuffer(stream.read(end - begin), np.uint16))
            found, sample = np.concatenate(pieces), dataset[number]
            assert np.array_equal(found[:-1], sample["tokens"]) and found[-1] == sample["labels"][-1]


@pytest.mark.parametrize("order", ["megatron", "continuing"])
def test_inspect_and_warm_show_and_read_training_samples(bins, prepared, tmp_path, capsys, order):
    recipe = [
        *("experiment=cpu_demo", f"data.path={prepared}", f"data.blend=['0.5 {bins}','0.5 {prepared}']"),
        *(f"data.order={order}", "data.packing=documents", f"data.cache_path={tmp_path}/cache", "seed=7"),
        *(f"stage.seq_length={LENGTH}", "stage.train_iters=8", "stage.global_batch_size=8", f"run_dir={tmp_path}/run"),
    ]
    assert cli.main(["data", "inspect", *recipe, "--start", "10", "--count", "20", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["name"] for each in shown] == [f"train sample {number} of 64" for number in range(10, 30)]
    assert {each["source"] for each in shown} == {f"{bins}/train", f"{prepared}/train"}
    blend, cache = [(0.5, bins), (0.5, prepared)], str(tmp_path / "own")
    tokenizer = MegatronTokenizer.from_pretrained(str(prepared / "tokenizer"), metadata_path={"library": "huggingface"})
    if order == "megatron":
        dataset = build(blend, 64, tokenizer, cache)
    else:
        dataset = build_stream(blend, 64, LENGTH, 7, tokenizer, cache, {})
    assert [each["in_loss"] for each in shown] == [int(dataset[n]["loss_mask"].sum()) for n in range(10, 30)]
    wanted = [warm.sample_ranges(dataset, number) for number in range(16, 40)]
    read = warm.needed(recipe_of(parser().read(recipe)), 2, 3, None)
    for path, begin, end in (each for ranges in wanted for each in ranges):
        assert any(first <= begin and end <= last for first, last in read[path])
    assert cli.main(["data", "warm", *recipe, "--from-step", "2", "--steps", "3"]) == 0
    assert "of 2 files in" in capsys.readouterr().out
    pretend_checkpoint(tmp_path / "run", 2)
    if order == "megatron":
        assert warm.needed(recipe_of(parser().read(recipe)), None, 3, None) == read
    assert cli.main(["data", "warm", *recipe, "--from-step", "8", "--steps", "1"]) == 2
    assert "--from-step=8: is past the end of the run. Allowed: 0 to 7" in capsys.readouterr().err
    assert cli.main(["data", "inspect", *recipe, "--start", "64"]) == 2
    assert "--start=64: the stage has 64 samples" in capsys.readouterr().err
