# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint of any layout of ranks to a folder that transformers, vLLM (native) or SGLang (legacy) reads."""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import xxhash

from zaya_plugin import __version__
from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.convert import hf_config, model_card, safetensors_files
from zaya_plugin.checkpoint.convert.adapters import Lora, open_base
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import TOKENIZER, check_rows
from zaya_plugin.checkpoint.convert.model_folder import (
    CONFIG,
    adds_tokens,
    check_new,
    copy_companions,
    token_ids,
    tokenizer_entries,
)
from zaya_plugin.checkpoint.convert.tables import (
    BIASES,
    DOWN_PROJECTION,
    EDA_SCALE,
    EMBEDDING,
    ROUTER_EPSILON,
    SKIP_OUTPUT,
    TEMPERATURE,
    WRITTEN,
    Row,
    balancing_state,
    layer_of,
    layers_of,
    rows,
    shape_problems,
    skip_is_reachable,
)
from zaya_plugin.checkpoint.convert.torch_dist import CheckpointTensors
from zaya_plugin.checkpoint.convert.values import Changed, OfLength, TensorContent, Values, Zeros, byte_blocks, whole
from zaya_plugin.checkpoint.finished_files import FinishedFiles, bytes_in
from zaya_plugin.checkpoint.reading import Reading
from zaya_plugin.config.messages import check_transformers_has
from zaya_plugin.ground.errors import check_space, mistake
from zaya_plugin.ground.lock import locked
from zaya_plugin.ground.whole_file import sync, write_whole

RECORD = "zaya_export.json"  # the checksum of every tensor, and the checkpoint
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")  # its tensors in a checkpoint, by Megatron's names
SHARD = 5 * 10**9  # bytes of a file
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model. tensors: by this package's names; arguments: Megatron's, of the save;
    reading: holds its files.

    adapter: the tensors that the checkpoint of a model with adapters holds, by the same names; those that they change
    are merged in `tensors`. base_layout: of the published weights that the adapter was trained on.
    """

    folder: Path
    model: Description
    tensors: Mapping[str, Values]
    arguments: object
    reading: Reading | None = None
    adapter: Mapping[str, Values] = field(default_factory=dict)
    base_layout: str | None = None

    @property
    def imported(self) -> dict:
        """The notes of the import of this checkpoint; empty for a checkpoint of a run."""
        return getattr(self.arguments, "zaya", {}).get("imported") or {}

    @property
    def special_tokens(self) -> bool:
        """Return whether texts get the tokens that the tokenizer adds (bos): as in the data of the run. A published
        model and a checkpoint of another program state no rule, and follow the tokenizer.
        """
        run = getattr(self.arguments, "zaya", None)
        return run is None or bool(self.imported) or bool((run.get("data") or {}).get("special_tokens"))

    @property
    def tokenizer(self) -> str | None:
        """Return the folder of the tokenizer: that of an import, which may have been moved, else the run's."""
        imported = self.folder.absolute().parent / TOKENIZER
        if self.imported and (imported / "tokenizer.json").is_file():
            return str(imported)
        return getattr(self.arguments, "tokenizer_model", None)

    def check_tokenizer(self, folder: Path, digest: str) -> None:
        """Raise ValueError if the run was trained with another tokenizer than that in `folder`. Checkpoints of earlier
        versions, imported ones and those of a tokenizer by its name on the Hub keep no digest of it.
        """
        if not on_disk.has_manifest(self.folder):
            return
        trained = (manifest.read(self.folder).get("data") or {}).get("tokenizer")
        if trained != digest and trained is not None and re.fullmatch("[0-9a-f]{16}", trained):
            raise mistake(
                "--tokenizer",
                folder,
                problem=f"is another tokenizer ({digest}) than that of the checkpoint {self.folder} ({trained}): the "
                "same token ids are other text",
                allowed="the tokenizer that the run was trained with",
                fix="--tokenizer <dataset of the run>/tokenizer",
            )


def open_checkpoint(checkpoint: Path | Reading, base: str | None = None) -> Trained:
    """Return the model of a checkpoint, with every tensor that its description requires.

    checkpoint: its folder, or as `reading.begin` returns it. base: where the published weights are that an adapter was
    trained on; None: where the run has read them.

    Raises:
        ValueError: the checkpoint is damaged, or its tensors are not those of its description; or there is no base, or
            another one.
    """
    stored = CheckpointTensors(checkpoint)
    arguments, shapes, values, layout = stored.arguments(), stored.shapes(), stored.values, None
    if Lora.of(arguments) is not None:
        published, own = open_base(arguments, base), shapes
        layout, frozen = published.layout, published.tensors
        shapes = {name: tensor.shape for name, tensor in frozen.items()} | own
        values = lambda name: stored.values(name) if name in own else frozen[name]  # noqa: E731
    elif base is not None:
        raise mistake("--base", base, problem=f"{stored.folder} holds no adapter", fix="leave it out")
    trained = checked(stored.folder, arguments, shapes, values)
    return replace(trained, reading=stored.reading, base_layout=layout)


def checked(
    folder: Path, arguments: object, shapes: Mapping[str, tuple[int, ...]], values: Callable[[str], Values]
) -> Trained:
    """Return the model that Megatron's arguments describe, whose tensors have `shapes` by this package's names.

    values: returns a tensor.

    Raises:
        ValueError: no layout has the model, or its tensors are other ones.
    """
    model = Description.of_arguments(arguments)
    check_expressible(model)
    parts = {name: row.part for row in rows("native", model) for name in row.ours}
    states, lora = {name: shape for name, _, shape in balancing_state(model)}, Lora.of(arguments)
    adapters, optional = ({}, {}) if lora is None else (lora.shapes(model), {} if lora.lora_balancing else states)
    required = {
        name: shape for name, shape in (parts | states | adapters).items() if name in shapes or name not in optional
    }
    of_model = {name: shape for name, shape in shapes.items() if not OPTIMIZER.match(name)}
    if problems := shape_problems(required, of_model):
        raise mistake(str(folder), problem=f"holds other tensors than those of its model: {problems}")
    tensors, own = {name: values(name) for name in parts}, {}
    if lora is not None:
        own = {name: values(name) for name in (*adapters, *(row.ours[0] for row in lora.retrained(model)))}
        tensors = lora.merged(model, tensors, own)
    return Trained(folder, model, tensors, arguments, adapter=own)


def check_expressible(model: Description) -> None:
    """Raise ValueError for a model that no layout has."""
    check_transformers_has(model.normalization)
    if not model.moe_skip_expert:
        raise mistake(
            "model.moe_skip_expert",
            False,
            problem="the layouts' routers always score the skip class, which changes every probability",
            allowed="true",
        )


def folded(trained: Trained, layout: str) -> tuple[Trained, list[str]]:
    """Return the same function in the form that a layout has, and what was changed.

    The key temperature becomes linear. A router without depth averaging gets a gamma of zeros. An epsilon e_r of the
    router's norm that differs from e of the layout's loaders becomes a scale of the state: norm(x, e_r) = norm(c x, e)
    with c^2 = e / e_r, and c goes into the down projection.
    """
    model, tensors, changes = trained.model, dict(trained.tensors), []
    forms = {"exp": torch.exp, "clamped_exp": lambda t: t.clamp(1e-7, 2).exp()}
    if model.temperature_form in forms:
        for layer in layers_of(TEMPERATURE, model):
            name = TEMPERATURE.format(l=layer)
            tensors[name] = Changed(tensors[name], forms[model.temperature_form])
        changes.append(f"temperature_form={model.temperature_form} is folded into the linear temperature")
    if not model.router_eda:
        for layer in range(1, model.num_layers):
            tensors[EDA_SCALE.format(l=layer)] = Zeros(torch.float32, (model.router_hidden_size,))
        changes.append("router_eda=false is expressed by router_states_scale=0")
    own, theirs = model.router_norm_epsilon or model.norm_epsilon, ROUTER_EPSILON.get(layout, model.norm_epsilon)
    if own != theirs:
        scale = math.sqrt(theirs / own)
        for layer in range(model.num_layers):
            for name in (part.format(l=layer) for part in DOWN_PROJECTION):
                tensors[name] = Changed(tensors[name], functools.partial(operator.mul, scale))
        changes.append(
            f"router_norm_epsilon={own:g} is folded into {theirs:g}, which loaders of {layout} take: the routers' down "
            f"projections are scaled by {scale:.6g}"
        )
    plain = replace(model, temperature_form="linear", router_eda=True, router_norm_epsilon=theirs)
    return replace(trained, model=plain.simplified(), tensors=tensors), changes


def check_skip(layout: str, trained: Trained, dtype: torch.dtype) -> str:
    """Return why the skip class computes the same in the layout's loaders; dtype: of the biases in the file.

    Raises:
        ValueError: it does not.
    """
    model, express = trained.model, SKIP_OUTPUT[layout]
    biases = [whole(trained.tensors[BIASES.format(l=layer)]).to(dtype).float() for layer in range(model.num_layers)]
    reachable = [layer for layer, b in enumerate(biases) if skip_is_reachable(b)]
    if reachable and model.skip_output != express:
        raise mistake(
            "model.skip_output",
            model.skip_output,
            problem=f"tokens may choose the skip class in layers {reachable}; loaders of {layout} compute {express}",
            allowed=f"{express}, or balancing biases with which 1 + the skip class's is at most the largest",
            fix=f"--layout {'legacy' if layout == 'native' else 'native'}",
        )
    if layout == "native":  # transformers overwrites the entry
        for layer, b in enumerate(biases):
            as_loaded = b.clone()
            as_loaded[-1] = -1.0
            if b[-1] != -1 and (layer in reachable or skip_is_reachable(as_loaded)):
                raise mistake(
                    BIASES.format(l=layer),
                    problem=f"the skip class's entry is {b[-1]:g}, transformers sets it to -1; tokens may choose it",
                    allowed="-1",
                    fix="--layout legacy",
                )
    if reachable:
        return (
            f"Tokens may choose the skip class in layers {reachable}; its output is {express}, as the model was "
            "trained."
        )
    return "No token can choose the skip class: 1 + its bias is at most the largest bias in every layer."


@dataclass(frozen=True)
class Export:
    """An export to write, checked. config: the content of config.json; changes: what was folded; skip: of the skip
    class; biases: their dtype's reason.
    """

    trained: Trained
    layout: str
    config: dict
    tensors: list[TensorContent]
    tokenizer: Path | None
    changes: list[str]
    skip: str
    biases: str


def plan(
    trained: Trained,
    layout: str = "native",
    dtype: str | None = None,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
) -> Export:
    """Return the export of a checkpoint.

    Args:
        dtype: bf16 or fp32; None: as the run computed, or as the imported files were.
        tokenizer: its folder; None: without one.
        vocab_size: rows of the embedding; None: those of the checkpoint.

    Raises:
        ValueError: the layout cannot express the model.
    """
    for option, value, known in (("--layout", layout, WRITTEN), ("--dtype", dtype, (None, *DTYPES))):
        if value not in known:
            raise mistake(option, value, problem="cannot be written", allowed=", ".join(filter(None, known)))
    imported = trained.imported
    used = tokenizer_entries(tokenizer) if tokenizer is not None else None
    of = trained.model.vocab_size
    check_rows(vocab_size or of, of + (used is not None and used > of), used)
    trained, changes = folded(trained, layout)
    if trained.adapter:
        changes.append("the adapter is merged into the weights in fp32 and rounded with them")
    if vocab_size is not None and vocab_size != of:
        embedding = OfLength(trained.tensors[EMBEDDING], vocab_size)
        trained = replace(trained, tensors={**trained.tensors, EMBEDDING: embedding})
        changes.append(
            f"the embedding has {vocab_size} rows in place of {of}; rows of padding were "
            f"{'added as zeros' if vocab_size > of else 'left out'}"
        )
    ids = {name: imported[name] for name in ("bos", "eos", "pad") if imported.get(name) is not None}
    if tokenizer is not None:
        ids = token_ids(tokenizer) | ids
        if not trained.special_tokens and adds_tokens(tokenizer):
            changes.append("the tokenizer adds no token to a text (bos), because the training data has none")
    model = replace(trained.model, vocab_size=vocab_size or of, **ids)
    trained = replace(trained, model=model)

    computed = torch.bfloat16 if getattr(trained.arguments, "bf16", False) else torch.float32
    if imported and dtype is None:
        of_biases = getattr(torch, imported["biases"])
        reason = f"The balancing biases are {imported['biases']}, as in the imported files."
    else:
        of_biases = torch.float32
        reason = "The balancing biases are fp32: in bf16 their steps are as large as what balancing moves them by."

    def as_written(name: str, parts: list[Values]) -> torch.dtype:
        if name.endswith("balancing_biases"):
            return of_biases
        if dtype is not None:
            return DTYPES[dtype]
        if not imported or isinstance(parts[0], Zeros):
            return computed
        # Experts of different dtypes are stacked in one that holds all of them.
        stored = (values.of.dtype if isinstance(values, (Changed, OfLength)) else values.dtype for values in parts)
        return functools.reduce(torch.promote_types, stored)

    tensors = []
    for row in ordered(layout, model):
        parts = [trained.tensors[name] for name in row.ours]
        written = as_written(row.ours[0], parts)
        tensors.append(TensorContent(row.name, written, row.shape, functools.partial(byte_blocks, parts, written)))
    skip = check_skip(layout, trained, of_biases)
    config = hf_config.write(layout, model, str(tensors[0].dtype).removeprefix("torch."))
    return Export(trained, layout, config, tensors, tokenizer, changes, skip, reason)


def ordered(layout: str, model: Description) -> list[Row]:
    """Return a layout's tensors by layers, as a checkpoint's files are,
    so that it is read from the front to the back.
    """
    return sorted(rows(layout, model), key=lambda row: layer_of(row.ours[0]))


def export_model(
    export: Export,
    output: Path,
    progress: Callable[[int], None] = lambda count: None,
    begins: Callable[[int], None] = lambda size: None,
    shard: int = SHARD,
) -> Path:
    """Write the folder `output`; one that was killed continues behind the last whole file.

    Raises:
        ValueError: the folder exists and is not empty, or another process is writing it.
    """
    output = output.absolute()
    with locked(output, "writing"):
        check_new(output)
        size = sum(tensor.bytes for tensor in export.tensors)
        unfinished = output.with_name(output.name + manifest.UNFINISHED)
        check_space(unfinished, size - bytes_in(unfinished))
        begins(size)
        finished = FinishedFiles(unfinished, _identity(export, shard))
        groups = safetensors_files.shards(export.tensors, shard)
        names = safetensors_files.file_names(len(groups))
        for name, tensors in zip(names, groups, strict=True):
            if name in finished.files:
                progress(sum(tensor.bytes for tensor in tensors))
                continue
            checksums = safetensors_files.write_file(unfinished / name, tensors, progress)
            finished.note(name, bytes=(unfinished / name).stat().st_size, tensors=checksums)
        safetensors_files.write_index(unfinished, groups, names)
        write_json(unfinished / CONFIG, export.config)
        _copy_companions(export, unfinished)
        checksums = {name: sum_ for file in names for name, sum_ in finished.files[file]["tensors"].items()}
        record = {
            "version": __version__,
            "layout": export.layout,
            "checkpoint": export.trained.folder.name,
            **{
                name: getattr(export.trained.arguments, "zaya", {}).get(name)
                for name in ("recipe", "run_id", "lineage")
            },
            "changes": export.changes,
            "xxh3_128": checksums,
        }
        write_json(unfinished / RECORD, record)
        (unfinished / model_card.NAME).write_text(model_card.text(export))
        finished.end()
        put_in_place(unfinished, output)
        return output


def put_in_place(unfinished: Path, output: Path) -> None:
    """Give a whole folder its name, under which there is none or an empty one."""
    sync(unfinished)
    if output.exists():
        output.rmdir()
    unfinished.rename(output)
    sync(output.parent)


def _copy_companions(export: Export, folder: Path) -> None:
    if export.tokenizer is not None:
        copy_companions(export.tokenizer, folder, export.trained.special_tokens)
    model = export.trained.model
    if not (folder / "generation_config.json").exists():
        ids = {f"{name}_token_id": getattr(model, name) for name in ("bos", "eos", "pad")}
        write_json(
            folder / "generation_config.json", {**{k: v for k, v in ids.items() if v is not None}, "use_cache": True}
        )


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def _identity(export: Export, shard: int) -> str:
    """Return a checksum of what decides the bytes of the files, without reading the tensors."""
    folder = export.trained.folder
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    tensors = [(tensor.name, str(tensor.dtype), tensor.shape) for tensor in export.tensors]
    parts = (__version__, export.layout, shard, str(folder.absolute()), files, tensors, export.changes)
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())
