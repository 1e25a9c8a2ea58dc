# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint (torch_dist), read and written without ranks and without Megatron's save and load."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from zaya_plugin.checkpoint import manifest, on_disk, reading
from zaya_plugin.checkpoint.convert.values import Boxes, Region, TensorContent
from zaya_plugin.checkpoint.finished_files import FinishedFiles, write_large
from zaya_plugin.checkpoint.places import at
from zaya_plugin.checkpoint.rank_file import COMMON, FORMAT, Entry, index, saved
from zaya_plugin.checkpoint.stored_boxes import Archive, values_of
from zaya_plugin.checkpoint.stored_tensor import archive, archive_bytes
from zaya_plugin.ground.errors import mistake


class CheckpointTensors:
    """The tensors of one iteration's folder. Keys may share storage:
    a model's weight that is the optimizer's fp32 copy.

    checkpoint: its folder, or as `reading.begin` returns it.

    Raises:
        ValueError: files are missing or damaged, or the folder is not a checkpoint.
    """

    def __init__(self, checkpoint: Path | reading.Reading):
        self.reading = checkpoint if isinstance(checkpoint, reading.Reading) else reading.begin(checkpoint)
        self.folder = self.reading.folder
        try:
            self.index = FileSystemReader(self.folder).read_metadata()
        except Exception as broken:  # unpickling damaged bytes can raise many types
            raise on_disk.unreadable(self.folder, broken) from broken

    def arguments(self) -> argparse.Namespace:
        """Return Megatron's arguments of the save."""
        return on_disk.saved_arguments(self.folder.parent, on_disk.iteration_of(self.folder))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        described = self.index.state_dict_metadata.items()
        return {key: tuple(entry.size) for key, entry in described if isinstance(entry, TensorStorageMetadata)}

    def values(self, key: str) -> Boxes:
        """Return a tensor's values. All parts have the dtype in which they are stored, whatever the index says."""
        entry, stored = self.index.state_dict_metadata[key], self.index.storage_data
        boxes = []
        for chunk in entry.chunks:
            place, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            info = stored.get(MetadataIndex(key, place)) or stored[MetadataIndex(key)]
            path = self.folder / info.relative_path
            dtype, start = values_of(Archive(path, info.offset, info.length), shape)
            boxes.append((place, Region(path, start, dtype, shape)))
        count = sum(prod(region.shape) for _, region in boxes)
        dtypes = {region.dtype for _, region in boxes}
        if count != prod(entry.size) or len(dtypes) != 1:
            raise mistake(
                key, problem=f"its parts have {count} elements of {prod(entry.size)}, in {len(dtypes)} dtypes"
            )
        return Boxes(dtypes.pop(), tuple(entry.size), tuple(boxes))


class CheckpointWriter:
    """Writes a checkpoint of iteration 0, file by file. Files that a killed import has finished are kept.

    Args:
        directory: of the iterations, as a run's `checkpoints` is.
        origin: identifies what is imported; the files of another origin are removed.
    """

    def __init__(self, directory: Path, origin: str):
        self.final = on_disk.folder(directory, 0)
        self.unfinished = self.final.with_name(self.final.name + manifest.UNFINISHED)
        self.finished = FinishedFiles(self.unfinished, origin)
        self.entries: list[Entry] = []

    def write(self, tensors: list[TensorContent], progress: Callable[[int], None]) -> None:
        """Write the next file, unless an earlier import has."""
        name, length = f"__{len({entry.file for entry in self.entries})}_0.distcp", 0
        for tensor in tensors:
            size, offset = archive_bytes(tensor.dtype, tensor.shape), (0,) * len(tensor.shape)
            entry = Entry(tensor.name, name, length, size, tensor.dtype, offset, tensor.shape, tensor.shape)
            self.entries.append(entry)
            length += size
        if name in self.finished.files:
            progress(length)
            return
        content = (data for tensor in tensors for data in archive(tensor.dtype, tensor.shape, tensor.blocks()))
        self.finished.note(name, **write_large(self.unfinished / name, content, length, progress))

    def finish(self, arguments: Mapping, **facts) -> Path:
        """Write the index, Megatron's arguments and progress, and the manifest; give the folder its name."""
        common = {
            "args": argparse.Namespace(**arguments),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "num_floating_point_operations_so_far": 0.0,
            "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", on_disk.MANIFEST_MARK: True},
        }
        name, data = f"__{len(self.finished.files)}_0.distcp", saved([common])
        self.entries.append(Entry(COMMON, name, 0, len(data)))
        files = dict(self.finished.files)
        content = {name: data, on_disk.INDEX: index(self.entries, ()), on_disk.FORMAT: FORMAT.encode()}
        for file, written in content.items():
            files[file] = at(self.unfinished / file).write([written])
        self.finished.end()
        manifest.commit(self.unfinished, self.final, files, **facts)
        on_disk.name_as_latest(self.final.parent, 0)
        return self.final
