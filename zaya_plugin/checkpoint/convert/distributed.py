# SPDX-License-Identifier: Apache-2.0
"""Published weights into and out of a model that is built: on one process, or split among ranks in any way."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.utils import unwrap_model
from torch import nn

from zaya_plugin.checkpoint import on_disk
from zaya_plugin.checkpoint.convert import exporting
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import Source, open_source
from zaya_plugin.checkpoint.convert.tables import EMBEDDING
from zaya_plugin.errors import mistake
from zaya_plugin.model.config import ZayaConfig


def config_from_hf(source: str | Path, **options) -> tuple[ZayaConfig, dict]:
    """Return the configuration of a published model, and the further arguments of `build_zaya_model`.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
        options: fields of ZayaConfig that the model does not decide, such as params_dtype or the parallel sizes.
    """
    model = open_source(source).model
    config = ZayaConfig(**model.config_fields() | options)
    return config, dict(
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
    )


@torch.no_grad()
def load_hf(model: nn.Module | Sequence[nn.Module], source: str | Path | Source) -> Source:
    """Copy published weights into a model, each rank its own part, and return what was read.

    Parameters and balancing biases are replaced; the state of the balancing optimizer becomes zero. An optimizer that
    exists already has fp32 copies of the weights: call its `reload_model_params()`.

    Args:
        model: or its chunks on this rank; with or without DDP.
        source: a folder, or a name on the Hugging Face Hub, of which the local cache has the files.

    Raises:
        ValueError: the source is not of this model; before any weight changes.
    """
    chunks = _unwrapped(model)
    published = source if isinstance(source, Source) else open_source(source, download=False)
    sharded = [
        tensor
        for chunk in chunks
        for tensor in chunk.sharded_state_dict().values()
        if isinstance(tensor, ShardedTensor)
    ]
    table = next((tensor.global_shape[0] for tensor in sharded if tensor.key == EMBEDDING), published.model.vocab_size)
    config = chunks[0].config
    mine = Description.of_config(config, table)
    theirs = published.model
    share = getattr(chunks[0], "rotary_percent", theirs.rotary_percent)
    mine = Description(**{**vars(mine), "rotary_percent": share})
    if different := mine.differences(theirs):
        raise mistake(
            str(published.name),
            problem=f"holds another model (here and there): {different}",
            allowed="a model of this configuration",
        )
    base = getattr(chunks[0], "rotary_base", theirs.rotary_base)
    if base != theirs.rotary_base:
        raise mistake(
            "rotary_base", base, problem=f"{published.name} was trained with another", allowed=str(theirs.rotary_base)
        )
    published = published.with_rows(table)
    shapes = {name: values.shape for name, values in published.tensors.items()}
    for tensor in sharded:
        if ".balancing_" in tensor.key and tensor.key not in shapes:
            continue
        if shapes.get(tensor.key) != tuple(tensor.global_shape):
            raise mistake(
                tensor.key,
                problem=f"has the shape {list(tensor.global_shape)} here, and {shapes.get(tensor.key)} there",
            )
    for tensor in sharded:
        if tensor.key not in shapes:
            tensor.data.zero_()
            continue
        first, *others = tensor.global_offset
        values = published.tensors[tensor.key].rows(first, first + tensor.local_shape[0])
        columns = tuple(slice(at, at + size) for at, size in zip(others, tensor.local_shape[1:], strict=True))
        tensor.data.copy_(values[(slice(None), *columns)].view(tensor.data.shape))
    return published


def save_hf(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    *,
    layout: str = "native",
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a model as `zaya convert export` does; a collective of all ranks.

    The ranks write their parts to <directory>.parts, which all of them reach, and rank 0 makes the files of them.

    Args:
        model: or its chunks on this rank; with or without DDP.
        directory: new or empty.
        dtype: bf16 or fp32; None: as the model computes.
        tokenizer: a folder with its files; None: the export has none.
    """
    chunks, directory = _unwrapped(model), Path(directory)
    rank = torch.distributed.get_rank()
    parts = directory.with_name(directory.name + ".parts")
    folder = on_disk.folder(parts, 0)
    if rank == 0:
        shutil.rmtree(parts, ignore_errors=True)
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    sharded, first = {}, chunks[0]
    for number, chunk in enumerate(chunks):
        sharded |= {f"{number}.{name}": value for name, value in chunk.sharded_state_dict().items()}
    table = max(_rows(sharded.values()))
    described = Description.of_config(first.config, table)
    described = Description(**{**vars(described), **_positions(first)})
    arguments = described.arguments() | {"bf16": first.config.params_dtype == torch.bfloat16}
    dist_checkpointing.save({**sharded, "args": argparse.Namespace(**arguments)}, str(folder))
    failed = [None]
    if rank == 0:
        try:
            trained = exporting.open_checkpoint(folder)
            planned = exporting.plan(trained, layout, dtype, Path(tokenizer) if tokenizer is not None else None)
            exporting.export_model(planned, directory)
        except (ValueError, OSError) as error:
            failed = [str(error)]
        shutil.rmtree(parts, ignore_errors=True)
    torch.distributed.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise ValueError(failed[0])


def _positions(model: nn.Module) -> dict:
    """Return RoPE's base and share, and the longest sequence, of a GPTModel."""
    return dict(
        rotary_base=int(model.rotary_base),
        rotary_percent=model.rotary_percent,
        max_position_embeddings=model.max_sequence_length,
    )


def _rows(tensors) -> list[int]:
    """Return the rows of the embedding on every rank, 0 on one without it."""
    here = [t.global_shape[0] for t in tensors if isinstance(t, ShardedTensor) and t.key == EMBEDDING]
    found: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, here[0] if here else 0)
    return found


def _unwrapped(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    return [unwrap_model(chunk) for chunk in chunks]
