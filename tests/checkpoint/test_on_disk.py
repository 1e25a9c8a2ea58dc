# SPDX-License-Identifier: Apache-2.0
"""The search for the newest complete checkpoint, and its model against that of a recipe: options that the checkpoint does
not know had their defaults.
"""

import time
from argparse import Namespace

import pytest
import torch

from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.rank_file import COMMON, FORMAT, Entry, index

MODEL = dict(
    on_disk.FIXED_OPTIONS,
    num_layers=4,
    hidden_size=64,
    router_hidden_size=16,
    temperature_form="linear",
    skip_output="zero",
    normalization="RMSNorm",
)


def saved(directory, **arguments):
    folder = on_disk.folder(directory, 5)
    folder.mkdir(exist_ok=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": Namespace(**arguments)}, folder / "common.pt")


def test_the_same_model_passes(tmp_path):
    saved(tmp_path, **MODEL)
    on_disk.check_same_model(tmp_path, 5, Namespace(**MODEL))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("num_layers", 5, "num_layers: checkpoint 4, recipe 5"),
        ("skip_output", "identity", "skip_output: checkpoint 'zero', recipe 'identity'"),
        ("normalization", "LayerNorm", "normalization: checkpoint 'RMSNorm', recipe 'LayerNorm'"),
    ],
)
def test_every_difference_is_named(tmp_path, name, value, message):
    saved(tmp_path, **MODEL)
    with pytest.raises(ValueError, match=message):
        on_disk.check_same_model(tmp_path, 5, Namespace(**MODEL | {name: value}))


def test_a_checkpoint_older_than_an_option_has_its_default(tmp_path):
    saved(tmp_path, **{name: value for name, value in MODEL.items() if name != "skip_output"})
    on_disk.check_same_model(tmp_path, 5, Namespace(**MODEL))
    with pytest.raises(ValueError, match="skip_output: checkpoint 'zero', recipe 'identity'"):
        on_disk.check_same_model(tmp_path, 5, Namespace(**MODEL | {"skip_output": "identity"}))


def test_the_search_among_fifty_checkpoints_is_quick_and_reads_no_content(tmp_path, monkeypatch):
    """A checkpoint of 1,024 ranks has as many files. 0.04 s were measured."""
    names = [f"__{rank}_0.distcp" for rank in range(1024)]
    files = {name: {"bytes": 1, "xxh3_128": "0" * 32} for name in names}
    for step in range(50):
        folder = on_disk.folder(tmp_path, step)
        folder.mkdir()
        manifest.write(folder, step, files)
        if step >= 48:  # the others need none: the search ends at 48
            for name in names:
                (folder / name).write_bytes(b"x")
    (on_disk.folder(tmp_path, 49) / names[3]).unlink()
    monkeypatch.setattr(manifest, "describe", None)
    began = time.monotonic()
    assert on_disk.latest(tmp_path) == (48, [f"{on_disk.folder(tmp_path, 49) / names[3]} is missing"])
    assert time.monotonic() - began < 60


def test_a_later_folder_without_a_manifest_does_not_displace_a_checkpoint(tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#5964: the numerically largest folder was loaded. NVIDIA-NeMo/Megatron-Bridge#4820: it
    was counted for retention.
    NVIDIA-NeMo/Megatron-Bridge#5296: folders inside checkpoints were counted.
    """
    for step in (10, 20):
        folder = on_disk.folder(tmp_path, step)
        (folder / "iter_0000099").mkdir(parents=True)
        (folder / "iter_0000099" / "side.file").write_text("")
        manifest.write(folder, step, {})
    later = on_disk.folder(tmp_path, 30)
    later.mkdir()
    (later / "__0_0.distcp").write_bytes(b"half")
    newest, skipped = on_disk.latest(tmp_path)
    assert newest == 20 and all(str(later) in text for text in skipped)
    assert on_disk.removable(tmp_path, keep_last=1) == [10], "20 is the newest complete one"
    assert on_disk.before(tmp_path, 20) == 10 and on_disk.before(tmp_path, 10) is None


def test_a_damaged_common_state_without_a_manifest_is_named(tmp_path):
    """All sizes fit; Megatron's reader raised through the search for the newest checkpoint."""
    folder = on_disk.folder(tmp_path, 5)
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(bytes(100))
    (folder / on_disk.INDEX).write_bytes(index([Entry(COMMON, "__0_0.distcp", 0, 100)], ()))
    (folder / on_disk.FORMAT).write_text(FORMAT)
    (found,) = on_disk.problems(tmp_path, 5)
    assert found.startswith(f"{folder}: its arguments and progress (common state) cannot be read (")
    with pytest.raises(ValueError, match=r"no checkpoint is complete: .*common state"):
        on_disk.latest(tmp_path)


def test_what_is_put_aside_keeps_its_content_and_a_name_of_its_own(tmp_path):
    """google/orbax#394: what could not be classified was deleted."""
    for content in "ab":
        on_disk.folder(tmp_path, 10).mkdir()
        (on_disk.folder(tmp_path, 10) / "file").write_text(content)
        on_disk.put_aside(tmp_path, 10)
    assert {path.name: (path / "file").read_text() for path in tmp_path.iterdir()} == {
        "iter_0000010.damaged": "a",
        "iter_0000010.1.damaged": "b",
    }
    assert on_disk.iterations(tmp_path) == [] and on_disk.removable(tmp_path, 1) == []
