# SPDX-License-Identifier: Apache-2.0
"""From a published model to a checkpoint: its description and tensors, then a stream of bytes from file to file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import xxhash

from zaya_plugin import __version__
from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.convert import hf_config, safetensors_files
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.model_folder import (
    CONFIG,
    copy_companions,
    json_object,
    resolve,
    token_ids,
    tokenizer_entries,
)
from zaya_plugin.checkpoint.convert.tables import (
    BIASES,
    EMBEDDING,
    SKIP_OUTPUT,
    TIED_HEAD,
    balancing_state,
    check_cover,
    layer_of,
    layers_of,
    recognise,
    sizes_of,
    skip_is_reachable,
)
from zaya_plugin.checkpoint.convert.torch_dist import CheckpointWriter
from zaya_plugin.checkpoint.convert.values import OfLength, Region, TensorContent, Values, Zeros, byte_blocks, whole
from zaya_plugin.checkpoint.finished_files import bytes_in
from zaya_plugin.checkpoint.stored_tensor import archive_bytes
from zaya_plugin.config.run_directory import iterations
from zaya_plugin.ground.errors import check_space, mistake
from zaya_plugin.ground.lock import locked

TOKENIZER = "tokenizer"  # folder next to the iterations with the tokenizer and the settings of generation


@dataclass(frozen=True)
class Source:
    """A published model, checked: every tensor is there once with its shape, and config.json fits.

    name: the folder's, or that on the Hub; tensors: by this package's names; notes: for the user.
    """

    name: str
    folder: Path
    layout: str
    model: Description
    tensors: dict[str, Values]
    notes: tuple[str, ...]

    def with_rows(self, rows: int) -> Source:
        """Return the source with `rows` rows of the embedding: rows of padding are added as zeros, or left out.

        Raises:
            ValueError: rows of the tokenizer's entries would be left out.
        """
        if rows == self.model.vocab_size:
            return self
        used = tokenizer_entries(self.folder)
        check_rows(rows, self.model.vocab_size, used)
        embedding = OfLength(self.tensors[EMBEDDING], rows)
        return replace(self, model=replace(self.model, vocab_size=rows), tensors=self.tensors | {EMBEDDING: embedding})


def check_rows(rows: int, of: int, used: int | None) -> None:
    """Raise ValueError if a table of `of` rows cannot have `rows`, because entries of the tokenizer would be left out.

    used: entries of the tokenizer, None if it is not known.
    """
    if rows < of and (used is None or rows < used):
        has = "no tokenizer shows which rows are padding" if used is None else f"the tokenizer has {used} entries"
        raise mistake("--vocab-size", rows, problem=has, allowed=f"{used or of} or more")


def open_source(
    source: str | Path, fallback: Description | None = None, name: str | Path | None = None, *, download: bool = True
) -> Source:
    """Return a published model.

    Args:
        source, download: see model_folder.resolve.
        fallback: the description of the recipe's model, for a folder without config.json (Primus writes none).
        name: what the user has given, where `source` is the folder that it was resolved to.

    Raises:
        ValueError: a file, a tensor or a field of config.json is not one of a model that can be imported.
    """
    folder = resolve(str(source), download=download)
    name = str(name or source)
    name = Path(name).resolve().name if Path(name).is_dir() else name
    regions = safetensors_files.tensors_of(folder)
    layout = recognise(regions)
    shapes = {name: region.shape for name, region in regions.items()}
    sizes = sizes_of(layout, shapes)
    path, notes = folder / CONFIG, []
    if path.is_file():
        values = json_object(path.read_bytes(), str(path))
        model, notes = hf_config.read(layout, values, sizes, str(path))
    elif fallback is None:
        raise mistake(
            str(path),
            problem="is missing; RoPE's base and the norms' epsilon are stated nowhere else",
            fix="`zaya checkpoint import --recipe FILE`, with a recipe of this model",
        )
    else:
        model, notes = replace(fallback, **sizes), [f"{path} is missing; the recipe says what the tensors do not show"]
    rows = check_cover(layout, model, shapes)
    if TIED_HEAD in regions:
        notes.append(_check_tied(regions, rows[0].name))
    tensors: dict[str, Values] = {}
    for row in rows:
        region = regions[row.name]
        tensors |= {ours: region.part(i) if row.stacked else region for i, ours in enumerate(row.ours)}
    model = _with_skip_output(layout, model, tensors, notes)
    return Source(name, folder, layout, model, tensors, tuple(notes))


def _check_tied(regions: dict[str, Region], embedding: str) -> str:
    """Return a note that the file's head is the embedding.

    Raises:
        ValueError: it is another tensor.
    """
    head, table = regions[TIED_HEAD], regions[embedding]
    same = head.shape == table.shape and all(
        one == other
        for one, other in zip(byte_blocks([head], torch.float32), byte_blocks([table], torch.float32), strict=True)
    )
    if not same:
        raise mistake(TIED_HEAD, problem=f"differs from {embedding}", allowed="models with a tied head")
    return f"{TIED_HEAD} equals {embedding} and is left out"


def _with_skip_output(layout: str, model: Description, tensors: dict[str, Values], notes: list[str]) -> Description:
    """Return `model` with the output of the skip class that loaders of the layout compute, None if no token can choose
    the class.
    """
    if not model.moe_skip_expert:
        return replace(model, skip_output=None)
    computed = SKIP_OUTPUT[layout]
    names = [BIASES.format(l=layer) for layer in layers_of(BIASES, model)]
    biases = [whole(tensors[name]) for name in names]
    if damaged := next((name for name, b in zip(names, biases, strict=True) if not b.isfinite().all()), None):
        raise mistake(damaged, problem="holds NaN or infinite values, with which no router can choose an expert")
    reachable = [layer for layer, b in enumerate(biases) if skip_is_reachable(b)]
    if reachable:
        notes.append(f"tokens may choose the skip class in layers {reachable}; in {layout} its output is {computed}")
    return replace(model, skip_output=computed if reachable else None)


def import_model(
    source: Source,
    directory: Path,
    progress: Callable[[int], None] = lambda count: None,
    begins: Callable[[int], None] = lambda size: None,
) -> Path:
    """Write the checkpoint of iteration 0 in `directory` and return its folder.

    An import that was killed continues behind the last whole file. progress: called with bytes as they are done;
    begins: with their sum.

    Raises:
        ValueError: there is a checkpoint, or another process is writing one.
    """
    with locked(directory, "writing"):
        if on_disk.folder(directory, 0).exists() or directory.is_dir() and iterations(directory):
            raise mistake("--output", directory, problem="contains a checkpoint", allowed="a directory without one")
        files = _files(source)
        _check_companions(source)
        size = sum(archive_bytes(tensor.dtype, tensor.shape) for tensors in files for tensor in tensors)
        final = on_disk.folder(directory, 0)
        check_space(directory, size - bytes_in(final.with_name(final.name + manifest.UNFINISHED)))
        begins(size)
        directory.mkdir(parents=True, exist_ok=True)
        copy_companions(source.folder, directory / TOKENIZER)
        writer = CheckpointWriter(directory, _identity(source))
        for tensors in files:
            writer.write(tensors, progress)
        of_layers = (source.tensors[BIASES.format(l=layer)].dtype for layer in layers_of(BIASES, source.model))
        biases = functools.reduce(torch.promote_types, of_layers)
        record = {
            "source": source.name,
            "layout": source.layout,
            "biases": str(biases).removeprefix("torch."),
            **{name: getattr(source.model, name) for name in ("bos", "eos", "pad")},
        }
        arguments = source.model.arguments() | {
            "bf16": source.tensors[EMBEDDING].dtype == torch.bfloat16,
            "zaya": {"version": __version__, "recipe": None, "run_id": None, "lineage": None, "imported": record},
        }
        if (directory / TOKENIZER / "tokenizer.json").is_file():
            arguments |= {
                "tokenizer_type": "HuggingFaceTokenizer",
                "tokenizer_model": str((directory / TOKENIZER).absolute()),
            }
        return writer.finish(arguments, version=__version__, imported=record)


def _files(source: Source) -> list[list[TensorContent]]:
    """Return the tensors file by file: those outside the layers, then one file a layer."""
    files: list[list[TensorContent]] = [[] for _ in range(source.model.num_layers + 1)]

    def add(name: str, dtype: torch.dtype, values: Values) -> None:
        blocks = functools.partial(byte_blocks, [values], dtype)
        files[layer_of(name) + 1].append(TensorContent(name, dtype, values.shape, blocks))

    for name, values in source.tensors.items():
        add(name, torch.float32 if name.endswith("balancing_biases") else values.dtype, values)
    for name, dtype, shape in balancing_state(source.model):
        add(name, getattr(torch, dtype), Zeros(getattr(torch, dtype), shape))
    return files


def _identity(source: Source) -> str:
    """Return a checksum of what decides the bytes of a checkpoint, without reading all values."""
    parts = [source.layout, repr(source.model), __version__, torch.__version__]
    for path in sorted({region.path for region in safetensors_files.tensors_of(source.folder).values()}):
        status = path.stat()
        parts.append(f"{path.absolute()} {status.st_size} {status.st_mtime_ns}")
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _check_companions(source: Source) -> None:
    """Raise ValueError if the files other than the weights are damaged, or the tokenizer is one of another model."""
    token_ids(source.folder)
    used = tokenizer_entries(source.folder)
    if used is not None and used > source.model.vocab_size:
        raise mistake(
            str(source.folder / "tokenizer.json"),
            problem=f"has {used} entries, and the embedding {source.model.vocab_size} rows",
            allowed="the tokenizer that the model was trained with",
        )


def size_of(source: Source) -> int:
    """Return the parameters of a model; the balancing biases are buffers."""
    return sum(prod(values.shape) for name, values in source.tensors.items() if not name.endswith("balancing_biases"))
