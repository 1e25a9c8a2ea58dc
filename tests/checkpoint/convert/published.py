# SPDX-License-Identifier: Apache-2.0
"""Tiny published models in every layout, written with the safetensors library: names and values apart from our writer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from zaya_plugin.checkpoint.convert import hf_config
from zaya_plugin.checkpoint.convert.adapters import Lora, fingerprint
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.checkpoint.convert.tables import WRITTEN, rows
from zaya_plugin.checkpoint.convert.torch_dist import CheckpointWriter
from zaya_plugin.checkpoint.convert.values import TensorContent, as_bytes

TINY = Description(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    num_experts=12,
    moe_ffn_hidden_size=8,
    router_hidden_size=8,
    vocab_size=64,
    rotary_base=1_000_000,
    max_position_embeddings=64,
    bos=2,
    eos=1,
    pad=0,
)


def tensors(layout: str = "native", model: Description = TINY, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Random tensors of a layout; the skip class cannot be chosen."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for row in rows(layout, model):
        found[row.name] = torch.randn(row.shape, generator=generator).to(dtype)
        if row.name.endswith("balancing_biases"):
            found[row.name] = (torch.rand(row.shape, generator=generator) * 0.05 + 0.001).to(dtype)
            found[row.name][-1] = -1
    return found


def spread(found: dict) -> None:
    """Make random weights as small as trained ones, with tokens on many experts: a router's biases would decide alone,
    and send all tokens of a layer to one.
    """
    for name, tensor in found.items():
        if name.endswith("balancing_biases"):
            tensor[:-1] *= 0.01
        elif "bias" in name or tensor.ndim > 1 and ".gate." not in name and "embed" not in name:
            tensor.mul_(0.1)


def publish(
    folder: Path,
    layout: str = "native",
    model: Description = TINY,
    *,
    shards: int = 1,
    change=None,
    config: dict | None = None,
) -> Path:
    """Write a model's folder. change: changes the tensors in place; config: fields to set in config.json, or to remove
    where they are ...
    """
    found = tensors(layout, model)
    if change is not None:
        change(found)
    folder.mkdir(parents=True)
    names = sorted(found)
    parts = [names[n::shards] for n in range(shards)]
    files = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    )
    for file, part in zip(files, parts, strict=True):
        save_file({name: found[name] for name in part}, folder / file, metadata={"format": "pt"})
    if shards > 1:
        placed = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    if layout in WRITTEN:
        values = hf_config.write(layout, model, "bfloat16") | (config or {})
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return folder


def adapter_run(directory: Path, base: Path, lora: Lora, table: int) -> None:
    """Write the checkpoint of an adapter of ones on a base whose embedding has `table` rows in the run."""
    source = open_source(base).with_rows(table)
    shapes = lora.shapes(source.model) | {row.ours[0]: row.shape for row in lora.retrained(source.model)}
    writer = CheckpointWriter(directory, "adapter")
    stored = [
        TensorContent(name, torch.float32, shape, lambda shape=shape: iter([as_bytes(torch.ones(shape))]))
        for name, shape in shapes.items()
    ]
    writer.write(stored, lambda count: None)
    record = {"base": {"source": str(base), "fingerprint": fingerprint(source)}}
    writer.finish(source.model.arguments() | vars(lora) | {"bf16": True, "zaya": record})
