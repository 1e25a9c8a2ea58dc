# SPDX-License-Identifier: Apache-2.0
"""What the loaders of exports require: transformers' own model, and the contract of vLLM's loader (pull request 41999)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.convert.published import TINY, publish
from zaya_plugin.checkpoint.convert import exporting, hf_config
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import import_model, open_source
from zaya_plugin.checkpoint.convert.tables import rows

BASE = Description(40, 2048, 8, 2, 128, 16, 2048, 256, 262_272, bos=2, eos=1, pad=0)


@pytest.fixture
def export(tmp_path) -> Path:
    checkpoint = import_model(open_source(publish(tmp_path / "published")), tmp_path / "checkpoint")
    return exporting.export_model(exporting.plan(exporting.open_checkpoint(checkpoint)), tmp_path / "export")


def test_native_names_and_shapes_are_those_of_transformers_model():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.ZayaForCausalLM(transformers.ZayaConfig(**hf_config.write("native", BASE, "bfloat16")))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert theirs == {row.name: row.shape for row in rows("native", BASE)} and len(theirs) == 1283


def test_transformers_finds_nothing_missing_or_unexpected(export):
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report.values()), report
    found = load_file(export / "model.safetensors")
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in found.items())


def test_vllms_contract(export):
    """vLLM's loader raises on an unknown tensor, a missing parameter and a head; it splits the stacked experts' gate and
    up halves along dimension 1, and renames the temperature.
    """
    found = load_file(export / "model.safetensors")
    assert "lm_head.weight" not in found
    assert not [name for name in found if name.endswith(("weight_scale", "inv_freq"))]
    parameters = {row.name for row in rows("native", TINY)}
    assert found.keys() == parameters
    for layer in range(TINY.num_layers):
        prefix = f"model.layers.{layer}."
        gate_up = found[prefix + "mlp.experts.gate_up_proj"]
        gate, up = gate_up.chunk(2, dim=1)
        assert gate.shape == up.shape == (12, 8, 16) and found[prefix + "mlp.experts.down_proj"].shape == (12, 16, 8)
        renamed = (prefix + "self_attn.qk_norm.temp").replace("qk_norm.temp", "qkv_proj.temp")
        assert renamed not in found and found[prefix + "self_attn.qk_norm.temp"].shape == (2,)
        assert found[prefix + "mlp.gate.balancing_biases"].shape == (13,)
