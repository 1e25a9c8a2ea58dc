# SPDX-License-Identifier: Apache-2.0
"""The model of a checkpoint against that of a recipe: options that the checkpoint does not know had their defaults."""

from argparse import Namespace

import pytest
import torch

from zaya_plugin.checkpoint import on_disk

MODEL = dict(
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
