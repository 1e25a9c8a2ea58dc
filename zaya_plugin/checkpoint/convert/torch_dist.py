# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint (torch_dist), read and written without ranks and without Megatron's save and load."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.convert.journal import Journal
from zaya_plugin.checkpoint.convert.safetensors_files import write_all
from zaya_plugin.checkpoint.convert.values import Boxes, Region
from zaya_plugin.checkpoint.stored_tensor import around, saved
from zaya_plugin.config.whole_file import write_whole
from zaya_plugin.errors import mistake

STORAGES = {
    b"FloatStorage": torch.float32,
    b"BFloat16Storage": torch.bfloat16,
    b"HalfStorage": torch.float16,
    b"LongStorage": torch.int64,
}
COMMON = "common_state/shard_0_1"  # Megatron's name for all that is no tensor


class CheckpointTensors:
    """The tensors of one iteration's folder. Keys may share storage: a model's weight that is the optimizer's fp32 copy.

    Raises:
        ValueError: files are missing or too short, or the folder is no checkpoint.
    """

    def __init__(self, folder: Path):
        if broken := on_disk.problems(folder.parent, on_disk.iteration_of(folder)):
            raise mistake(str(folder), problem="the checkpoint is not complete: " + "; ".join(broken))
        self.folder = folder
        self.index = FileSystemReader(folder).read_metadata()
        self.parts: dict[str, list] = {}
        for key, info in self.index.storage_data.items():
            self.parts.setdefault(key.fqn, []).append((tuple(key.offset or ()), info))

    def arguments(self) -> argparse.Namespace:
        """Return Megatron's arguments of the save."""
        return on_disk.saved_arguments(self.folder.parent, on_disk.iteration_of(self.folder))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        described = self.index.state_dict_metadata.items()
        return {key: tuple(entry.size) for key, entry in described if isinstance(entry, TensorStorageMetadata)}

    def values(self, key: str) -> Boxes:
        """Return a tensor's values. All parts have the dtype in which they are stored, whatever the index says."""
        entry, infos = self.index.state_dict_metadata[key], dict(self.parts[key])
        found = []
        for chunk in entry.chunks:
            place, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            info = infos.get(place) or infos[()]
            found.append((place, self._region(info, shape, key)))
        stored = sum(prod(region.shape) for _, region in found)
        dtypes = {region.dtype for _, region in found}
        if stored != prod(entry.size) or len(dtypes) != 1:
            raise mistake(
                key, problem=f"its parts have {stored} elements of {prod(entry.size)}, in {len(dtypes)} dtypes"
            )
        return Boxes(dtypes.pop(), tuple(entry.size), tuple(found))

    def _region(self, info: _StorageInfo, shape: tuple[int, ...], key: str) -> Region:
        path = self.folder / info.relative_path
        with open(path, "rb") as file, zipfile.ZipFile(_Slice(file, info.offset, info.length)) as archive:
            record = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
            pickled = archive.read(next(each for each in archive.namelist() if each.endswith("/data.pkl")))
            file.seek(info.offset + record.header_offset)
            local = file.read(30)
        name, extra = (int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
        storage = re.search(rb"torch\n(\w+Storage)\n", pickled)
        dtype = STORAGES.get(storage[1] if storage else b"")
        if dtype is None or record.file_size != prod(shape) * dtype.itemsize:
            raise mistake(
                f"{path}: {key}", problem=f"is not stored as {list(shape)} in {', '.join(map(str, STORAGES.values()))}"
            )
        return Region(path, info.offset + record.header_offset + 30 + name + extra, dtype, shape)


class _Slice(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file, start: int, length: int):
        self.file, self.start, self.length, self.at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence] + offset
        return self.at

    def readinto(self, data) -> int:
        self.file.seek(self.start + self.at)
        read = self.file.read(min(len(data), max(0, self.length - self.at)))
        data[: len(read)] = read
        self.at += len(read)
        return len(read)


@dataclass(frozen=True)
class Stored:
    """A tensor to store. blocks: its bytes, in pieces."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[memoryview]]

    @property
    def length(self) -> int:
        """Bytes in the file."""
        return sum(map(len, around(self.dtype, self.shape))) + prod(self.shape) * self.dtype.itemsize


class CheckpointWriter:
    """Writes a checkpoint of iteration 0, file by file. What a killed import has written is not written again.

    Args:
        directory: of the iterations, as a run's `checkpoints` is.
        origin: identifies what is imported; a folder that was begun with another origin is begun anew.
    """

    def __init__(self, directory: Path, origin: str):
        self.final = on_disk.folder(directory, 0)
        self.unfinished = self.final.with_name(self.final.name + manifest.UNFINISHED)
        self.journal = Journal(self.unfinished, origin)
        self.entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, tensors: list[Stored], progress: Callable[[int], None]) -> None:
        """Write the next file, unless an earlier import has."""
        name, offset = f"__{len({place.relative_path for place in self.places.values()})}_0.distcp", 0
        for tensor in tensors:
            place, size = torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape)
            chunk, properties = ChunkStorageMetadata(place, size), TensorProperties(dtype=tensor.dtype)
            self.entries[tensor.key] = TensorStorageMetadata(properties, size, [chunk])
            self.places[MetadataIndex(tensor.key, place)] = _StorageInfo(name, offset, tensor.length)
            offset += tensor.length
        if name in self.journal.files:
            progress(offset)
            return
        part, digest = self.unfinished / (name + ".part"), xxhash.xxh3_128()

        def put(data) -> None:
            digest.update(data)
            write_all(file, data)
            progress(len(data))

        with open(part, "wb", buffering=0) as file:
            for tensor in tensors:
                before, after = around(tensor.dtype, tensor.shape)
                put(before)
                for block in tensor.blocks():
                    put(block)
                put(after)
            os.fsync(file.fileno())
        if part.stat().st_size != offset:
            raise ValueError(f"{part} has {part.stat().st_size} bytes, and {offset} were to be written")
        part.rename(self.unfinished / name)
        self.journal.note(name, bytes=offset, xxh3_128=digest.hexdigest())

    def finish(self, arguments: Mapping, **facts) -> Path:
        """Write the index, what Megatron stores beside tensors, and the manifest; give the folder its name."""
        common = {
            "args": argparse.Namespace(**arguments),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "num_floating_point_operations_so_far": 0.0,
            "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", on_disk.WRITTEN_HERE: True},
        }
        name, data = f"__{len(self.journal.files)}_0.distcp", saved([common])
        self.entries[COMMON] = BytesStorageMetadata()
        self.places[MetadataIndex(COMMON)] = _StorageInfo(name, 0, len(data))
        files = dict(self.journal.files)
        content = {
            name: data,
            ".metadata": pickle.dumps(Metadata(self.entries, storage_data=self.places)),
            "metadata.json": json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}),
        }
        for file, written in content.items():
            write_whole(self.unfinished / file, written)
            files[file] = manifest.describe(self.unfinished / file)
        self.journal.end()
        manifest.write(self.unfinished, 0, files, **facts)
        manifest.sync(self.unfinished)
        self.unfinished.rename(self.final)
        manifest.sync(self.final.parent)
        on_disk.name_as_latest(self.final.parent, 0)
        return self.final
