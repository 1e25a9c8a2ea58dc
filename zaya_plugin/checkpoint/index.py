# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint that are no shards: `.metadata`, the index by torch's readers, and `metadata.json`."""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

# Megatron's description of the format, as its own save writes it.
FORMAT = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
COMMON = "common_state/shard_0_1"  # Megatron's key of what is not sharded, as a list of one dictionary
# Megatron's key of the fp32 weights of a parameter begins with this; the rest is the parameter's own key.
MAIN_WEIGHTS = "optimizer.state.param."


@dataclass(frozen=True)
class Entry:
    """A place in a file of the checkpoint. dtype: None for an object, which has no shape."""

    key: str
    file: str
    start: int
    length: int
    dtype: torch.dtype | None = None
    offset: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


def index(entries: Iterable[Entry], derived: Iterable[str]) -> bytes:
    """Return the content of `.metadata`, the index of a checkpoint by torch's readers.

    entries: of all ranks. derived: keys of the model's weights, which point to the bytes of the fp32 weights; torch's
    reader converts them to the dtype of the tensor that it fills.

    Raises:
        ValueError: the boxes of a tensor do not have as many elements as the tensor.
    """
    by_key: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_key[entry.key].append(entry)
    for key in sorted(set(derived)):
        by_key[key] = by_key[MAIN_WEIGHTS + key]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, parts in by_key.items():
        first = parts[0]
        for part in parts:
            offset = torch.Size(part.offset) if part.dtype is not None else None
            places[MetadataIndex(key, offset)] = _StorageInfo(part.file, part.start, part.length)
        if first.dtype is None:
            described[key] = BytesStorageMetadata()
            continue
        held = sum(math.prod(part.sizes) for part in parts)
        if held != math.prod(first.shape) or any(part.shape != first.shape for part in parts):
            raise ValueError(f"{key}: the ranks hold {held} elements of a tensor of {list(first.shape)}")
        described[key] = TensorStorageMetadata(
            properties=TensorProperties.create_from_tensor(torch.empty(0, dtype=first.dtype)),
            size=torch.Size(first.shape),
            chunks=[ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.sizes)) for part in parts],
        )
    metadata = Metadata(described, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    return pickle.dumps(metadata)
