# SPDX-License-Identifier: Apache-2.0
"""Sources over stages: the tokens of a source are read in order, each once an epoch, also when the blend, length or
batch changes between stages.
"""

import itertools
import os

import numpy as np
import pytest

from zaya_plugin.corpus import mixture
from zaya_plugin.data import ledger
from zaya_plugin.data.indexed_dataset import IndexedReader, write_index
from zaya_plugin.data.ledger import stage_use
from zaya_plugin.data.stream_dataset import StageShuffle, TokenStream


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three sources in which every token is unique, so that repeated or missing tokens are detected."""
    directory, at = tmp_path_factory.mktemp("sources"), 1
    rng = np.random.RandomState(0)
    for name, documents in (("web", 400), ("code", 90), ("math", 60)):
        lengths = rng.randint(1, 120, documents).astype(np.int32)
        total = int(lengths.sum())
        np.arange(at, at + total, dtype=np.int32).tofile(directory / f"{name}.bin")
        write_index(str(directory / f"{name}.idx"), np.dtype("int32"), lengths)
        at += total
    return directory


@pytest.fixture
def stream(sources, tmp_path):
    return lambda name, seed=7: TokenStream(
        str(sources / name), f"{len(name) * 31 + ord(name[0]):016x}", seed, str(tmp_path)
    )


def test_an_epoch_holds_each_document_whole_and_once(stream, sources):
    web, reader = stream("web"), IndexedReader(str(sources / "web"))
    length = web.epoch_tokens
    first, second = web.read(0, length), web.read(length, length)
    assert sorted(first.tolist()) == sorted(second.tolist()) == reader.stream.tolist()
    assert first.tolist() != second.tolist() != reader.stream.tolist()
    for epoch in (first, second):
        position = {int(token): at for at, token in enumerate(epoch)}
        for number in range(len(reader)):
            document = reader.document(number)
            at = position[int(document[0])]
            assert np.array_equal(epoch[at : at + len(document)], document)


def test_any_piece_of_the_stream_is_a_slice_of_the_whole(stream):
    web = stream("code")
    whole = web.read(0, 3 * web.epoch_tokens)
    rng = np.random.RandomState(1)
    for _ in range(200):
        begin = int(rng.randint(0, 2 * web.epoch_tokens))
        length = int(rng.randint(1, web.epoch_tokens))
        assert np.array_equal(web.read(begin, length), whole[begin : begin + length])
    for begin in (web.epoch_tokens - 1, web.epoch_tokens, web.epoch_tokens + 1):
        assert np.array_equal(web.read(begin - 1, 3), whole[begin - 1 : begin + 2])


def test_order_depends_on_seed_and_content_alone(stream, tmp_path):
    a, b = stream("web"), stream("web")
    assert np.array_equal(a.read(0, 1000), b.read(0, 1000))
    assert not np.array_equal(a.read(0, 1000), stream("web", seed=8).read(0, 1000))
    assert all(not name.endswith(".tmp") for _, _, names in os.walk(tmp_path) for name in names)


def test_window_shuffle_is_a_permutation_of_the_stage(monkeypatch):
    monkeypatch.setattr("zaya_plugin.data.stream_dataset.WINDOW_SAMPLES", 16)
    shuffle = StageShuffle(50, [1, 2])
    places = [shuffle[number] for number in range(50)]
    assert sorted(places) == list(range(50)) and places != list(range(50))
    assert all(place // 16 == number // 16 for number, place in enumerate(places))


# Blend, samples and sequence length of three stages: weights, sources and lengths change, math comes later, code
# pauses.
STAGES = [
    ({"web": 0.7, "code": 0.3}, 300, 32),
    ({"web": 0.5, "math": 0.5}, 200, 32),
    ({"web": 0.2, "code": 0.3, "math": 0.5}, 40, 256),
]


def drawn_by_stages(sources, cache, stages=STAGES, seed=7):
    """Tokens that each stage reads of each source, by the datasets that training uses, and the ledger at the end."""
    from zaya_plugin.data.stream_dataset import StreamDataset

    found, read = [], {}
    for blend, samples, length in stages:
        entries = [f"{weight} {sources / name}" for name, weight in blend.items()]
        uses = stage_use(entries, samples, length, read, seed)
        dataset = StreamDataset(uses, length, seed, eod=0, cache_path=str(cache))
        assert len(dataset) == samples
        tokens = {name: [] for name in blend}
        for number in range(samples):
            sample = dataset[number]
            assert np.array_equal(sample["tokens"][1:], sample["labels"][:-1]) and sample["loss_mask"].sum() == length
            tokens[list(blend)[sample["dataset_id"]]].append(sample["tokens"].numpy())
        found.append(tokens)
        read = ledger.after(read, uses)
    return found, read


def test_stage_boundaries_neither_replay_nor_skip(sources, tmp_path):
    found, read = drawn_by_stages(sources, tmp_path)
    for name in ("web", "code", "math"):
        prefix = os.path.realpath(sources / name)
        stream = TokenStream(prefix, content(prefix), 7, str(tmp_path))
        position = 0
        for tokens in found:
            stage = tokens.get(name, [])
            samples = sorted(map(tuple, stage))
            length = len(samples[0]) if samples else 0
            expected = [tuple(stream.read(position + at * length, length)) for at in range(len(samples))]
            assert samples == sorted(expected)
            position += length * len(samples)
        assert read[prefix] == position > 0
        counts = np.unique(
            np.concatenate([piece for tokens in found for piece in tokens.get(name, [])]), return_counts=True
        )[1]
        epochs = position / stream.epoch_tokens
        assert counts.max() == int(np.ceil(epochs)) and (epochs < 1 or counts.min() >= int(epochs))


def content(prefix):
    from zaya_plugin.data.blend import content_name

    return content_name([prefix])


def test_a_longer_stage_is_two_shorter_ones(sources, tmp_path):
    """Cutting a stage in two, with the ledger between them, reads the same tokens."""
    whole, read = drawn_by_stages(sources, tmp_path, [({"web": 1.0}, 90, 64)])
    halves, again = drawn_by_stages(sources, tmp_path, [({"web": 1.0}, 50, 64), ({"web": 1.0}, 40, 64)])
    assert read == again
    both = itertools.chain.from_iterable(part["web"] for part in halves)
    assert sorted(map(tuple, whole[0]["web"])) == sorted(map(tuple, both))


def test_mixture_prints_tokens_epochs_and_the_ledger(sources, capsys):
    web = IndexedReader(str(sources / "web")).indexed.tokens

    def shown(blend, samples, *options):
        run = [f"data.path={sources}/web", "data.order=continuing", "stage.seq_length=64", "stage.global_batch_size=1"]
        return mixture.main(
            ["experiment=cpu_demo", *run, f"stage.train_iters={samples}", f"data.blend={blend}", *options]
        )

    assert shown([f"0.75 {sources}/web", f"0.25 {sources}/code"], 1024) == 0
    out = capsys.readouterr().out
    assert f"{768 * 64:,}" in out and f"{768 * 64 / web:8.3f}" in out and "75.00%" in out
    following = [line.strip() for line in out.split("data.consumed:\n")[1].splitlines()]
    assert following == [f"{768 * 64} {sources}/web", f"{256 * 64} {sources}/code"]
    assert shown([f"1 {sources}/math"], 10, f"data.consumed={following}") == 0
    assert f"{768 * 64} {sources}/web" in capsys.readouterr().out
    assert shown([f"1 {sources}/web", f"2 {sources}/web"], 10) == 2
    assert shown([f"1 {sources}/web"], 10, "data.consumed=[much]") == 2
    err = capsys.readouterr().err
    assert "a source is listed twice" in err and "Allowed: a number of tokens, a blank and a path" in err
