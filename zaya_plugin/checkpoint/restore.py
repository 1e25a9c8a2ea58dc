# SPDX-License-Identifier: Apache-2.0
"""Before a load, on all ranks: finish interrupted uploads, compare every file with its checksum, and choose for each
node which files it reads from its local folder.

All functions are collectives. Each file is read once, by the rank that wrote it where that rank exists: the load that
follows then finds it in the page cache of the node that needs it, and no two ranks read one file of the shared path at
the same time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zaya_plugin.checkpoint import manifest, on_disk, places, starts
from zaya_plugin.checkpoint.places import Place, at
from zaya_plugin.config.run_directory import uploads
from zaya_plugin.ground.errors import mistake

LINKS = "load"  # folder of a node's local folder: the checkpoint to load, as links to the files of both places
BOOT = Path("/proc/sys/kernel/random/boot_id")  # differs between machines that have one host name


def on_rank_0(work: Callable):
    """Return what `work` returns on rank 0, on all ranks; a ValueError or OSError there is raised on all ranks."""
    box = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            box = [work(), None]
        except (ValueError, OSError) as error:
            box = [None, error]
    torch.distributed.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def gathered(mine) -> list:
    """Return every rank's object."""
    values: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, mine)
    return values


@dataclass(frozen=True)
class Nodes:
    """The nodes of the run. ranks: of each node; own: this rank's node; local: its folder for checkpoints, or None."""

    ranks: tuple[tuple[int, ...], ...]
    own: int
    local: Path | None

    @staticmethod
    def find(local: Path | None) -> Nodes:
        boot = BOOT.read_text() if BOOT.exists() else ""
        keys = gathered((boot, os.uname().nodename, str(local)))
        names = list(dict.fromkeys(keys))
        ranks = tuple(tuple(rank for rank, key in enumerate(keys) if key == name) for name in names)
        return Nodes(ranks, names.index(keys[torch.distributed.get_rank()]), local)

    @property
    def place(self) -> int:
        """This rank's place among those of its node."""
        return self.ranks[self.own].index(torch.distributed.get_rank())

    def gathered(self, of_node: Callable[[], object]) -> list:
        """Return what `of_node` returns on the first rank of every node, in the order of the nodes."""
        mine = of_node() if self.place == 0 else None
        values = gathered(mine)
        return [values[ranks[0]] for ranks in self.ranks]


def finish_uploads(directory: Place | Path, nodes: Nodes) -> list[str]:
    """Complete the newest checkpoint at the shared path that a kill has left without a name: upload the files that only
    nodes have.

    Return lines about what was done, and what could not be.
    """
    lines, directory = [], at(directory)
    for iteration, folder in on_rank_0(lambda: _interrupted(directory)):
        finished, line = _finish_upload(directory, iteration, folder, nodes)
        lines.append(line)
        if finished:
            break
    return lines


def _finish_upload(directory: Place, iteration: int, folder: Place, nodes: Nodes) -> tuple[bool, str]:
    """Complete one upload. Return whether that was possible, and a line about it."""
    files = on_rank_0(lambda: manifest.read(folder)["files"])
    complete_files = set(on_rank_0(lambda: _with_its_size(folder, files)))
    local = [at(nodes.local) / name for name in (on_disk.folder(directory, iteration).name, folder.name) if nodes.local]
    sources = {name: path / name for path in local for name in _with_its_size(path, files)}
    of_nodes = [set(names) for names in nodes.gathered(lambda: list(sources))]
    work, missing = _shared_out([name for name in files if name not in complete_files], nodes, of_nodes)
    if missing:
        return False, (
            f"WARNING: the upload of step {iteration} was interrupted and cannot be finished: {', '.join(missing)} "
            "is on no node of this start"
        )
    errors = []
    for name in work:
        try:
            places.upload(sources[name], folder / name, files[name])
        except (OSError, ValueError) as error:
            errors.append(str(error))
    if failures := [text for texts in gathered(errors) for text in texts]:
        return False, f"WARNING: the upload of step {iteration} cannot be finished: {'; '.join(failures)}"
    on_rank_0(lambda: _complete(folder, directory, iteration))
    if len(complete_files) < len(files):
        return True, f"the interrupted upload of step {iteration} was finished"
    return True, f"the checkpoint of step {iteration} was complete but for its folder's name, which it has now"


def _interrupted(directory: Place) -> list[tuple[int, Place]]:
    """Return the uploads of this run that are newer than its newest complete checkpoint, newest first."""
    complete = next((i for i in reversed(on_disk.iterations(directory)) if not on_disk.problems(directory, i)), 0)
    folders = [(iteration, folder) for iteration, folder in uploads(directory) if iteration > complete]
    run_id = starts.read(directory).get("run_id")
    return [(iteration, folder) for iteration, folder in reversed(folders) if manifest.is_of(folder, run_id)]


def _with_its_size(folder: Place, files: dict) -> list[str]:
    """Return the files of a manifest that a folder has, each with its size."""
    try:
        sizes = folder.list()
    except OSError:
        return []
    return [name for name, file in files.items() if sizes.get(name) == file["bytes"]]


def _shared_out(names: Iterable[str], nodes: Nodes, of_nodes: list[set[str]]) -> tuple[list[str], list[str]]:
    """Return the files that this rank takes, and those that no node has. of_nodes: the files of each node."""
    mine, missing = [], []
    for name in sorted(names):
        ranks = [rank for node, has in enumerate(of_nodes) if name in has for rank in nodes.ranks[node]]
        if not ranks:
            missing.append(name)
        elif _reader(name, ranks) == torch.distributed.get_rank():
            mine.append(name)
    return mine, missing


def _reader(name: str, ranks: Sequence[int]) -> int:
    """Return the rank of `ranks` that reads a file: the one that wrote it, else any, the same on all ranks."""
    writer = re.match(r"__(\d+)_", name)
    number = int(writer[1]) if writer else sum(name.encode())
    return number if number in ranks else ranks[number % len(ranks)]


def _complete(folder: Place, directory: Place, iteration: int) -> None:
    final = on_disk.folder(directory, iteration)
    if broken := manifest.problems(folder):
        raise ValueError("; ".join(broken))
    files = manifest.read(folder)["files"]
    if final.name in places.names(directory):
        on_disk.put_aside(directory, iteration)
    for name in folder.list():  # notes of the writers to each other, and parts of uploads
        if name != manifest.NAME and name not in files:
            (folder / name).remove()
    manifest.give_name(folder, final)


@dataclass(frozen=True)
class Compared:
    """The content of a checkpoint.

    Attributes:
        damaged: why it cannot be loaded.
        notes: what is wrong with local copies, which are not read then.
        local: the files that each node reads from its local folder.
        files: those of the manifest; None without one.
    """

    damaged: list[str]
    notes: list[str]
    local: list[set[str]]
    files: dict | None


def compare(directory: Place | Path, iteration: int, nodes: Nodes | None = None) -> Compared:
    """Read all files of a checkpoint that the load will read, once, and compare their checksums.

    A local copy that is wrong is replaced by the shared one. Without a manifest no checksum is known.
    """
    nodes = nodes or Nodes.find(None)
    path = at(on_disk.folder(directory, iteration))
    files = on_rank_0(lambda: manifest.read(path)["files"] if places.exists(path / manifest.NAME) else None)
    if files is None:
        return Compared([], [], [set() for _ in nodes.ranks], None)
    local = None if nodes.local is None else at(nodes.local / path.name)
    has = nodes.gathered(lambda: _with_its_size(local, files) if local else [])
    ranks = nodes.ranks[nodes.own]
    mine = [name for name in sorted(has[nodes.own]) if _reader(name, ranks) == torch.distributed.get_rank()]
    wrong = gathered(_damaged(local, files, mine) if local else {})
    notes = [text for of_rank in wrong for text in of_rank.values()]
    good = [set(names) - {name for rank in nodes.ranks[i] for name in wrong[rank]} for i, names in enumerate(has)]
    mine, _ = _shared_out(files, nodes, [set(files) - names for names in good])
    damaged = gathered(_damaged(path, files, mine))
    texts = [text for of_rank in damaged for text in of_rank.values()]
    return Compared(texts, notes, good, files)


def _damaged(folder: Place, files: dict, names: list[str]) -> dict[str, str]:
    return {name: text for name in names for text in manifest.damaged(folder, [name], files=files)}


def origin(directory: Place | Path, iteration: int, nodes: Nodes, compared: Compared) -> str:
    """Return a line about the places that a checkpoint is read from."""
    locally = set().union(*compared.local)
    size = sum(compared.files[name]["bytes"] for name in locally) / 1e9
    having = sum(bool(names) for names in compared.local)
    return (
        f"the checkpoint of step {iteration} is read from {nodes.local}: {len(locally)} of {len(compared.files)} "
        f"files, {size:.2f} GB, on {having} of {len(nodes.ranks)} nodes; all else from {directory}"
    )


def link(directory: Place | Path, iteration: int, nodes: Nodes, compared: Compared) -> Path:
    """Return the directory to load from on this node: of links that prefer local files, or the shared one."""
    directory, local = at(directory), compared.local[nodes.own]
    if not local and directory.path is not None:
        gathered(None)
        return directory.path
    if nodes.local is None:
        allowed = "a folder, into which each node copies the files: the loader reads paths"
        raise mistake("checkpoint.local_path", None, problem=f"{directory} has no paths", allowed=allowed)
    links, path = nodes.local / LINKS, on_disk.folder(directory, iteration)
    if nodes.place == 0:
        at(links).remove()
        folder = on_disk.folder(links, iteration)
        at(folder).make()
        for name in path.list(sizes=False):
            source = at(nodes.local / path.name / name) if name in local else path / name
            if source.path is not None:
                (folder / name).symlink_to(source.path.absolute())
            else:
                places.copy(source, at(folder / name))
        on_disk.name_as_latest(links, iteration)
    gathered(None)
    return links
