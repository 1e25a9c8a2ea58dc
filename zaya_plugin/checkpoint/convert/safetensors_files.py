# SPDX-License-Identifier: Apache-2.0
"""A model's folder of safetensors files: its tensors, with every check that needs no values, and its files written.

The library reads the headers. The values are read and written by this module, which takes a block at a time:

- Of a file that `safe_open` has mapped, all pages that were read count as memory of the process. Slices of a file of
  512 MiB raised the peak by 532 MiB, blocks of 16 MiB by 18 (safetensors 0.8.0).
- `serialize_file` requires all tensors of a file (5 GB) in memory at once.

A file is eight bytes with the header's length, the header (JSON: name, dtype, shape, place), and the values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import torch
import xxhash

from zaya_plugin.checkpoint.convert.model_folder import json_object, without_weights
from zaya_plugin.checkpoint.convert.tables import check_once
from zaya_plugin.checkpoint.convert.values import Region, TensorContent
from zaya_plugin.checkpoint.finished_files import write_large
from zaya_plugin.checkpoint.places import ignore
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.whole_file import write_whole

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def tensors_of(folder: Path) -> dict[str, Region]:
    """Return the tensors of a folder's safetensors files.

    Raises:
        ValueError: a file is missing, cut off or malformed, its index names other tensors, or a tensor comes twice.
    """
    index = folder / INDEX
    if index.is_file():
        content = json_object(index.read_bytes(), str(index))
        try:
            named = content["weight_map"]
            files = sorted(set(named.values()))
            bad = [name for name in files if name != Path(name).name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(index, f"is not an index of safetensors files ({error!r})") from error
        if bad:
            raise _damaged(index, f"names a file outside its folder: {bad[0]}")
        if left := sorted({path.name for path in folder.glob("*.safetensors")} - set(files)):
            raise _damaged(folder / left[0], f"is not one of the files that {index.name} names")
    else:
        named, files = None, sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise without_weights(folder, "SOURCE")
    if missing := [name for name in files if not (folder / name).is_file()]:
        problem = "must be a file" if named is None else f"is missing, and {index.name} names it"
        raise _damaged(folder / missing[0], problem)
    regions = [(name, region) for file in files for name, region in header(folder / file).items()]
    check_once(name for name, _ in regions)
    if named is not None:
        file_names = {name: region.path.name for name, region in regions}
        if wrong := sorted(
            name for name in named.keys() | file_names.keys() if named.get(name) != file_names.get(name)
        ):
            raise _damaged(
                wrong[0],
                f"{index.name} places it in {named.get(wrong[0])}, and it lies in {file_names.get(wrong[0])} "
                f"({len(wrong)} such tensors)",
            )
    return dict(regions)


def _damaged(key: object, problem: str) -> ValueError:
    return mistake(str(key), problem=problem, allowed="the whole files of one model", fix="copy or download them again")


def header(path: Path) -> dict[str, Region]:
    """Return the tensors of one safetensors file, whose header the library checks.

    Raises:
        ValueError: the file is malformed or shorter than its header states, or a tensor has an unsupported dtype.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        fix = "pip install safetensors"
        raise mistake(str(path), problem="reading it requires the package safetensors", fix=fix) from None
    size, described = path.stat().st_size, []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                tensor = file.get_slice(name)
                described.append((name, tensor.get_dtype(), tuple(tensor.get_shape())))
    except SafetensorError as error:
        raise _damaged(path, f"is not a valid safetensors file of {size} bytes ({error})") from error
    if unknown := [(name, dtype) for name, dtype, _ in described if dtype not in DTYPES]:
        name, dtype = unknown[0]
        raise _damaged(path, f"{name} has the dtype {dtype}; allowed are {', '.join(DTYPES)}")
    regions, end = {}, size
    for name, dtype, shape in reversed(described):  # without gaps, up to the end of the file
        end -= prod(shape) * DTYPES[dtype].itemsize
        regions[name] = Region(path, end, DTYPES[dtype], shape)
    return dict(reversed(regions.items()))


def shards(tensors: list[TensorContent], limit: int) -> list[list[TensorContent]]:
    """Return the tensors in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    groups: list[list[TensorContent]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.bytes
    return groups


def file_names(count: int) -> list[str]:
    """Return the names of a model's files, as transformers has them."""
    return [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]


def write_file(path: Path, tensors: list[TensorContent], progress: Callable[[int], None] = ignore) -> dict[str, str]:
    """Write one file, durable before it has its name, and return the checksum of every tensor's values."""
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offset = 0
    for tensor in tensors:
        place = [offset, offset + tensor.bytes]
        entries[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        offset = place[1]
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the values are aligned
    checksums = {}

    def content() -> Iterator[bytes | memoryview]:
        yield len(head).to_bytes(8, "little") + head
        for tensor in tensors:
            digest = xxhash.xxh3_128()
            for block in tensor.blocks():
                digest.update(block)
                yield block
                progress(len(block))
            checksums[tensor.name] = digest.hexdigest()

    write_large(path, content(), 8 + len(head) + offset)
    return checksums


def write_index(folder: Path, groups: list[list[TensorContent]], names: list[str]) -> None:
    """Write the index of a model in several files; total_size counts all tensors."""
    if len(names) == 1:
        return
    placed = {tensor.name: name for group, name in zip(groups, names, strict=True) for tensor in group}
    total = sum(tensor.bytes for group in groups for tensor in group)
    content = {"metadata": {"total_size": total}, "weight_map": placed}
    write_whole(folder / INDEX, json.dumps(content, indent=2) + "\n")
