# SPDX-License-Identifier: Apache-2.0
"""What lies in a checkpoint directory, looked at before anything is launched or loaded: which iterations, whether they
are whole, and of which model. Reads Megatron's torch_dist layout: `<dir>/iter_0000015/` and
`<dir>/latest_checkpointed_iteration.txt`.
"""

from __future__ import annotations

import re
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"

# A checkpoint whose model differs in one of these cannot be loaded into the other. Names are Megatron's arguments.
MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
    "router_hidden_size",
    "padded_vocab_size",
    "rotary_percent",
    "temperature_form",
    "skip_output",
)


def iterations(directory: Path) -> list[int]:
    """Iterations that have a folder, ascending, whole or not."""
    found = (re.fullmatch(r"iter_(\d{7})", entry.name) for entry in directory.glob("iter_*") if entry.is_dir())
    return sorted(int(match.group(1)) for match in found if match)


def folder(directory: Path, iteration: int) -> Path:
    """Folder of one iteration."""
    return directory / f"iter_{iteration:07d}"


def latest(directory: Path) -> int | None:
    """Iteration that the tracker file names, or None where there is no tracker.

    Raises:
        ValueError: the tracker does not hold a number.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    text = tracker.read_text().strip()
    if not text.isdigit():
        whole = [i for i in iterations(directory) if not problems(directory, i)]
        raise ValueError(
            f"{tracker} holds {text!r} instead of an iteration; whole checkpoints in the directory: {whole or 'none'}; "
            "write one of them into the file to continue from it"
        )
    return int(text)


def problems(directory: Path, iteration: int) -> list[str]:
    """What is missing from a checkpoint; an empty list means that it is whole as far as its own index tells."""
    path = folder(directory, iteration)
    if not path.is_dir():
        return [f"{path} does not exist"]
    missing = [f"{path / name} is missing" for name in ("metadata.json", ".metadata") if not _filled(path / name)]
    if missing:
        return missing
    from torch.distributed.checkpoint import FileSystemReader

    try:
        index = FileSystemReader(path).read_metadata()
    except Exception as broken:  # unpickling a truncated file raises nearly anything
        return [f"{path / '.metadata'} cannot be read ({broken})"]
    ends: dict[str, int] = {}
    for stored in (index.storage_data or {}).values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None:
            missing.append(f"{path / name} is missing")
        elif size < end:
            missing.append(f"{path / name} has {size} bytes, its index says {end}")
    return missing


def saved_arguments(directory: Path, iteration: int):
    """Megatron's argument namespace as it was at the save."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    return load_common_state_dict(str(folder(directory, iteration)))["args"]


def check_same_model(directory: Path, iteration: int, args) -> None:
    """Compare a checkpoint's model with the one about to be built.

    Raises:
        ValueError: naming every argument that differs, with both values.
    """
    saved = saved_arguments(directory, iteration)
    different = [
        f"{name}: checkpoint {getattr(saved, name)!r}, recipe {getattr(args, name)!r}"
        for name in MODEL_ARGUMENTS
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]
    if different:
        raise ValueError(
            f"{folder(directory, iteration)} holds another model than the recipe:\n  " + "\n  ".join(different) + "\n"
            "use the recipe that wrote it, or another run_dir"
        )


def _filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
