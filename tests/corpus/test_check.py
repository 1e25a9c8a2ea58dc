# SPDX-License-Identifier: Apache-2.0
"""`zaya data check` reads every byte and compares it with the manifest."""

import shutil

import numpy as np
import pytest

from zaya_plugin import cli
from zaya_plugin.data.fingerprint import fingerprint


def test_whole_datasets_are_described(prepared, tmp_path, capsys):
    for suffix in (".bin", ".idx"):
        shutil.copy(prepared / f"train{suffix}", tmp_path / f"bare{suffix}")
    assert (
        cli.main(["data", "check", str(prepared), str(tmp_path / "bare"), "--tokenizer", str(prepared / "tokenizer")])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "has no manifest.json" in lines[3]
    counts = f"244 documents, 37,076 tokens, fingerprint {fingerprint(str(prepared / 'train'))}"
    assert lines[0] == f"{prepared}: train: {counts}, all checksums fit"
    assert lines[2] == f"{tmp_path}/bare: text: {counts}, token ids compared"


def test_all_datasets_of_a_recipe_are_checked(prepared, tmp_path, capsys):
    copied = shutil.copytree(prepared, tmp_path / "copied")
    words = ["experiment=cpu_demo", f"data.path={prepared}", f"data.blend=['1 {copied}']"]
    assert cli.main(["data", "check", *words]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == [
        *[str(prepared)] * 2,
        *[str(copied)] * 2,
        f"{prepared}/valid",
    ]


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer/tokenizer.json"])
def test_a_changed_byte_is_detected(prepared, tmp_path, capsys, name):
    copied = shutil.copytree(prepared, tmp_path / "copied")
    content = np.fromfile(copied / name, np.uint8)
    content[len(content) * 2 // 3] ^= 1
    content.tofile(copied / name)
    assert cli.main(["data", "check", str(copied)]) != 0
    assert f"{copied / name}: " in capsys.readouterr().err


def test_a_change_between_stretches_is_detected(prepared, tmp_path, capsys, monkeypatch):
    """Stands for a file so large that a start reads stretches of it and misses the change."""
    from zaya_plugin.data import prepared as checks

    monkeypatch.setattr(checks, "fingerprint", lambda prefix: checks.locate(prefix)[0].splits["train"].fingerprint)
    copied = shutil.copytree(prepared, tmp_path / "copied")
    content = np.fromfile(copied / "train.bin", np.uint16)
    content[:2] = content[1::-1]
    content.tofile(copied / "train.bin")
    checks.check_dataset(copied / "train")
    assert cli.main(["data", "check", str(copied / "train")]) != 0
    assert "train.bin: is damaged: its sha256" in capsys.readouterr().err
