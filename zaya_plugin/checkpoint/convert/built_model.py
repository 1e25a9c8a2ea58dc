# SPDX-License-Identifier: Apache-2.0
"""Published weights into and out of a model that is built: on one process, or split among ranks in any way."""

from __future__ import annotations

import argparse
import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from zaya_plugin.checkpoint.convert import exporting
from zaya_plugin.checkpoint.convert.adapters import Lora
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import Source, open_source
from zaya_plugin.checkpoint.convert.loading import configuration
from zaya_plugin.checkpoint.convert.peft_folder import read_adapter
from zaya_plugin.checkpoint.convert.safetensors_files import shards
from zaya_plugin.checkpoint.convert.tables import EMBEDDING
from zaya_plugin.checkpoint.convert.values import Boxes, Region, as_bytes
from zaya_plugin.checkpoint.restore import gathered
from zaya_plugin.ground.errors import mistake
from zaya_plugin.model.build import build_zaya_model, groups_of_one
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.gpt_model import ZayaGPTModel
from zaya_plugin.model.low_rank import ADAPTER

T = TypeVar("T")


def zaya_from_hf(source: str | Path, **options) -> ZayaGPTModel:
    """Return a model with published weights; of several ranks each holds its own part.

    Megatron's groups decide the parallel sizes and the pipeline stage; without groups, those of one rank are started.

    Args:
        source: a folder, or a name on the Hugging Face Hub.
        options: fields of ZayaConfig that the model does not decide, such as params_dtype.

    Raises:
        ValueError: the source is not a ZAYA model, or a field has a value that the model does not support.
    """
    groups_of_one()
    published = open_source(source)
    groups = dict(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    config, sizes = configuration(published.model, dict(groups, perform_initialization=False) | options)
    stage = dict(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    )
    model = build_zaya_model(config, **sizes, **stage)
    load_hf(model, published)
    return model


def config_from_hf(source: str | Path, **options) -> tuple[ZayaConfig, dict[str, Any]]:
    """Return the configuration of a published model, and the further arguments of `build_zaya_model`.

    Args:
        source, options: as of `zaya_from_hf`.
    """
    return configuration(open_source(source).model, options)


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
    sharded = [tensor for tensor in _sharded_tensors(chunks, whole=True) if ADAPTER not in tensor.key]
    table = next((tensor.global_shape[0] for tensor in sharded if tensor.key == EMBEDDING), published.model.vocab_size)
    config = chunks[0].config
    theirs = published.model
    share = getattr(chunks[0], "rotary_percent", theirs.rotary_percent)
    mine = replace(Description.of_config(config, table), rotary_percent=share)
    if different := mine.differences(theirs):
        raise mistake(
            str(published.name),
            problem=f"holds another model (built and published): {different}",
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
                problem=f"the built model has the shape {list(tensor.global_shape)}, the published one "
                f"{shapes.get(tensor.key)}",
            )
    for tensor in sharded:
        if tensor.key not in shapes:
            cast(Tensor, tensor.data).zero_()
        else:
            first = tensor.global_offset[0]
            copy_part(tensor, published.tensors[tensor.key].rows(first, first + tensor.local_shape[0]))
    return published


def copy_part(tensor: ShardedTensor, values: Tensor) -> None:
    """Copy into this rank's part of a tensor. values: the rows of the part, of all columns."""
    places = zip(tensor.global_offset[1:], tensor.local_shape[1:], strict=True)
    columns = tuple(slice(at, at + size) for at, size in places)
    own = cast(Tensor, tensor.data)
    own.copy_(values[(slice(None), *columns)].view(own.shape))


@torch.no_grad()
def load_adapter(model: nn.Module | Sequence[nn.Module], folder: Path) -> None:
    """Copy an adapter by peft into a model with adapters, each rank its own part.

    Raises:
        ValueError: it does not fit the model.
    """
    chunks = _unwrapped(model)
    config = chunks[0].config
    # no tensor of an adapter depends on the vocabulary
    tensors = read_adapter(folder, cast(Lora, Lora.of(config)), Description.of_config(config, 1))
    for tensor in _sharded_tensors(chunks):
        if tensor.key in tensors:
            first = tensor.global_offset[0]
            copy_part(tensor, tensors[tensor.key][first : first + tensor.local_shape[0]])


def save_hf(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    *,
    layout: str = "native",
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a model as `zaya checkpoint export` does; a collective of all ranks.

    The ranks write their parts to <directory>.parts, which all of them reach, and rank 0 makes the files of them.

    Args:
        model: or its chunks on this rank; with or without DDP.
        directory: new or empty.
        dtype: bf16 or fp32; None: as the model computes.
        tokenizer: a folder with its files; None: the export has none.

    Raises:
        Exception: of any rank, on all ranks: a ValueError for what the layout cannot express, or an output that exists.
    """
    chunks, directory = _unwrapped(model), Path(directory)
    rank, parts = torch.distributed.get_rank(), directory.with_name(directory.name + ".parts")

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir(parents=True)

    def write() -> list[_Part]:
        return _write_parts(parts / f"{rank}.bin", chunks)

    def export() -> None:
        if rank == 0:
            trained = _put_together(parts, chunks[0], written)
            planned = exporting.plan(trained, layout, dtype, Path(tokenizer) if tokenizer is not None else None)
            exporting.export_model(planned, directory)

    try:
        _on_all_ranks(begin)
        written = [part for of_rank in _on_all_ranks(write) for part in of_rank]
        _on_all_ranks(export)
    finally:
        if rank == 0:
            shutil.rmtree(parts, ignore_errors=True)


@torch.no_grad()
def stream_hf(
    model: nn.Module | Sequence[nn.Module],
    callback: Callable[[dict[str, torch.Tensor]], None],
    *,
    layout: str = "native",
    dtype: str | None = None,
    bucket_bytes: int = 2**30,
    sent: dict[str, str] | None = None,
) -> None:
    """Hand over a model's weights by the names of a published layout, without a file; a collective of all ranks.

    Each tensor is broadcast from the ranks that hold it, a block of rows at a time.

    Args:
        model: or its chunks on this rank; with or without DDP.
        callback: called on rank 0 with tensors by name, on the host, in the layout's shapes; it may keep them.
        dtype: bf16 or fp32; None: as the model computes.
        bucket_bytes: of one call, at most; a larger tensor has a call of its own.
        sent: checksums by name of what the receiver has; rank 0's decides. Tensors that it has are left out, and it is
            brought up to date after each call. None: all tensors are handed over.

    Raises:
        ValueError: the layout cannot express the model.
        Exception: of the callback, on rank 0; on the others a ValueError with its text for a ValueError, and a
            RuntimeError that names rank 0 and the exception's class for any other.
    """
    chunks, rank = _unwrapped(model), torch.distributed.get_rank()
    mine = _main_copies(chunks)
    device = next(chunks[0].parameters()).device
    facts = [
        (t.key, *map(tuple, (t.global_shape, t.global_offset, t.local_shape)), cast(Tensor, t.data).dtype) for t in mine
    ]
    parts = [
        _Part(key, shape, place, _Broadcast(owner, kind, local, mine[n].data if owner == rank else None, device))
        for owner, of_rank in enumerate(gathered(facts))
        for n, (key, shape, place, local, kind) in enumerate(of_rank)
    ]
    planned = exporting.plan(_put_together(Path(), chunks[0], parts), layout, dtype)
    known = {} if sent is None else sent
    for group in shards(planned.tensors, bucket_bytes):
        contents = {tensor.name: bytearray(b"".join(tensor.blocks())) for tensor in group}
        checksums = {name: xxhash.xxh3_128_hexdigest(content) for name, content in contents.items()}
        bucket = {
            tensor.name: torch.frombuffer(contents[tensor.name], dtype=tensor.dtype).view(tensor.shape)
            for tensor in group
            if rank == 0 and known.get(tensor.name) != checksums[tensor.name]
        }
        # a collective for each group, whatever rank 0 hands over: its error must not leave the others in a broadcast
        _on_all_ranks(functools.partial(_hand_over, callback, bucket))
        known.update(checksums)  # of a callback that raises, the tensors are handed over again


def _hand_over(callback: Callable[[dict[str, torch.Tensor]], None], bucket: dict[str, torch.Tensor]) -> None:
    """Call `callback` unless the bucket is empty; its result, which may not be picklable, is dropped."""
    if bucket:
        callback(bucket)


@dataclass(frozen=True)
class _Broadcast:
    """Values that rank `owner` holds, None elsewhere. All ranks read the same rows in the same order, since a read is a
    broadcast.
    """

    owner: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    held: torch.Tensor | None
    device: torch.device

    def rows(self, start: int, stop: int) -> torch.Tensor:
        values = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype, device=self.device)
        if self.held is not None:
            values.copy_(self.held.detach().view(self.shape)[start:stop])
        torch.distributed.broadcast(values, self.owner)
        return values.cpu()


@dataclass(frozen=True)
class _Part:
    """A rectangle of the tensor `key`, which has `shape`: it begins at `place`; its values lie in a file or on a
    rank.
    """

    key: str
    shape: tuple[int, ...]
    place: tuple[int, ...]
    values: Region | _Broadcast


def _on_all_ranks(step: Callable[[], T]) -> list[T]:
    """Run a step, which calls no collective, on every rank, and return the results of all of them.

    Raises:
        Exception: the step's own error, on its rank; on the others a ValueError for a ValueError, and a RuntimeError
            for any other.
    """
    result, error = None, None
    try:
        result = step()
    except Exception as raised:
        error = raised
    mine = (result, None if error is None else (isinstance(error, ValueError), f"{error}", type(error).__name__))
    outcomes = gathered(mine)
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            of_user, text, kind = failed
            raise ValueError(text) if of_user else RuntimeError(f"rank {rank}: {kind}: {text}")
    return [result for result, _ in outcomes]


def _sharded_tensors(chunks: list[ZayaGPTModel], whole: bool = False) -> list[ShardedTensor]:
    """Return this rank's parts of a model's tensors. whole: as of `sharded_state_dict`."""
    return [
        value
        for chunk in chunks
        for value in chunk.sharded_state_dict(whole=whole).values()
        if isinstance(value, ShardedTensor)
    ]


def _main_copies(chunks: list[ZayaGPTModel]) -> list[ShardedTensor]:
    """Return the tensors of which this rank has the main copy."""
    return [tensor for tensor in _sharded_tensors(chunks, whole=True) if is_main_replica(tensor.replica_id)]


def _write_parts(path: Path, chunks: list[ZayaGPTModel]) -> list[_Part]:
    """Write the tensors of which this rank has the main copy, one behind another, and return where they are."""
    parts = []
    with open(path, "wb") as file:
        for tensor in _main_copies(chunks):
            values = cast(Tensor, tensor.data).detach().cpu()
            region = Region(path, file.tell(), values.dtype, tuple(tensor.local_shape))
            parts.append(_Part(tensor.key, tuple(tensor.global_shape), tuple(tensor.global_offset), region))
            file.write(as_bytes(values))
    return parts


def _put_together(parts: Path, first: ZayaGPTModel, written: list[_Part]) -> exporting.Trained:
    """Return the model that all ranks have written; first: a chunk of it.

    Raises:
        ValueError: no layout has it.
    """
    of_key: dict[str, list[_Part]] = {}
    for part in written:
        of_key.setdefault(part.key, []).append(part)
    shapes = {key: parts_of_key[0].shape for key, parts_of_key in of_key.items()}
    described = replace(
        Description.of_config(first.config, shapes[EMBEDDING][0]),
        rotary_base=int(first.rotary_base),  # ty: ignore[invalid-argument-type]  # read from a configuration
        rotary_percent=first.rotary_percent,
        max_position_embeddings=first.max_sequence_length,
    )
    arguments = described.arguments() | {"bf16": first.config.params_dtype == torch.bfloat16}
    if (lora := Lora.of(first.config)) is not None:
        arguments |= vars(lora)

    def values(key: str) -> Boxes:
        places = tuple((part.place, part.values) for part in of_key[key])
        assert sum(prod(region.shape) for _, region in places) == prod(shapes[key]), f"ranks hold {key} in part"
        return Boxes(places[0][1].dtype, shapes[key], places)  # ty: ignore[invalid-argument-type]  # _Broadcast reads as Region does

    return exporting.checked(parts, argparse.Namespace(**arguments), shapes, values)


def _unwrapped(model: nn.Module | Sequence[nn.Module]) -> list[ZayaGPTModel]:
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    return [unwrap_model(chunk) for chunk in chunks]
