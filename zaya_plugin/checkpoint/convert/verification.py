# SPDX-License-Identifier: Apache-2.0
"""Whether an export holds the checkpoint's model: every tensor bit by bit, and logits of the loaded files."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from math import prod
from operator import methodcaller
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from zaya_plugin.checkpoint.convert import exporting, safetensors_files
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import Source, open_source
from zaya_plugin.checkpoint.convert.loading import load_model
from zaya_plugin.checkpoint.convert.values import Changed, Values, byte_blocks
from zaya_plugin.ground.errors import free_memory, mistake

CLOSE = 1e-5  # relative difference of logits in fp32
TOKENS = 64
TRIES = 3  # other tokens, because rounding flips an expert where two are nearly equal; a wrong tensor fails on all


def verify(export: exporting.Export, folder: Path, progress: Callable[[int], None] = lambda count: None) -> list[str]:
    """Return lines about what was compared, for the model card.

    Raises:
        ValueError: the files differ from the checkpoint, or compute other logits.
    """
    lines = [_bits(export, folder, progress)]
    source = open_source(folder)
    needed = sum(4 * prod(values.shape) for values in source.tensors.values())
    if needed > 0.8 * free_memory():
        return [
            *lines,
            f"Logits were not compared: the model takes {needed / 2**30:.1f} GiB in fp32, more than is free.",
        ]
    # The checkpoint's values differ from the files' by rounding: both sides get the values as they were written.
    order = exporting.ordered(export.layout, export.trained.model)
    written = {name: tensor.dtype for row, tensor in zip(order, export.tensors, strict=True) for name in row.ours}
    rounded = {
        name: Changed(values, methodcaller("to", written[name]), written[name])
        for name, values in export.trained.tensors.items()
    }
    reader = _transformers if export.layout == "native" else _this_package
    return [*lines, _logits(export.trained.model, rounded, folder, reader)]


def _bits(export: exporting.Export, folder: Path, progress: Callable[[int], None]) -> str:
    recorded = json.loads((folder / exporting.RECORD).read_text())["xxh3_128"]
    regions, count = safetensors_files.tensors_of(folder), 0
    if wrong := sorted(regions.keys() ^ {tensor.name for tensor in export.tensors}):
        raise mistake(wrong[0], problem=f"the files in {folder} hold other tensors than the checkpoint")
    for tensor in export.tensors:
        stored, expected = xxhash.xxh3_128(), xxhash.xxh3_128()
        for block in byte_blocks([regions[tensor.name]], tensor.dtype):
            stored.update(block)
        for block in tensor.blocks():
            expected.update(block)
            progress(len(block))
        if not stored.hexdigest() == expected.hexdigest() == recorded[tensor.name]:
            raise mistake(tensor.name, problem=f"in {folder} it differs from the checkpoint")
        count += tensor.bytes
    return f"{len(export.tensors)} tensors, {count} bytes, equal those of the checkpoint bit by bit."


def differences(one: Source, other: Source) -> list[str]:
    """Return how two models differ: in their descriptions, and in which tensors; empty if they are equal bit by bit."""
    texts = [text] if (text := one.model.differences(other.model)) else []
    texts += [f"{name} is in one of the two" for name in sorted(one.tensors.keys() ^ other.tensors.keys())]
    for name in one.tensors.keys() & other.tensors.keys():
        mine, theirs = one.tensors[name], other.tensors[name]
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            texts.append(f"{name}: {mine.dtype} {mine.shape} and {theirs.dtype} {theirs.shape}")
        elif any(
            a != b for a, b in zip(*(byte_blocks([values], values.dtype) for values in (mine, theirs)), strict=True)
        ):
            texts.append(f"{name} has other values")
    return texts


def _logits(model: Description, tensors: Mapping[str, Values], folder: Path, reader: Callable) -> str:
    generator = torch.Generator().manual_seed(1)
    length = min(TOKENS, model.max_position_embeddings)
    ids = [torch.randint(model.vocab_size, (1, length), generator=generator) for _ in range(TRIES)]
    ours = our_logits(model, tensors, ids)
    gc.collect()
    name, theirs = reader(folder, ids)
    difference = min(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))
    if not difference < CLOSE:
        raise mistake(
            str(folder),
            problem=f"logits of {length} tokens differ by {difference:.1e}, relative to their norm",
            allowed=f"below {CLOSE:g}",
        )
    return (
        f"Logits of {length} tokens in fp32 on a CPU equal those of {name} within {difference:.1e}, relative to "
        "their norm."
    )


@torch.no_grad()
def our_logits(model: Description, tensors: Mapping[str, Values], ids: list[Tensor]) -> list[Tensor]:
    """Return the logits [s, v] of this package's model in fp32 for each of `ids`, [1, s]."""
    built = load_model(model, tensors)
    return [built(tokens, torch.arange(tokens.shape[1])[None], None)[0].float() for tokens in ids]


@torch.no_grad()
def _transformers(folder: Path, ids: list[Tensor]) -> tuple[str, list[Tensor]]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    return f"transformers {transformers.__version__}", [model(tokens, use_cache=False).logits[0] for tokens in ids]


def _this_package(folder: Path, ids: list[Tensor]) -> tuple[str, list[Tensor]]:
    source = open_source(folder)
    return "this package, from the files", our_logits(source.model, source.tensors, ids)
