# SPDX-License-Identifier: Apache-2.0
"""A cached sample index that was damaged, or belongs to something else, is made again: the samples stay the same."""

import json
import shutil
import threading
import time
import warnings

import numpy as np
import pytest

from zaya_plugin.data import sealed_cache
from zaya_plugin.data.dataset import build_gpt_datasets, build_stream
from zaya_plugin.data.sealed_cache import RECORD_FILE, CacheWarning, make_once
from zaya_plugin.ground.lock import Lock, machine

LENGTH = 32
# The content of a lock whose owner, a process that started at another time than this one, is gone.
OWNER = {"token": "x", "launch": None, "attempt": None, "pid": 1, "start": 1}


@pytest.fixture(scope="module")
def tokenizer(prepared):
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(str(prepared / "tokenizer"), metadata_path={"library": "huggingface"})


@pytest.fixture(scope="module")
def drawn(tokenizer):
    """Returns the tokens of 40 samples of a run that keeps its index in `cache`."""

    def call(kind, data, cache, seed=7, length=LENGTH):
        if kind == "continuing":
            dataset = build_stream(str(data), 40, length, seed, tokenizer, str(cache), {})
        else:
            blend = str(data) if kind == "single" else [(1, f"{data}/train"), (2, f"{data}/valid")]
            options = dict(sequence_length=length, seed=seed, tokenizer=tokenizer, cache_path=str(cache))
            dataset = build_gpt_datasets(blend, None, (40, 0, 0), **options)[0]
        return [dataset[number]["tokens"].tolist() for number in range(40)]

    return call


def zero(path):
    """The index as it was after a disk failure: the header is whole and all entries are 0."""
    array = np.load(path)
    np.save(path, np.zeros_like(array))


def zero_all(path):
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


DAMAGES = (zero, zero_all, truncate, flip)


@pytest.mark.parametrize("kind", ["single", "blend", "continuing"])
def test_a_damaged_index_is_made_again(tmp_path, prepared, drawn, kind):
    whole = drawn(kind, prepared, tmp_path)
    files = sorted(path for path in tmp_path.rglob("*.npy"))
    assert len(files) == {"single": 3, "blend": 8, "continuing": 1}[kind]
    with warnings.catch_warnings():  # no index is made again without a reason
        warnings.simplefilter("error", CacheWarning)
        assert drawn(kind, prepared, tmp_path) == whole
    kept = {path: path.read_bytes() for path in files}
    for number, path in enumerate(files):
        DAMAGES[number % len(DAMAGES)](path)
        with pytest.warns(CacheWarning, match=path.name):
            assert drawn(kind, prepared, tmp_path) == whole
        assert {path: path.read_bytes() for path in files} == kept


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_detected(tmp_path, prepared, drawn, damage):
    whole = drawn("single", prepared, tmp_path)
    damage(next(tmp_path.rglob("*-sample_index.npy")))
    with pytest.warns(CacheWarning, match="sample_index.npy did not fit"):
        assert drawn("single", prepared, tmp_path) == whole


@pytest.mark.parametrize("other", [{"seed": 8}, {"length": 16}])
def test_an_index_of_another_seed_or_length_is_not_read(tmp_path, prepared, drawn, other):
    whole = drawn("single", prepared, tmp_path)
    names = {path.name for path in tmp_path.rglob("*.npy")}
    drawn("single", prepared, tmp_path, **other)
    folder = next(tmp_path.iterdir())
    for name in names:
        theirs = next(path for path in folder.glob(f"*{name.rpartition('-')[2]}") if path.name not in names)
        shutil.copy(theirs, folder / name)
    with pytest.warns(CacheWarning):
        assert drawn("single", prepared, tmp_path) == whole


@pytest.mark.parametrize("kind", ["single", "continuing"])
def test_a_whole_cache_of_other_data_is_not_read(tmp_path, prepared, drawn, kind):
    whole = drawn(kind, prepared, tmp_path / "a")
    record = next((tmp_path / "a").rglob(RECORD_FILE))
    content = json.loads(record.read_text())
    content["made_from"] = "0" * 16
    record.write_text(json.dumps(content))
    with pytest.warns(CacheWarning):
        assert drawn(kind, prepared, tmp_path / "a") == whole


@pytest.mark.parametrize("record", [None, b"", b"{", b"[]", b'{"made_from": 1}', b"\xff\xfe"])
def test_an_index_without_a_readable_record_is_made_again(tmp_path, prepared, drawn, record):
    whole = drawn("single", prepared, tmp_path)
    path = next(tmp_path.rglob(RECORD_FILE))
    path.unlink() if record is None else path.write_bytes(record)
    with pytest.warns(CacheWarning):
        assert drawn("single", prepared, tmp_path) == whole


def test_a_cache_that_cannot_be_written_is_named(tmp_path, prepared, drawn):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="data.cache_path=.*cannot be written .Not a directory"):
        drawn("single", prepared, tmp_path / "cache")


def test_of_several_that_need_a_file_one_makes_it_also_after_a_killed_one(tmp_path, monkeypatch):
    """The lock of a killed process is taken over. It needs no flock."""
    monkeypatch.setattr(sealed_cache, "WAIT_SECONDS", 0.01)
    Lock.acquire([tmp_path / "lock"], AssertionError).files[0].write_text(
        json.dumps({**OWNER, "machine": machine(), "since": time.time()})
    )
    path, calls = tmp_path / "order.npy", []

    def make():
        calls.append(len(list(tmp_path.glob("lock.*"))))
        time.sleep(0.05)
        path.write_bytes(b"order")

    threads = [threading.Thread(target=make_once, args=(path, "0" * 16, make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert calls == [1] and path.read_bytes() == b"order"
    path.write_bytes(b"Order")
    with pytest.warns(CacheWarning, match="order.npy did not fit"):
        make_once(path, "0" * 16, make)
    assert calls == [1, 1] and path.read_bytes() == b"order" and not list(tmp_path.glob("lock*"))
