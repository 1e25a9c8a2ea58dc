# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's manifest: what is written is read, and every kind of damage is named."""

import pytest

from zaya_plugin.checkpoint import manifest

FILES = {"__0_0.distcp": b"weights" * 100, ".metadata": b"index", "empty": b""}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    manifest.write(tmp_path, 7, {name: manifest.describe(tmp_path / name) for name in FILES})
    return tmp_path


def test_a_whole_checkpoint_has_no_problems(folder):
    content = manifest.read(folder)
    assert content["iteration"] == 7 and list(content["files"]) == sorted(FILES)
    # xxh3_128 of nothing, as the authors of xxHash publish it
    assert content["files"]["empty"] == {"bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}
    assert manifest.problems(folder) == manifest.damaged(folder) == []


def test_progress_counts_every_byte(folder):
    counted = []
    manifest.damaged(folder, progress=counted.append)
    assert sum(counted) == sum(map(len, FILES.values()))


def test_another_size_and_a_missing_file_are_named_without_reading(folder):
    (folder / "__0_0.distcp").write_bytes(b"short")
    (folder / ".metadata").unlink()
    assert sorted(problem.removeprefix(str(folder)) for problem in manifest.problems(folder)) == [
        "/.metadata is missing",
        "/__0_0.distcp has 5 bytes, its manifest states 700",
    ]


def test_every_flipped_byte_is_detected_by_the_checksum(folder):
    content = bytearray(FILES[".metadata"])
    for place in range(len(content)):
        content[place] ^= 4
        (folder / ".metadata").write_bytes(content)
        content[place] ^= 4
        assert manifest.problems(folder) == []
        (found,) = manifest.damaged(folder)
        assert found.startswith(f"{folder}/.metadata has the checksum ")
        assert manifest.damaged(folder, ["__0_0.distcp"]) == []


def test_every_flipped_byte_of_the_manifest_itself_is_detected(folder):
    path = folder / manifest.NAME
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        broken = bytearray(whole)
        broken[place] ^= 2
        path.write_bytes(broken)
        assert manifest.problems(folder), place
    path.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in manifest.problems(folder)[0]


def test_a_later_format_is_refused(folder, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", "zaya checkpoint/2")
    assert manifest.problems(folder) == [
        f"{folder / manifest.NAME} has the format 'zaya checkpoint/1', and this version reads 'zaya checkpoint/2'"
    ]
