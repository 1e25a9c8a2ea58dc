# SPDX-License-Identifier: Apache-2.0
"""An adapter as a folder of peft 0.21, on transformers' ZAYA: written from a checkpoint, and read into a run.

Projections are target_modules. The experts' stacked weights are target_parameters, for which peft keeps the adapters of
all experts as two matrices: lora_A [E r, in], expert by expert, and lora_B [out, r E], of which column j E + e is
column j of expert e. An adapter that all experts share is written once for each of them. Two such parameters of one
module are nested: gate_up_proj is the inner one, under `base_layer`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zaya_plugin.checkpoint import manifest
from zaya_plugin.checkpoint.convert import exporting, safetensors_files
from zaya_plugin.checkpoint.convert.adapters import Lora
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.model_folder import check_new, copy_companions, json_object
from zaya_plugin.checkpoint.convert.tables import Row
from zaya_plugin.checkpoint.convert.values import TensorContent, as_bytes, whole
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.lock import locked

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Fields of adapter_config.json that are read here or do not change what the stored tensors compute.
HARMLESS = (
    "r lora_alpha lora_dropout target_modules target_parameters exclude_modules modules_to_save layers_to_transform "
    "layers_pattern task_type auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core "
    "qalora_group_size"
).split()
# Values of the other fields for plain LoRA on unchanged base weights; of those that are not here: none, false or empty.
PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}


@dataclass(frozen=True)
class PeftTensor:
    """A tensor of the file. ours: its name in checkpoints; stack: experts, 0 for a matrix; second: it is lora_B; shared:
    it is [1, ..] for all experts.
    """

    name: str
    ours: str
    stack: int = 0
    second: bool = False
    shared: bool = False

    def to_peft(self, values: Tensor) -> Tensor:
        """Return the file's matrix from this package's [E, r, in] or [E, out, r]."""
        if self.shared:
            values = values.expand(self.stack, -1, -1)
        if self.stack and self.second:
            return values.permute(1, 2, 0).flatten(1)
        return values.flatten(0, 1) if self.stack else values

    def from_peft(self, values: Tensor) -> Tensor:
        """Return the inverse of `to_peft`.

        Raises:
            ValueError: the adapter is to be shared, and the experts' differ.
        """
        if self.stack and self.second:
            values = values.unflatten(1, (-1, self.stack)).permute(2, 0, 1).contiguous()
        elif self.stack:
            values = values.unflatten(0, (self.stack, -1))
        if self.shared:
            if not torch.equal(values, values[:1].expand_as(values)):
                problem = f"the experts have different values in {self.name}"
                raise mistake("optim.lora.experts", "shared", problem=problem, fix="optim.lora.experts=each")
            values = values[:1].clone()
        return values


def peft_tensors(lora: Lora, model: Description) -> Iterator[PeftTensor]:
    """Yield the tensors of an adapter's file."""
    for row, begin in lora.adapted(model):
        if row.stacked:
            module, _, weight = row.name.rpartition(".")
            theirs = f"{module}.base_layer" if weight == "gate_up_proj" else module
        else:
            theirs = row.name.removesuffix(".weight")
        stack, shared = (len(row.ours), lora.shared) if row.stacked else (0, False)
        for second, part in enumerate(("lora_A", "lora_B")):
            yield PeftTensor(f"{PREFIX}{theirs}.{part}.weight", begin + part, stack, bool(second), shared)
    for row in lora.retrained(model):
        yield PeftTensor(PREFIX + row.name, row.ours[0])


def config_of(lora: Lora, model: Description, base: str) -> dict:
    """Return adapter_config.json. base: a folder, or a name on the Hub with or without @REVISION."""
    of_layer = [row for row, _ in lora.adapted(model) if ".layers.0." in row.name]
    name, _, revision = base.partition("@") if not Path(base).is_dir() else (str(Path(base).absolute()), "", "")

    def ends(rows: list[Row], parts: int) -> list[str]:
        return [".".join(row.name.removesuffix(".weight").split(".")[-parts:]) for row in rows]

    retrained = [row for row in lora.retrained(model) if ".layers.0." in row.name and row.name.endswith(".weight")]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
        "inference_mode": True,
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ends([row for row in of_layer if not row.stacked], 1) or None,
        "target_parameters": ends([row for row in of_layer if row.stacked], 3) or None,
        "modules_to_save": ends(retrained, 2) or None,
    }


def export_adapter(
    trained: exporting.Trained, output: Path, dtype: str | None, tokenizer: Path | None, base: str | None
) -> int:
    """Write the folder `output`, which appears when it is whole, and return the number of tensors in it.

    Args:
        dtype: bf16 or fp32; None: as the run computed. tokenizer: its folder; None: without one.
        base: another name of the base for adapter_config.json than that of the run.

    Raises:
        ValueError: there is no adapter, or a loader would drop or change a part of it without a message.
    """
    lora, record = Lora.of(trained.arguments), getattr(trained.arguments, "zaya", {}).get("base") or {}
    if lora is None:
        raise mistake("--adapter", problem=f"{trained.folder} holds no adapter", allowed="a run with optim.lora.rank")
    if lora.lora_balancing:
        raise mistake(
            "optim.lora.balancing",
            True,
            problem="peft has no place for the balancing biases, and would load those of the base",
            allowed="false with --adapter",
            fix="the merged export, without --adapter",
        )
    if trained.base_layout != "native":
        raise mistake(
            "--base",
            base or record["source"],
            problem=f"is in the {trained.base_layout} layout, which transformers and peft do not read",
            allowed="the same weights in the native layout",
            fix="`zaya checkpoint import` and `export --layout native`, then --base with that folder",
        )
    exporting.check_skip("native", trained, torch.float32)
    written = exporting.DTYPES[dtype or ("bf16" if getattr(trained.arguments, "bf16", False) else "fp32")]

    def blocks(tensor: PeftTensor) -> Iterator[memoryview]:
        yield as_bytes(tensor.to_peft(whole(trained.adapter[tensor.ours])).to(written))

    tensors = []
    for tensor in peft_tensors(lora, trained.model):
        shape = tensor.to_peft(torch.empty(trained.adapter[tensor.ours].shape, device="meta")).shape
        tensors.append(TensorContent(tensor.name, written, tuple(shape), functools.partial(blocks, tensor)))
    output = output.absolute()
    with locked(output, "writing"):
        check_new(output)
        unfinished = output.with_name(output.name + manifest.UNFINISHED)
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        if tokenizer is not None:
            copy_companions(tokenizer, unfinished, trained.special_tokens)
        safetensors_files.write_file(unfinished / WEIGHTS, tensors)
        exporting.write_json(unfinished / CONFIG, config_of(lora, trained.model, base or record["source"]))
        exporting.put_in_place(unfinished, output)
    return len(tensors)


def read_adapter(folder: Path, lora: Lora, model: Description) -> Mapping[str, Tensor]:
    """Return the tensors of an adapter by peft, by their names in checkpoints. Adapters that it lacks are left out: the
    model starts them with B = 0, which computes the same.

    Raises:
        ValueError: it is of another form than `lora`, or of another model.
    """
    path, key = folder / CONFIG, "handover.adapter"
    if not path.is_file() or not (folder / WEIGHTS).is_file():
        raise mistake(key, folder, problem="is no adapter", allowed=f"a folder with {CONFIG} and {WEIGHTS}")
    config = json_object(path.read_bytes(), str(path))
    for name, value in ({"peft_type": None} | config).items():
        if name not in HARMLESS and (value not in PLAIN[name] if name in PLAIN else value):
            allowed = "LoRA on unchanged base weights, without fields of other methods"
            raise mistake(str(path), problem=f"{name}={value} may compute something else", allowed=allowed)
    for name, value in (("rank", config.get("r")), ("alpha", config.get("lora_alpha"))):
        if value != (own := getattr(lora, f"lora_{name}")):
            raise mistake(f"optim.lora.{name}", own, problem=f"{path} has {value}", fix=f"optim.lora.{name}={value}")
    stored = safetensors_files.header(folder / WEIGHTS)
    known = {tensor.name: tensor for tensor in peft_tensors(lora, model)}
    if unknown := sorted(stored.keys() - known.keys()):
        problem = f"{folder / WEIGHTS} holds {unknown[0]}, which no optim.lora.targets={lora.lora_targets} has"
        raise mistake(key, folder, problem=problem, allowed=", ".join(list(known)[:2]) + " and so on")
    shapes, tensors = lora.shapes(model) | {row.ours[0]: row.shape for row in lora.retrained(model)}, {}
    for name, region in stored.items():
        tensor = known[name]
        expected = tuple(tensor.to_peft(torch.empty(shapes[tensor.ours], device="meta")).shape)
        pair = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
        if region.shape != expected or pair not in stored:
            what = f"has the shape {list(region.shape)}, not {list(expected)}" if pair in stored else f"lacks {pair}"
            raise mistake(key, folder, problem=f"{name} {what}")
        tensors[tensor.ours] = tensor.from_peft(whole(region))
    return tensors
