# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training loop of your own:

    checkpoints = Checkpoints("/shared/run/checkpoints")
    checkpoints.save(100, state)               # returns once the tensors are copied; a process writes them
    newest = checkpoints.newest()              # 100, once it is complete
    state = checkpoints.load(newest, state)    # compares the checksums, and reads with Megatron's loader

`state` is Megatron's sharded state, as `model.sharded_state_dict()` returns it. `zaya train` uses the parts itself:
saver.py, on_disk.py and restore.py.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values

from zaya_plugin.checkpoint import manifest, on_disk, places, restore
from zaya_plugin.checkpoint.places import Place
from zaya_plugin.checkpoint.saver import Saver
from zaya_plugin.ground.errors import mistake


class Checkpoints:
    """The checkpoints at a place, of all ranks of torch.distributed.

    options: of `Saver`, such as keep_last.
    """

    def __init__(self, place: Place | str | Path, **options):
        self.place, self.options = places.at(place), options
        self._saver: Saver | None = None

    def save(self, iteration: int, state: dict, facts: dict | None = None) -> bool:
        """Start a checkpoint, after the one before has ended. The first call is a collective and plans the files: later
        states must have the same tensors, changed in place. facts: about the run, for the manifest.

        Returns:
            whether the save before has not failed on this rank.
        """
        if self._saver is None:
            world = torch.distributed.get_world_size()
            self._saver = Saver(self.place, torch.distributed.get_rank(), world, **self.options)
            self._saver.generation = restore.on_rank_0(lambda: secrets.token_hex(4))
            on_device = any(
                getattr(value.data, "is_cuda", False) for value in nested_values(state) if hasattr(value, "data")
            )
            self._saver.prepare(dict(state), pin=on_device)
        sound = self.wait()
        self._saver.save(iteration, dict(state), facts or {})
        return sound

    def wait(self) -> bool:
        """Wait for the save in flight. Return whether the last save has not failed on this rank."""
        return self._saver is None or self._saver.wait() and self._saver.failed is None

    def newest(self) -> int | None:
        """Return the iteration of the newest complete checkpoint as rank 0 sees it, a collective; None: the place has no
        checkpoint.
        """
        return restore.on_rank_0(lambda: on_disk.latest(self.place)[0])

    def load(self, iteration: int, state: dict) -> dict:
        """Return `state` with the values of a checkpoint, a collective; rank 0 compares the checksums. A storage
        without paths is copied to this machine first.

        Raises:
            ValueError: a file of the checkpoint is missing or damaged, or a rank could not copy one; on all ranks.
        """
        folder = on_disk.folder(self.place, iteration)
        with manifest.hold(folder) or contextlib.nullcontext():  # not removed meanwhile
            if wrong := restore.on_rank_0(lambda: manifest.problems(folder) or manifest.damaged(folder)):
                raise mistake(str(folder), problem="; ".join(wrong), allowed="an intact checkpoint")
            if folder.path is not None:
                return dist_checkpointing.load(state, str(folder.path))
            with tempfile.TemporaryDirectory() as copied:
                # Before the collective: the other ranks would wait in it for one whose copy fails.
                if wrong := [text for text in restore.gathered(_copied(folder, places.at(copied))) if text]:
                    raise mistake(str(folder), problem="; ".join(dict.fromkeys(wrong)), fix="load it again")
                return dist_checkpointing.load(state, copied)

    def close(self) -> None:
        """Wait for the save in flight and end the writer."""
        if self._saver is not None:
            self._saver.wait()
            self._saver.close()


def _copied(folder: Place, to: Place) -> str | None:
    """Copy the files of a checkpoint; return why that failed on this rank, or None."""
    try:
        files = manifest.read(folder)["files"]
        for name in folder.list():
            stated = places.copy(folder / name, to / name)
            if stated != files.get(name, stated):
                return f"{name} changed while it was copied"
    except (OSError, ValueError) as error:
        return f"rank {torch.distributed.get_rank()}: {error}"
    return None
