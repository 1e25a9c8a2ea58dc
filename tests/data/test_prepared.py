# SPDX-License-Identifier: Apache-2.0
"""`load_manifest` and `check_dataset`, on prepared datasets and on bare Megatron files."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from zaya_plugin.data.prepared import DatasetWarning, check_dataset, load_manifest


@pytest.fixture
def copied(tmp_path, prepared):
    return shutil.copytree(prepared, tmp_path / "out")


@pytest.fixture
def bare(tmp_path, prepared):
    for suffix in (".bin", ".idx"):
        shutil.copy(prepared / f"train{suffix}", tmp_path / f"theirs{suffix}")
    return tmp_path / "theirs"


def rewrite(directory, **changes):
    record = json.loads((directory / "manifest.json").read_text())
    record.pop("checksum", None)
    record.update(changes)
    (directory / "manifest.json").write_text(json.dumps(record))


def test_good_dataset_passes_and_is_described(prepared, recwarn):
    manifest = load_manifest(prepared)
    for full in (False, True):
        checked = check_dataset(prepared, 400, eod_id=0, full=full)
        assert {name: (each.documents, each.tokens) for name, each in checked.items()} == {
            name: (split.documents, split.tokens) for name, split in manifest.splits.items()
        }
    assert list(check_dataset(prepared / "valid", 400)) == ["valid"] and list(
        check_dataset(f"{prepared}/train.bin")
    ) == ["train"]
    assert load_manifest(prepared / "manifest.json") == manifest
    assert not recwarn.list


def test_missing_path_says_what_to_do(tmp_path):
    with pytest.raises(
        ValueError,
        match=f"{tmp_path}/none: there is no dataset at this path.* Fix: zaya data prepare --output {tmp_path}/none",
    ):
        check_dataset(tmp_path / "none")
    (tmp_path / "none.partial").mkdir()
    with pytest.raises(ValueError, match="but an unfinished one of `zaya data prepare`"):
        check_dataset(tmp_path / "none")
    with pytest.raises(ValueError, match="manifest.json: does not exist.*zaya data prepare"):
        load_manifest(tmp_path)


def test_directory_without_manifest_names_its_prefixes(bare):
    with pytest.raises(ValueError, match=f"give one of its prefixes: {bare}"):
        check_dataset(bare.parent)


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
@pytest.mark.parametrize("name", ["train.bin", "train.idx", "valid.bin", "valid.idx"])
def test_cut_files_are_detected(copied, name, share):
    data = (copied / name).read_bytes()
    (copied / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=f"{name}: cut short"):
        check_dataset(copied)
    (copied / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: does not exist"):
        check_dataset(copied)


def test_files_of_another_run_are_detected(copied):
    for suffix in (".bin", ".idx"):
        shutil.copy(copied / f"valid{suffix}", copied / f"train{suffix}")
    with pytest.raises(ValueError, match="not of the same run"):
        check_dataset(copied)


def flipped(path, at=77):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_changed_byte_is_detected_at_every_start_and_by_the_full_check(copied):
    flipped(copied / "train.bin")
    with pytest.raises(ValueError, match="train: was changed after it was prepared"):
        check_dataset(copied)
    with pytest.raises(ValueError, match="train.bin: is damaged: its sha256"):
        check_dataset(copied, full=True)


def test_a_dataset_of_an_earlier_version_has_no_fingerprint(copied):
    record = json.loads((copied / "manifest.json").read_text())
    for split in record["splits"].values():
        del split["fingerprint"]
    del record["checksum"]
    (copied / "manifest.json").write_text(json.dumps(record))
    check_dataset(copied, 400)
    flipped(copied / "train.bin")
    check_dataset(copied, 400)
    tokens = np.fromfile(copied / "train.bin", np.uint16)
    tokens[len(tokens) // 2] = 400
    tokens.tofile(copied / "train.bin")
    with pytest.raises(ValueError, match="holds token id 400, and the vocabulary has 400 entries"):
        check_dataset(copied)


def move(directory):
    """Exchange two documents of the same length."""
    tokens, lengths = (
        np.fromfile(directory / "train.bin", np.uint16),
        np.fromfile(directory / "train.idx", "<i4", 244, offset=34),
    )
    starts = np.concatenate(([0], np.cumsum(lengths)))
    first, second = next((a, b) for a in range(244) for b in range(a) if lengths[a] == lengths[b])
    one, other = (slice(starts[number], starts[number + 1]) for number in (first, second))
    tokens[one], tokens[other] = tokens[other].copy(), tokens[one].copy()
    tokens.tofile(directory / "train.bin")


def above(directory):
    tokens = np.fromfile(directory / "valid.bin", np.uint16)
    tokens[len(tokens) // 2] = 65535
    tokens.tofile(directory / "valid.bin")


def permute(directory):
    path = directory / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    content["model"]["vocab"] = dict(zip([*names[:300], *names[:299:-1]], sorted(vocabulary.values()), strict=True))
    path.write_text(json.dumps(content))


def edit(change):
    def edited(directory):
        record = json.loads((directory / "manifest.json").read_text())
        change(record)
        (directory / "manifest.json").write_text(json.dumps(record))

    return edited


CHANGES = {
    "documents exchanged": (move, "train: was changed after"),
    "tokens replaced": (lambda directory: flipped(directory / "train.bin", 2000), "train: was changed after"),
    "token above the vocabulary": (above, "valid: was changed after"),
    "tokenizer permuted": (permute, "tokenizer.json: is not the tokenizer of the dataset"),
    "size": (edit(lambda record: record["splits"]["train"].update(bin_bytes=1)), "manifest.json: is damaged"),
    "hash": (edit(lambda record: record["splits"]["valid"].update(bin_sha256="0" * 64)), "manifest.json: is damaged"),
    "tokens": (edit(lambda record: record["splits"]["valid"].update(tokens=7)), "manifest.json: is damaged"),
    "largest id": (edit(lambda record: record["splits"]["valid"].update(max_token_id=3)), "manifest.json: is damaged"),
    "eod": (edit(lambda record: record["tokenizer"].update(eod_id=5)), "manifest.json: is damaged"),
    "tokenizer's hash": (edit(lambda record: record["tokenizer"].update(sha256="0")), "manifest.json: is damaged"),
    "no splits": (edit(lambda record: record.update(splits={})), "manifest.json: is damaged"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_data_that_changed_is_refused_at_every_start(copied, name):
    change, message = CHANGES[name]
    check_dataset(copied, 400)
    change(copied)
    with pytest.raises(ValueError, match=message):
        check_dataset(copied, 400)


def test_of_a_large_file_stretches_are_read(tmp_path, monkeypatch):
    from zaya_plugin.data import fingerprint

    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "BLOCK_COUNT", 4)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 100)
    (tmp_path / "a.idx").write_bytes(b"index")
    content = np.zeros(3100, np.uint8)
    found = set()
    for at in (0, 99, 100, 1000, 1099, 2000, 3099):  # stretches begin at 0, 1000, 2000, 3000
        content[:] = 0
        content[at] = 1
        content.tofile(tmp_path / "a.bin")
        found.add(fingerprint.fingerprint(str(tmp_path / "a")))
    assert len(found) == 7  # only byte 100 is not read: its fingerprint is that of the zeros
    np.zeros(3100, np.uint8).tofile(tmp_path / "a.bin")
    assert fingerprint.fingerprint(str(tmp_path / "a")) in found


def test_vocabulary_that_does_not_fit(prepared):
    largest = max(split.max_token_id for split in load_manifest(prepared).splits.values())
    check_dataset(prepared, largest + 1)
    with pytest.raises(
        ValueError,
        match=rf"holds token id {largest}, and the vocabulary has {largest} entries.* Fix: .*/tokenizer .400 entries",
    ):
        check_dataset(prepared, largest)
    with pytest.raises(ValueError, match="ends its documents with token 0; the tokenizer's end of document is 7"):
        check_dataset(prepared, 400, eod_id=7)


def test_manifest_of_another_version_or_damaged(copied):
    rewrite(copied, format_version=2)
    with pytest.raises(
        ValueError, match=r"format version 2 cannot be read.* Allowed: version 1. Fix: use zaya_plugin 0\.1\.0"
    ):
        check_dataset(copied)
    rewrite(copied, format_version=1, splits={"train": {"documents": 1}})
    with pytest.raises(ValueError, match="is damaged"):
        load_manifest(copied)
    rewrite(copied, format="something else")
    with pytest.raises(ValueError, match="is not the manifest"):
        load_manifest(copied)
    (copied / "manifest.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="is damaged"):
        check_dataset(copied / "train")


def test_bare_dataset_warns_about_what_cannot_be_checked(bare, monkeypatch):
    largest = int(np.fromfile(f"{bare}.bin", np.uint16).max())
    with pytest.warns(DatasetWarning, match="has no manifest.json.*not compared with a vocabulary"):
        check_dataset(bare)
    with pytest.warns(DatasetWarning) as caught:
        assert check_dataset(bare, largest + 1)["text"].tokens == np.fromfile(f"{bare}.bin", np.uint16).size
    assert len(caught) == 1 and "MB of" not in str(caught[0].message)
    with pytest.raises(ValueError, match=f"holds token id {largest}"):
        check_dataset(bare, largest)
    monkeypatch.setattr("zaya_plugin.data.prepared.SCANNED_BYTES", 100)
    with pytest.warns(DatasetWarning, match="compared with the vocabulary in 0 MB of"):
        check_dataset(bare, largest + 1)


def test_empty_dataset_is_refused(tmp_path):
    from zaya_plugin.data.indexed_dataset import write_index

    (tmp_path / "e.bin").write_bytes(b"")
    write_index(str(tmp_path / "e.idx"), np.dtype("uint16"), np.empty(0, np.int32))
    with pytest.raises(ValueError, match="holds no tokens"):
        check_dataset(tmp_path / "e")


def test_checks_load_no_torch(prepared):
    code = (
        f"import sys\nfrom zaya_plugin.data.prepared import check_dataset\ncheck_dataset({str(prepared)!r}, 400, "
        "full=True)\n"
    )
    code += "assert not {'torch', 'megatron', 'transformers', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
