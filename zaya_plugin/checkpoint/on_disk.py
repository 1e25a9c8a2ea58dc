# SPDX-License-Identifier: Apache-2.0
"""Inspects a checkpoint directory before a start or a load: its iterations, whether they are complete, and their model.

The layout is Megatron's torch_dist: `<dir>/iter_0000015/` and `<dir>/latest_checkpointed_iteration.txt`.
"""

from __future__ import annotations

import re
from pathlib import Path

from zaya_plugin.config.schema import leaves
from zaya_plugin.errors import mistake

TRACKER = "latest_checkpointed_iteration.txt"

# Options of ZAYA in which the model of a checkpoint must equal the model that loads it, each with its default.
FIXED_OPTIONS = {field.name: field.default for _, field in leaves() if field.metadata["fixed"]}
# The same of Megatron's own arguments.
MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "padded_vocab_size",
    "rotary_percent",
    "normalization",
)


def iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder, ascending, complete or not."""
    found = (re.fullmatch(r"iter_(\d{7})", entry.name) for entry in directory.glob("iter_*") if entry.is_dir())
    return sorted(int(match.group(1)) for match in found if match)


def folder(directory: Path, iteration: int) -> Path:
    """Return the folder of one iteration."""
    return directory / f"iter_{iteration:07d}"


def latest(directory: Path) -> int | None:
    """Return the iteration in the tracker file, or None without a tracker.

    Raises:
        ValueError: the tracker does not hold a number.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        whole = [str(i) for i in iterations(directory) if not problems(directory, i)]
        allowed = f"an iteration with a complete checkpoint: {', '.join(whole) or 'none in this directory'}"
        raise mistake(
            str(tracker),
            problem=f"holds {text!r}, which is no iteration",
            allowed=allowed,
            fix="write one of them into the file",
        )
    return int(text)


def problems(directory: Path, iteration: int) -> list[str]:
    """Return the missing parts of a checkpoint; empty if it is complete according to its own index."""
    path = folder(directory, iteration)
    if not path.is_dir():
        return [f"{path} does not exist"]
    missing = [f"{path / name} is missing" for name in ("metadata.json", ".metadata") if not _filled(path / name)]
    if missing:
        return missing
    from torch.distributed.checkpoint import FileSystemReader

    try:
        index = FileSystemReader(path).read_metadata()
    except Exception as broken:  # unpickling a truncated file can raise many types
        return [f"{path / '.metadata'} cannot be read ({broken})"]
    ends: dict[str, int] = {}
    for stored in (index.storage_data or {}).values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None:
            missing.append(f"{path / name} is missing")
        elif size < end:
            missing.append(f"{path / name} has {size} bytes, its index requires {end}")
    return missing


def saved_arguments(directory: Path, iteration: int):
    """Return Megatron's argument namespace of the save."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    return load_common_state_dict(str(folder(directory, iteration)))["args"]


def check_same_model(directory: Path, iteration: int, args) -> None:
    """Compare a checkpoint's model with the one that will be built.

    Raises:
        ValueError: arguments differ; the message lists each with both values.
    """
    saved = vars(saved_arguments(directory, iteration))
    compared = {name: saved[name] for name in MODEL_ARGUMENTS if name in saved}
    compared |= {name: saved.get(name, default) for name, default in FIXED_OPTIONS.items()}
    different = [
        f"{name}: checkpoint {value!r}, recipe {getattr(args, name)!r}"
        for name, value in compared.items()
        if value != getattr(args, name)
    ]
    if different:
        problem = "holds another model than the recipe: " + "; ".join(different)
        fix = "the recipe that wrote it, or run_dir=<another directory>"
        raise mistake(str(folder(directory, iteration)), problem=problem, fix=fix)


def _filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
