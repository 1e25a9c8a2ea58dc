# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint again with another number of files, in one process without ranks, piece by piece.

Every tensor is cut into pieces of at most PIECE bytes, and each piece is put together from the boxes of the source that
it intersects. At any time one piece and the part of one source box that goes into it are in memory. Names, shapes and
values stay as they are, so the new checkpoint loads wherever the old one does, to the same bits.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.finished_files import FinishedFiles
from zaya_plugin.checkpoint.places import at
from zaya_plugin.checkpoint.stored_boxes import Archive, Box, Indices, common_box, elements, pieces
from zaya_plugin.checkpoint.stored_tensor import archive, archive_bytes
from zaya_plugin.ground.errors import check_space, mistake
from zaya_plugin.ground.lock import locked

PIECE = 32 * 2**20  # bytes: one of ZAYA1-base's gate+up matrices in fp32, so that Muon's matrices stay whole
NOT_COPIED = {
    manifest.NAME,
    on_disk.INDEX,
    "integrity.json",
}  # written by reshape; Megatron's checksums of the old files
STATE = re.compile(r"^.*optimizer\.state\.\w+?\.")  # before a parameter's name, in the names of its optimizer state


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source. keys: its names; several where they share their bytes."""

    keys: tuple[str, ...]
    shape: Indices
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    def piece(self, offset: Indices, sizes: Indices) -> np.ndarray:
        """Return the values of a box of the whole tensor."""
        whole, filled = np.empty(sizes, elements(self.dtype)), 0
        for box in self.boxes:
            if (common := common_box((box.offset, box.sizes), (offset, sizes))) is None:
                continue
            if (dtype := box.place[0]) != self.dtype:
                raise mistake(str(box.archive.path), problem=f"has {self.keys[0]} as {dtype}, elsewhere {self.dtype}")
            place = tuple(slice(a - b, a - b + n) for a, b, n in zip(common[0], offset, common[1], strict=True))
            whole[place] = box.values(*common)
            filled += math.prod(common[1])
        if filled != whole.size:
            raise mistake(
                self.keys[0],
                problem=f"{filled} of the {whole.size} elements from {offset} on are in the checkpoint's files",
            )
        return whole


@dataclass(frozen=True)
class Entry:
    """One range of the target's bytes: a piece of `tensor`, or an object's bytes as the source has them."""

    length: int
    index: MetadataIndex | None = None
    object: Archive | None = None
    tensor: Tensor | None = None
    offset: Indices = ()
    sizes: Indices = ()

    def content(self) -> Iterator[bytes | memoryview]:
        """Return its bytes in parts."""
        if self.object is not None:
            yield self.object.content()
            return
        values = self.tensor.piece(self.offset, self.sizes).reshape(-1).view(np.uint8)
        yield from archive(self.tensor.dtype, self.sizes, [memoryview(values)])


def reshape(
    source: Path, final: Path, files: int, progress: Callable[[int], None] = lambda count: None
) -> tuple[int, int]:
    """Write the checkpoint in the folder `source` to the folder `final`, in at most `files` files of about equal size.

    Files that an earlier, interrupted call with the same arguments has finished are kept. progress: called with bytes.

    Returns:
        the files that were kept, and all files.

    Raises:
        ValueError: the source is damaged, the target cannot be written or exists.
    """
    if final.exists():
        raise mistake("--output", final, problem="exists", fix="--output <another folder>")
    index = read_index(source)
    contents = layout(entries(source, index), files)
    unfinished = final.with_name(final.name + manifest.UNFINISHED)
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with locked(final, "writing"):
            return _write(source, index, contents, unfinished, final, progress)
    except OSError as error:
        parent = next(folder for folder in final.parents if folder.is_dir())
        named = f" ({error.filename})" if error.filename else ""
        raise mistake(
            "--output",
            final.parent,
            problem=f"cannot be written: {error.strerror}{named}; {shutil.disk_usage(parent).free / 1e9:.2f} GB are "
            "free",
            fix="the same command again continues with the files that are not finished",
        ) from error


def read_index(source: Path) -> Metadata:
    """Return the index of a checkpoint that can be reshaped."""
    index = FileSystemReader(source).read_metadata()
    if any(".bucket_idx_" in key for key in index.state_dict_metadata):
        raise mistake(
            str(source),
            problem="its optimizer state is stored by its place in buffers (dp_reshardable), and loads only at the "
            "number of data-parallel ranks that wrote it, however many files it has",
            fix="load it at that number and save it with --dist-ckpt-optim-fully-reshardable",
        )
    return index


def entries(source: Path, index: Metadata) -> list[Entry]:
    """Return what the target stores, in its order: first the objects, then all state of a parameter together."""

    def place_of(of: MetadataIndex) -> Archive:
        stored = index.storage_data[of]
        if getattr(stored, "transform_descriptors", None):
            raise mistake(
                str(source / stored.relative_path), problem="is compressed", fix="save it without compression"
            )
        return Archive(source / stored.relative_path, stored.offset, stored.length)

    results, shared = [], {}
    for key, described in index.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            boxes = tuple(
                Box(tuple(box.offsets), tuple(box.sizes), place_of(MetadataIndex(key, box.offsets)))
                for box in sorted(described.chunks, key=lambda box: tuple(box.offsets))
            )
            if boxes:
                shared.setdefault((tuple(described.size), boxes), []).append(key)
    for of in sorted(index.storage_data, key=lambda of: of.fqn):
        if not isinstance(index.state_dict_metadata[of.fqn], TensorStorageMetadata):
            place = place_of(of)
            results.append(Entry(place.length, of, place))
    for (shape, boxes), keys in sorted(shared.items(), key=lambda item: _order(item[1][0])):
        tensor = Tensor(tuple(keys), shape, boxes[0].place[0], boxes)
        for offset, sizes in pieces(shape, tensor.dtype.itemsize, PIECE):
            length = archive_bytes(tensor.dtype, sizes)
            results.append(Entry(length, tensor=tensor, offset=offset, sizes=sizes))
    return results


def _order(key: str) -> tuple:
    """Sort by the parameter's name, with its numbers as numbers."""
    name = STATE.sub("", key)
    return [(not part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)], key


def layout(stored: list[Entry], files: int) -> list[list[Entry]]:
    """Return the entries of each file: neighbours stay neighbours, and files have about equal sizes."""
    total, before = sum(entry.length for entry in stored), 0
    by_file: dict[int, list[Entry]] = {}
    for entry in stored:
        by_file.setdefault((2 * before + entry.length) * files // (2 * total), []).append(entry)
        before += entry.length
    return list(by_file.values())


def _write(
    source: Path, index: Metadata, contents: list[list[Entry]], unfinished: Path, final: Path, progress
) -> tuple[int, int]:
    stated = [manifest.describe(source / name) for name in (on_disk.INDEX, manifest.NAME) if (source / name).exists()]
    lengths, kept = [sum(entry.length for entry in content) for content in contents], 0
    finished = FinishedFiles(unfinished, json.dumps([stated, lengths]))  # of this source and this number of files
    for number, content in enumerate(contents):
        path = unfinished / f"__{number}_0.distcp"
        if path.exists() and finished.files[path.name] == manifest.describe(path):
            kept += 1
            progress(path.stat().st_size)
            continue
        path.unlink(missing_ok=True)
        check_space(unfinished, sum(lengths[number:]))
        parts = (part for entry in content for part in entry.content())
        finished.note(path.name, **at(path).write(parts, progress))
    done = dict(finished.files)
    done[on_disk.INDEX] = at(unfinished / on_disk.INDEX).write([pickle.dumps(_index_of(index, contents))])
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".distcp" and path.name not in NOT_COPIED:
            done[path.name] = at(unfinished / path.name).write([path.read_bytes()])
    own = manifest.read(source) if (source / manifest.NAME).exists() else {}
    facts = {key: own[key] for key in own if key not in ("format", "iteration", "files", "xxh3_128")}
    manifest.commit(unfinished, final, done, **{**facts, "reshaped_from": str(source)})
    finished.end(final)
    return kept, len(contents)


def _index_of(source: Metadata, contents: list[list[Entry]]) -> Metadata:
    """Return the index of the target: that of the source with other boxes in other files."""
    target = copy.copy(source)
    target.__dict__.pop("all_local_plans", None)  # of the ranks that wrote the source
    stored = next(iter(source.storage_data.values()))
    boxes: dict[str, list[ChunkStorageMetadata]] = {}
    target.storage_data = {}
    for number, content in enumerate(contents):
        at = 0
        for entry in content:
            place = replace(stored, relative_path=f"__{number}_0.distcp", offset=at, length=entry.length)
            at += entry.length
            if entry.tensor is None:
                target.storage_data[entry.index] = place
                continue
            offset, sizes = torch.Size(entry.offset), torch.Size(entry.sizes)
            for key in entry.tensor.keys:
                target.storage_data[MetadataIndex(key, offset)] = place
                boxes.setdefault(key, []).append(ChunkStorageMetadata(offset, sizes))
    target.state_dict_metadata = {
        key: replace(described, chunks=boxes[key]) if key in boxes else described
        for key, described in source.state_dict_metadata.items()
    }
    return target
