# SPDX-License-Identifier: Apache-2.0
"""Inspects a checkpoint directory before a start or a load: its iterations, whether they are complete, and their model.

The layout is Megatron's torch_dist: `<dir>/iter_0000015/` and `<dir>/latest_checkpointed_iteration.txt`. Checkpoints of
this version have a manifest (manifest.py), which decides; for those of earlier versions and of other programs their own
index does. The file that names the latest iteration is written for Megatron and not read.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TypeVar

from zaya_plugin.checkpoint import manifest, places, starts
from zaya_plugin.checkpoint.places import Place, at
from zaya_plugin.config.run_directory import iterations, uploads
from zaya_plugin.config.schema import default_of, leaves, megatron_argument
from zaya_plugin.ground.errors import message, mistake

TRACKER = "latest_checkpointed_iteration.txt"
INDEX, FORMAT = ".metadata", "metadata.json"  # files of a checkpoint that are no shards, see rank_file.py
# In Megatron's record of a checkpoint's content: it was written by this version, so it has a manifest.
MANIFEST_MARK = "zaya_manifest"

# Options of ZAYA in which the model of a checkpoint must equal the model that loads it, each with its default.
FIXED_OPTIONS = {megatron_argument(field): default_of(field) for _, field in leaves() if field.metadata["fixed"]}
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


Directory = TypeVar("Directory", Place, Path)


def folder(directory: Directory, iteration: int) -> Directory:
    """Return the folder of one iteration."""
    return directory / f"iter_{iteration:07d}"


def iteration_of(path: Place | Path) -> int:
    """Return the iteration in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("iter_"))


def has_manifest(path: Place | Path) -> bool:
    """Return whether a checkpoint has a manifest; no, if its folder cannot be read."""
    try:
        return places.exists(at(path / manifest.NAME))
    except OSError:
        return False


def latest(directory: Place | Path, below: int | None = None) -> tuple[int | None, list[str]]:
    """Return the newest complete checkpoint's iteration, below `below` if given, and the problems of newer ones.

    None if the directory has no checkpoint, not even an incomplete one.

    Raises:
        ValueError: there are checkpoints, and none is complete.
    """
    skipped: list[str] = []
    for iteration in reversed(iterations(directory)):
        if below is not None and iteration >= below:
            continue
        if not (texts := problems(directory, iteration)):
            return iteration, skipped
        skipped += texts
    if skipped or below is not None:
        raise mistake(
            str(directory),
            problem="no checkpoint is complete" + (f": {'; '.join(skipped)}" if skipped else f" below step {below}"),
            fix="run_dir=<another directory> to start a new run, or restore the files",
        )
    return None, []


def before(directory: Place | Path, iteration: int) -> int | None:
    """Return the newest complete checkpoint before `iteration`, or None."""
    older = (i for i in reversed(iterations(directory)) if i < iteration)
    return next((i for i in older if not problems(directory, i)), None)


def removable(
    directory: Place | Path, keep_last: int, keep_every: int | None = None, newest: int | None = None
) -> list[int]:
    """Return the iterations that may be removed: complete, with a manifest, and older than the newest `keep_last` of
    those up to `newest`; never a multiple of `keep_every`, nor a link to a folder elsewhere. keep_last=0 keeps all.
    """
    own = [i for i in iterations(directory) if (newest is None or i <= newest) and has_manifest(folder(directory, i))]
    complete = [i for i in own if not problems(directory, i)]
    older = complete[:-keep_last] if keep_last else []
    links = {i for i in older if (path := at(folder(directory, i)).path) is not None and path.is_symlink()}
    return [i for i in older if not (keep_every and i % keep_every == 0) and i not in links]


def put_aside(directory: Directory, iteration: int, end: str = manifest.DAMAGED) -> Directory:
    """Put a checkpoint aside, see `manifest.put_aside`. end: DAMAGED or FAILED of manifest.py."""
    return manifest.put_aside(folder(directory, iteration), end)


def put_aside_from(directory: Directory, step: int) -> list[Directory]:
    """Put the checkpoints of `step` and later ones aside, because they hold a state that is not to be loaded, and the
    uploads of such that a start would finish. Return their new paths.
    """
    later = [folder(directory, iteration) for iteration in iterations(directory) if iteration >= step]
    later += [path for iteration, path in uploads(directory) if iteration >= step]
    return [manifest.put_aside(path, manifest.FAILED) for path in later]


def remove(directory: Place | Path, iteration: int) -> bool:
    """Remove a checkpoint, see `manifest.remove`."""
    return manifest.remove(at(folder(directory, iteration)))


def name_as_latest(directory: Place | Path, iteration: int) -> None:
    """Write the file by which Megatron finds the checkpoint to load; this package does not read it."""
    tracker, text = at(directory / TRACKER), str(iteration).encode()
    with contextlib.suppress(FileNotFoundError):
        if places.read(tracker).strip() == text:
            return
    tracker.put(text)


def problems(directory: Place | Path, iteration: int) -> list[str]:
    """Return the missing parts of a checkpoint by its manifest, or by its own index if another program wrote it; empty
    if it is complete.
    """
    path = folder(directory, iteration)
    try:
        if places.exists(at(path / manifest.NAME)):
            return manifest.problems(path, starts.read(directory).get("run_id"))
        if path.name not in places.names(at(path.parent)):
            return [f"{path} does not exist"]
        if (local := at(path).path) is None:
            return [f"{path / manifest.NAME} is missing"]
        texts = _problems_by_index(local)
    except OSError as error:
        return [f"{error.filename or path} cannot be read ({error.strerror})"]
    return texts or _missing_manifest(local)


def _missing_manifest(path: Path) -> list[str]:
    """Return why a checkpoint without a manifest cannot be used: it is of this version, which writes one, or Megatron's
    arguments and progress cannot be read.
    """
    from megatron.core.dist_checkpointing import load_content_metadata
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        is_ours = (load_content_metadata(str(path)) or {}).get(MANIFEST_MARK)
    except (Exception, CheckpointException) as broken:  # of damaged bytes come many types; torch's is no Exception
        return [f"{path}: its arguments and progress (common state) cannot be read ({_reason(broken)})"]
    return [f"{path / manifest.NAME} is missing"] if is_ours else []


def _problems_by_index(path: Path) -> list[str]:
    sizes = at(path).list()
    missing = [f"{path / name} is missing" for name in (FORMAT, INDEX) if not sizes.get(name)]
    if missing:
        return missing
    from torch.distributed.checkpoint import FileSystemReader

    try:
        index = FileSystemReader(path).read_metadata()
    except Exception as broken:  # unpickling a truncated file can raise many types
        return [f"{path / INDEX} cannot be read ({broken})"]
    ends: dict[str, int] = {}
    for stored in (index.storage_data or {}).values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in sorted(ends.items()):
        if sizes.get(name) is None:
            missing.append(f"{path / name} is missing")
        elif sizes[name] < end:
            missing.append(f"{path / name} has {sizes[name]} bytes, its index requires {end}")
    return missing


def saved_arguments(directory: Path, iteration: int):
    """Return Megatron's argument namespace of the save.

    Raises:
        UnreadableError: it cannot be read.
    """
    from megatron.core.dist_checkpointing import load_common_state_dict
    from torch.distributed.checkpoint.api import CheckpointException

    path = folder(directory, iteration)
    try:
        return load_common_state_dict(str(path))["args"]
    except (Exception, CheckpointException) as broken:  # of damaged bytes come many types
        raise unreadable(path, broken) from broken


class UnreadableError(ValueError):
    """The index of a checkpoint, or its arguments and progress, cannot be read."""


def unreadable(path: Path, broken: BaseException) -> UnreadableError:
    """Return the error of a checkpoint of which torch or Megatron cannot read the index, arguments or progress.
    broken: theirs; torch's CheckpointException is no Exception.
    """
    problem = f"its index, arguments or progress cannot be read ({_reason(broken)})"
    fix = f"zaya checkpoint verify {path.parent} --step {iteration_of(path)}"
    return UnreadableError(message(str(path), problem=problem, allowed="an intact checkpoint", fix=fix))


def _reason(broken: BaseException) -> str:
    """Return the last line of an error's text, which stands behind a traceback."""
    return (str(broken).strip().splitlines() or [repr(broken)])[-1]


def newest_facts(directory: Path) -> tuple[Path, dict]:
    """Return the folder of the newest complete checkpoint and the facts in its manifest; none where it has no manifest,
    or none is complete.
    """
    try:
        path = folder(directory, latest(directory)[0] or 0)
        return path, manifest.read(path)
    except ValueError:
        return directory, {}


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
