# SPDX-License-Identifier: Apache-2.0
"""The model of `handover.from_hf` as values of the recipe: sizes, RoPE's base, and the tokenizer of data that names
none. Reads config.json and the headers of the weights. No torch import.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from zaya_plugin.checkpoint.convert import hf_config
from zaya_plugin.checkpoint.convert.description import KEYS, Description
from zaya_plugin.checkpoint.convert.model_folder import CONFIG, json_object, resolve
from zaya_plugin.checkpoint.convert.tables import recognise, sizes_of
from zaya_plugin.config.compose import compose
from zaya_plugin.config.resume import values_in
from zaya_plugin.config.run_directory import checkpoint_path, has_checkpoint
from zaya_plugin.config.schema import Recipe, get, with_values
from zaya_plugin.data.prepared import tokenizer_of
from zaya_plugin.ground.errors import as_typed, mistake


def compose_published(overrides: list[str]) -> Recipe:
    """Compose as `zaya train` does, with the model of `handover.from_hf` where its files are on this machine."""
    return with_published(compose(overrides), overrides, download=False)


def with_published(recipe: Recipe, overrides: Iterable[str], download: bool) -> Recipe:
    """Return `recipe` with the model of `handover.from_hf`, which may have another one than the recipe's files; rank 0
    prints what it takes. A run that has begun keeps its model. The recipe is returned as it is where the weights' files
    are missing or damaged.

    Args:
        overrides: the typed words, which the published model must not contradict. download: whether to fetch files.

    Raises:
        ValueError: a word contradicts the published model.
    """
    source = recipe.handover.from_hf
    if source is None:
        return recipe
    if has_checkpoint(checkpoint_path(recipe)):
        kept = values_in(recipe.run_dir)
        return with_values(
            recipe, {key: kept[key] for key in KEYS.values() if key in kept and key != "stage.seq_length"}
        )
    try:
        folder = resolve(source, download=download, key="handover.from_hf")
        published = described(folder)
    except (OSError, ValueError, KeyError, TypeError):  # the start refuses the files with all details
        return recipe
    names = [*Description.of_recipe(recipe, published.vocab_size).differing(published), "rotary_base"]
    values = {KEYS[name]: getattr(published, name) for name in names}
    values = {key: value for key, value in values.items() if get(recipe, key) != value}
    typed = {word.lstrip("+").partition("=")[0] for word in overrides}
    for key, value in values.items():
        if key in typed or key.partition(".")[0] in typed - {"stage"}:
            problem = f"handover.from_hf={source} has {as_typed(value)}"
            fix = f"leave out {key if key in typed else 'model'}=, which is taken from there"
            raise mistake(key, get(recipe, key), problem=problem, allowed=as_typed(value), fix=fix)
    if values and os.environ.get("RANK", "0") == "0":
        print(f"zaya: from {source}: {' '.join(f'{k}={as_typed(v)}' for k, v in values.items())}", file=sys.stderr)
    bare = os.path.isfile(f"{recipe.data.path}.idx") and tokenizer_of(recipe.data.path) is None
    if recipe.data.tokenizer is None and bare and (folder / "tokenizer.json").is_file():
        values["data.tokenizer"] = str(folder)
    return with_values(recipe, values)


def described(folder: Path) -> Description:
    """Return the model of a folder of published weights.

    Raises:
        ValueError: config.json or the weights are not of a model that can be imported.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:  # eight bytes with the length of the header, which is JSON
            length = min(
                int.from_bytes(file.read(8), "little"), path.stat().st_size
            )  # of a damaged file it is any number
            header = json_object(file.read(length), str(path))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    layout = recognise(shapes)
    values = json_object((folder / CONFIG).read_bytes(), str(folder / CONFIG))
    model, _ = hf_config.read(layout, values, sizes_of(layout, shapes), str(folder / CONFIG))
    return replace(model, skip_output=None)  # whether a token can choose that class is in the values
