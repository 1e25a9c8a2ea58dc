# SPDX-License-Identifier: Apache-2.0
"""The part of a checkpoint that one rank writes: the tensors and objects of which it is the owner,
and their places in its file.

The file is a file of torch's distributed checkpoints, made of slices of one buffer. The places are the same in every
save: a tensor keeps its shape, and an object gets room to grow. So the index of the checkpoint, `.metadata`,
is made once.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from torch import Tensor
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

from zaya_plugin.checkpoint.stored_tensor import around

ALIGNMENT = 64  # of the tensors in the buffer
LONGEST_COMMENT = 4000  # torch looks for an archive's end in its last 4 KiB
# Megatron's description of the format, as its own save writes it.
FORMAT = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
COMMON = "common_state/shard_0_1"  # Megatron's key of what is not sharded, as a list of one dictionary
# Megatron's key of the fp32 weights of a parameter begins with this; the rest is the parameter's own key.
MAIN_WEIGHTS = "optimizer.state.param."


@dataclass(frozen=True)
class Box:
    """A part of a tensor that one rank owns. offset, sizes: in the whole tensor, which has `shape`."""

    key: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    values: Tensor


def contents(sharded_state_dict: ShardedStateDict) -> tuple[list[Box], dict[str, object], dict]:
    """Return what this rank owns of Megatron's state: tensors, objects by key, and what is not sharded.

    Changes the dictionary as Megatron's save does: factories build their tensors.
    """
    apply_factories(sharded_state_dict)
    _, kept = extract_nonpersistent(sharded_state_dict)
    sharded, common = extract_sharded_base(kept)
    boxes, objects = [], defaultdict(list)
    for value in nested_values(sharded):
        if not is_main_replica(value.replica_id):
            continue
        if isinstance(value, ShardedObject):
            objects[value.unique_key].append(value.data)
        elif value.data.numel():
            boxes.append(_box(value))
    return boxes, dict(objects), common


def _box(tensor: ShardedTensor) -> Box:
    assert tensor.flattened_range is None, f"{tensor.key}: a format that Megatron no longer reads"
    sizes = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    values = tensor.data.detach()
    assert values.is_contiguous(), f"{tensor.key} is not contiguous, so its copy would not follow it"
    return Box(tensor.key, tuple(tensor.global_offset), sizes, tuple(tensor.global_shape), values.view(-1))


def without_derived(boxes: Sequence[Box], shapes: dict[str, tuple[int, ...]]) -> tuple[list[Box], list[str]]:
    """Leave out the model's weights that a load derives from the fp32 weights. Return the boxes left, and the keys left
    out.

    shapes: of the fp32 weights that any rank owns, by the key of the parameter.
    """
    derived = {box.key for box in boxes if shapes.get(box.key) == box.shape}
    return [box for box in boxes if box.key not in derived], sorted(derived)


def main_weights(boxes: Iterable[Box]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the fp32 weights among `boxes`, by the key of the parameter."""
    return {box.key.removeprefix(MAIN_WEIGHTS): box.shape for box in boxes if box.key.startswith(MAIN_WEIGHTS)}


def copied_weights(sharded_state_dict: ShardedStateDict) -> list[str]:
    """Return the keys of parameters whose fp32 weights are in this rank's state and owned by others. Call it after
    `contents`.
    """
    sharded, _ = extract_sharded_base(sharded_state_dict)
    keys = (value.key for value in nested_values(sharded) if not is_main_replica(value.replica_id))
    return [key.removeprefix(MAIN_WEIGHTS) for key in keys if key.startswith(MAIN_WEIGHTS)]


@dataclass
class RankFile:
    """The plan of one rank's file.

    Attributes:
        name: of the file.
        size: bytes of the buffer.
        fixed: (start in the buffer, bytes) that are the same in every save.
        tensors: (start in the buffer, tensor), in the order of the buffer.
        rooms: key of an object -> (start in the buffer, bytes).
        slices: (start in the buffer, length) of which the file consists, in its order.
        entries: for the index.
    """

    name: str
    size: int = 0
    fixed: list[tuple[int, bytes]] = field(default_factory=list)
    tensors: list[tuple[int, Tensor]] = field(default_factory=list)
    rooms: dict[str, tuple[int, int]] = field(default_factory=dict)
    slices: list[tuple[int, int]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def plan(cls, name: str, boxes: Sequence[Box], objects: dict[str, object]) -> RankFile:
        """Plan the file `name`. Small tensors come first in the buffer, so that they can be copied together."""
        self = cls(name)
        length = 0

        def put(size: int) -> int:
            start = self.size
            self.size += size
            return start

        for key, value in sorted(objects.items()):
            room = len(saved(value)) + LONGEST_COMMENT // 2
            self.rooms[key] = (put(room), room)
            self.slices.append(self.rooms[key])
            self.entries.append(Entry(key, name, length, room))
            length += room
        boxes = sorted(boxes, key=lambda box: box.values.nbytes)
        texts: dict[tuple, list[tuple[int, int]]] = {}
        for box in boxes:
            if (kind := (box.values.dtype, box.sizes)) not in texts:
                pair = around(*kind)
                texts[kind] = [(put(len(text)), len(text)) for text in pair]
                self.fixed += [(start, text) for (start, _), text in zip(texts[kind], pair, strict=True)]
        for box in boxes:
            before, after = texts[box.values.dtype, box.sizes]
            put(-self.size % ALIGNMENT)
            values = put(box.values.nbytes), box.values.nbytes
            self.tensors.append((values[0], box.values))
            parts = before, values, after
            self.slices += parts
            size = sum(part[1] for part in parts)
            self.entries.append(Entry(box.key, name, length, size, box.values.dtype, box.offset, box.sizes, box.shape))
            length += size
        return self

    def archive(self, key: str, value: object) -> tuple[int, bytes]:
        """Return the start and the bytes of an object for the buffer.

        Raises:
            ValueError: it no longer fits into its room.
        """
        start, room = self.rooms[key]
        return start, padded_archive(saved(value), room)


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
        ValueError: the boxes of a tensor do not have as many elements as the tensor, or no rank owns fp32 weights.
    """
    by_key: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_key[entry.key].append(entry)
    for key in sorted(set(derived)):
        by_key[key] = by_key[MAIN_WEIGHTS + key]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, parts in by_key.items():
        if not parts:
            raise ValueError(f"{key}: no rank owns its fp32 weights, so no run could resume from the checkpoint")
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


def padded_archive(archive: bytes, size: int) -> bytes:
    """Return a zip archive with a comment of zeros, so that it has `size` bytes.

    Raises:
        ValueError: it is longer, or shorter by more than LONGEST_COMMENT.
    """
    room = size - len(archive)
    if not 0 <= room <= LONGEST_COMMENT:
        raise ValueError(f"an archive of {len(archive)} bytes cannot become one of {size}")
    assert archive[-22:-18] == b"PK\5\6" and archive[-2:] == b"\0\0", "an end of the directory without a comment"
    return archive[:-2] + room.to_bytes(2, "little") + bytes(room)


def saved(value: object) -> bytes:
    """Return an object as `torch.save` writes it."""
    archive = io.BytesIO()
    torch.save(value, archive)
    return archive.getvalue()
