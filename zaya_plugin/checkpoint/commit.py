# SPDX-License-Identifier: Apache-2.0
"""Megatron's save of a checkpoint with a commit: into a folder of another name, checksums, manifest, then the name.

`save` takes the place of megatron.core.dist_checkpointing.save during a run (patches/hooks.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from zaya_plugin.checkpoint import manifest, places
from zaya_plugin.checkpoint.on_disk import MANIFEST_MARK
from zaya_plugin.config.run_directory import is_checkpoint
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.whole_file import sync


def save(stock: Callable, sharded_state_dict: dict, checkpoint_dir: str, *positional, **named) -> None:
    """Save as Megatron's function `stock` does; `checkpoint_dir` has a complete checkpoint afterwards, or is as before.

    A collective. Every rank takes the checksums of its own files.
    """
    if named.get("async_sharded_save"):
        raise mistake("--async-save", problem="saves without a commit", fix="leave --async-save out")
    final = Path(checkpoint_dir)
    if not is_checkpoint(final):  # another folder that a host saves in this format
        return stock(sharded_state_dict, checkpoint_dir, *positional, **named)
    unfinished = final.with_name(final.name + manifest.UNFINISHED)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank == 0:
        places.at(unfinished).remove()  # of a save that was killed
        places.at(unfinished).make()
    torch.distributed.barrier()
    facts = getattr(sharded_state_dict.get("args"), "zaya", {})
    named["content_metadata"] = {**(named.get("content_metadata") or {}), MANIFEST_MARK: True}
    stock(sharded_state_dict, str(unfinished), *positional, **named)
    own = {path.name: _described(path) for path in unfinished.glob(f"__{rank}_*.distcp")}
    (unfinished / _part(rank)).write_text(json.dumps(own))
    torch.distributed.barrier()
    if rank == 0:
        _commit(unfinished, final, world, facts)
    torch.distributed.barrier()


def _commit(unfinished: Path, final: Path, world: int, facts: dict) -> None:
    files = {}
    for part in (unfinished / _part(rank) for rank in range(world)):
        files |= json.loads(part.read_text())
        part.unlink()
    files |= {path.name: _described(path) for path in unfinished.iterdir() if path.name not in files}
    manifest.commit(unfinished, final, files, **facts, ranks=world)


def _described(path: Path) -> dict:
    sync(path)
    return manifest.describe(path)


def _part(rank: int) -> str:
    return f"checksums_{rank}.json"
