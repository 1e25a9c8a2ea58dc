# SPDX-License-Identifier: Apache-2.0
"""A small published model whose greedy text does not repeat one token, with a byte-level tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.convert.published import TINY
from zaya_plugin.checkpoint.convert import hf_config
from zaya_plugin.checkpoint.convert.tables import rows
from zaya_plugin.data.tokenizer import train_bpe
from zaya_plugin.inference.opening import Opened, find_model, open_model

TEXTS = ["the cat sat on the mat and the dog sat on the log", "one two three four five six seven", "a b c d e f g"]
VOCABULARY = 300
SMALL = replace(
    TINY,
    num_layers=4,
    hidden_size=48,
    router_hidden_size=24,
    moe_ffn_hidden_size=40,
    num_experts=5,
    vocab_size=320,
    max_position_embeddings=256,
    rotary_base=10_000,
    bos=0,
    eos=0,
    pad=1,
)


def random_tensors(layout: str = "native", model=SMALL) -> dict[str, torch.Tensor]:
    """Tensors in fp32: 1-D ones around their neutral value, and a stream in which the layers outweigh the embedding."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for row in rows(layout, model):
        name, shape = row.name, torch.Size(row.shape)
        values = torch.randn(shape, generator=generator)
        if name.endswith("balancing_biases"):
            values = values.mul_(0.03)
            values[:-1].abs_()
            values[-1] = -1
        elif "temp" in name:
            values = values.abs_().add_(0.5)
        elif len(shape) == 1:
            neutral = 1.0 if name.endswith(("scale", "norm.weight", "layernorm.weight", "eda.weight")) else 0.0
            values = values.mul_(0.2).add_(neutral)
            if ".residual_scale" in name:
                values.mul_(0.3)
        elif name.endswith("embed_tokens.weight"):
            values.mul_(0.1)
        else:
            values.mul_(1.5 * (shape[1:].numel() if len(shape) == 3 and shape[2] == 2 else shape[-1]) ** -0.5)
        found[name] = values
    return found


def publish_small(folder: Path, layout: str = "native", model=SMALL) -> Path:
    folder.mkdir(parents=True)
    save_file(random_tensors(layout, model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config.write(layout, model, "float32")))
    train_bpe(TEXTS * 3, VOCABULARY, str(folder))
    return folder


def open_decoder(folder: Path):
    from zaya_plugin.checkpoint.convert.importing import open_source
    from zaya_plugin.checkpoint.convert.loading import load_model
    from zaya_plugin.inference.decoder import Decoder

    source = open_source(folder)
    return Decoder(load_model(source.model, source.tensors))


def open_theirs(folder: Path):
    """The same model in transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def open_given(given: Path, needs_tokenizer: bool = True, **more) -> Opened:
    """Open a model as the commands do, on the CPU."""
    plain = dict(model=str(given), step=None, tokenizer=None, device="cpu", dtype=None, verify=True)
    options = SimpleNamespace(**plain | more)
    return open_model(options, find_model(options), needs_tokenizer)
