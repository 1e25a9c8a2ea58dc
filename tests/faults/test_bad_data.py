# SPDX-License-Identifier: Apache-2.0
"""Data that cannot be trained on: one message, exit code 2, nothing started and nothing written."""

import os
import shutil

import pytest

from tests.running import MICRO, train, zaya
from zaya_plugin import cli


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory):
    """A tokenizer of fewer entries than the corpus's."""
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "text").mkdir()
    for i in range(30):
        (root / "text" / f"{i}.txt").write_text(f"some words, number {i}")
    done = zaya("data", "prepare", "--input", str(root / "text"), "--output", str(root / "out"), "--train-bpe", "300")
    assert done.returncode == 0, done.stdout
    return root / "out" / "tokenizer"


@pytest.fixture
def refused(tmp_path, capfd):
    """`zaya train` in this process: a mistake, of which the output is returned."""

    def run(data, *overrides):
        code = cli.main(["train", *MICRO, f"run_dir={tmp_path / 'run'}", f"data.path={data}", *overrides])
        output = "".join(capfd.readouterr())
        assert code == 2 and "Traceback" not in output, output
        assert not (tmp_path / "run").exists()
        return output

    return run


def test_missing_data(tmp_path, refused):
    output = refused(tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'}: there is no dataset" in output and "zaya data prepare" in output


@pytest.mark.parametrize("name", ["train.idx", "train.bin", "valid.idx"])
def test_truncated_files(tmp_path, corpus, name, refused):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    os.truncate(data / name, (data / name).stat().st_size // 3)
    assert name.rsplit(".", 1)[0] in refused(data)


def test_a_tokenizer_with_fewer_entries_than_the_data(tmp_path, corpus, small_tokenizer, refused):
    output = refused(corpus, f"data.tokenizer={small_tokenizer}")
    assert "token" in output and "300" in output


def test_data_without_manifest_needs_a_tokenizer(tmp_path, corpus, refused):
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus / f"train{suffix}", tmp_path / f"bare{suffix}")
    assert "data.tokenizer" in refused(tmp_path / "bare")
    output = refused(tmp_path / "bare", f"data.tokenizer={corpus / 'tokenizer'}")
    assert "stage.eval_iters=2: there is no validation data" in output and "data.valid_path" in output


@pytest.mark.parametrize("entry", ["'heavy data/web'", "'0 data/web'", "'0.5'"])
def test_malformed_blends(tmp_path, corpus, entry, refused):
    assert "data.blend" in refused(corpus, f"data.blend=[{entry}]")


@pytest.mark.slow
def test_a_run_resumes_on_the_data_of_its_checkpoint(tmp_path, corpus):
    """Data without manifest is known by the fingerprint that the checkpoint keeps; a tokenizer by its digest."""
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus / f"train{suffix}", tmp_path / f"bare{suffix}")
    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    options = [f"data.tokenizer={tmp_path / 'tokenizer'}", "stage.eval_iters=0", "stage.train_iters=4"]
    run = tmp_path / "run"
    first = train(run, tmp_path / "bare", *options, "exit_interval=2")
    assert first.code == 0, first.output
    options += ["resume=auto"]
    content = bytearray((tmp_path / "bare.bin").read_bytes())
    content[1000:1002], content[1002:1004] = content[1002:1004], content[1000:1002]
    (tmp_path / "bare.bin").write_bytes(content)
    refused = train(run, tmp_path / "bare", *options, check=False)
    assert refused.code == 2 and "Traceback" not in refused.output, refused.output
    assert len(list((run / "logs").glob("launch_*"))) == 1, "before any rank"
    dry = train(run, tmp_path / "bare", *options, "dry_run=true", check=False)
    assert dry.code == 2 and dry.output.endswith(refused.output[refused.output.index("zaya: data.changed") :])
    assert "data.changed=refuse" in refused.output and f"the train data was {tmp_path}/bare (" in refused.output
    told = train(run, tmp_path / "bare", *options, "data.changed=accept")
    assert told.code == 0 and "was trained on other data" in told.output, told.output
