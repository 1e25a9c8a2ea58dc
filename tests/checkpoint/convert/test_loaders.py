# SPDX-License-Identifier: Apache-2.0
"""What the loaders of exports require: transformers' own model, SGLang's own loader, and the contract of vLLM's (pull
request 41999; no wheel has it, 0.33.0 included).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.convert.published import TINY, publish
from tests.checkpoint.convert.test_lora import adapted, smaller
from zaya_plugin.checkpoint.convert import exporting, hf_config, verification
from zaya_plugin.checkpoint.convert.built_model import save_hf
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import import_model, open_source
from zaya_plugin.checkpoint.convert.tables import rows
from zaya_plugin.data.tokenizer import train_bpe

BASE = Description(40, 2048, 8, 2, 128, 16, 2048, 256, 262_272, bos=2, eos=1, pad=0)


@pytest.fixture
def export(tmp_path) -> Path:
    checkpoint = import_model(open_source(publish(tmp_path / "published")), tmp_path / "checkpoint")
    return exporting.export_model(exporting.plan(exporting.open_checkpoint(checkpoint)), tmp_path / "export")


ZAYA1_74B = Description(60, 4096, 16, 2, 128, 24, 4096, 256, 262_272, sliding_window=4096, window_attn_skip_freq=2)


@pytest.mark.parametrize(
    ("of", "names", "parameters", "biases"),
    [(BASE, 1283, 8_840_488_784, 680), (ZAYA1_74B, 1923, 74_793_953_144, 1500)],
    ids=["base", "74b"],
)
def test_native_names_and_shapes_are_those_of_transformers_model(of, names, parameters, biases):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.ZayaForCausalLM(transformers.ZayaConfig(**hf_config.write("native", of, "bfloat16")))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert theirs == {row.name: row.shape for row in rows("native", of)} and len(theirs) == names
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(b.numel() for name, b in model.named_buffers() if name.endswith("balancing_biases")) == biases


def test_transformers_finds_nothing_missing_or_unexpected(export):
    transformers = pytest.importorskip("transformers")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report.values()), report
    found = load_file(export / "model.safetensors")
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True], ids=["plain", "merged LoRA"])
def test_sglang_loads_a_legacy_export_exactly(tmp_path, merged):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed; see CONTRIBUTING.md")
    published, folder = publish(tmp_path / "published", change=smaller), tmp_path / "export"
    if merged:
        save_hf(adapted(published), folder, layout="legacy")
        assert verification.differences(open_source(folder), open_source(published))
    else:
        checkpoint = import_model(open_source(published), tmp_path / "checkpoint")
        exporting.export_model(exporting.plan(exporting.open_checkpoint(checkpoint), layout="legacy"), folder)
    command = [sys.executable, "-m", "tests.checkpoint.convert.sglang_load", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["stored"] == len(list(rows("legacy", TINY)))
    assert (found["wrong"], found["left"], found["warnings"]) == ([], [], [])
    # The first router has no router before it, so SGLang does not read this one.
    assert found["unset"] == ["model.layers.1.zaya_block.router.router_states_scale"]
    stacked = 2 * TINY.num_layers * (TINY.num_experts - 1)  # an entry for all experts of a matrix
    assert found["held"] == found["stored"] - stacked + 1


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


@pytest.mark.slow
def test_the_snippet_of_the_page_runs(tmp_path):
    """As printed, but for the model's name and the tokenizer's folder."""
    folder = publish(tmp_path / "published")
    train_bpe(["a few words"] * 3, 300, str(tmp_path / "tokenizer"))
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()  # TINY has fewer rows than any
    text = (Path(__file__).parents[3] / "docs" / "weights.md").read_text()
    snippet = text.partition("```python network\n")[2].partition("```")[0]
    for name, path in (("Zyphra/ZAYA1-base", folder), ("data/mine/tokenizer", tmp_path / "tokenizer")):
        assert name in snippet
        snippet = snippet.replace(name, str(path))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    different = verification.differences(open_source(folder), open_source(tmp_path / "exports" / "mine"))
    assert [line for line in different if "balancing_biases: torch.bfloat16" not in line] == []
